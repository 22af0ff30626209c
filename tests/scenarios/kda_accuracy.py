# SPDX-License-Identifier: Apache-2.0
"""Our Triton implementation of Kimi delta attention and SGLang's own kernels: how far off fp64 each is, in RMS.

In float16, because SGLang's convolution in bfloat16 is not a number in Triton's interpreter.
"""

from __future__ import annotations

import collections
import importlib
from typing import Any

import torch

from cpu_sglang import one_batch
from tests.scenarios import telling

LENGTHS, FRESH, SEEDS = [130, 3, 64], [0, 1], 4
# of gates, and their lower bound
CASES = (("near 0", None), ("gentle", None), ("mixed", -5.0), ("mixed", None))


def sglangs(step: Any) -> Any:
    """Run SGLang's kernels on a step, as its backend calls them."""
    from tests.kernels import kda_extend_cases as cases

    backend = importlib.import_module("sglang.srt.layers.attention.linear.kda_backend")
    shape, lengths = step.shape, torch.tensor(step.lengths)
    conv, state = step.conv.clone(), step.state.clone()
    slots, starts = (
        torch.tensor(step.slots, dtype=torch.int32),
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
    )
    mixed = backend.causal_conv1d_fn(
        step.mixed_qkv.T,
        step.conv_weights,
        None,
        activation="silu",
        conv_states=conv,
        has_initial_state=torch.tensor(step.prefixes) > 0,
        cache_indices=slots,
        query_start_loc=starts,
        seq_lens_cpu=step.lengths,
    ).T
    of_keys, of_values = shape.heads * shape.keys, shape.heads * shape.values
    q, k, v = (part.unflatten(1, (shape.heads, -1))[None] for part in mixed.split([of_keys, of_keys, of_values], 1))
    found = backend.TritonKDAKernel().extend(
        q=q,
        k=k,
        v=v,
        g=step.a.unflatten(1, (shape.heads, -1))[None],
        beta=step.b.float().sigmoid()[None],
        ssm_states=state,
        cache_indices=slots,
        query_start_loc=starts,
        A_log=step.A_log,
        dt_bias=step.dt_bias,
        lower_bound=shape.lower_bound,
    )
    output = found[0] if isinstance(found, tuple) else found
    return cases.After(output.view(-1, shape.heads, shape.values), conv, state)


def main() -> None:
    one_batch.import_sglang()
    from sglang_bcg_fixes.kernels.kda_extend import Shape, triton
    from tests.kernels import accuracy
    from tests.kernels import kda_extend_cases as cases

    # programs one by one, as the interpreter runs them
    tuning = triton.Tuning(prepare_programs=2, advance_programs=2)
    found: dict[str, Any] = {}
    for gates, lower_bound in CASES:
        squares: dict[str, Any] = {"ours": collections.Counter(), "SGLang's": collections.Counter()}
        for seed in range(SEEDS):
            shape = Shape(2, 64, 64, 4, lower_bound)
            step = cases.draw(shape, LENGTHS, device="cpu", dtype=torch.float16, gates=gates, fresh=FRESH, seed=seed)
            exact = cases.wanted(step, kind=torch.float64)
            for name, after in (("ours", cases.Launched(step, tuning).run()), ("SGLang's", sglangs(step))):
                got = accuracy.Results(after.output, after.conv[step.slots], after.state[step.slots])
                squares[name].update({each: error**2 for each, error in accuracy.errors(got, exact).items()})
        found[f"{gates}, {lower_bound}"] = {
            name: {each: (sum / SEEDS) ** 0.5 for each, sum in of.items()} for name, of in squares.items()
        }
    telling.result(found)


if __name__ == "__main__":
    main()
