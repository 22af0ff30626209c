# SPDX-License-Identifier: Apache-2.0
"""Mixers of a real release that have a state of their own.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m tests.releases.mixers OUT.json [ARCHITECTURE...]

With architectures: the mixers of each for which no break is known, beside the backend that the release gives the
model. Without: Falcon-H1 before and after prefill graphs are asked for. SGLANG_PLUGINS and the flags are a server's.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import pathlib
import sys
import types
import unittest.mock
from collections.abc import Iterator
from typing import Any

from cpu_sglang import graphs, one_batch, prefill
from sglang_bcg_fixes.fixes import unbroken_mixer_captured as fix
from tests.releases import layer_stacks

SPARSE: dict[str, Any] = {
    **layer_stacks.DEEPSEEK,
    "q_lora_rank": 64,
    "index_topk": 64,
    "index_head_dim": 128,
    "index_n_heads": 4,
}
POOLED: dict[str, Any] = {"index_kpool": 4, "index_kpool_always_select_tail": True, "index_kpool_compress": True}
layer_stacks.MODELS |= {
    "DeepseekV32ForCausalLM": layer_stacks.text("deepseek_v3", **SPARSE),
    "DeepseekV32ForCausalLM pooled": layer_stacks.text("deepseek_v3", **SPARSE, **POOLED),
}


def walked(architectures: list[str]) -> dict[str, list[str]]:
    model_runner = one_batch.load("llama", dtype="bfloat16").model_runner
    from sglang.srt.models.registry import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    return {
        name: list(fix.unbroken_mixers(*with_backend(model_runner, *layer_stacks.build(name))))
        for name in architectures
        if layer_stacks.architecture_of(name) in known
    }


def with_backend(model_runner: Any, model_config: Any, model: Any) -> tuple[Any, Any]:
    """The model, and the linear backend that this release makes for it, empty: only its code is looked at."""
    from sglang.srt.layers.attention.attention_registry import attn_backend_wrapper

    model_runner.model_config = model_config
    full = types.SimpleNamespace()
    with empty_backends():
        backend = attn_backend_wrapper(model_runner, full)
    return model, getattr(backend, fix.BACKEND, None)


@contextlib.contextmanager
def empty_backends() -> Iterator[None]:
    """Attention backends that allocate nothing: they would read the pools of the model that was loaded."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid

    def empty(self: Any, *args: Any) -> None: ...

    def only_its_parts(self: Any, full: Any, linear: Any, layers: Any) -> None:
        self.linear_attn_backend = linear

    for name in ("gdn", "kda", "lightning", "short_conv"):
        # the short convolution has no backend of its own in early releases
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"sglang.srt.layers.attention.linear.{name}_backend")
    with contextlib.ExitStack() as stack:
        for kind in subclasses(hybrid.MambaAttnBackendBase):
            stack.enter_context(unittest.mock.patch.object(kind, "__init__", empty))
        stack.enter_context(unittest.mock.patch.object(hybrid.HybridLinearAttnBackend, "__init__", only_its_parts))
        yield


def subclasses(kind: Any) -> list[Any]:
    return [every for direct in kind.__subclasses__() for every in [direct, *subclasses(direct)]]


def falcon() -> dict[str, Any]:
    loaded = one_batch.load("falcon_h1")
    # SGLang takes away the handlers that it finds
    said = layer_stacks.Said()
    logging.getLogger().addHandler(said)
    one_batch.randomize(loaded.model_runner.model)
    prompts = prefill._prompts([6, 5])
    eager = one_batch.generate(loaded, prompts, 2)
    graphs.freed_memory_is_garbage = True
    try:
        prefill.capture_prefill(loaded.model_runner)
    except RuntimeError as nothing:
        outcome = str(nothing)
    else:
        outcome = "captured"
    before = graphs.counters.replays
    after = one_batch.generate(loaded, prompts, 2)
    return {
        "outcome": outcome,
        "replays": graphs.counters.replays - before,
        "difference": (after[1] - eager[1]).abs().max().item(),
        "warnings": said.messages("sglang_bcg_fixes"),
    }


def main(out: str, *architectures: str) -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    report = walked(list(architectures)) if architectures else falcon()
    pathlib.Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
