# SPDX-License-Identifier: Apache-2.0
"""The draft model's extend step in a graph of the Triton backend, for a layer with a sliding window.

python -m tests.scenarios.window_drafts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cpu_sglang import draft_extend, one_batch
from tests.scenarios import telling
from tests.scenarios.draft_extend_extent import ACCEPTED, STEPS


class Triton(draft_extend.Triton):
    def replay(self, step: draft_extend.Step, batch: Any) -> None:
        # until 0.5.20 SGLang asks the device how many slots a window has
        self.fill(step, batch)


def errors(backend: Triton) -> dict[str, Any]:
    """Measure how far attention is off, eager and in a graph captured for nobody, or say how it fails."""
    steps = {name: STEPS[name] for name in ("one page and two", "padded")}
    # later releases have no worker whose step is in this mode
    steps |= {} if backend.is_handed_batches else ACCEPTED
    ways = {"eager": backend.attended, "graph": backend.attended_in_graph}
    return {name: {way: error(attend, step) for way, attend in ways.items()} for name, step in steps.items()}


def error(attend: Callable[[draft_extend.Step], dict[str, Any]], step: draft_extend.Step) -> Any:
    try:
        return attend(step)["error"]
    except Exception as problem:
        return repr(problem)


def main() -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    backend = Triton(draft_extend.load("gpt_oss", windowed=True))
    telling.with_and_perhaps_without(lambda: errors(backend))


if __name__ == "__main__":
    main()
