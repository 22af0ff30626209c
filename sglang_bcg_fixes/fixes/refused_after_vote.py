# SPDX-License-Identifier: Apache-2.0
"""DP attention hangs or dies in prefill (own embeddings; long prompts of DeepSeek-V4.1)

Symptom: With --enable-dp-attention, the ranks hang in a prefill, or a collective ends them. On 0.5.17 and 0.5.18 where
one of them has a prompt with embeddings of its own (`positional_embed_overrides`, also those given to /v1/score); on
0.5.21 and 0.5.22 where a prompt of DeepSeek-V4.1 on one of them is longer than 16,384 tokens. Default flags.
Cause: Before each step, the ranks vote on replaying the prefill graph, so that all of them do the same. Such a batch is
never replayed, but the vote does not know: it sees no such embeddings, and the attention backend is asked for the
longest context of its graphs only after the vote. So one rank runs eagerly while others replay, and their collectives
differ in size.
Change: A rank votes against a replay for each batch that it would refuse, so all ranks prefill that step eagerly.
Remove when: Every release that has to be served asks about all of this in the vote.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DP_ATTENTION, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import PREFILL, PREFILL_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, ends, fixed

SYNC = "sglang.srt.managers.scheduler_components.dp_attn"
PREPARE = f"{SYNC}:prepare_mlp_sync_batch_raw"
VOTE = f"{SYNC}:_local_prefill_cuda_graph_vote"
ASKED = f"{PREFILL}.can_replay_locally"
REFUSES = f"{PREFILL}.can_run_graph"


def probe(source: Source) -> Finding:
    if not source.has_module(PREFILL_MODULE):
        return absent("prefill graphs of this release cannot be captured under DP attention")
    votes = source.find(VOTE) or source.need(PREPARE)
    if not votes.mentions("can_replay_locally"):
        return absent("the vote asks no runner at all", votes, source.need(REFUSES))
    read = [votes, source.need(ASKED), source.need(REFUSES)]
    unasked = [
        name
        for name, is_unasked in (
            ("embeddings of single tokens", hides_embeddings),
            ("the longest context of the attention backend", refuses_long_contexts),
        )
        if is_unasked(source)
    ]
    if unasked:
        return affected(f"the vote does not ask about {', '.join(unasked)}", *read)
    return fixed("the vote asks about everything that the runner refuses", *read)


def hides_embeddings(source: Source) -> bool:
    return source.need(PREPARE).mentions("replace_embeds=None")


def refuses_long_contexts(source: Source) -> bool:
    return source.need(REFUSES).mentions("backend_can_run(forward_batch)") and not source.need(ASKED).mentions(
        "self.max_seq_len"
    )


def prepare(original: Callable[..., Any], local_batch: Any, **rest: Any) -> Any:
    if local_batch is None or local_batch.replace_embeds is None or local_batch.input_embeds is not None:
        return original(local_batch, **rest)
    # the runner refuses both, and the vote asks about these alone
    local_batch.input_embeds = local_batch.replace_embeds
    try:
        return original(local_batch, **rest)
    finally:
        local_batch.input_embeds = None


def vote(original: Callable[..., bool], *, local_batch: Any, prefill_graph_runner: Any, **rest: Any) -> bool:
    can_replay = original(local_batch=local_batch, prefill_graph_runner=prefill_graph_runner, **rest)
    return can_replay and is_short_enough(prefill_graph_runner, local_batch)


def is_short_enough(runner: Any, batch: Any) -> bool:
    backend_can_run = getattr(runner, "_backend_can_run_prefill_cuda_graph", None)
    # that of diffusion models asks about more than a batch of the scheduler has
    if batch is None or backend_can_run is None or getattr(runner, "dllm_attention", None) is not None:
        return True
    extended = batch.extend_lens if batch.forward_mode.is_extend() else None
    return bool(backend_can_run(SimpleNamespace(seq_lens_cpu=batch.seq_lens_cpu, extend_seq_lens_cpu=extended)))


FIX = Fix(
    probe=probe,
    patches=(
        PatchPoint((PREPARE,), How.AROUND, prepare, needed=hides_embeddings),
        PatchPoint((VOTE,), How.AROUND, vote, needed=refuses_long_contexts),
    ),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(DP_ATTENTION, PREFILL_GRAPHS),
)
