# SPDX-License-Identifier: Apache-2.0
"""The slots of a thinking request that was retracted, and answers that are computed together once it has ended.

Arguments: the model, then server arguments as JSON. The fixes that are on stay on: a scheduler that has retracted a
request takes care that it happens to no other one. Three requests do not fit together once they are answered, so the
last one is retracted: its own release, its return and its end are SGLang's.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from cpu_sglang import scheduler
from tests.scenarios import shortened_keys, warm_answers

PROMPT, TOKENS = 60, 100
SERVER = {"max_total_tokens": 300, "schedule_conservativeness": 0.01}
# they need what is cached evicted
OTHERS, NEW = [70, 80, 90], 4


def hold(served: scheduler.Scheduler, rounding: float) -> dict[str, Any]:
    """Count the slots that are free or cached, and tell which later answers are those of an empty cache."""
    source = random.Random(1)
    prompts = [[source.randrange(3, 120) for _ in range(length)] for length in (PROMPT, PROMPT, PROMPT, *OTHERS)]
    served.forget()
    with shortened_keys.thinking(served, waits=False), retractions() as retracted:
        try:
            answers = served.answer({"0": prompts[0]}, TOKENS, {"1": prompts[1], "2": prompts[2]}, after=2)
            # some releases are idle before the request comes back
            while any(len(answer.logits) < TOKENS for answer in answers.values()):
                served._loop()
        except AssertionError as error:
            return {"ends": str(error)}
    assert retracted, "no request was retracted"
    slots = free_and_cached(served.scheduler)
    others = {str(number): prompt for number, prompt in enumerate(prompts[3:])}
    warm = served.answer(others, NEW)
    served.forget()
    cold = served.answer(others, NEW)
    right = [
        torch.allclose(torch.stack(warm[name].logits), torch.stack(cold[name].logits), atol=rounding, rtol=0)
        for name in others
    ]
    return {"slots": slots, "right": right}


@contextlib.contextmanager
def retractions() -> Iterator[list[int]]:
    """Collect how many requests were running at each."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    running: list[int] = []
    retract = ScheduleBatch.retract_decode

    def retract_decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        running.append(len(self.reqs))
        return retract(self, *args, **kwargs)

    with mock.patch.object(ScheduleBatch, "retract_decode", retract_decode):
        yield running


def free_and_cached(running: Any) -> int:
    tree = running.tree_cache
    # both kinds of memory have a size of their own where there are states; some trees have zeros for the others
    sizes = [getattr(tree, name)() for name in ("evictable_size", "full_evictable_size") if hasattr(tree, name)]
    free: int = running.token_to_kv_pool_allocator.available_size()
    return free + max(size for size in sizes if isinstance(size, int))


def main(model: str, server_args: str) -> None:
    warm_answers.serve(model, SERVER | json.loads(server_args), hold, without=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
