# SPDX-License-Identifier: Apache-2.0
"""The order in which SGLang's own overlapped scheduler launches steps, waits for them and writes on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cpu_sglang import graphs, one_batch, scheduler
from tests.releases import kinds_of_request
from tests.scenarios import telling


class ScheduleStream(graphs.Stream):
    """The stream that the scheduler writes on, and the steps that it would write beside."""

    def __init__(self) -> None:
        super().__init__()
        self.unfenced = 0
        self.waits = 0
        # by what the scheduler does: the most steps whose reads it did not wait for
        self.beside: dict[str, int] = {}

    def wait_event(self, event: Any) -> None:
        self.waits += 1
        self.unfenced = 0

    def launched(self) -> None:
        self.unfenced += 1

    def writes(self, what: str) -> None:
        self.beside[what] = max(self.beside.get(what, 0), self.unfenced)


def called_before(owner: Any, name: str, note: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return original(*args, **kwargs)

    setattr(owner, name, noted)


def program(served: scheduler.Scheduler) -> None:
    own = served.scheduler
    # as on CUDA
    own._war_barrier_enabled, own.forward_stream = True, graphs.Stream()
    streams: list[ScheduleStream] = []
    called_before(own.model_worker, "forward_batch_generation", lambda: streams[-1].launched())
    called_before(own, "process_batch_result", lambda: streams[-1].writes("results"))
    called_before(own, "get_next_batch_to_run", lambda: streams[-1].writes("next batch"))

    def act() -> dict[str, Any]:
        own.schedule_stream = ScheduleStream()
        streams.append(own.schedule_stream)
        answers = served.answer({"one": [5, 6, 7], "two": [8, 9, 10, 11]}, 6)
        assert [len(answer.logits) for answer in answers.values()] == [6, 6]
        return {"beside": own.schedule_stream.beside, "waits": own.schedule_stream.waits}

    telling.with_and_without(act)


if __name__ == "__main__":
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    kinds_of_request.forget_pinned_memory()
    scheduler.run(program, "llama", disable_overlap_schedule=False)
