# SPDX-License-Identifier: Apache-2.0
"""The answer to a prompt behind a request whose key was cut back when it ended, beside the cold answer.

Arguments: the model, then server arguments as JSON. Among these, "ends" names what is cut off: "thinking", which is
all that the request generates, or tokens behind a "stop" or a "grammar" that is complete. They are computed one by
one, and leave what a verification that accepts them together leaves. "tokens" has how many each of several requests
generates. The next prompt begins with what a client sends again.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from cpu_sglang import scheduler
from tests.scenarios import warm_answers

FIRST, ADDED, BEYOND = 100, 40, 3
NO_TOKEN = 1 << 20


@contextmanager
def thinking(served: scheduler.Scheduler, waits: bool = True) -> Iterator[None]:
    """Have requests ask for thinking, which nothing ends.

    One that waits is not begun before there is room for all that it will generate.
    """
    config = served.scheduler.model_config
    # one id before 0.5.17
    config.think_end_id, config.think_end_ids = NO_TOKEN, [NO_TOKEN]
    plain = scheduler.request

    def request(*asked: Any) -> Any:
        made = plain(*asked)
        made.require_reasoning = True
        made.sampling_params.ignore_eos = waits
        return made

    with mock.patch.object(scheduler, "request", request):
        yield


@contextmanager
def stopping(served: scheduler.Scheduler) -> Iterator[None]:
    """Have requests end before their last tokens, which have been computed, as a verification computes them."""
    from sglang.srt.managers.schedule_batch import Req

    processor: Any = type(served.scheduler.batch_result_processor)
    update, handle = Req.update_finish_state, processor._handle_finish_state_updated_req

    def update_finish_state(self: Any, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        if self.finished():
            self.finished_len = len(self.output_ids) - BEYOND

    def handle_verified(self: Any, req: Any, batch: Any, result: Any, i: int, *args: Any, **kwargs: Any) -> None:
        # 0.5.23 asks it of a verification's result alone
        result.num_correct_drafts_per_req_cpu = [BEYOND] * len(batch.reqs)
        handle(self, req, batch, result, i, *args, **kwargs)

    with (
        mock.patch.object(Req, "update_finish_state", update_finish_state),
        mock.patch.object(processor, "_handle_finish_state_updated_req", handle_verified),
    ):
        yield


@contextmanager
def completing(served: scheduler.Scheduler) -> Iterator[None]:
    """Have requests end before their last tokens, as a grammar does that is complete inside a verification's tokens.

    SGLang counts and keeps the tokens up to the grammar's end alone, and has computed all. It asks once for all of them
    if a checkpoint is among them.
    """
    from sglang.srt.managers.schedule_batch import Req

    processor: Any = served.scheduler.batch_result_processor
    update, check = Req.update_finish_state, type(processor)._mamba_check_track_boundary
    handle = type(processor)._handle_finish_state_updated_req
    complete = SimpleNamespace(accept_token=lambda token: None, is_terminated=lambda: True)
    speculating = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: False))
    kept: list[int] = []

    def handle_verified(self: Any, req: Any, batch: Any, *rest: Any) -> None:
        if kept and req.finished():
            # a verification has none of them
            batch.mamba_track_mask_cpu = batch.mamba_track_buffer_indices = None
        handle(self, req, batch, *rest)

    def check_verified(self: Any, req: Any, batch: Any, result: Any, i: int) -> Any:
        if not kept or not req.finished():
            return check(self, req, batch, result, i)
        # what was kept of it is asked for from 0.5.22 on
        verified = SimpleNamespace(
            num_correct_drafts_per_req_cpu=[BEYOND] * len(batch.reqs),
            num_non_draft_tokens_per_req=1,
            grammar_retained_tokens=[kept] * len(batch.reqs),
        )
        return check(self, req, speculating, verified, i)

    def update_finish_state(self: Any, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        if self.finished():
            verified = list(self.output_ids[-BEYOND - 1 :])
            self.grammar = complete
            kept[:] = processor._accept_grammar_tokens(self, verified)
            dropped = len(verified) - len(kept)
            self.grammar = None
            del self.output_ids[-dropped:]
            self.finished_len = len(self.output_ids)
            # among the request's own fields before 0.5.18
            counted = self.kv if hasattr(getattr(self, "kv", None), "kv_committed_len") else self
            counted.kv_committed_len -= dropped

    with (
        mock.patch.object(Req, "update_finish_state", update_finish_state),
        mock.patch.object(type(processor), "_mamba_check_track_boundary", check_verified),
        mock.patch.object(type(processor), "_handle_finish_state_updated_req", handle_verified),
    ):
        yield


ENDS = {"thinking": thinking, "stop": stopping, "grammar": completing}


def hold(served: scheduler.Scheduler, ends: str, tokens: int, rounding: float) -> list[Any] | str:
    """The length that was found of the next prompt, and whether its answer is the cold one."""
    source = random.Random(tokens)

    def drawn(number: int) -> list[int]:
        return [source.randrange(3, 120) for _ in range(number)]

    served.forget()
    warm_answers.poison(served)
    first = drawn(FIRST)
    with ENDS[ends](served):
        try:
            answered = served.answer({"first": first}, tokens)["first"]
        except AssertionError as error:
            return str(error)
    kept = 0 if ends == "thinking" else tokens - BEYOND
    prompt = {"next": [*first, *(int(logits.argmax()) for logits in answered.logits[:kept]), *drawn(ADDED)]}
    found: list[Any] = warm_answers.compare(served, prompt, served.answer(prompt, 1), rounding)[0]
    return found


def main(model: str, server_args: str) -> None:
    given = json.loads(server_args)
    ends, tokens = given.pop("ends"), given.pop("tokens")

    def act(served: scheduler.Scheduler, rounding: float) -> Any:
        return [hold(served, ends, number, rounding) for number in tokens]

    warm_answers.serve(model, given, act)


if __name__ == "__main__":
    main(*sys.argv[1:])
