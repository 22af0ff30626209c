# SPDX-License-Identifier: Apache-2.0
"""Replayed prefills against the same code with replay refused, between the capture and the first request.

Everything runs through SGLang's own functions: the model runner prepares the batch, asks its graph runner, replays or
does not. Only the answer to that question is ours, for the time of the check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from sglang_bcg_fixes.anatomy.layer_stack import first_layer_of_experts
from sglang_bcg_fixes.anatomy.ranks import attends_in_parallel
from sglang_bcg_fixes.anatomy.runners import makes_full_graphs
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.process.selfcheck import batches, judge, pools
from sglang_bcg_fixes.process.selfcheck.batches import Batch, OneBatch
from sglang_bcg_fixes.process.selfcheck.bookkeeping import Bookkeeping, Randomness

RIGHT, WRONG = "right", "wrong"
INCONCLUSIVE, NOT_REPLAYED = "inconclusive", "not replayed"
QUESTIONS = ("can_run", "can_run_graph")
ATTENTION = "attention_extend"
# for runs that compile nothing; what would take longer is left out and said
SECONDS = 3.0
# for compiling what the first requests would have to: no batch begins once it has taken as long
SECONDS_TO_COMPILE = 120.0
# of each batch: two eager ones, and the replay
RUNS = 3
# the prompts of a batch, and the one that pads
REQUESTS = 4
# true while a check runs and not a request
_is_running = [False]


@dataclasses.dataclass(frozen=True)
class Case:
    """The result of one batch."""

    batch: Batch
    verdict: str
    first: judge.Difference | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        first = dataclasses.asdict(self.first) if self.first else None
        return {"batch": str(self.batch), "verdict": self.verdict, "first": first, "seconds": round(self.seconds, 3)}


class Unchecked(Exception):
    """The reason why this server cannot be checked."""


class NoGraphs(Unchecked):
    """There is nothing to check."""


class ReplayDied(Exception):
    """A batch that runs eagerly ended in an error when it was replayed."""


def is_running() -> bool:
    return _is_running[0]


def graph_runner(model_runner: Any) -> Any:
    """The runner of breakable prefill graphs that has captured something, wherever this release keeps it."""
    for name in ("prefill_cuda_graph_runner", "piecewise_cuda_graph_runner"):
        runner = getattr(model_runner, name, None)
        kinds = (type(runner).__name__, type(getattr(runner, "backend", None)).__name__)
        if any(kind in ("BreakableCudaGraphRunner", "BreakableCudaGraphBackend") for kind in kinds):
            return runner
        if makes_full_graphs(runner):
            raise Unchecked("full prefill graphs: only breakable ones are compared")
    raise NoGraphs("there are no breakable prefill graphs")


def question(runner: Any) -> str:
    """Its method that says whether a batch may be replayed."""
    return next(name for name in QUESTIONS if hasattr(runner, name))


def refuse_what_cannot_be_checked(model_runner: Any) -> None:
    """Servers whose batches are more than prompts of their own rank."""
    from sglang.srt.distributed import parallel_state

    reasons = {
        "pipeline stages: no rank has the whole model": parallel_state.get_pp_group().world_size > 1,
        "DP attention: ranks replay batches of their own": attends_in_parallel(model_runner.server_args),
        "it is a draft model": model_runner.is_draft_worker,
        "it generates nothing": not model_runner.is_generation,
        "encoder and decoder: prompts alone are not its input": model_runner.model_config.is_encoder_decoder,
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unchecked(reason)
    # only where all of its layers are here
    if not pools.can_be_read(model_runner):
        raise Unchecked("keys and values that its pool does not show")


@dataclasses.dataclass
class Replays:
    """The breakable graphs that have been replayed: a batch that is admitted may still run eagerly."""

    count: int = 0


@contextlib.contextmanager
def counted(replays: Replays) -> Iterator[None]:
    graph_class = graph_break.load("breakable_cuda_graph").BreakableCUDAGraph
    replay = graph_class.replay

    def count(graph: Any, *args: Any, **kwargs: Any) -> Any:
        replays.count += 1
        return replay(graph, *args, **kwargs)

    with replaced(graph_class, "replay", count):
        yield


class Switch:
    """Allows or refuses replays, and counts them."""

    def __init__(self, model_runner: Any, runner: Any) -> None:
        self.model_runner = model_runner
        self.runner = runner
        self.name = question(runner)
        self.is_on = False
        self.replays = Replays()
        # although they were refused
        self.stray_replays = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[Switch]:
        ask, forward = getattr(self.runner, self.name), self.model_runner.forward
        # a target of speculative decoding replays only what asks for the hidden states that were captured
        mode = getattr(self.runner, "capture_hidden_mode", None)

        def forward_as_captured(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if mode is not None:
                forward_batch.capture_hidden_mode = mode
            return forward(forward_batch, *args, **kwargs)

        def answer(*args: Any, **kwargs: Any) -> bool:
            return self.is_on and bool(ask(*args, **kwargs))

        with (
            replaced(self.model_runner, "forward", forward_as_captured),
            replaced(self.runner, self.name, answer),
            counted(self.replays),
        ):
            _is_running[0] = True
            try:
                yield self
            finally:
                _is_running[0] = False

    @contextlib.contextmanager
    def on(self, wanted: bool) -> Iterator[None]:
        self.is_on, self.replays.count = wanted, 0
        try:
            yield
        except Exception as error:
            if wanted:
                raise ReplayDied(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            self.is_on = False
            self.stray_replays += 0 if wanted else self.replays.count


class Check:
    """One check of one model; leaves the server as it found it."""

    def __init__(self, model_runner: Any, any_rank: Callable[[bool], bool]) -> None:
        self.runner = graph_runner(model_runner)
        refuse_what_cannot_be_checked(model_runner)
        self.model_runner = model_runner
        self.any_rank = any_rank
        self.one = OneBatch(model_runner)
        self.switch = Switch(model_runner, self.runner)
        self.routed = first_layer_of_experts(model_runner.model)
        self.page = int(model_runner.token_to_kv_pool_allocator.page_size)
        self.batches = batches.chosen(list(self.runner.capture_num_tokens), self.most_tokens())
        if not self.batches:
            raise Unchecked("no bucket fits into the memory for keys and values")

    def most_tokens(self) -> int:
        free = self.model_runner.token_to_kv_pool_allocator.available_size() - self.page * REQUESTS
        return int(min(free, self.model_runner.model_config.context_len - 1))

    def run(self) -> Iterator[Case]:
        """Check each batch while there is time and nothing is wrong, on which all ranks must agree."""
        model_runner = self.model_runner
        books = Bookkeeping(model_runner.req_to_token_pool, model_runner.token_to_kv_pool_allocator)
        randomness, passes = Randomness(model_runner.device), model_runner.forward_pass_id
        try:
            with self.switch.installed():
                yield from self.cases(books)
        finally:
            books.restore()
            randomness.restore()
            model_runner.forward_pass_id = passes
            give_memory_back(model_runner.device)

    def cases(self, books: Bookkeeping) -> Iterator[Case]:
        clock = Clock()
        # what is tuned while it runs may write what it must not, and is not compared
        clock.compiled(self.timed(self.batches[0], 0, books, replay=False)[1])
        for seed, batch in enumerate(self.batches):
            # one batch is checked, whatever the clock says
            if seed and self.any_rank(not clock.allows(batch)):
                continue
            eager, first = self.timed(batch, seed, books, replay=False)
            # one that takes longer than expected may have compiled something: the next tells
            if seed and self.any_rank(first <= clock.expects(batch) and not clock.allows(batch, RUNS, first)):
                clock.ran(batch, first)
                continue
            again, second = self.timed(batch, seed, books, replay=False)
            usual = min(first, second)
            if seed and self.any_rank(not clock.allows(batch, RUNS, usual)):
                clock.ran(batch, usual, first, second)
                continue
            judged, taken = self.judged(batch, seed, books, eager, again)
            clock.ran(batch, usual, first, second, *taken)
            found = Case(batch, *judged, first + second + sum(taken))
            if self.any_rank(found.verdict == WRONG):
                yield found if found.verdict == WRONG else dataclasses.replace(found, verdict=WRONG, first=None)
                return
            yield found

    def judged(
        self,
        batch: Batch,
        seed: int,
        books: Bookkeeping,
        eager: list[judge.Observation],
        again: list[judge.Observation],
    ) -> tuple[tuple[str, judge.Difference | None], list[float]]:
        """Judge the replay, and the seconds that it took.

        One of a graph with attention inside is followed by one of SGLang's graph. If only the first is wrong, there are
        no such graphs from then on.
        """
        replayed, seconds = self.timed(batch, seed, books, replay=True)
        found = self.verdict(eager, again, replayed)
        inside = attention_inside()
        if inside is None or not inside.took_twin:
            return found, [seconds]
        with inside.withheld():
            replayed, more = self.timed(batch, seed, books, replay=True)
        own = self.verdict(eager, again, replayed)
        is_wrong = self.any_rank(found[0] == WRONG)
        if self.any_rank(own[0] == WRONG):
            return own, [seconds, more]
        if is_wrong:
            inside.drop(f"the self-check found another answer with attention inside: {batch}")
            return own, [seconds, more]
        return found, [seconds, more]

    def timed(self, batch: Batch, seed: int, books: Bookkeeping, replay: bool) -> tuple[list[judge.Observation], float]:
        began = time.perf_counter()
        found = self.observe(batch, seed, books, replay)
        wait_for(self.model_runner.device)
        return found, time.perf_counter() - began

    def observe(self, batch: Batch, seed: int, books: Bookkeeping, replay: bool) -> list[judge.Observation]:
        """Run a batch from the same initial state as every other, and sample what it writes and answers.

        Run eagerly, a batch is as long as its graph is: another number of rows is reason enough for other kernels.
        """
        books.restore()
        logits, requests = self.one.run(batch, seed, padded=not replay, last=self.switch.on(replay))
        count = len(batch.lengths)
        found = judge.observe(requests.first(count).places(self.model_runner), logits[:count])
        requests.empty(self.model_runner)
        return found

    def verdict(
        self, eager: list[judge.Observation], again: list[judge.Observation], replayed: list[judge.Observation]
    ) -> tuple[str, judge.Difference | None]:
        if not self.switch.replays.count:
            return NOT_REPLAYED, None
        found = judge.differences(eager, again, replayed, self.model_runner.dtype, self.routed)
        if judge.is_blind(eager) or any(not each.noise <= judge.MOST for each in found):
            return INCONCLUSIVE, None
        first = next((each for each in found if each.is_too_large), None)
        if first:
            return WRONG, first
        # two replays agree, whatever both have read
        return (INCONCLUSIVE if self.switch.stray_replays else RIGHT), None


@dataclasses.dataclass
class Clock:
    """Two budgets: one for runs, and one for what they compile, which a run takes longer than a usual one."""

    spent: float = 0.0
    compiling: float = 0.0
    # by the quickest run so far: small batches cost more than their tokens
    seconds_a_token: float = 0.0

    def expects(self, batch: Batch) -> float:
        return self.seconds_a_token * (batch.prefix + batch.bucket)

    def allows(self, batch: Batch, runs: int = 1, usual: float | None = None) -> bool:
        """Tell whether so many runs fit that take as long as a usual one, or as is expected."""
        each = self.expects(batch) if usual is None else usual
        return self.compiling <= SECONDS_TO_COMPILE and self.spent + runs * each <= SECONDS

    def ran(self, batch: Batch, usual: float, *runs: float) -> None:
        """Count each run as a usual one, and what it took longer as compiling."""
        mine = usual / (batch.prefix + batch.bucket)
        self.seconds_a_token = min(self.seconds_a_token or mine, mine)
        for seconds in runs or (usual,):
            self.spent += min(seconds, usual)
            self.compiled(seconds - min(seconds, usual))

    def compiled(self, seconds: float) -> None:
        self.compiling += seconds


def attention_inside() -> Any:
    """The second graphs of this process, with attention inside; None without that kernel."""
    if not active.is_used(ATTENTION):
        return None
    return importlib.import_module(f"sglang_bcg_fixes.kernels.{ATTENTION}.adapter").OPERATION


def wait_for(device: str) -> None:
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def give_memory_back(device: str) -> None:
    import torch

    wait_for(device)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
