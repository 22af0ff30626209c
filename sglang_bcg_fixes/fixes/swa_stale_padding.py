# SPDX-License-Identifier: Apache-2.0
"""Worse answers under load, or no start (sliding windows: MiMo V2.5 Pro, Gemma, GPT-OSS)

Symptom: On 0.5.11, models with a sliding window pool (MiMo V2.5 Pro, Gemma, GPT-OSS) lose accuracy under load, 80.3
instead of 90.3 on AIME24-25 in the upstream report, or get NaN. On 0.5.12 and 0.5.12.post1 the server asserts at
start-up when breakable CUDA graphs are on.
Cause: On 0.5.11 a batch that is padded to a captured size keeps the sliding window locations of an earlier, larger
batch in its last rows, and the replay stores there. 0.5.12 zeroes them but makes the buffer int32 in the decode and
piecewise runners and int64 in the breakable runner, and the shared buffer refuses the mismatch.
Change: On 0.5.11 the locations of a padded batch are set to 0, a slot that no request owns, before it is filled in. Its
buffers stay int64: all three runners agree on that, and the cache stores the same with either type. On 0.5.12 and
0.5.12.post1 every runner's buffer is made int32, the type of what is copied into it, before it is shared.
Remove when: No release before 0.5.13 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, DECODE_PADDING, WINDOW, always
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL
from sglang_bcg_fixes.anatomy.workarounds import NO_BREAKABLE_GRAPHS_AND_NO_PADDING
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, ends, fixed, wrong

DECODE = "sglang.srt.model_executor.cuda_graph_runner:DecodeInputBuffers"
FILL = f"{DECODE}.populate_from_forward_batch"
SHARE = "sglang.srt.model_executor.input_buffers:ForwardInputBuffers.share_buffers"
REGISTRY = "sglang.srt.model_executor.cuda_graph_buffer_registry:build_decode_registry"
BACKEND = "sglang.srt.layers.attention.triton_backend:TritonAttnBackend._fill_cuda_graph_swa_out_cache_loc"


def probe(source: Source) -> Finding:
    if source.find(REGISTRY):
        slots = source.need(REGISTRY).need_assignment_to("slots")
        return fixed("attention backends derive the locations anew in every step", slots, source.need(BACKEND))
    fill, decode, breakable = source.need(FILL), decode_buffer(source), breakable_buffer(source)
    share = source.need(SHARE)
    wrong = []
    if padding_is_stale(source):
        wrong.append("padding leaves the decode graphs' sliding window locations as they are")
    if types_differ(source):
        wrong.append("the decode buffer is int32 and the breakable runner's is int64, which asserts at start-up")
    if wrong:
        return affected("; ".join(wrong), fill, decode, breakable, share)
    return fixed("padding zeroes the locations, and the runners agree on their type", fill, decode, breakable)


def decode_buffer(source: Source) -> Definition:
    return source.need(f"{DECODE}.create").need_assignment_to("out_cache_loc_swa")


def breakable_buffer(source: Source) -> Definition:
    return source.need(f"{OLD_PREFILL}._init_buffers").need_assignment_to("out_cache_loc_swa")


def padding_is_stale(source: Source) -> bool:
    return "self.out_cache_loc_swa.zero_" not in source.need(FILL).calls


def types_differ(source: Source) -> bool:
    return decode_buffer(source).mentions("torch.int32") and breakable_buffer(source).mentions("torch.int64")


def zero_padded_locations(self: Any, *, raw_bs: int, bs: int, **_: Any) -> None:
    if bs != raw_bs and self.out_cache_loc_swa is not None:
        self.out_cache_loc_swa.zero_()


def make_locations_int32(self: Any) -> None:
    """Make the locations int32 before they are shared; other runners' buffers have no such field, or None."""
    import torch

    locations = getattr(self, "out_cache_loc_swa", None)
    if locations is not None and locations.dtype != torch.int32:
        self.out_cache_loc_swa = locations.to(torch.int32)


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/pull/23552",
        "https://github.com/sgl-project/sglang/pull/24743",
    ),
    probe=probe,
    patches=(
        PatchPoint((FILL,), How.BEFORE, zero_padded_locations, needed=padding_is_stale),
        PatchPoint((SHARE,), How.BEFORE, make_locations_int32, needed=types_differ),
    ),
    workarounds=NO_BREAKABLE_GRAPHS_AND_NO_PADDING,
    verify=("gpt_oss_decode_padding", "gpt_oss_breakable_start"),
    concerns=wrong(WINDOW, DECODE_PADDING, always("stale padding").where(padding_is_stale))
    + ends(WINDOW, ASKED_FOR, always("buffers of two types").where(types_differ)),
)
