# SPDX-License-Identifier: Apache-2.0
"""Slower: fewer drafts accepted by EAGLE, EAGLE3 and STANDALONE on Triton attention

Symptom: EAGLE, EAGLE3 and STANDALONE with the Triton attention backend accept fewer draft tokens than they should;
answers stay right, speed is lost, nothing is in the log. With topk 1 the accept length is as it should be without CUDA
graphs. With topk above 1, or with the overlap schedule off, it is too low without them too.
Cause: seq_lens is prefix plus new tokens. The graph path of the Triton backend lists the cache slots of all of them as
prefix, and the extend kernel gets the keys and values of the new tokens a second time, with no causal mask between the
two. The worker for topk above 1 has the same defect in eager mode; in graphs the backend also assumes rows of equal
length, while they lie one after the other, each as long as what was accepted. FlashAttention is right in every release:
its kernel expects this seq_lens.
Change: In capture, in replay and in that worker's eager step the backend gets the prefix alone, seq_lens minus the new
tokens, and its rows are laid out by their lengths. Eager steps with topk 1 and every other mode are left as they are.
Remove when: No release before 0.5.13 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.launches import DRAFT_MODEL, TRITON
from sglang_bcg_fixes.anatomy.runners import DRAFT_EXTEND, SPECULATIVE
from sglang_bcg_fixes.anatomy.workarounds import DRAFT_WITHOUT_TRITON
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, slower, unknown

if TYPE_CHECKING:
    from torch import Tensor

BACKEND = "sglang.srt.layers.attention.triton_backend:TritonAttnBackend"
EAGER = f"{BACKEND}.init_forward_metadata"
CAPTURE = f"{BACKEND}.init_forward_metadata_capture_cuda_graph"
REPLAY = f"{BACKEND}.init_forward_metadata_replay_cuda_graph"
FORWARD = f"{BACKEND}.forward_extend"
RUNNERS = (
    f"{DRAFT_EXTEND}.replay",
    f"{SPECULATIVE}.multi_layer_eagle_draft_extend_cuda_graph_runner:MultiLayerEagleDraftExtendCudaGraphRunner.replay",
)
# the worker for topk above 1
POSITIONS = f"{SPECULATIVE}.spec_utils:create_extend_after_decode_spec_info"


def probe(source: Source) -> Finding:
    update = source.find(f"{BACKEND}._update_draft_extend_buffers")
    if update:
        lengths = update.need_assignment_to("kv_lens")
        if lengths.mentions("seq_lens - extend_seq_lens"):
            return fixed("the graph path takes the new tokens off the prefix", update)
        return drifted("the graph path computes the prefix", update)
    methods = [source.need(where) for where in (EAGER, CAPTURE, REPLAY)]
    runners = [source.need(where) for where in RUNNERS]
    forward, positions = source.need(FORWARD), source.need(POSITIONS)
    read = (*methods, *runners, forward, positions)
    noted = all(runner.mentions("spec_info.extend_seq_lens_tensor = ") for runner in runners)
    if any(method.mentions("extend_seq_lens_tensor") for method in methods) or not noted:
        return drifted("the graph path computes the prefix", *read)
    if not positions.mentions("seq_length - accept_len"):
        return unknown("the worker for topk above 1 does not count from seq_lens as in the known releases", *read)
    return affected("the backend takes seq_lens, new tokens included, for the prefix", *read)


def prefix_of(seq_lens: Tensor, new: Tensor) -> Tensor:
    """Prefix of each row, at least 0: padded rows have a length of 1 and are full of new tokens."""
    return (seq_lens - new.to(seq_lens.dtype)).clamp_(min=0)


def new_tokens(spec_info: Any, seq_lens: Tensor, width: int) -> Tensor:
    """Count each row's new tokens: SGLang's runners note it before a replay, and capture with full rows."""
    noted = getattr(spec_info, "extend_seq_lens_tensor", None)
    return seq_lens.new_full(seq_lens.shape, width) if noted is None else noted[: len(seq_lens)]


def lay_out_rows(backend: Any, new: Tensor) -> None:
    """Lay rows one after the other, where the captured kernels read the layout."""
    backend.qo_indptr[1 : len(new) + 1] = new.cumsum(0)


def capture_prefix_alone(
    original: Callable[..., None],
    self: Any,
    bs: int,
    num_tokens: int,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    encoder_lens: Tensor | None,
    forward_mode: Any,
    spec_info: Any,
) -> None:
    if not forward_mode.is_draft_extend(include_v2=True):
        return original(self, bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info)
    width = num_tokens // bs
    new = new_tokens(spec_info, seq_lens[:bs], width)
    prefix = prefix_of(seq_lens[:bs], new)
    original(self, bs, num_tokens, req_pool_indices, prefix, encoder_lens, forward_mode, spec_info)
    lay_out_rows(self, new)
    # later layers of a multi-layer draft model have longer rows than the backend knows of
    self.forward_metadata.max_extend_len = width


def replay_prefix_alone(
    original: Callable[..., None],
    self: Any,
    bs: int,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    seq_lens_sum: int,
    encoder_lens: Tensor | None,
    forward_mode: Any,
    spec_info: Any,
    seq_lens_cpu: Tensor | None,
) -> None:
    rest = (seq_lens_sum, encoder_lens, forward_mode, spec_info, seq_lens_cpu)
    if not forward_mode.is_draft_extend(include_v2=True):
        return original(self, bs, req_pool_indices, seq_lens, *rest)
    new = new_tokens(spec_info, seq_lens[:bs], self.speculative_num_steps + 1)
    original(self, bs, req_pool_indices, prefix_of(seq_lens[:bs], new), *rest)
    lay_out_rows(self, new)


def eager_prefix_alone(original: Callable[..., None], self: Any, forward_batch: Any) -> None:
    """Pass the prefix alone; with topk 1 the mode is DRAFT_EXTEND_V2, which goes by extend_prefix_lens."""
    if not forward_batch.forward_mode.is_draft_extend():
        return original(self, forward_batch)
    whole = forward_batch.seq_lens
    forward_batch.seq_lens = prefix_of(whole, forward_batch.extend_seq_lens)
    try:
        original(self, forward_batch)
    finally:
        forward_batch.seq_lens = whole


def zero_rows_of_nobody(
    original: Callable[..., Tensor],
    self: Any,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    layer: Any,
    forward_batch: Any,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """Zero the last rows of a graph's output, which nothing writes when fewer tokens were accepted."""
    import torch

    output = original(self, q, k, v, layer, forward_batch, *rest, **named)
    if forward_batch.forward_mode.is_draft_extend():
        of_nobody = torch.arange(len(output), device=output.device) >= self.forward_metadata.qo_indptr[-1]
        output.masked_fill_(of_nobody.view(-1, *[1] * (output.ndim - 1)), 0)
    return output


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/pull/26512",
        "https://github.com/sgl-project/sglang/pull/26628",
        "https://github.com/sgl-project/sglang/pull/26651",
    ),
    probe=probe,
    patches=(
        PatchPoint((CAPTURE,), How.AROUND, capture_prefix_alone),
        PatchPoint((REPLAY,), How.AROUND, replay_prefix_alone),
        PatchPoint((EAGER,), How.AROUND, eager_prefix_alone),
        PatchPoint((FORWARD,), How.AROUND, zero_rows_of_nobody),
    ),
    workarounds=DRAFT_WITHOUT_TRITON,
    verify=("eagle_triton_draft_extend",),
    concerns=slower(DRAFT_MODEL, TRITON),
)
