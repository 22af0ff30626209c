# SPDX-License-Identifier: Apache-2.0
"""Qwen4 with DP attention dies when one rank prefills while another is idle

Symptom: With --enable-dp-attention and default flags, Qwen4 ends with "invalid configuration argument" as soon as one
rank prefills while another has nothing to do.
Cause: An idle rank replays the prefill graph with a made-up prompt, so that all ranks take part in its collectives. In
a break, Qwen4's n-gram embeddings (PLE) ask the batch what it was before it was made up, and an idle one joins the
collectives and adds nothing. The batch of a replay does not know: the embeddings of none of its tokens are computed,
and a kernel is launched without blocks.
Change: There, a batch without any token of its own passes for the idle one that it is.
Remove when: Every release that has to be served tells the batch of a replay what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DP_ATTENTION, PREFILL_GRAPHS, named
from sglang_bcg_fixes.anatomy.qwen4 import MODEL, nothing_in_a_break
from sglang_bcg_fixes.anatomy.runners import PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, ends, fixed

PREPARE = f"{MODEL}:_prepare_ple_batch"
KNOWN_BY = "_original_forward_mode"


def probe(source: Source) -> Finding:
    if missing := nothing_in_a_break(source, PREPARE):
        return missing
    prepare = source.need(PREPARE)
    mode, load = source.need(f"{MODEL}:_get_ple_forward_mode"), source.need(f"{PREFILL}.load_batch")
    read = [prepare, mode, load]
    if not (prepare.mentions("mode.is_idle()") and mode.mentions(f"forward_batch.{KNOWN_BY}")):
        return drifted("an idle batch is recognised", *read)
    if load.mentions(KNOWN_BY):
        return fixed("the batch of a replay knows what it was", *read)
    return affected("an idle batch is recognised by what the batch of a replay does not have", *read)


def prepare(original: Callable[..., Any], input_ids: Any, forward_batch: Any, **sizes: Any) -> Any:
    if not is_made_up(forward_batch):
        return original(input_ids, forward_batch, **sizes)
    setattr(forward_batch, KNOWN_BY, type(forward_batch.forward_mode).IDLE)
    try:
        return original(input_ids, forward_batch, **sizes)
    finally:
        setattr(forward_batch, KNOWN_BY, None)


def is_made_up(batch: Any) -> bool:
    """Tell whether a rank without requests has been given this prompt, and the batch does not say so."""
    has_no_token = batch.global_num_token_non_padded_cpu == 0 and batch.forward_mode.is_extend()
    return has_no_token and getattr(batch, KNOWN_BY) is None


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((PREPARE,), How.AROUND, prepare),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(named("Qwen4*"), DP_ATTENTION, PREFILL_GRAPHS),
)
