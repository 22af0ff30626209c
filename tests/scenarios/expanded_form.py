# SPDX-License-Identifier: Apache-2.0
"""A tiny Sarvam with latent attention under breakable graphs; with `--off-cuda` where SGLang does not find CUDA."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from cpu_sglang import graphs, one_batch, prefill
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.anatomy.runners import PREFILL_MODULE
from tests.scenarios import mla_replay, telling

ID = "expanded_form_captured"
WRITERS = "sglang.kernels.ops.kvcache.mla_buffer"
# with padding, and ragged
BATCHES = ([list(range(3, 14))], [list(range(3, 9)), list(range(20, 25))], [list(range(40, 45))])


def write_by_index(kv_buffer: Any, loc: Any, cache_k_nope: Any, cache_k_rope: Any, **of_ranks: Any) -> None:
    """Every row to its slot, as the kernel does for one rank; the slot of padding takes rows that nobody reads."""
    rows = torch.cat([part.reshape(len(loc), -1) for part in (cache_k_nope, cache_k_rope)], -1)
    kv_buffer.view(kv_buffer.shape[0], -1)[loc] = rows.to(kv_buffer.dtype)


def write_without_a_mask() -> None:
    """Later releases write on the CPU through a mask, which reads the device: their kernel has none."""
    try:
        writers = importlib.import_module(WRITERS)
    except ModuleNotFoundError:
        return
    if hasattr(writers, "set_mla_kv_buffer_naive"):
        vars(writers)["set_mla_kv_buffer_naive"] = write_by_index


def main() -> None:
    loaded = mla_replay.sarvam()
    write_without_a_mask()
    # what replays are prepared for is decided by this
    vars(importlib.import_module(PREFILL_MODULE))["is_cuda"] = lambda: "--off-cuda" not in sys.argv
    eager = [one_batch.generate(loaded, prompts, 2) for prompts in BATCHES]
    prefill.capture_prefill(loaded.model_runner, (8, 16))
    found: dict[str, Any] = {"applied": ID in plugin.load().ledger.applied(), "same": [], "off": []}
    try:
        for prompts, (tokens, logits) in zip(BATCHES, eager, strict=True):
            again, replayed = one_batch.generate(loaded, prompts, 2)
            found["same"].append(again == tokens)
            found["off"].append((replayed - logits).abs().max().item())
    except RuntimeError as error:
        found["error"] = str(error)
    telling.result({**found, "replays": graphs.counters.replays})


if __name__ == "__main__":
    main()
