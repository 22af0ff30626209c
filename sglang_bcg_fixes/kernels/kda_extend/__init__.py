# SPDX-License-Identifier: Apache-2.0
"""Extend of a Kimi delta attention layer, projections to output, for captured graphs: its implementations' contract.

    Tables, Scratch                        as in gdn_extend, whose tables these are
    extend(mixed_qkv, a, b, ...)           one layer: convolution, gates, delta rule, state, output
    refusal(shape, ...)                    the reason a layer is not supported, asked once

`stepwise.py` does it in plain torch and fp32, token by token; `triton.py` in two launches.

For `extend`:

- Launches, tables, pools, padding, checkpoints and the independence of a sequence's bits are as `gdn_extend` says.
- Sequences are back to back from row 0.
    in    mixed_qkv     [rows, channels] bf16|f16, any row stride: queries, keys and values of every head, before the
                        convolution
          a             [rows, heads * keys] bf16|f16, any row stride: gates before bias and activation
          b             [rows, heads] any float, any row stride: betas, before their sigmoid unless `is_squashed`
          conv_weights  [channels, width]; bias [channels] or None; A_log [heads]; dt_bias [heads * keys]
    pools conv          [slots, channels, width - 1], any strides
          state         [slots, heads, values, keys] f32|bf16, each slot contiguous, any stride between slots
    out   output        [rows, heads, values], contiguous
- A token's gate has a number for every key. With x = a + dt_bias, of a head,
    g = -exp(A_log) softplus(x)            or, with a lower bound,            g = lower_bound sigmoid(exp(A_log) x)
    state = state diag(exp(g));  state += beta (v - state k) k^T;  output = state q
  where q and k have length keys^-0.5 and 1.
- The gate of the output, its norm and the projections are SGLang's own, captured beside it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

SIZES = (16, 32, 64, 128)
HALVES = ("torch.bfloat16", "torch.float16")
STATES = ("torch.float32", "torch.bfloat16")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads and their sizes of a layer on one GPU; `width` is the convolution's."""

    heads: int
    keys: int
    values: int
    width: int
    lower_bound: float | None = None

    @property
    def channels(self) -> int:
        return self.heads * (2 * self.keys + self.values)


def refusal(shape: Shape, *, kind: Any, activation: str | None, conv: Any, state: Any) -> str | None:
    """Return the reason a layer with projections of this dtype, on these pools, is not supported, or None."""
    of_state = (shape.values * shape.keys, shape.keys, 1)
    wrong = {
        f"heads of {shape.keys} keys and {shape.values} values": {shape.keys, shape.values} <= set(SIZES),
        f"gates above {shape.lower_bound}": shape.lower_bound is None or shape.lower_bound <= 0,
        f"a convolution of width {shape.width}": 2 <= shape.width <= 5,
        f"the activation {activation!r}": activation in ("silu", "swish"),
        f"projections in {kind}": str(kind) in HALVES,
        f"windows in {conv.dtype} for projections in {kind}": conv.dtype == kind,
        f"windows of {tuple(conv.shape[1:])}": conv.shape[1:] == (shape.channels, shape.width - 1),
        f"states in {state.dtype}": str(state.dtype) in STATES,
        f"states of {tuple(state.shape[1:])}": state.shape[1:] == (shape.heads, shape.values, shape.keys),
        f"states with strides {state.stride()[1:]}": state.stride()[1:] == of_state,
    }
    found = [what for what, is_right in wrong.items() if not is_right]
    return f"no kernel for {found[0]}" if found else None
