# SPDX-License-Identifier: Apache-2.0
"""The short convolution of ours and SGLang's own, each beside fp64: how far off they are, in RMS.

In float16, because SGLang's convolution in bfloat16 is not a number in Triton's interpreter.
"""

from __future__ import annotations

import collections
import importlib
from typing import Any

import torch

from cpu_sglang import one_batch
from tests.scenarios import telling

LENGTHS, FRESH, SEEDS = [130, 3, 64, 1, 2], [0, 1, 4], 4


def sglangs(step: Any) -> Any:
    """Run SGLang's convolution on a step, as the layer calls it."""
    from tests.kernels.linear_extend_cases import After

    model = importlib.import_module("sglang.srt.models.lfm2")
    conv, lengths = step.conv.clone(), torch.tensor(step.lengths)
    output = model.causal_conv1d_fn(
        step.inputs.T.contiguous(),
        step.conv_weights,
        step.bias,
        query_start_loc=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        cache_indices=torch.tensor(step.slots, dtype=torch.int32),
        has_initial_state=torch.tensor(step.prefixes) > 0,
        conv_states=conv,
        activation=None,
    ).T
    return After(output, conv, step.state)


def main() -> None:
    one_batch.import_sglang()
    from sglang_bcg_fixes.kernels.short_conv_extend import Shape, triton
    from tests.kernels import accuracy, linear_extend_cases
    from tests.kernels import short_conv_extend_cases as cases

    # programs one by one, as the interpreter runs them
    tuning = triton.Tuning(programs=2)
    squares: dict[str, Any] = {"ours": collections.Counter(), "SGLang's": collections.Counter()}
    for seed in range(SEEDS):
        step = cases.draw(Shape(64, 3), LENGTHS, dtype=torch.float16, fresh=FRESH, seed=seed)
        exact = linear_extend_cases.wanted(step, kind=torch.float64)
        for name, after in (("ours", cases.Launched(step, tuning).run()), ("SGLang's", sglangs(step))):
            got = accuracy.Results(after.output, after.conv[step.slots], after.state[step.slots])
            for result, value in accuracy.errors(got, exact).items():
                squares[name][result] += value**2 / SEEDS
    telling.result({name: {result: sum_**0.5 for result, sum_ in of.items()} for name, of in squares.items()})


if __name__ == "__main__":
    main()
