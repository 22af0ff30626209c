# SPDX-License-Identifier: Apache-2.0
"""One launch that tests.explore has drawn: random conversations, with or without prefill graphs, beside cold answers.

The argument is the draw as JSON: the architecture, server arguments, "graphs" (sizes of buckets, or none), "happens"
(what befalls requests: see HAPPENINGS), "turns" and "seed". Cold answers are eager, each from an empty cache.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import pathlib
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from cpu_sglang import architectures, graphs, mamba, one_batch, prefill, scheduler
from sglang_bcg_fixes import plugin
from tests.releases import kinds_of_request
from tests.scenarios import host_hits, random_conversations, retracted_thinking, shortened_keys, telling, warm_answers

LONGEST_IN_A_CROWD = 300
# a line that is printed once the server is up: one that fails before takes the process with it
SERVES = "SERVES"
THINKS, CROWDS, ABORTS, RANKS = "thinking", "crowded", "aborts", "priorities"
FORMS, SLEEPS, HOSTS = "structured output", "sleep", "HiCache"
HAPPENINGS = (THINKS, CROWDS, ABORTS, RANKS, FORMS, SLEEPS, HOSTS)
# of a server to which these happen
ASKED: dict[str, dict[str, Any]] = {
    THINKS: {"strip_thinking_cache": True},
    # a pool that the longest conversations together do not fit into
    CROWDS: {"max_total_tokens": 900, "schedule_conservativeness": 0.01},
    # SGLang takes priorities with no other policy
    RANKS: {
        "enable_priority_scheduling": True,
        "priority_scheduling_preemption_threshold": 0,
        "schedule_policy": "fcfs",
        "max_running_requests": 3,
    },
    HOSTS: {name: value for name, value in host_hits.SERVER.items() if name.startswith(("enable_hier", "hicache"))},
}


@contextlib.contextmanager
def happening(served: scheduler.Scheduler, names: list[str], seed: int, seen: Counter[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        served.scheduler.on_idle = functools.partial(leave, served, iter(range(1000)))
        if THINKS in names:
            stack.enter_context(shortened_keys.thinking(served, waits=CROWDS not in names))
        if ABORTS in names:
            stack.enter_context(aborting(served, random.Random(seed), seen))
        if RANKS in names:
            stack.enter_context(asking(rank, random.Random(seed), seen))
        if FORMS in names:
            served.scheduler.grammar_manager.grammar_backend = grammars()
            stack.enter_context(asking(form, random.Random(seed), seen))
        if SLEEPS in names:
            stack.enter_context(before_rounds(served, lambda: sleep(served), random.Random(seed), seen, SLEEPS))
        if HOSTS in names:
            evict = functools.partial(host_hits.leave_the_device, served)
            stack.enter_context(before_rounds(served, evict, random.Random(seed), seen, HOSTS))
        retracted = stack.enter_context(retracted_thinking.retractions())
        yield
        seen["retractions"] += len(retracted)


def leave(served: scheduler.Scheduler, patience: Iterator[int]) -> None:
    """Leave the loop; a request that another has displaced begins again in one of its next rounds."""
    if not served.scheduler.waiting_queue or next(patience, None) is None:
        raise scheduler.Idle


@contextlib.contextmanager
def aborting(served: scheduler.Scheduler, source: random.Random, seen: Counter[str]) -> Iterator[None]:
    """Abort some of the requests that have answered something, at any token."""
    from sglang.srt.managers.io_struct import AbortReq

    process = served.scheduler.process_batch_result

    def process_and_abort(batch: Any, *args: Any, **named: Any) -> Any:
        processed = process(batch, *args, **named)
        for asked in batch.reqs:
            # requests that are to arrive do so once one of the first has answered enough
            if asked.output_ids and not (asked.finished() or served._later) and source.random() < 0.02:
                served.scheduler.abort_request(AbortReq(rid=asked.rid))
                seen["aborts"] += 1
        return processed

    with mock.patch.object(served.scheduler, "process_batch_result", process_and_abort):
        yield


@contextlib.contextmanager
def asking(
    change: Callable[[Any, random.Random, Counter[str]], None], source: random.Random, seen: Counter[str]
) -> Iterator[None]:
    """Change each request before the scheduler has it."""
    plain = scheduler.request

    def request(*asked: Any) -> Any:
        made = plain(*asked)
        change(made, source, seen)
        return made

    with mock.patch.object(scheduler, "request", request):
        yield


def rank(made: Any, source: random.Random, seen: Counter[str]) -> None:
    made.priority = source.randrange(3)
    seen[RANKS] += made.priority > 0


def form(made: Any, source: random.Random, seen: Counter[str]) -> None:
    if source.random() < 0.5:
        made.sampling_params.regex = "even tokens"
        seen[FORMS] += 1


def grammars() -> Any:
    """SGLang's backend of grammars, with one: even tokens after the first, whose logits are those that are compared."""
    from sglang.srt.constrained import base_grammar_backend as base

    class Even(base.BaseGrammarObject):
        begun = False

        def accept_token(self, token: int) -> None:
            assert not (self.begun and token % 2), f"the grammar does not allow token {token}"
            self.begun = True

        def rollback(self, k: int) -> None: ...

        def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
            return torch.zeros(batch_size, vocab_size, dtype=torch.bool)

        def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
            vocab_mask[idx, 1::2] = self.begun

        @staticmethod
        def move_vocab_mask(vocab_mask: torch.Tensor, device: Any) -> torch.Tensor:
            return vocab_mask

        @staticmethod
        def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
            logits.masked_fill_(vocab_mask, -1e4)

        def copy(self) -> Any:
            return Even()

    class Backend(base.BaseGrammarBackend):
        def dispatch_regex(self, key_string: str) -> Any:
            return Even()

    return Backend()


@contextlib.contextmanager
def before_rounds(
    served: scheduler.Scheduler, act: Callable[[], Any], source: random.Random, seen: Counter[str], name: str
) -> Iterator[None]:
    """Act before some of the rounds, while the scheduler is idle."""
    answer = served.answer

    def act_and_answer(*asked: Any, **named: Any) -> dict[str, scheduler.Answer]:
        if source.random() < 0.3 and served.scheduler.is_fully_idle():
            act()
            seen[name] += 1
        return answer(*asked, **named)

    with mock.patch.object(served, "answer", act_and_answer):
        yield


def sleep(served: scheduler.Scheduler) -> None:
    """Give the cache's memory back and take it again, as a trainer does; states come back as anything."""
    from sglang.srt.managers import io_struct

    dispatch = served.scheduler._request_dispatcher
    dispatch(io_struct.ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    if hasattr(served.scheduler.req_to_token_pool, "mamba_pool"):
        warm_answers.poison(served)
    dispatch(io_struct.ResumeMemoryOccupationReqInput(tags=["kv_cache"]))


@contextlib.contextmanager
def without_graphs(model_runner: Any) -> Iterator[None]:
    """Answer eagerly meanwhile."""
    with contextlib.ExitStack() as stack:
        for name in ("prefill_cuda_graph_runner", "piecewise_cuda_graph_runner"):
            if hasattr(model_runner, name):
                stack.enter_context(mock.patch.object(model_runner, name, None))
        yield


def capture(model_runner: Any, buckets: list[int]) -> None:
    """Capture prefill graphs of a model that SGLang makes them for."""
    try:
        runner = prefill.capture_prefill(model_runner, buckets)
    except RuntimeError as error:
        if "captured nothing" not in str(error):
            raise
        return
    # as on an NVIDIA GPU: elsewhere replays are prepared for the form of latent attention that is not captured
    vars(sys.modules[type(runner).__module__])["is_cuda"] = lambda: True


def program(served: scheduler.Scheduler, draw: dict[str, Any]) -> dict[str, Any]:
    model_runner, seen = served.scheduler.tp_worker.model_runner, Counter[str]()
    if draw["graphs"]:
        graphs.freed_memory_is_garbage = True
        capture(model_runner, draw["graphs"])
    before = graphs.counters.replays
    longest = LONGEST_IN_A_CROWD if CROWDS in draw["happens"] else random_conversations.LONGEST
    talks = random_conversations.Talks(draw["seed"], longest, answers_come_back=THINKS not in draw["happens"])
    with happening(served, draw["happens"], draw["seed"], seen):
        rounds = random_conversations.converse(served, talks, draw["turns"])
    replays = graphs.counters.replays - before
    with without_graphs(model_runner):
        found = random_conversations.judged(served, rounds, warm_answers.ROUNDING[draw["server"]["dtype"]])
    return {**found, **seen, "replays": replays, "applied": plugin.load().ledger.applied()}


def main(drawn: str) -> None:
    draw = json.loads(drawn)
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    kinds_of_request.forget_pinned_memory()
    environ: Any = importlib.import_module("sglang.srt.environ")
    # as the model's type, and written to with that
    environ.envs.SGLANG_MAMBA_CONV_DTYPE.set(draw["server"]["dtype"])
    configuration = architectures.CONFIGURATIONS[draw["architecture"]]
    asked = {**warm_answers.SERVER, **configuration.server_args, **draw["server"]}
    for name in draw["happens"]:
        asked |= ASKED.get(name, {})
    if HOSTS in draw["happens"]:
        host_hits.install_copies()
    if "mamba_radix_cache_strategy" in asked:
        mamba.allow_extra_buffer()
    built = prefill.built_for_graphs(draw["graphs"]) if draw["graphs"] else contextlib.nullcontext()
    override = json.dumps({"max_position_embeddings": 2048, **draw.get("model", {})})
    told: dict[str, Any] = {}

    def answer(served: scheduler.Scheduler) -> None:
        print(SERVES, flush=True)
        told.update(program(served, draw))

    with tempfile.TemporaryDirectory() as folder, built:
        try:
            model = warm_answers.configured(draw["architecture"], pathlib.Path(folder))
            scheduler.run(answer, model, json_model_override_args=override, **asked)
        except scheduler.Failed as error:
            traceback.print_exception(error.__cause__)
            told["ends"] = " ".join(f"{type(error.__cause__).__name__}: {error.__cause__}".split())[:300]
    telling.result(told)


if __name__ == "__main__":
    main(*sys.argv[1:])
