# SPDX-License-Identifier: Apache-2.0
"""The server dies: EAGLE with topk above 1 on FlashAttention with small pages

Symptom: The server stops with a device-side assert, "index out of bounds", or "illegal memory access": EAGLE with topk
above 1 on FlashAttention, CUDA graphs, and pages so small that the drafts of one branch need more than two of them,
such as --page-size 2 with 4 steps.
Cause: Each draft step has a graph whose table is as wide as the tokens so far plus one page, but the pages of all steps
are written into it, including those of tokens not drafted yet.
Change: Only the slots of the tokens so far are passed on. In eager passes the table has room for all of them, and the
entries left out are not read there.
Remove when: No release before 0.5.13 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import BRANCHES, DECODE_GRAPHS, DRAFT_MODEL, FA3, PAGES
from sglang_bcg_fixes.anatomy.workarounds import PAGES_OF_ONE_TOKEN
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, ends, fixed

MODULE = "sglang.srt.layers.attention.flashattention_backend"
BACKEND = f"{MODULE}:FlashAttentionBackend"
FILL = f"{MODULE}:draft_decode_set_expand_metadata"


def probe(source: Source) -> Finding:
    fill = source.need(FILL)
    replay = source.need(f"{BACKEND}._apply_cuda_graph_metadata", f"{BACKEND}.init_forward_metadata_replay_cuda_graph")
    slots = replay.need_assignment_to("cache_loc")
    if replay.mentions("cache_loc = cache_loc[:, :decode_length]"):
        return fixed("a replay passes on the slots of the tokens so far", fill, slots)
    if replay.mentions("cache_loc=cache_loc,"):
        return affected("a replay passes on the slots of all steps", fill, slots)
    return drifted("a replay fills the table", fill, slots)


def of_the_tokens_so_far(
    original: Callable[..., None],
    cache_seqlens_int32: Any,
    page_table: Any,
    last_page_lens: Any,
    decode_length: int,
    cache_loc: Any,
    **rest: Any,
) -> None:
    original(
        cache_seqlens_int32=cache_seqlens_int32,
        page_table=page_table,
        last_page_lens=last_page_lens,
        decode_length=decode_length,
        cache_loc=cache_loc[:, :decode_length],
        **rest,
    )


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((FILL,), How.AROUND, of_the_tokens_so_far),),
    workarounds=PAGES_OF_ONE_TOKEN,
    verify=("eagle_prefix_only_worker",),
    concerns=ends(DRAFT_MODEL, BRANCHES, FA3, DECODE_GRAPHS, PAGES),
)
