# SPDX-License-Identifier: Apache-2.0
"""Answers from what a request has left in the prefix cache, during which another one arrived, beside cold answers.

Arguments: the model, then server arguments as JSON. Among these, "arrivals" are pairs: after how many tokens of the
first request the second arrives, and how many tokens each of them asks for. All tokens of the first one begin the next
prompt.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from cpu_sglang import scheduler
from tests.scenarios import warm_answers

# the first request is at a boundary of 16 with its fifth token
FIRST, SECOND, ADDED = 12, 20, 40


def hold(served: scheduler.Scheduler, after: int, tokens: int, rounding: float) -> list[Any]:
    """The length that was found of the next prompt, and whether its answer is the cold one."""
    source = random.Random(after + tokens)
    first, second, added = ([source.randrange(3, 120) for _ in range(number)] for number in (FIRST, SECOND, ADDED))
    served.forget()
    warm_answers.poison(served)
    answered = served.answer({"first": first}, tokens, {"second": second}, after)["first"]
    prompt = {"first": [*first, *(int(logits.argmax()) for logits in answered.logits), *added]}
    found: list[Any] = warm_answers.compare(served, prompt, served.answer(prompt, 1), rounding)[0]
    return found


def main(model: str, server_args: str) -> None:
    given = json.loads(server_args)
    arrivals = given.pop("arrivals")

    def act(served: scheduler.Scheduler, rounding: float) -> Any:
        if hasattr(served.scheduler, "_reqs_finishing_inflight"):
            # an answer ends as if by a stop token, which nobody foresees: one more step is in flight
            served.scheduler._reqs_finishing_inflight = lambda batch: []
        return [hold(served, after, tokens, rounding) for after, tokens in arrivals]

    warm_answers.serve(model, given, act)


if __name__ == "__main__":
    main(*sys.argv[1:])
