# SPDX-License-Identifier: Apache-2.0
"""A model that adds something to its answer, and what comes out of a real replay."""

from __future__ import annotations

from typing import Any

from cpu_sglang import graphs, one_batch, prefill
from tests.scenarios import released, telling


def main() -> None:
    loaded = released.load("llama")
    runner = loaded.model_runner
    answers, logits, run = list[Any](), runner.model.logits_processor.forward, runner.forward

    def with_info(*args: Any, **kwargs: Any) -> Any:
        answer = logits(*args, **kwargs)
        answer.customized_info = {"request": ["first", "second"]}
        return answer

    def watched(*args: Any, **kwargs: Any) -> Any:
        answer = run(*args, **kwargs)
        answers.append(getattr(answer, "logits_output", None) or answer[0])
        return answer

    runner.model.logits_processor.forward, runner.forward = with_info, watched
    prefill.capture_prefill(runner)

    def replayed() -> list[Any]:
        before = graphs.counters.replays
        one_batch.generate(loaded, prefill._prompts([3, 4]), 1)
        return [answers[-1].customized_info, graphs.counters.replays > before, "forward" in vars(runner.model)]

    telling.with_and_without(replayed)


if __name__ == "__main__":
    main()
