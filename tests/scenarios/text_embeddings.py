# SPDX-License-Identifier: Apache-2.0
"""A model with a slot for embeddings that hands its layers token ids, captured and replayed."""

from __future__ import annotations

from cpu_sglang import graphs, one_batch, prefill
from tests.scenarios import released, telling


def main() -> None:
    loaded = released.load("llama")
    runner = loaded.model_runner
    runner.is_multimodal = runner.model_config.is_multimodal = True
    batches = [prefill._prompts([6, 5]), prefill._prompts([9])]
    eager = [one_batch.generate(loaded, prompts, 1)[1] for prompts in batches]

    def replayed() -> list[bool]:
        prefill.capture_prefill(runner, (16,))
        before = graphs.counters.replays
        answers = [one_batch.generate(loaded, prompts, 1)[1] for prompts in batches]
        equal = [bool((one == other).all()) for one, other in zip(answers, eager, strict=True)]
        return [graphs.counters.replays > before, *equal]

    telling.with_and_without(replayed)


if __name__ == "__main__":
    main()
