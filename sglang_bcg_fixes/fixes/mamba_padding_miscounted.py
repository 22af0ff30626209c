# SPDX-License-Identifier: Apache-2.0
"""Wrong answer with speculation while another request has length 1 (hybrid models)

Symptom: With speculative decoding and CUDA graphs, the last request of a batch of a hybrid model (gated delta net,
Mamba2, lightning attention) loses its state whenever another request of the batch has length 1: a wrong answer, nothing
in the log.
Cause: The number of padded rows is not passed down but guessed, by counting how often the fill value, 1, occurs in
seq_lens. The state index of that many last rows is set to -1, and the last row is a real request.
Change: For target verification the real rows are counted by the drafts that the batch brings, and the lengths that the
number is guessed from get that many entries above the fill value; nothing else reads the lengths there. In decode a
length is never 1, because the new token counts.
Remove when: No release before 0.5.14 has to be served, or none before 0.5.17 with Bailing's linear models.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import DECODE_GRAPHS, HYBRID, SPECULATION
from sglang_bcg_fixes.anatomy.workarounds import DECODE_GRAPHS_OFF
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, wrong

BACKENDS = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
SHARED = f"{BACKENDS}:MambaAttnBackendBase"
MAMBA2 = f"{BACKENDS}:Mamba2AttnBackend"
LIGHTNING = "sglang.srt.layers.attention.linear.lightning_backend:LightningAttentionBackend"
FAMILIES = {SHARED: "gated delta net and KDA", MAMBA2: "Mamba2", LIGHTNING: "lightning attention"}


def probe(source: Source) -> Finding:
    shared = source.need(f"{SHARED}._replay_metadata")
    callers = {owner: caller(source, owner) for owner in FAMILIES}
    for owner, family in FAMILIES.items():
        if "self._replay_metadata" not in callers[owner].calls:
            return drifted(f"{family} prepares a replay", *callers.values())
    wrong = [family for owner, family in FAMILIES.items() if guesses(source, owner)]
    if wrong:
        reason = f"the number of padded rows is guessed from seq_lens for {', '.join(wrong)}"
        return affected(reason, shared, *callers.values())
    return fixed("the number of padded rows is passed down", shared.header, *callers.values())


def caller(source: Source, owner: str) -> Definition:
    return source.need(f"{owner}.init_forward_metadata_out_graph", f"{owner}.init_forward_metadata_replay_cuda_graph")


def guesses(source: Source, owner: str) -> bool:
    return not caller(source, owner).mentions("num_padding=")


def shared_guesses(source: Source) -> bool:
    return guesses(source, SHARED) or guesses(source, MAMBA2)


def lightning_guesses_alone(source: Source) -> bool:
    return guesses(source, LIGHTNING) and not shared_guesses(source)


def count_by_drafts(
    original: Any, self: Any, bs: int, req_pool_indices: Any, forward_mode: Any, spec_info: Any, seq_lens_cpu: Any
) -> Any:
    """Return lengths in which only padded rows have the fill value.

    A batch without drafts (an idle rank, or an algorithm that has none) is guessed for as before.
    """
    import torch

    drafts = getattr(spec_info, "draft_token", None)
    # no lengths exist while a graph is captured
    if seq_lens_cpu is not None and forward_mode.is_target_verify() and drafts is not None and len(drafts):
        seq_lens_cpu = torch.full_like(seq_lens_cpu, self.get_cuda_graph_seq_len_fill_value())
        seq_lens_cpu[: len(drafts) // spec_info.draft_token_num] += 1
    return original(self, bs, req_pool_indices, forward_mode, spec_info, seq_lens_cpu)


BODY = count_by_drafts

FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/27120",),
    probe=probe,
    patches=(
        PatchPoint((f"{SHARED}._replay_metadata",), How.AROUND, BODY, needed=shared_guesses),
        # inherited: the others, which receive the number, keep the original
        PatchPoint((f"{LIGHTNING}._replay_metadata",), How.AROUND, BODY, needed=lightning_guesses_alone),
    ),
    workarounds=DECODE_GRAPHS_OFF,
    verify=("qwen3_next_adaptive_speculation",),
    concerns=wrong(HYBRID, SPECULATION, DECODE_GRAPHS),
)
