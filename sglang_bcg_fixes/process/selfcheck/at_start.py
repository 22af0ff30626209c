# SPDX-License-Identifier: Apache-2.0
"""The check at start-up and its consequence: graphs turned off, or no server. Then the scheduler logs its one line.

It runs at the end of the scheduler's construction: by then all graphs are captured, and no request has come.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.anatomy.ranks import any_rank, tensor_parallel_ranks
from sglang_bcg_fixes.model import Fix, How, Patch
from sglang_bcg_fixes.process import report, watch
from sglang_bcg_fixes.process.log import logger, refuse, say
from sglang_bcg_fixes.process.metrics import Metrics
from sglang_bcg_fixes.process.selfcheck import check, judge
from sglang_bcg_fixes.process.selfcheck.check import Case, Check, NoGraphs, ReplayDied, Unchecked
from sglang_bcg_fixes.source.finding import Verdict

if TYPE_CHECKING:
    from sglang_bcg_fixes.process.process import Process

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler.__init__"
NO_GRAPHS, NOT_CHECKED = "no graphs", "not checked"
# in one line
LONGEST_REASON = 40


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of the check of one server, in this rank."""

    verdict: str
    reason: str
    cases: tuple[Case, ...] = ()
    # all batches, also those that there was no time for
    planned: int = 0
    seconds: float = 0.0
    # of the GPU's memory, more than before
    kept_bytes: int = 0
    # the module in which the first difference was seen
    layer: Any = None

    def as_dict(self) -> dict[str, Any]:
        cases = [case.as_dict() for case in self.cases]
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "short": self.short,
            "compared": self.compared,
            "planned": self.planned,
            "seconds": round(self.seconds, 3),
            "kept_bytes": self.kept_bytes,
            "batches": cases,
        }

    @property
    def compared(self) -> int:
        return sum(case.verdict in (check.RIGHT, check.WRONG) for case in self.cases)

    @property
    def short(self) -> str:
        """The verdict, and for how many batches it stands, or why there is none."""
        if self.verdict == NOT_CHECKED:
            return f"not made: {textwrap.shorten(self.reason.partition(': ')[0], LONGEST_REASON, placeholder='...')}"
        return f"{self.verdict} {self.compared}/{self.planned}" if self.verdict == check.RIGHT else self.verdict

    def line(self) -> str:
        return f"self-check: {self.verdict}: {self.reason}"


def hooks(process: Process) -> Iterator[Patch]:
    if process.source.find(SCHEDULER):
        yield watch.hook("selfcheck", SCHEDULER, How.AROUND, functools.partial(around_scheduler, process))


def around_scheduler(process: Process, original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    # batches that come before its end are of a capture
    process.is_starting = True
    try:
        original(self, *args, **kwargs)
    finally:
        process.is_starting = False
    after_scheduler(process, getattr(getattr(self, "tp_worker", None), "model_runner", None))


def after_scheduler(process: Process, model_runner: Any) -> None:
    if process.settings.selfcheck != "off":
        unseen = Outcome(NOT_CHECKED, "the scheduler has no model runner")
        conclude(process, model_runner, unseen if model_runner is None else look(model_runner))
    # re-baseline the counters: batches of the self-check are not user traffic
    watch.look_again(process, "the scheduler was ready", model_runner)
    if model_runner is None:
        process.warn_of_missing(whatever_the_model=True)
    process.say_once()


def conclude(process: Process, model_runner: Any, outcome: Outcome) -> None:
    """Report the outcome, log it, and act on it."""
    process.report.selfcheck = outcome.as_dict()
    # with no fix in place nobody else has begun to
    watch.show_metrics(process, model_runner)
    unmended = [
        decision.subject
        for decision in process.plan.fixes
        if decision.finding.verdict is Verdict.AFFECTED and process.report.state(decision.id) != report.APPLIED
    ]
    # what has a place in the code of that layer comes first
    modules = {type(module).__module__ for module in outcome.layer.modules()} if outcome.layer is not None else set()
    unmended.sort(key=lambda fix: not any(where.partition(":")[0] in modules for where in places_of(fix)))
    react(process, model_runner, outcome, [fix.id for fix in unmended])


def places_of(fix: Fix) -> list[str]:
    return [where for point in fix.patches for where in point.where]


def look(model_runner: Any) -> Outcome:
    """Run the check; an error of the check itself is logged and never taken for a result."""
    started, bytes_before = time.perf_counter(), allocated_bytes(model_runner.device)
    ranks = tensor_parallel_ranks()
    cases: list[Case] = []
    try:
        checked = agreed(lambda: Check(model_runner, any_rank))
        for case in checked.run():
            cases.append(case)
    except Unchecked as why:
        return Outcome(NO_GRAPHS if isinstance(why, NoGraphs) else NOT_CHECKED, str(why))
    except Exception as error:
        # other ranks wait for this one, or the GPU answers nothing any more: nobody could go on
        if ranks > 1 or is_lost(model_runner.device):
            refuse(
                f"bcg-fixes refuses to serve: the self-check ended in {type(error).__name__}: {error}. Start without "
                f"prefill graphs (`bcg-fixes doctor` shows the flags), or set {flags.SELFCHECK}=off",
                error,
            )
        logger.exception("bcg-fixes: the self-check ended in an error")
        verdict = check.WRONG if isinstance(error, ReplayDied) else NOT_CHECKED
        reason = f"replaying ended in {error}" if isinstance(error, ReplayDied) else f"{type(error).__name__}: {error}"
        return Outcome(verdict, reason, tuple(cases), seconds=time.perf_counter() - started)
    outcome = judged(model_runner, tuple(cases), time.perf_counter() - started, len(checked.batches))
    return dataclasses.replace(outcome, kept_bytes=allocated_bytes(model_runner.device) - bytes_before)


def agreed(begin: Callable[[], Check]) -> Check:
    """Begin in all ranks or in none: one that cannot would leave the others waiting in the first batch."""
    checked, problem = None, None
    try:
        checked = begin()
    except Unchecked:
        # by the server's configuration, which all ranks have
        raise
    except Exception as error:
        logger.exception("bcg-fixes: the self-check could not begin")
        problem = error
    if any_rank(problem is not None):
        own = f"it could not begin: {type(problem).__name__}: {problem}"
        raise Unchecked(own if problem else "another rank could not begin")
    assert checked is not None
    return checked


def judged(model_runner: Any, cases: tuple[Case, ...], seconds: float, planned: int) -> Outcome:
    right = [case for case in cases if case.verdict == check.RIGHT]
    wrong = [case for case in cases if case.verdict == check.WRONG]
    if wrong:
        return wrong_outcome(model_runner.model, str(wrong[0].batch), wrong[0].first, cases, seconds)
    others = [f"{case.batch}: {case.verdict}" for case in cases if case not in right]
    compared = f"{len(right)} of {planned} compared"
    compared += f", {planned - len(cases)} left out: time" if planned > len(cases) else ""
    verdict = check.RIGHT if right else NOT_CHECKED
    return Outcome(verdict, "; ".join([compared, *others, f"{seconds:.1f} s"]), cases, planned, seconds)


def react(process: Process, model_runner: Any, outcome: Outcome, unmended: list[str]) -> None:
    is_bad, strict = outcome.verdict == check.WRONG, process.settings.selfcheck == "strict"
    if not is_bad and not (strict and outcome.verdict == NOT_CHECKED):
        logger.debug("bcg-fixes %s", outcome.line())
        return
    known = ", ".join(f"`bcg-fixes explain {name}`" for name in unmended[:3])
    more = f" and {len(unmended) - 3} more in `bcg-fixes doctor`" if len(unmended) > 3 else ""
    pointed = f"This SGLang has defects that are not fixed here: {known}{more}. " if unmended else ""
    if strict:
        refuse(
            f"bcg-fixes refuses to serve ({flags.SELFCHECK}=strict): {outcome.line()}. {pointed}Start without prefill "
            f"graphs, or with {flags.SELFCHECK}=warn"
        )
    turn_off(model_runner, process.metrics)
    say(
        logging.WARNING,
        f"bcg-fixes {outcome.line()}. Prefill runs eagerly in this server from now on, which is right and slower. "
        f"{pointed}{flags.SELFCHECK}=off serves with the graphs",
    )


def turn_off(model_runner: Any, metrics: Metrics) -> None:
    runner = check.graph_runner(model_runner)
    setattr(runner, check.question(runner), functools.partial(refuse_for_good, metrics))


def refuse_for_good(metrics: Metrics, *args: Any, **kwargs: Any) -> bool:
    """The runner's answer to every batch once the self-check has failed."""
    metrics.count("the self-check has failed")
    return False


def wrong_outcome(
    model: Any, batch: str, first: judge.Difference | None, cases: tuple[Case, ...] = (), seconds: float = 0.0
) -> Outcome:
    """Name the layer where the two first differ; keys and values are fed by the layer before."""
    if first is None:
        return Outcome(check.WRONG, f"{batch}: found by another rank", cases, seconds=seconds)
    (name, layer), (name_before, before) = (layer_of(model, number) for number in (first.layer, first.layer - 1))
    is_fed = before is not None and first.kind in ("keys", "values")
    into = f", which {name_before} feeds" if is_fed else ""
    return Outcome(
        check.WRONG,
        f"{batch}: {first.kind} of {name}{into}: off by {first}",
        cases,
        seconds=seconds,
        layer=before if is_fed else layer,
    )


def layer_of(model: Any, number: int) -> tuple[str, Any]:
    """The name and module of the layer with this number; the number alone if there is none."""
    for name, module in model.named_modules():
        if re.search(rf"(^|\.){number}$", name) and any(
            getattr(inner, "layer_id", None) == number for inner in module.modules()
        ):
            return f"{name} ({type(module).__name__})", module
    return f"layer {number}", None


def allocated_bytes(device: str) -> int:
    import torch

    return torch.cuda.memory_allocated() if torch.device(device).type == "cuda" else 0


def is_lost(device: str) -> bool:
    """Tell whether the GPU no longer answers, as after an illegal memory access."""
    import torch

    if torch.device(device).type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
