# SPDX-License-Identifier: Apache-2.0
"""The break around a pooled indexer, which chooses for fewer tokens than data parallel attention has padded to."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from cpu_sglang import one_batch
from sglang_bcg_fixes.engine import graph_break
from tests.scenarios import telling

# rows of the graph, of the padded batch, and of real tokens
GRAPH, BATCH = 8, 6
REAL = {"as many": [4, 2], "fewer": [3, 1], "one request": [5]}


class Indexer(torch.nn.Module):
    """Chooses the row's own number for each real token."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def _forward_cuda_impl(self, x: Any, **_: Any) -> Any:
        assert len(x) == BATCH
        return torch.arange(self.rows, dtype=torch.int32)[:, None].repeat(1, 2)


def chosen(module: Any, lengths: list[int], rows: int) -> list[int] | str:
    batch = SimpleNamespace(extend_num_tokens=BATCH, extend_seq_lens_cpu=lengths)
    module.get_tc_piecewise_forward_context = lambda: SimpleNamespace(forward_batch=batch)
    # what a replay runs between two segments
    run = graph_break.inner_of(module.bcg_kpool_indexer_prefill_with_output)
    output, tokens = torch.full((GRAPH, 2), 99, dtype=torch.int32), torch.zeros(GRAPH, 1)
    indexer = Indexer(rows)
    try:
        run(indexer, tokens, tokens, tokens, output, 0)
    except ValueError as error:
        return str(error)
    finally:
        assert "_forward_cuda_impl" not in vars(indexer)
    return output[:, 0].tolist()


def main() -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    module: Any = importlib.import_module("sglang.srt.layers.attention.dsa.kpool_prefill_cuda_graph")

    def of_each() -> dict[str, Any]:
        found: dict[str, Any] = {name: chosen(module, lengths, sum(lengths)) for name, lengths in REAL.items()}
        return {**found, "rows for padding too": chosen(module, [4], BATCH), "too few rows": chosen(module, [4], 3)}

    telling.with_and_without(of_each)


if __name__ == "__main__":
    main()
