# SPDX-License-Identifier: Apache-2.0
"""While serving: every N-th replayed prefill is run eagerly as well, and the two are compared.

The request gets what the eager run answered and wrote, so it is right either way. Nothing waits for the comparison: its
numbers are read when the next prefill comes. Other prefills pay for asking the runner once more.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.anatomy.ranks import any_rank
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.model import How, Patch
from sglang_bcg_fixes.process import watch
from sglang_bcg_fixes.process.selfcheck import at_start, check, judge, pools

if TYPE_CHECKING:
    from sglang_bcg_fixes.process.process import Process

NAME = "canary"

logger = logging.getLogger("sglang_bcg_fixes")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A prefill whose two runs are being compared on the device."""

    batch: str
    places: list[judge.Observation]
    distances: Any

    def wrong(self) -> judge.Difference | None:
        """One eager run tells nothing of its own noise, so only what no rounding explains counts."""
        found = zip(self.places, self.distances.tolist(), strict=True)
        all_of_them = [judge.Difference(place.layer, place.kind, far, 0.0, judge.MOST) for place, far in found]
        return next((each for each in all_of_them if each.is_too_large), None)


@dataclasses.dataclass
class Canary:
    """The comparisons of one model runner so far; equal in all ranks, which see the same batches."""

    every: int
    any_rank: Callable[[bool], bool]
    admitted: int = 0
    compared: int = 0
    pending: Comparison | None = None
    is_told: bool = False
    # it stays so for a server's life, and to ask may take long
    is_checkable: bool = False

    def runner_that_replays(self, model_runner: Any, forward_batch: Any) -> Any:
        """The runner that is going to replay this batch, or None."""
        if not forward_batch.forward_mode.is_extend():
            return None
        try:
            runner = check.graph_runner(model_runner)
            if not self.is_checkable:
                check.refuse_what_cannot_be_checked(model_runner)
                self.is_checkable = True
        except check.NoGraphs:
            return None
        except check.Unchecked as why:
            self.tell("compares no prefills", why)
            return None
        with watch.uncounted():
            return runner if getattr(runner, check.question(runner))(forward_batch) else None

    def put_off(self, why: str) -> None:
        """Leave this prefill uncompared; the next that is admitted takes its place."""
        self.admitted -= 1
        self.tell("did not compare a prefill", why)

    def tell(self, what: str, why: object) -> None:
        if not self.is_told:
            logger.warning("bcg-fixes: %s %s: %s", flags.CANARY, what, why)
        self.is_told = True


class Canaries:
    """The canary of each model runner of this process, dropped with the runner."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._by_runner: weakref.WeakKeyDictionary[Any, Canary] = weakref.WeakKeyDictionary()

    def of(self, model_runner: Any) -> Canary:
        if model_runner not in self._by_runner:
            self._by_runner[model_runner] = Canary(self.process.settings.canary, any_rank)
        return self._by_runner[model_runner]


def hooks(process: Process) -> Iterator[Patch]:
    if process.source.find(watch.FORWARD):
        body = functools.partial(around_forward, Canaries(process))
        yield watch.hook(NAME, watch.FORWARD, How.AROUND, body)


def around_forward(
    canaries: Canaries, original: Callable[..., Any], self: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    # which has to see what the replay wrote, and not what an eager run wrote after it
    if check.is_running():
        return original(self, forward_batch, *args, **kwargs)
    canary = canaries.of(self)
    runner = canary.runner_that_replays(self, forward_batch)
    if runner is None:
        return original(self, forward_batch, *args, **kwargs)
    canary.admitted += 1
    if canary.pending:
        judge_pending(canaries.process, self, canary, canary.pending)
    if canary.admitted % canary.every:
        return original(self, forward_batch, *args, **kwargs)
    # each run notes in its batch what it has done with it
    again = copy.copy(forward_batch)
    states = pools.state_slots(self, forward_batch.req_pool_indices)
    before = [(place, place.copy()) for place in pools.states_of(self, states)]
    replays = check.Replays()
    with check.counted(replays):
        output = original(self, forward_batch, *args, **kwargs)
    if not replays.count:
        canary.put_off("the graph runner admitted a prefill that then ran eagerly")
        return output
    if output.logits_output.next_token_logits is None:
        canary.put_off("the server answers without logits of next tokens, as a diffusion LLM does")
        return output
    replayed = observe(self, forward_batch, states, output)
    for place, copied in before:
        place.put_back(copied)
    strays = check.Replays()
    with replaced(runner, check.question(runner), refuse), check.counted(strays):
        output = original(self, again, *args, **kwargs)
    if strays.count:
        canary.put_off("a graph was replayed although it was refused")
        return output
    eager = observe(self, again, states, output)
    size = f"a prefill of {len(forward_batch.input_ids)} tokens in {forward_batch.batch_size} requests"
    canary.pending = Comparison(size, eager, judge.distances(eager, replayed))
    return output


def refuse(forward_batch: Any) -> bool:
    return False


def observe(model_runner: Any, forward_batch: Any, states: Any, output: Any) -> list[judge.Observation]:
    found = pools.places(model_runner, forward_batch.out_cache_loc, states)
    return judge.observe(found, output.logits_output.next_token_logits.clone())


def judge_pending(process: Process, model_runner: Any, canary: Canary, comparison: Comparison) -> None:
    canary.pending = None
    canary.compared += 1
    process.report.canary = {"every": canary.every, "compared": canary.compared}
    wrong = comparison.wrong()
    if canary.any_rank(wrong is not None):
        at_start.conclude(process, model_runner, at_start.wrong_outcome(model_runner.model, comparison.batch, wrong))
    process.write()
