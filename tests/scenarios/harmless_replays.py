# SPDX-License-Identifier: Apache-2.0
"""Conditions that `sglang_bcg_fixes/cli/harmless.py` calls harmless, in prefill graphs of a whole model."""

from __future__ import annotations

from typing import Any

import torch

from cpu_sglang import graphs, prefill
from cpu_sglang.one_batch import generate
from tests.scenarios import named, released


def hybrid_runner() -> dict[str, Any]:
    loaded = released.load("qwen3next")
    runner = loaded.model_runner
    prompts = prefill._prompts([6, 5])
    eager = generate(loaded, prompts, 2)[1]
    prefill.capture_prefill(runner)
    states = runner.req_to_token_pool.mamba_pool.mamba_cache
    poisoned = 0
    for state in (*states.conv, states.temporal):
        state.fill_(float("nan"))
        poisoned += state.numel()
    equal = bool((generate(loaded, prompts, 2)[1] == eager).all())
    # a stage of the pipeline has the layers of the model but not all of them
    runner.model_config.num_hidden_layers += 1
    try:
        prefill.capture_prefill(runner)
        outcome = "captured"
    except RuntimeError as nothing:
        outcome = str(nothing)
    return {"poisoned": poisoned, "equal": equal, "outcome": outcome}


def large_bucket() -> dict[str, Any]:
    """A graph of more tokens than the context has, and the experts of the padding in it."""
    loaded = released.load("llama", chunked_prefill_size=256)
    from sglang.srt.layers.moe import topk

    runner = loaded.model_runner
    prompts = prefill._prompts([100, 90])
    eager = generate(loaded, prompts, 2)[1]
    prefill.capture_prefill(runner, (8, 256))
    before = graphs.counters.replays
    equal = bool((generate(loaded, prompts, 2)[1] == eager).all())
    replayed = graphs.counters.replays > before

    chosen = torch.arange(10, dtype=torch.int32).view(5, 2)
    masked = chosen.clone()
    topk._mask_topk_ids_padded_region(masked, torch.tensor(3))
    return {
        "context": runner.model_config.context_len,
        "equal": equal,
        "replayed": replayed,
        "of tokens": bool((masked[:3] == chosen[:3]).all()),
        "of padding": sorted(set(masked[3:].flatten().tolist())),
    }


if __name__ == "__main__":
    named.run(globals())
