# SPDX-License-Identifier: Apache-2.0
"""One launch that tests.explore has drawn: random conversations, with or without prefill graphs, beside cold answers.

The argument is the draw as JSON: the architecture, server arguments, "graphs" (sizes of buckets, or none), "happens"
(what befalls requests: see HAPPENINGS), "turns" and "seed". Cold answers are eager, each from an empty cache.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pathlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cpu_sglang import architectures, graphs, mamba, one_batch, prefill, scheduler
from sglang_bcg_fixes import plugin
from tests.releases import kinds_of_request
from tests.scenarios import random_conversations, retracted_thinking, shortened_keys, telling, warm_answers

# a pool that the longest conversations together do not fit into
CROWDED = {"max_total_tokens": 900, "schedule_conservativeness": 0.01}
LONGEST_IN_A_CROWD = 300
# a line that is printed once the server is up: one that fails before takes the process with it
SERVES = "SERVES"
THINKS, CROWDS, ABORTS = "thinking", "crowded", "aborts"
HAPPENINGS = (THINKS, CROWDS, ABORTS)


@contextlib.contextmanager
def happening(served: scheduler.Scheduler, names: list[str], seed: int, seen: Counter[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if THINKS in names:
            stack.enter_context(shortened_keys.thinking(served, waits=CROWDS not in names))
        if ABORTS in names:
            stack.enter_context(aborting(served, random.Random(seed), seen))
        retracted = stack.enter_context(retracted_thinking.retractions())
        yield
        seen["retractions"] += len(retracted)


@contextlib.contextmanager
def aborting(served: scheduler.Scheduler, source: random.Random, seen: Counter[str]) -> Iterator[None]:
    """Abort some of the requests that have answered something, at any token."""
    from sglang.srt.managers.io_struct import AbortReq

    process = served.scheduler.process_batch_result

    def process_and_abort(batch: Any, *args: Any, **named: Any) -> Any:
        processed = process(batch, *args, **named)
        for asked in batch.reqs:
            if asked.output_ids and not asked.finished() and source.random() < 0.02:
                served.scheduler.abort_request(AbortReq(rid=asked.rid))
                seen["aborts"] += 1
        return processed

    with mock.patch.object(served.scheduler, "process_batch_result", process_and_abort):
        yield


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
        prefill.capture_prefill(model_runner, buckets)
    except RuntimeError as error:
        if "captured nothing" not in str(error):
            raise


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
    if CROWDS in draw["happens"]:
        asked |= CROWDED
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
            told["ends"] = " ".join(f"{type(error.__cause__).__name__}: {error.__cause__}".split())[:300]
    telling.result(told)


if __name__ == "__main__":
    main(*sys.argv[1:])
