# SPDX-License-Identifier: Apache-2.0
"""An interpreted kernel inside the stand-in for CUDA graphs: one operation, whose reach is checked."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cpu_sglang import graphs, stand_ins


@triton.jit  # type: ignore[untyped-decorator]
def gather(source: Any, index: Any, target: Any, n: tl.constexpr) -> None:
    offsets = tl.arange(0, n)
    tl.store(target + offsets, tl.load(source + tl.load(index + offsets)))


@triton.jit  # type: ignore[untyped-decorator]
def gather_known(source: Any, index: Any, target: Any, n: tl.constexpr) -> None:
    """Leave out a row whose index is -1, as kernels do with padded rows."""
    row = tl.program_id(0)
    offsets = tl.arange(0, n)
    place = tl.load(index + row)
    mask = offsets < n
    mask &= place != -1
    tl.store(target + row * n + offsets, tl.load(source + place * n + offsets, mask=mask, other=7.0))


def main() -> None:
    stand_ins.install()
    graphs.install()
    source, index, target, graph = torch.arange(4.0), torch.tensor([3, 1]), torch.zeros(2), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather[(1,)](source, index, target, 2)
    assert graphs.counters.operations == 1, graphs.counters
    index.copy_(torch.tensor([0, 2]))
    graph.replay()
    assert target.tolist() == [0, 2], target
    del index
    try:
        graph.replay()
    except Exception as error:
        assert "illegal memory access" in repr(error), error
    else:
        raise AssertionError("the kernel followed an index in freed memory")
    padded_rows()


def padded_rows() -> None:
    source, index, target, graph = torch.arange(4.0), torch.tensor([1, 0]), torch.zeros(4), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_known[(2,)](source, index, target, 2)
    index.copy_(torch.tensor([1, -1]))
    # nothing that is masked out is touched, wherever it would lie
    graph.replay()
    assert target.tolist() == [2, 3, 7, 7], target
    index.copy_(torch.tensor([1, -2]))
    try:
        graph.replay()
    except Exception as error:
        assert "illegal memory access" in repr(error), error
    else:
        raise AssertionError("the kernel read memory that it was not given")


if __name__ == "__main__":
    main()
