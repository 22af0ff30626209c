# SPDX-License-Identifier: Apache-2.0
"""benchmarks.bench.mamba2_layer where there is no GPU: a real SGLang's layer, tiny, in Triton's interpreter.

    python -m tests.bench.cpu_mamba2_layer JOB
    python -m tests.bench.cpu_mamba2_layer errors

The latter prints how far SGLang's results and ours are from fp64's.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

from benchmarks.bench import gdn_layer, mamba2_layer, timing
from cpu_sglang import one_batch
from sglang_bcg_fixes.kernels.mamba2_extend import triton
from sglang_bcg_fixes.kernels.mamba2_extend.walks import Walk
from tests.bench.cpu_device import Cpu, once
from tests.kernels import mamba2_reference

# SGLang's convolution in bfloat16 is not a number in the interpreter
HALF = "float16"
TINY = mamba2_layer.Shape(1, 2, 1, 32, 32, chunk=64)
# of each step, SGLang's chunks begin with the first sequence, ours with every one
LENGTHS = ([130], [64, 64], [3, 70, 1, 33])
SHAPES = (
    TINY,
    mamba2_layer.Shape(1, 4, 2, 16, 64, chunk=128),
    mamba2_layer.Shape(1, 2, 2, 64, 16, chunk=64, kept="bfloat16"),
)


def errors() -> list[dict[str, Any]]:
    """The errors of every step of every shape, against fp64."""
    import torch

    found = []
    for shape in SHAPES:
        for lengths in LENGTHS:
            problem = mamba2_layer.Problem(shape, lengths, "cpu", HALF)
            wanted = mamba2_reference.recurrent(problem.inputs, torch.float64)
            row: dict[str, Any] = {"shape": SHAPES.index(shape), "lengths": lengths}
            for name, builder in mamba2_layer.KERNELS.items():
                problem.restore()
                builder(problem)(0)
                row[name] = problem.errors(wanted)
            found.append(row)
    return found


if __name__ == "__main__":
    one_batch.import_sglang()
    import torch

    torch.cuda.get_device_name = lambda *_: "none"
    # bound for CUDA, NPU and XPU only
    one_batch.server_arguments("falcon_h1")
    gdn_layer.Cuda = Cpu  # type: ignore[assignment, misc]
    mamba2_layer.SHAPES = {"nemotron_h_8b": TINY}
    # the interpreter runs every program of a grid, also those that find nothing to do
    walk = Walk(programs=2, warps=4, stages=1, part=64)
    few = triton.Tuning(walk, (walk,), prepare_programs=2)
    triton.tuning_for = lambda shape: few
    timing.in_turn = once  # type: ignore[assignment]
    if sys.argv[1] == "errors":
        print("RESULT", json.dumps(errors()))
    else:
        mamba2_layer.Problem = functools.partial(mamba2_layer.Problem, kind=HALF)  # type: ignore[assignment, misc]
        gdn_layer.serve(json.loads(sys.argv[1]), mamba2_layer.case_of)
