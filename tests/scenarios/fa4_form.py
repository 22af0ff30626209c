# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek under breakable graphs whose prefill is said to be by fa4: on Hopper, or with `--blackwell`."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from cpu_sglang import graphs, one_batch, prefill
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.anatomy.latent_attention import HANDLERS
from sglang_bcg_fixes.anatomy.runners import PREFILL_MODULE
from tests.scenarios import expanded_form, small_deepseek, telling

ID = "fa4_form_captured"


def as_on(blackwell: bool) -> None:
    handlers: Any = importlib.import_module(HANDLERS)
    if hasattr(handlers, "is_sm100_or_sm110_supported"):
        handlers.is_sm100_or_sm110_supported = lambda: blackwell
    else:
        handlers.get_platform = lambda: types.SimpleNamespace(is_sm100_or_sm110=blackwell)


def main() -> None:
    loaded = small_deepseek.load()
    expanded_form.write_without_a_mask()
    as_on("--blackwell" in sys.argv)
    # what replays are prepared for is decided by this
    vars(importlib.import_module(PREFILL_MODULE))["is_cuda"] = lambda: True
    if "--fa3" not in sys.argv:
        loaded.model_runner.attn_backend.prefill_attention_backend_str = "fa4"
    eager = [one_batch.generate(loaded, prompts, 2)[0] for prompts in expanded_form.BATCHES]
    found: dict[str, Any] = {"applied": ID in plugin.load().ledger.applied(), "same": []}
    try:
        prefill.capture_prefill(loaded.model_runner, (8, 16))
    except RuntimeError as error:
        found["capture"] = str(error)
    try:
        for prompts, tokens in zip(expanded_form.BATCHES, eager, strict=True):
            found["same"].append(one_batch.generate(loaded, prompts, 2)[0] == tokens)
    except (RuntimeError, AssertionError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    telling.result({**found, "replays": graphs.counters.replays})


if __name__ == "__main__":
    main()
