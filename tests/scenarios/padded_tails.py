# SPDX-License-Identifier: Apache-2.0
"""The padded rows of attention's outputs after a real replay, where uninitialised memory is NaN."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch

from cpu_sglang import one_batch, prefill
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.engine import graph_break
from tests.scenarios import telling

PROMPT, BUCKET = list(range(5, 16)), 16


def watch_scopes() -> list[bool]:
    """Note for each graph's scope that is entered from now on whether it is inside another one."""
    context = graph_break.load("context")
    scope, inside_another = context.enable_breakable_cuda_graph, list[bool]()

    def watched_scope() -> Any:
        inside_another.append(context.is_in_breakable_cuda_graph())
        return scope()

    # the package has a copy of it
    for name in (context.__name__, context.__name__.rpartition(".")[0]):
        vars(sys.modules[name])["enable_breakable_cuda_graph"] = watched_scope
    return inside_another


class Replays:
    """A small hybrid model whose attention layers are watched."""

    def __init__(self) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

        self.loaded = one_batch.load("qwen3next")
        model = self.loaded.model_runner.model
        one_batch.randomize(model)
        self.eager = one_batch.generate(self.loaded, [PROMPT], 3)[1]
        self.outputs: list[tuple[str, Any]] = []
        for module in model.modules():
            if isinstance(module, (RadixAttention, RadixLinearAttention)):
                module.register_forward_hook(self.note)

    def note(self, module: Any, given: Any, output: Any) -> None:
        self.outputs.append((type(module).__name__, output))

    def capture_and_replay(self) -> dict[str, Any]:
        self.outputs.clear()
        prefill.capture_prefill(self.loaded.model_runner, (BUCKET,))
        # the runs that warm up come first, and the last three layers are those of the graph
        captured = self.outputs[-3:]
        whole = all(bool(rows_of(*item).flatten(1).any(1).all()) for item in captured)
        replayed = one_batch.generate(self.loaded, [PROMPT], 3)[1]
        rows = [(kind, rows_of(kind, output)) for kind, output in captured]
        return {
            "every row is real while capturing": whole,
            "equal": bool((replayed == self.eager).all()),
            # the first of its kind: what follows a layer with NaN in its tail may write NaN into its own
            "tails": {kind: kind_of_tail(tail[len(PROMPT) :]) for kind, tail in reversed(rows)},
            "real": [hashlib.sha256(real[: len(PROMPT)].numpy().tobytes()).hexdigest() for _, real in rows],
        }


def rows_of(kind: str, output: Any) -> torch.Tensor:
    rows: torch.Tensor = output[0] if kind == "RadixLinearAttention" else output
    return rows


def kind_of_tail(tail: torch.Tensor) -> str:
    return "nan" if tail.isnan().all() else "zero" if (tail == 0).all() else "other"


def main() -> None:
    one_batch.import_sglang(with_graphs=True)
    inside_another = watch_scopes()
    one_batch.load_plugins()
    replays, ledger = Replays(), plugin.load().ledger
    applied = [name for name in ledger.applied() if name.endswith("_tail_uninitialised")]
    places = [change.slot.where for name in applied for change in ledger._changes[name]]
    found = {"applied": applied, "places": places, "with": replays.capture_and_replay()}
    for name in applied:
        ledger.undo(name)
    found["without"] = replays.capture_and_replay()
    telling.result({**found, "scopes inside another": inside_another})


if __name__ == "__main__":
    main()
