# SPDX-License-Identifier: Apache-2.0
"""The draft model's extend step in a graph of the Triton backend, for a layer with a sliding window.

python -m tests.scenarios.window_drafts
"""

from __future__ import annotations

from typing import Any

from cpu_sglang import draft_extend, one_batch
from tests.scenarios import telling
from tests.scenarios.draft_extend_extent import STEPS


class Triton(draft_extend.Triton):
    def replay(self, step: draft_extend.Step, batch: Any) -> None:
        # until 0.5.20 SGLang asks the device how many slots a window has
        self.fill(step, batch)


def errors(backend: Triton) -> dict[str, Any]:
    """Measure how far attention is off, eager and in a graph captured for nobody, or say how the graph fails."""
    found: dict[str, Any] = {}
    for name in ("one page and two", "padded"):
        eager = backend.attended(STEPS[name])["error"]
        try:
            graph: Any = backend.attended_in_graph(STEPS[name])["error"]
        except Exception as problem:
            graph = repr(problem)
        found[name] = {"eager": eager, "graph": graph}
    return found


def main() -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    backend = Triton(draft_extend.load("gpt_oss", windowed=True))
    telling.with_and_perhaps_without(lambda: errors(backend))


if __name__ == "__main__":
    main()
