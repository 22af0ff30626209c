# SPDX-License-Identifier: Apache-2.0
"""Slower: few drafts accepted with a draft worker that SGLang does not ship

Symptom: None with the workers that SGLang ships. With another worker, such as one of a build from main, few draft
tokens are accepted although the same draft model does well elsewhere: its new tokens do not attend to each other.
Cause: In the draft model's extend step seq_lens is prefix plus new tokens, by convention alone; the attention backends
use it as passed. Every caller in every release follows the convention. A worker that passes the prefix gets an extent
that ends before its new tokens; the Triton backend's graphs, which subtract the new tokens, shorten it by that many
again.
Change: Only with SGLANG_BCG_FIX_DRAFT_EXTEND_PREFIX_ONLY=on. Where seq_lens equals extend_prefix_lens the new tokens
are added to it for the duration of the call: in the eager step, in the runners that fill a graph's buffers, and from
0.5.13 in the backends' graph methods, which receive a batch. A length that counts its new tokens never equals its
prefix and is left as it is, so nothing is counted twice. No flag of SGLang avoids it.
Remove when: No worker that passes the prefix alone has to be served.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.launches import CODE_OF_YOUR_OWN, DRAFT_MODEL
from sglang_bcg_fixes.anatomy.runners import DRAFT_EXTEND
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, drifted, latent, slower

if TYPE_CHECKING:
    from torch import Tensor

FLASH = "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend"
TRITON = "sglang.srt.layers.attention.triton_backend:TritonAttnBackend"
MULTI = "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner:MultiLayerEagle"
EAGER = f"{FLASH}.init_forward_metadata"
# methods that fill a captured graph's buffers, oldest first
SINGLE_FILLS = (f"{DRAFT_EXTEND}.execute", f"{DRAFT_EXTEND}.replay")
MULTI_FILLS = (
    f"{MULTI}MultiStepDraftExtendCudaGraphRunner.prepare",
    f"{MULTI}DraftExtendCudaGraphRunner.execute",
    f"{MULTI}DraftExtendCudaGraphRunner.replay",
)
# later releases only: before, the backends' graph methods get lengths without a prefix to compare with
AROUND_GRAPHS = (f"{FLASH}.init_forward_metadata_out_graph", f"{TRITON}.init_forward_metadata_out_graph")
IN_GRAPH = f"{FLASH}.init_forward_metadata_in_graph"

logger = logging.getLogger("sglang_bcg_fixes")


def probe(source: Source) -> Finding:
    eager, single, multi = source.need(EAGER), source.need(*SINGLE_FILLS), source.need(*MULTI_FILLS)
    graph = [method for where in (*AROUND_GRAPHS, IN_GRAPH) if (method := source.find(where))]
    read = (eager.header, single, multi.header, *(method.header for method in graph))
    if eager.mentions("seqlens_in_batch = forward_batch.seq_lens\n") and single.mentions("forward_batch.seq_lens"):
        return latent("seq_lens is used as passed, which is right for every caller in this source", *read)
    return drifted("the extent is computed", *read)


def count_new_tokens(original: Callable[..., Any], self: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
    whole = whole_lengths(forward_batch)
    if whole and forward_batch.seq_lens_cpu is not None:
        on_host = whole_lengths_on_host(forward_batch)
        whole = whole | on_host if on_host else {}
    with lengths(forward_batch, whole):
        return original(self, forward_batch, *rest, **named)


def count_new_tokens_in_graph(original: Callable[..., None], self: Any, forward_batch: Any) -> None:
    """Add the new tokens inside the graph, which has no use for lengths on the host."""
    with lengths(forward_batch, whole_lengths(forward_batch)):
        original(self, forward_batch)


@contextlib.contextmanager
def lengths(batch: Any, whole: dict[str, Any]) -> Iterator[None]:
    """Replace lengths for one call: the caller may go on with those that it passed."""
    passed = {name: getattr(batch, name) for name in whole}
    try:
        for name, value in whole.items():
            setattr(batch, name, value)
        yield
    finally:
        for name, value in passed.items():
            setattr(batch, name, value)


def whole_lengths(batch: Any) -> dict[str, Any]:
    """Full lengths by the batch's field names; empty in other modes, or without a prefix to compare."""
    prefix, new = getattr(batch, "extend_prefix_lens", None), getattr(batch, "extend_seq_lens", None)
    if prefix is None or new is None or not batch.forward_mode.is_draft_extend_v2():
        return {}
    return {"seq_lens": with_new_tokens(batch.seq_lens, prefix, new)}


def whole_lengths_on_host(batch: Any) -> dict[str, Any]:
    import torch

    prefix, new = getattr(batch, "extend_prefix_lens_cpu", None), getattr(batch, "extend_seq_lens_cpu", None)
    if prefix is None or new is None:
        warn(
            "bcg-fixes: draft_extend_prefix_only leaves a batch as it is that has seq_lens_cpu without "
            "extend_prefix_lens_cpu and extend_seq_lens_cpu; let the worker set all three, or none of them. "
            "SGLANG_BCG_FIX_DRAFT_EXTEND_PREFIX_ONLY=off silences this"
        )
        return {}
    whole = with_new_tokens(batch.seq_lens_cpu, torch.as_tensor(prefix), torch.as_tensor(new))
    total = batch.seq_lens_sum
    added = int((whole - batch.seq_lens_cpu).sum())
    return {"seq_lens_cpu": whole, "seq_lens_sum": None if total is None else total + added}


def with_new_tokens(lengths: Tensor, prefix: Tensor, new: Tensor) -> Tensor:
    """Add new tokens to rows that end with their prefix; buffers may have more rows than the batch."""
    rows = len(prefix)
    whole = lengths.clone()
    whole[:rows] += (lengths[:rows] == prefix) * new[:rows]
    return whole


@functools.cache
def warn(message: str) -> None:
    """Warn once per process: every step would say the same."""
    logger.warning(message)


def is_there(where: str) -> Callable[[Source], bool]:
    return lambda source: source.find(where) is not None


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/pull/26512",
        "https://github.com/sgl-project/sglang/pull/26628",
        "https://github.com/sgl-project/sglang/pull/26651",
    ),
    probe=probe,
    patches=(
        PatchPoint((EAGER,), How.AROUND, count_new_tokens),
        PatchPoint(SINGLE_FILLS, How.AROUND, count_new_tokens),
        PatchPoint(MULTI_FILLS, How.AROUND, count_new_tokens),
        *(PatchPoint((where,), How.AROUND, count_new_tokens, needed=is_there(where)) for where in AROUND_GRAPHS),
        PatchPoint((IN_GRAPH,), How.AROUND, count_new_tokens_in_graph, needed=is_there(IN_GRAPH)),
    ),
    default="off",
    verify=("eagle_prefix_only_worker",),
    concerns=slower(DRAFT_MODEL, CODE_OF_YOUR_OWN),
)
