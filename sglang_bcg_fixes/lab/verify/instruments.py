# SPDX-License-Identifier: Apache-2.0
"""Instruments that `bcg-fixes verify` puts into its servers: replay counters, and refusals for the reference.

To the plugin they are fixes, switched on by SGLANG_BCG_INSTRUMENTS alone. A counter does not change what SGLang does.
It notes each forward pass as one line of JSON, `[phase, what, tokens, requests, detail]`, in a file per process next to
the plugin's reports. The line is written before the answer leaves the process, so a killed process loses none.
"""

from __future__ import annotations

import json
import os
import pkgutil
import types
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes import fixes, flags
from sglang_bcg_fixes.anatomy.runners import BY_PHASE, EXECUTOR, PREFILL
from sglang_bcg_fixes.api import hookimpl
from sglang_bcg_fixes.fixes import stack_call_signature
from sglang_bcg_fixes.model import Fix, How, PatchPoint
from sglang_bcg_fixes.process import fallbacks, report
from sglang_bcg_fixes.process.selfcheck import check
from sglang_bcg_fixes.source.finding import Finding, Verdict
from sglang_bcg_fixes.source.tree import Source

PHASES = ("prefill", "decode", "draft_extend")
# prefills that no user has asked for
SELFCHECK = "self-check"
# a prefill that was replayed from a graph with attention inside is noted under both
INSIDE = "attention inside"
# older and newer releases name the methods differently
QUESTIONS, ANSWERS = ("can_run", "can_run_graph"), ("replay", "execute")
PRIMITIVES = tuple(
    f"{EXECUTOR}.{package}breakable_cuda_graph.breakable_cuda_graph" for package in ("", "runner_backend_utils.")
)
UNBROKEN_BACKEND = f"{EXECUTOR}.runner_backend.full_cuda_graph_backend:FullCudaGraphBackend"
UNBROKEN = "count_unbroken_graphs"
PADDED_BACKEND = f"{EXECUTOR}.runner_backend.breakable_cuda_graph_backend:BreakableCudaGraphBackend"
SUFFIX = ".passes"
# every tiny model has this token, and SGLang pads with 0
PADDING = 7
PADDED = "run_code_on_padded_batch"


# our own state: this process's file, and the breakable graphs replayed so far
_file: dict[int, int] = {}
_replayed: list[int] = [0]
# the layers that the prefill runner is about to replay
_layers: list[Any] = [None]


def note(phase: str, *rest: Any) -> None:
    """Append a line in one write, which is whole or absent, whatever kills the process afterwards."""
    line = (SELFCHECK if check.is_running() else phase, *rest)
    pid = os.getpid()
    if pid not in _file:
        folder = flags.report_dir()
        report.make_private(folder)
        _file[pid] = os.open(folder / f"{pid}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(_file[pid], (json.dumps(line) + "\n").encode())


def note_capture(self: Any) -> None:
    note("prefill", "captured", None, None, None)


def note_unbroken_capture(result: Any, *args: Any, **kwargs: Any) -> Any:
    note_capture(None)
    return result


def note_unbroken_replay(*args: Any, **kwargs: Any) -> None:
    # of any phase: who notes a prefill looks whether one was replayed in it
    note_replay_of_graph(None)


def note_replay_of_graph(self: Any) -> None:
    _replayed[0] += 1


def note_prefill_refused(result: bool, self: Any, forward_batch: Any) -> bool:
    if not result:
        note("prefill", "refused", *size(forward_batch), why_refused(self, forward_batch))
    return result


def note_prefill(original: Callable[..., Any], self: Any, forward_batch: Any, **kwargs: Any) -> Any:
    """Note a prefill as replayed only if a graph was replayed in it: being admitted is not enough."""
    before = _replayed[0]
    output = original(self, forward_batch, **kwargs)
    tokens, requests = size(forward_batch)
    what = "replayed" if _replayed[0] > before else "admitted, not replayed"
    bucket = fallbacks.bucket(self.capture_num_tokens, tokens)
    note("prefill", what, tokens, requests, bucket)
    inside = check.attention_inside()
    if what == "replayed" and inside is not None and inside.took_twin:
        note(INSIDE, what, tokens, requests, bucket)
    return output


def noting_refusals(phase: str) -> Callable[..., bool]:
    def note_refused(result: bool, self: Any, forward_batch: Any) -> bool:
        if not result:
            note(phase, "refused", *size(forward_batch), "by the runner")
        return result

    return note_refused


def noting_replays(phase: str) -> Callable[..., Any]:
    def note_replayed(result: Any, self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, requests = size(forward_batch)
        note(phase, "replayed", tokens, requests, fallbacks.bucket(self.capture_bs, requests))
        return result

    return note_replayed


note_decode_refused, note_decode = noting_refusals("decode"), noting_replays("decode")
note_draft_extend_refused, note_draft_extend = noting_refusals("draft_extend"), noting_replays("draft_extend")


def refuse(result: bool, self: Any, forward_batch: Any) -> bool:
    return False


def change_the_padding(result: Any, self: Any, forward_batch: Any, **kwargs: Any) -> Any:
    """Put another token into padded rows, whose results must not reach a real row."""
    # some releases return more than the padded batch
    padded = result[0] if isinstance(result, tuple) else result
    padded.input_ids[len(forward_batch.input_ids) :].fill_(PADDING)
    _layers[0] = self.layer_model
    return result


def run_the_code(
    original: Callable[..., Any], self: Any, shape_key: Any, static_forward_batch: Any, **kwargs: Any
) -> Any:
    """Run the captured code instead of replaying it: layers on the padded batch, breaks as plain calls."""
    import torch

    note_replay_of_graph(self)
    batch, layers = static_forward_batch, _layers[0]
    # the instance's own forward is what leads here
    forward = types.MethodType(type(layers).forward, layers)
    arguments = (batch.input_ids, batch.positions, batch, batch.input_embeds)
    parameters = stack_call_signature.live_parameters(forward)
    assert parameters, f"{type(layers).__name__}.forward does not say what it takes"
    with torch.no_grad():
        return forward(**stack_call_signature.by_name(parameters, arguments, {}))


def size(batch: Any) -> tuple[int, int]:
    return 0 if batch.input_ids is None else len(batch.input_ids), batch.batch_size


def why_refused(runner: Any, batch: Any) -> str:
    return "for the reference" if "refuse_prefill" in flags.instruments() else fallbacks.why(runner, batch)


def first_there(source: Source, places: tuple[str, ...]) -> bool:
    return any(source.find(place) for place in places)


def instrument(name: str, doc: str, *points: PatchPoint, after: tuple[str, ...] = ()) -> Fix:
    """Declare an instrument: on whenever registered; a server that cannot have it does not start."""

    def probe(source: Source) -> Finding:
        there = all(first_there(source, point.where) for point in points)
        return Finding(
            Verdict.AFFECTED if there else Verdict.ABSENT, "verify asks for it" if there else "nothing to see"
        )

    return Fix(id=name, doc=doc, upstream=(), probe=probe, known={}, patches=points, default="on", after=after)


def methods(phase: str, names: tuple[str, str]) -> tuple[str, ...]:
    """Method of the phase's runner in older and newer releases."""
    places = BY_PHASE[phase]
    return tuple(f"{runner}.{name}" for runner, name in zip((places[0], places[-1]), names, strict=True))


def every_instrument() -> dict[str, Fix]:
    # a counter is outermost, where it sees how a fix changes the arguments and the answer
    mended = tuple(info.name for info in pkgutil.iter_modules(fixes.__path__))
    found = {}
    for phase in PHASES:
        asked = methods(phase, QUESTIONS)
        done = methods(phase, ANSWERS)
        how = How.AROUND if phase == "prefill" else How.AFTER
        found[f"refuse_{phase}"] = instrument(
            f"refuse_{phase}",
            f"Graphs of the phase {phase} are replayed.",
            PatchPoint(asked, How.AFTER, refuse),
            after=mended,
        )
        found[f"count_{phase}"] = instrument(
            f"count_{phase}",
            f"Nobody counts the phase {phase}.",
            PatchPoint(asked, How.AFTER, f"{__name__}:note_{phase}_refused"),
            PatchPoint(done, how, f"{__name__}:note_{phase}"),
            after=(*mended, f"refuse_{phase}"),
        )
    replays, captures = (
        tuple(f"{module}:{method}" for module in PRIMITIVES)
        for method in ("BreakableCUDAGraph.replay", "BreakableCUDAGraphCapture.__enter__")
    )
    found[PADDED] = instrument(
        PADDED,
        "Replays are of graphs, not of the code that they were captured from.",
        PatchPoint((f"{PREFILL}.load_batch",), How.AFTER, change_the_padding),
        PatchPoint((f"{PADDED_BACKEND}.replay",), How.AROUND, run_the_code),
        after=mended,
    )
    found[UNBROKEN] = instrument(
        UNBROKEN,
        "Nobody counts captures and replays of prefill graphs without breaks.",
        PatchPoint((f"{PREFILL}.capture_prepare",), How.AFTER, note_unbroken_capture),
        PatchPoint((f"{UNBROKEN_BACKEND}.replay",), How.BEFORE, note_unbroken_replay),
        after=mended,
    )
    found["count_graphs"] = instrument(
        "count_graphs",
        "Nobody counts replays of breakable graphs.",
        PatchPoint(replays, How.BEFORE, note_replay_of_graph),
        PatchPoint(captures, How.BEFORE, note_capture),
        after=mended,
    )
    return found


def can_run_padded(source: Source) -> bool:
    """Tell whether the padded batch and the replay pass through separate functions."""
    return all(source.find(where) for where in (f"{PREFILL}.load_batch", f"{PADDED_BACKEND}.replay"))


COUNTERS = ("count_prefill", "count_decode", "count_draft_extend", "count_graphs")


@hookimpl
def bcg_fixes() -> list[Fix]:
    wanted = flags.instruments()
    known = every_instrument() if wanted else {}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise flags.FlagError(f"{flags.INSTRUMENTS}: no instrument {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in wanted]
