# SPDX-License-Identifier: Apache-2.0
"""Extend of a Mamba2 layer, input projection to gated norm, for captured graphs: its implementations' contract.

    Tables, Scratch                        as in gdn_extend, whose tables these are
    extend(inputs, dt, ...)                one layer: convolution, step sizes, scan, D, state, output
    refusal(shape, ...)                    the reason a layer is not supported, asked once

`stepwise.py` does it in plain torch and fp32, token by token; `triton.py` in a few launches; `cuda.py` in two for
Hopper, and one more for an output in which a sequence may be cut.

For `extend`:

- Launches, tables, pools, padding, checkpoints and the independence of a sequence's bits are as `gdn_extend` says.
- Sequences are back to back from row 0.
    in    inputs        [rows, channels] bf16|f16, any row stride: x of every head, B of every group, C of every group,
                        before the convolution
          dt            [rows, heads] bf16|f16, any row stride: step sizes before bias and softplus
          conv_weights  [channels, width]; bias [channels] or None; A (below 0), D and dt_bias [heads]
    pools conv          [slots, channels, width - 1], any strides
          state         [slots, heads, head, states] f32|bf16, each slot contiguous, any stride between slots
    out   output        [rows, heads, head], contiguous
- Of a token's step size d = clamp(softplus(dt + dt_bias), least, most), of a head in a group:
    state = exp(d A) state + (d x) B^T        output = state C + D x
- A state is kept in fp32 within a step, and rounded once to the pool's dtype. It is read only if there is a prefix.
- The gate, its norm and the projections are SGLang's own, captured beside it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

SIZES = (16, 32, 64, 128, 256)
HALVES = ("torch.bfloat16", "torch.float16")
KEPT = ("torch.float32", "torch.bfloat16")
# rows of a product
LEAST_PART = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """Head counts and sizes of a layer on one GPU; `width` is the convolution's."""

    heads: int
    groups: int
    head: int
    states: int
    width: int
    least_step: float = 0.0
    most_step: float = math.inf

    @property
    def inner(self) -> int:
        return self.heads * self.head

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.states


def refusal(shape: Shape, *, kind: Any, activation: str | None, conv: Any, state: Any) -> str | None:
    """Return the reason a layer with projections of this dtype, on these pools, is not supported, or None."""
    of_state = (shape.head * shape.states, shape.states, 1)
    wrong = {
        f"heads of {shape.head}": shape.head > 0 and shape.head % LEAST_PART == 0,
        f"{shape.states} states": shape.states in SIZES,
        f"{shape.heads} heads in {shape.groups} groups": shape.heads % shape.groups == 0,
        f"a convolution of width {shape.width}": 2 <= shape.width <= 5,
        f"the activation {activation!r}": activation in ("silu", "swish"),
        f"projections in {kind}": str(kind) in HALVES,
        f"windows in {conv.dtype} for projections in {kind}": conv.dtype == kind,
        f"windows of {tuple(conv.shape[1:])}": conv.shape[1:] == (shape.channels, shape.width - 1),
        f"states in {state.dtype}": str(state.dtype) in KEPT,
        f"states of {tuple(state.shape[1:])}": state.shape[1:] == (shape.heads, shape.head, shape.states),
        f"states with strides {state.stride()[1:]}": state.stride()[1:] == of_state,
    }
    found = [what for what, is_right in wrong.items() if not is_right]
    return f"no kernel for {found[0]}" if found else None
