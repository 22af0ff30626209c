"""What becomes of a real release's mixers with a state of their own.

    PYTHONPATH=<unpacked wheel>:tools:. TRITON_INTERPRET=1 python -m tests.releases.mixers OUT.json [ARCHITECTURE...]

With architectures: the mixers of each for which no break is known. Without: Falcon-H1 before and after prefill graphs
are asked for. SGLANG_PLUGINS and the flags of the environment are those of a server.
"""

from __future__ import annotations

import json
import logging
import pathlib
import sys
from typing import Any

from sglang_on_cpu import graphs, one_batch, prefill

from sglang_bcg_fixes.fixes import unbroken_mixer_captured as fix
from tests.releases import layer_stacks

SPARSE = {**layer_stacks.DEEPSEEK, "q_lora_rank": 64, "index_topk": 64, "index_head_dim": 128, "index_n_heads": 4}
POOLED = {"index_kpool": 4, "index_kpool_always_select_tail": True, "index_kpool_compress": True}
layer_stacks.MODELS |= {
    "DeepseekV32ForCausalLM": layer_stacks.text("deepseek_v3", **SPARSE),
    "DeepseekV32ForCausalLM pooled": layer_stacks.text("deepseek_v3", **SPARSE, **POOLED),
}


def walked(architectures: list[str]) -> dict[str, list[str]]:
    one_batch.load("llama", dtype="bfloat16")
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
    from sglang.srt.models.registry import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    return {
        name: list(fix.unbroken_mixers(layer_stacks.build(name)[1], Mamba2AttnBackend))
        for name in architectures
        if layer_stacks.architecture_of(name) in known
    }


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
