# SPDX-License-Identifier: Apache-2.0
"""DP attention with 8 or more ranks a group does not start, or may hang in prefill

Symptom: With --enable-dp-attention and an attention group (--tp-size over --dp-size) of 8 ranks or more, the server
does not start: a collective of the capture finds that "input tensor must be the same size as output size times world
size". On 0.5.17 to 0.5.21 with default flags, before that with --cuda-graph-backend-prefill breakable. Smaller groups
end so at sizes of --cuda-graph-bs-prefill that they do not divide. From 0.5.22 on the server starts with such sizes;
but if the largest one is not a multiple of the group, a prefill larger than the last multiple below it hangs the ranks
or ends them.
Cause: The tokens of a group are scattered over its ranks. Eager batches and decode graphs are padded to a multiple of
the group for that; the sizes of prefill graphs are taken as they come, among them 4, 12, 20 and 28. From 0.5.22 on the
capture rounds them up, but where the ranks agree on one size for a step they use those that were given. Past the
largest they agree on none, and each rank replays a graph of its own size.
Change: Each size is rounded up to a multiple of the group for both, or down where the graph would hold more tokens than
the server can. Where nothing is scattered, and where every size is a multiple, nothing changes.
Remove when: Every release that has to be served uses multiples of the group in both places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DP_ATTENTION, PREFILL_GRAPHS, PREFILL_SIZES, UNEVEN_GROUP
from sglang_bcg_fixes.anatomy.runners import PREFILL, PREFILL_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Workaround
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, ends, fixed

MAKE = f"{PREFILL}.__init__"
ALIGN = f"{PREFILL_MODULE}:get_prefill_num_tokens_to_capture"
SIZES = "self.capture_num_tokens"
AGREE = "sglang.srt.model_executor.forward_batch_info:ForwardBatch.prepare_mlp_sync_batch"
SCATTERS = "sglang.srt.utils.common:require_gathered_buffer"


def probe(source: Source) -> Finding:
    if not source.has_module(PREFILL_MODULE):
        return absent("prefill graphs of this release cannot be captured under DP attention")
    sizes = source.need(MAKE).need_assignment_to(SIZES)
    read = [sizes, configuration(source), source.need(SCATTERS)]
    if sizes.mentions("sorted(capture_tokens)"):
        return affected("sizes are taken as they come", *read)
    if not sizes.mentions("get_prefill_num_tokens_to_capture(capture_tokens)"):
        return drifted("the sizes are chosen", *read)
    agree = source.need(AGREE)
    read += [source.need(ALIGN), agree]
    if agree.mentions("max(prefill_cg.bs)"):
        return affected("sizes are rounded up for the capture, and not where ranks agree on one", *read)
    return fixed("sizes are rounded up to a multiple of the attention group", *read)


def configuration(source: Source) -> Definition:
    make = source.need(MAKE)
    return make.assignment_to("prefill_config") or make.need_assignment_to("capture_tokens")


def in_arguments(source: Source) -> bool:
    return configuration(source).mentions("model_runner.server_args.cuda_graph_config.prefill")


def in_context(source: Source) -> bool:
    return configuration(source).mentions("get_exec().graph.cuda_graph_config.prefill")


def capture_by_arguments(original: Callable[..., None], self: Any, model_runner: Any) -> None:
    from sglang.srt.utils.common import require_gathered_buffer

    arguments = model_runner.server_args
    if require_gathered_buffer(arguments):
        align(arguments.cuda_graph_config.prefill, model_runner)
    original(self, model_runner)


def capture_by_context(original: Callable[..., None], self: Any, model_runner: Any) -> None:
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.utils.common import require_gathered_buffer

    if require_gathered_buffer():
        align(get_exec().graph.cuda_graph_config.prefill, model_runner)
    original(self, model_runner)


def align(prefill: Any, model_runner: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    at_most = model_runner.req_to_token_pool.size * model_runner.model_config.context_len
    # none is an error of SGLang's own
    if prefill.bs:
        prefill.bs = multiples(prefill.bs, get_parallel().attn_tp_size, at_most)


def multiples(sizes: Iterable[int], group: int, at_most: int) -> list[int]:
    """Round each up to a multiple of the group, or down where that is more than the limit."""
    found = set()
    for size in sizes:
        up = -(-size // group) * group
        found.add(up if up <= at_most or up == size else up - group)
    return sorted(found - {0})


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/36262",),
    probe=probe,
    patches=(
        PatchPoint((MAKE,), How.AROUND, capture_by_arguments, needed=in_arguments),
        PatchPoint((MAKE,), How.AROUND, capture_by_context, needed=in_context),
    ),
    workarounds=(
        Workaround(
            flags="--cuda-graph-bs-prefill 64 128 256 512 1024 2048 (multiples of the group)",
            option="--cuda-graph-bs-prefill",
            effect="every graph can be captured; shorter prefills are padded more, or eager",
        ),
        *PREFILL_GRAPHS_OFF,
    ),
    verify=("llama_prefix_cache",),
    concerns=ends(DP_ATTENTION, PREFILL_GRAPHS, UNEVEN_GROUP | PREFILL_SIZES),
)
