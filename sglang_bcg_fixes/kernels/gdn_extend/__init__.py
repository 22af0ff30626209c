# SPDX-License-Identifier: Apache-2.0
"""Extend of a gated delta net layer, from projections to output, for captured graphs: its implementations' contract.

    Tables(max_tokens, max_sequences, device)          work tables of a step, in static device buffers
    Tables.fill(lengths, slots, prefixes, tracking)    one launch per step, for all its layers
    Scratch.for_rows(rows, tables, shape, ...)         scratch between the kernels of one layer
    extend(mixed_qkv, a, b, ...)                       one layer: convolution, gates, delta rule, state, output
    refusal(shape, ...)                                the reason a layer is not supported, asked once

`stepwise.py` does it in plain torch and fp32, token by token; `triton.py`, and `cuda.py` on Hopper, in two launches
per span of tokens (`Tables(..., span=...)`: the default is one span; more spans mean more launches and less scratch).
With few heads and one span, `cuda.py` cuts long sequences into segments, with a third launch.

For `extend`:

- It launches on the current stream, allocates nothing, synchronises nothing and returns None. Its grids depend on the
  tuning alone, the number of launches on the rows of `output`. The work is read from the tables on the device, so a
  captured launch is right for every batch of up to `max_sequences` sequences and `max_tokens` tokens, and a smaller
  batch costs no more than it would alone.
- Sequences are back to back from row 0.
    in    mixed_qkv     [rows, channels] bf16|f16, any row stride: queries of every key head, keys of every key head,
                        values of every value head, before the convolution
          a, b          [rows, value heads] bf16|f16, any row stride
          conv_weights  [channels, width]; bias [channels] or None; A_log and dt_bias [value heads]
    pools conv          [slots, channels, width - 1], any strides
          state         [slots, value heads, values, keys] f32|bf16, each slot contiguous, any stride between slots
    out   output        [rows, value heads, values], contiguous
- Every row of `output` is written; past the last token, and in sequences whose slot is below 0, with zeros. Input rows
  past the last token, or of a sequence whose slot is below 0, are not read.
- Of both pools, only the slots in the tables are read and written, in place. The state is always read, because SGLang
  zeroes it when it hands out a slot; in bf16 it is rounded where it is stored, at the end of a step or span. The
  convolution's window is read only if the prefix is not empty. Slots below 0, and sequences without tokens, touch
  nothing. A slot that two sequences of a step share (slot 0, in a dummy run) ends up with the result of either, or of
  a mix of what both left there.
- A sequence's results have the same bits whatever its neighbours and its position are, and however many rows and table
  entries follow it. NaN in one sequence stays there. Segments depend on its length, the heads and the number of spans.
- Nothing in the scratch outlives the call: all layers may share it, and inside a capture it may come from the graph's
  own pool. Before the first step, scratch and tables may hold anything, except `counts`.
- With `tracking` (the prefix cache's extra buffer), a masked sequence's state after its last whole chunk of 64, counted
  from the prefix and up to its tracked length, and the inputs that a convolution there would need, are written to its
  tracked slot, which is no sequence's own.

`refusal` names what is not supported. Target verify and draft extend are other operations.
"""

from __future__ import annotations

import dataclasses
from typing import Any

SIZES = (16, 32, 64, 128, 256)
HALVES = ("torch.bfloat16", "torch.float16")
STATES = ("torch.float32", "torch.bfloat16")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Head counts and sizes of a layer on one GPU; `width` is the convolution's."""

    key_heads: int
    value_heads: int
    keys: int
    values: int
    width: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.keys + self.value_heads * self.values


def refusal(shape: Shape, *, kind: Any, activation: str | None, conv: Any, state: Any) -> str | None:
    """Return the reason a layer with projections of this dtype, on these pools, is not supported, or None."""
    of_state = (shape.values * shape.keys, shape.keys, 1)
    wrong = {
        f"heads of {shape.keys} keys and {shape.values} values": {shape.keys, shape.values} <= set(SIZES),
        f"{shape.value_heads} value heads on {shape.key_heads} key heads": shape.value_heads % shape.key_heads == 0,
        f"a convolution of width {shape.width}": 2 <= shape.width <= 5,
        f"the activation {activation!r}": activation in ("silu", "swish"),
        f"projections in {kind}": str(kind) in HALVES,
        f"windows in {conv.dtype} for projections in {kind}": conv.dtype == kind,
        f"windows of {tuple(conv.shape[1:])}": conv.shape[1:] == (shape.channels, shape.width - 1),
        f"states in {state.dtype}": str(state.dtype) in STATES,
        f"states of {tuple(state.shape[1:])}": state.shape[1:] == (shape.value_heads, shape.values, shape.keys),
        f"states with strides {state.stride()[1:]}": state.stride()[1:] == of_state,
    }
    found = [what for what, is_right in wrong.items() if not is_right]
    return f"no kernel for {found[0]}" if found else None
