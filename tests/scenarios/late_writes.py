# SPDX-License-Identifier: Apache-2.0
"""Answers from a warm prefix cache beside cold ones, where each step writes its states as late as a GPU may.

Arguments: those of warm_answers. A CPU has one stream, so what a step does to the states is taken back after it, and
done when somebody waits for the step: the next one, its result, or a stream that waits for that of the layers.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from cpu_sglang import scheduler
from tests.scenarios import warm_answers


class LateWrites:
    """A scheduler's steps in flight: at most one has run and is still to write its states."""

    def __init__(self, running: Any) -> None:
        self.states = warm_answers.states_of(running)
        self.in_flight: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.run = running.run_batch
        running.run_batch = self.run_batch
        layers = running.forward_stream

        def wait_stream(stream: Any, other: Any) -> None:
            if other is layers:
                self.land()

        type(layers).wait_stream = wait_stream

    def run_batch(self, *args: Any, **kwargs: Any) -> Any:
        self.land()
        before = [state.clone() for state in self.states]
        result = self.run(*args, **kwargs)
        changes = [(state.clone(), old) for state, old in zip(self.states, before, strict=True)]
        for state, old in zip(self.states, before, strict=True):
            state.copy_(old)
        self.in_flight = changes
        done = result.copy_done.synchronize

        def synchronize() -> None:
            done()
            if self.in_flight is changes:
                self.land()

        result.copy_done.synchronize = synchronize
        return result

    def land(self) -> None:
        for state, (new, old) in zip(self.states, self.in_flight, strict=bool(self.in_flight)):
            state.copy_(torch.where(new != old, new, state))
        self.in_flight = []


def main(model: str, server_args: str) -> None:
    given = json.loads(server_args)
    conversations = given.pop("conversations")
    late: list[LateWrites] = []

    def act(served: scheduler.Scheduler, rounding: float) -> dict[str, Any]:
        if not late:
            late.append(LateWrites(served.scheduler))
        held = {name: warm_answers.CONVERSATIONS[name] for name in conversations}
        return {name: warm_answers.hold(served, each, rounding, True) for name, each in held.items()}

    warm_answers.serve(model, given, act)


if __name__ == "__main__":
    main(*sys.argv[1:])
