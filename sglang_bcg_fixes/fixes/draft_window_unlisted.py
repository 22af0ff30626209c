# SPDX-License-Identifier: Apache-2.0
"""The server does not start: drafts with sliding windows on Triton attention

Symptom: With a draft model that has layers with a sliding window, as those of MiMo-V2, and the Triton attention
backend, the server does not start: the graph of the draft model's extend step cannot be captured. On AMD a memory
fault was reported in its place.
Until 0.5.12.post1, with topk above 1 or without the overlap schedule, that step without its graph ends the server.
Cause: The backend lists, for that step's graph, the cache slots of layers without a window alone. Layers with one get
no list at all. Without graphs they do, except in the older workers' step.
Change: The slots of the window are listed beside the others, in capture, in replay and in that step, by SGLang's own
function, as from 0.5.23 on. Until 0.5.21 that function waits for the device, there as in decode. Nothing changes for
draft models without windows, with decode context parallelism, or with a memory pool that both kinds of layer share.
Remove when: 0.5.22 need not be served.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DECODE_GRAPHS, DRAFT_MODEL, TRITON, WINDOW, flag
from sglang_bcg_fixes.anatomy.workarounds import DRAFT_WITHOUT_TRITON
from sglang_bcg_fixes.concern import Condition
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, ends, fixed

MODULE = "sglang.srt.layers.attention.triton_backend"
BACKEND = f"{MODULE}:TritonAttnBackend"
FILL = f"{BACKEND}._update_draft_extend_buffers"
BUILD = f"{BACKEND}._build_cuda_graph_forward_metadata"
# until 0.5.12.post1 one method does both
OLD_CAPTURE, OLD_REPLAY = (f"{BACKEND}.init_forward_metadata_{step}_cuda_graph" for step in ("capture", "replay"))
# as long as a worker has a mode of its own for the step
OLD_EAGER = f"{BACKEND}.init_forward_metadata"
LIST, LISTED = "update_sliding_window_buffer", "window_kv_indices"
OLD_LIST = f"{LIST}_cuda_graph"
# of the draft model alone, whatever the served model's configuration says
GIVEN_WINDOW = Condition("--speculative-draft-window-size", flag("--speculative-draft-window-size"))
UNLISTED = "the graph of the draft's extend step has no slots of sliding windows"
PREPARED = "the graph of the draft's extend step is prepared"


def probe(source: Source) -> Finding:
    if is_old(source):
        steps = [source.need(where) for where in (OLD_CAPTURE, OLD_REPLAY, OLD_EAGER)]
        modes = ("is_draft_extend(include_v2=True)", "is_draft_extend(include_v2=True)", "is_draft_extend()")
        branches = [of_mode(step.text, mode) for step, mode in zip(steps, modes, strict=True)]
        if all(branch and LIST not in branch for branch in branches):
            return affected(UNLISTED, *steps, source.need(f"{MODULE}:{OLD_LIST}"), source.need(f"{MODULE}:{LIST}"))
        return drifted(PREPARED, *steps)
    fill, build, listing = source.need(FILL), source.need(BUILD), source.need(f"{MODULE}:{LIST}")
    if fill.mentions(LISTED):
        return fixed("the graph of the draft's extend step has the slots of sliding windows", fill, build)
    if build.mentions(f"{LISTED}=None") and LISTED in listing.parameters:
        return affected(UNLISTED, fill, build, listing)
    return drifted(PREPARED, fill, build, listing)


def of_mode(text: str, mode: str) -> str:
    """The branch for a mode, without the last one, which is for all others."""
    return text.partition(mode)[2].partition("\n    else:")[0]


def list_windows(original: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
    found = original(self, *args, **named)
    if given := windowed_extend(original, self, args, named):
        write_windows(self, given)
    return found


def point_to_windows(original: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
    metadata = original(self, *args, **named)
    if given := windowed_extend(original, self, args, named):
        write_windows_into(metadata, self, given["bs"])
    return metadata


def capture_with_windows(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    original(self, *args, **named)
    if given := windowed_extend(original, self, args, named):
        write_windows(self, given)
        write_windows_into(self.forward_metadata, self, given["bs"])


def replay_with_windows(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    original(self, *args, **named)
    if given := windowed_extend(original, self, args, named):
        write_windows(self, given)


def list_windows_without_a_graph(result: None, self: Any, forward_batch: Any) -> None:
    if not has_windows(self) or forward_batch.forward_mode.name != "DRAFT_EXTEND":
        return
    listing = getattr(sys.modules[MODULE], LIST)
    metadata, rows = self.forward_metadata, forward_batch.batch_size
    metadata.window_kv_indptr, metadata.window_kv_indices, _, metadata.window_kv_offsets = listing(
        self.window_kv_indptr,
        self.req_to_token,
        self.sliding_window_size,
        # those that the layers without a window have just been given
        metadata.kv_indptr.diff(),
        forward_batch.req_pool_indices,
        rows,
        self.device,
        self.token_to_kv_pool_allocator,
    )


def windowed_extend(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """The arguments by name of a draft's extend step with windows; nothing for any other step."""
    # asked first: to bind takes longer than all else here, and most drafts have no windows
    if not has_windows(self):
        return {}
    given = inspect.signature(original).bind(self, *args, **named).arguments
    return given if given["forward_mode"].name in ("DRAFT_EXTEND", "DRAFT_EXTEND_V2") else {}


def write_windows(backend: Any, given: dict[str, Any]) -> None:
    """List the windows by SGLang's function, which takes the table, the pool and the requests in several ways."""
    here = sys.modules[MODULE]
    listing = getattr(here, OLD_LIST, None) or getattr(here, LIST)
    rows = given["bs"]
    at_hand = vars(backend) | given
    at_hand |= {
        "translator": at_hand.get("kv_index_translator"),
        "window_kv_indices": backend.cuda_graph_window_kv_indices,
        # those that the layers without a window have just been given
        "seq_lens": backend.kv_indptr[: rows + 1].diff(),
    }
    if "req_pool_indices" in given:
        at_hand["req_pool_indices"] = given["req_pool_indices"][:rows]
    taken = inspect.signature(listing).parameters.values()
    listing(**{each.name: at_hand[each.name] for each in taken if each.name in at_hand or each.default is each.empty})


def has_windows(backend: Any) -> bool:
    """False also with decode context parallelism or a pool shared by both kinds of layer: decode lists otherwise."""
    is_plain = getattr(backend, "dcp_size", 1) == 1 and getattr(backend, "_translate_kv_loc", None) is None
    return is_plain and backend.sliding_window_size is not None and backend.sliding_window_size > 0


def write_windows_into(metadata: Any, backend: Any, rows: int) -> None:
    metadata.window_kv_indptr = backend.window_kv_indptr[: rows + 1]
    metadata.window_kv_indices = backend.cuda_graph_window_kv_indices


def is_old(source: Source) -> bool:
    return source.find(FILL) is None


def is_new(source: Source) -> bool:
    return not is_old(source)


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/issues/29858",
        "https://github.com/sgl-project/sglang/issues/22679",
    ),
    probe=probe,
    patches=(
        PatchPoint((FILL,), How.AROUND, list_windows, needed=is_new),
        PatchPoint((BUILD,), How.AROUND, point_to_windows, needed=is_new),
        PatchPoint((OLD_CAPTURE,), How.AROUND, capture_with_windows, needed=is_old),
        PatchPoint((OLD_REPLAY,), How.AROUND, replay_with_windows, needed=is_old),
        PatchPoint((OLD_EAGER,), How.AFTER, list_windows_without_a_graph, needed=is_old),
    ),
    workarounds=DRAFT_WITHOUT_TRITON,
    verify=("eagle3_windowed_draft",),
    concerns=ends(DRAFT_MODEL, TRITON, WINDOW | GIVEN_WINDOW, DECODE_GRAPHS),
)
