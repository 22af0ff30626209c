# SPDX-License-Identifier: Apache-2.0
"""Slots that a verification saves states to, where one of its requests has finished since it was prepared."""

from __future__ import annotations

import importlib
from typing import Any

import numpy
import torch

from cpu_sglang import mamba, one_batch, prefill
from tests.releases import kinds_of_request
from tests.scenarios import telling

FINISHED, INDEX = 1, "mamba_next_track_idx"


def slots(loaded: one_batch.LoadedModel) -> list[str] | str:
    """Say where the states of each of three requests go; the second one's first slot is the prefix cache's by then."""
    prompts = [numpy.array(prompt, dtype=numpy.int32) for prompt in prefill._prompts([5, 6, 7])]
    with torch.no_grad():
        loaded.runner.clear()
        requests = loaded.benchmark.prepare_synthetic_inputs_for_latency_test(len(prompts), 7, prompts)
        _, _, batch = loaded.runner.extend(requests)
    pool = loaded.model_runner.req_to_token_pool
    table = pool.req_index_to_mamba_ping_pong_track_buffer_mapping
    # later releases keep it with what else a request holds
    holders = [request if hasattr(request, INDEX) else request.kv for request in batch.reqs]
    # the other one holds the last states that were saved
    holders[FINISHED].mamba_next_track_idx = 1
    rows = batch.req_pool_indices.tolist()
    own = [int(table[row, holder.mamba_next_track_idx]) for row, holder in zip(rows, holders, strict=True)]
    cached = int(table[rows[FINISHED], 0])
    pool.free_mamba_cache(batch.reqs[FINISHED], mamba_ping_pong_track_buffer_to_keep=0)
    try:
        prepare(batch)
    except TypeError as error:
        return str(error)
    names = {cached: "the cache's", 0: "reserved", -1: "none"}
    return [
        "own" if slot == mine and number != FINISHED else names.get(slot, "another's")
        for number, (slot, mine) in enumerate(zip(batch.mamba_track_indices.tolist(), own, strict=True))
    ]


def prepare(batch: Any) -> None:
    """Have the release choose the slots as its verification does."""
    utilities = importlib.import_module("sglang.srt.speculative.spec_utils")
    if hasattr(utilities, "prepare_mamba_track_for_verify"):
        utilities.prepare_mamba_track_for_verify(batch)
        return
    verification: Any = importlib.import_module("sglang.srt.speculative.eagle_info_v2")
    verification.set_mamba_track_indices_from_reqs(batch)


def main() -> None:
    one_batch.import_sglang()
    one_batch.load_plugins()
    kinds_of_request.forget_pinned_memory()
    loaded = one_batch.load(
        "qwen3next",
        max_mamba_cache_size=16,
        disable_radix_cache=False,
        disable_overlap_schedule=False,
        **mamba.allow_extra_buffer(),
    )
    telling.with_and_without(lambda: slots(loaded))


if __name__ == "__main__":
    main()
