# SPDX-License-Identifier: Apache-2.0
"""Answers of a real scheduler with a warm prefix cache, by breakable graphs beside eager ones, compared bit by bit.

Arguments: the architecture, then JSON of what its configuration has in place of what is in cpu_sglang/architectures.py;
there, "server" is for server arguments. Each of the requests that come together goes on with its answer.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import tempfile
from typing import Any

import torch

from cpu_sglang import architectures, graphs, one_batch, prefill, scheduler
from sglang_bcg_fixes import plugin
from tests.releases import kinds_of_request
from tests.scenarios import telling, trees, warm_answers

# in each round together; every sum is padded to a graph, and the last one fills it
LENGTHS, ADDED, NEW_TOKENS = [7, 5], ([6, 3], [3, 8], [11, 5]), 2
# as long as the tiny models allow
SMALL = {"dtype": "float16", "context_length": 128, "chunked_prefill_size": 64, "max_total_tokens": 512}
NAMES = [str(row) for row in range(len(LENGTHS))]


def converse(served: scheduler.Scheduler) -> tuple[list[torch.Tensor], list[int]]:
    """All logits, and how many tokens of each prompt were found in the cache."""
    served.forget()
    answers: dict[str, scheduler.Answer] = {}
    talks: dict[str, list[int]] = {name: [] for name in NAMES}
    logits, found = [], []
    for lengths in (LENGTHS, *ADDED):
        for row, name in enumerate(NAMES):
            said = [int(given.argmax()) for given in answers[name].logits] if answers else []
            begun = len(talks[name]) + len(said)
            talks[name] += [*said, *(3 + (17 * row + 5 * (begun + i)) % 100 for i in range(lengths[row]))]
        answers = served.answer(talks, NEW_TOKENS)
        for name in NAMES:
            logits += answers[name].logits
            found.append(answers[name].found)
    return logits, found


def program(served: scheduler.Scheduler) -> dict[str, Any]:
    eager, found = converse(served)
    told: dict[str, Any] = {"applied": plugin.load().ledger.applied(), "found": found}
    runner = served.scheduler.tp_worker.model_runner
    graphs.freed_memory_is_garbage = True
    try:
        prefill.capture_prefill(runner)
    # some releases raise no narrower one
    except Exception as error:
        return {**told, "error": str(error)}
    before = graphs.counters.replays
    replayed, again = converse(served)
    same = [torch.equal(one, other) for one, other in zip(eager, replayed, strict=True)]
    return {**told, "same": same, "again": again, "replays": graphs.counters.replays - before}


def main(architecture: str, given: str) -> None:
    overridden = json.loads(given)
    asked = {**warm_answers.SERVER, **SMALL, **overridden.pop("server", {})}
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    kinds_of_request.forget_pinned_memory()
    configuration = architectures.CONFIGURATIONS[architecture]
    architectures.CONFIGURATIONS[architecture] = dataclasses.replace(
        configuration, config={**configuration.config, **overridden}
    )
    with tempfile.TemporaryDirectory() as folder, prefill.built_for_graphs():
        model = warm_answers.configured(architecture, pathlib.Path(folder))
        told = trees.given_by_each(program, model, **{**configuration.server_args, **asked})
    telling.result(trees.the_same(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
