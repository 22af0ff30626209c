# SPDX-License-Identifier: Apache-2.0
"""The graphs that the real runner replays for each number of tokens, and if the answer is right."""

from __future__ import annotations

from collections.abc import Callable

from cpu_sglang import one_batch, prefill
from tests.scenarios import released, telling

LENGTHS: list[list[int]] = [[1], [2, 1], [4], [5], [3, 5], [9], [7, 8], [16]]


def main() -> None:
    loaded = released.load("llama")
    batches = {sum(lengths): prefill._prompts(lengths) for lengths in LENGTHS}
    eager = {tokens: one_batch.generate(loaded, prompts, 1)[1] for tokens, prompts in batches.items()}
    runner, chosen = prefill.capture_prefill(loaded.model_runner, (4, 8, 16)), list[int]()

    def tell(size: int, replay: Callable[[], None]) -> Callable[[], None]:
        def tell_and_replay() -> None:
            chosen.append(size)
            replay()

        return tell_and_replay

    for size, graph in prefill.captured_graphs(runner).items():
        graph.replay = tell(size, graph.replay)
    found = []
    for tokens, prompts in batches.items():
        answer = one_batch.generate(loaded, prompts, 1)[1]
        found.append([tokens, list(chosen), bool((answer == eager[tokens]).all())])
        chosen.clear()
    telling.result(found)


if __name__ == "__main__":
    main()
