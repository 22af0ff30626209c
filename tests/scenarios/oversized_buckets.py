# SPDX-License-Identifier: Apache-2.0
"""A server whose prefill graph sizes are all too large, as far as the real ModelRunner comes with it."""

from __future__ import annotations

from typing import Any

from cpu_sglang import one_batch, prefill
from tests.scenarios import released, telling


def main() -> None:
    loaded = released.load("llama")
    runner = loaded.model_runner
    prompts = prefill._prompts([6, 5])
    eager = one_batch.generate(loaded, prompts, 2)[1]

    def start() -> Any:
        phase = prefill._graph_config(runner).prefill
        phase.backend, phase.bs = "breakable", [10**6]
        try:
            runner.init_prefill_cuda_graph()
        except AttributeError as error:
            return str(error)
        same = bool((one_batch.generate(loaded, prompts, 2)[1] == eager).all())
        return [type(runner.prefill_cuda_graph_runner).__name__, same]

    telling.with_and_without(start)


if __name__ == "__main__":
    main()
