"""Gated delta net's extend, from the projections to the output, for a captured graph: the contract of its forms.

    Tables(max_tokens, max_sequences, device)     what a step's kernels have to do, in static device buffers
    Tables.fill(lengths, slots, prefixes, tracking)    one launch for each step, of all its layers
    Scratch.for_rows(rows, tables, shape, ...)         what one layer's kernels tell one another
    extend(mixed_qkv, a, b, ...)                       one layer: convolution, gates, delta rule, state, output
    refusal(shape, ...)                                why a layer cannot be run by them, asked once

`reference.py` says it in plain torch and fp32, token after token; `triton.py` does it in two launches for each span of
tokens (`Tables(..., span=...)`: one span is the default, less scratch and more launches the choice), and so does
`cuda.py`, on Hopper.

What holds for `extend`:

- It launches on the current stream, allocates nothing, synchronises nothing and returns None. Its grids follow from the
  tuning alone, their number from the rows of `output`. What there is to do is read from the tables on the device, so a
  captured launch is right for every batch of up to `max_sequences` sequences and `max_tokens` tokens, and a smaller
  batch costs what it costs alone.
- Sequences stand one behind the other from row 0.
    in    mixed_qkv     [rows, channels] bf16|f16, rows any stride apart: queries of every key head, keys of every key
                        head, values of every value head, as they are before the convolution
          a, b          [rows, value heads] bf16|f16, rows any stride apart
          conv_weights  [channels, width]; bias [channels] or None; A_log and dt_bias [value heads]
    pools conv          [slots, channels, width - 1], any strides
          state         [slots, value heads, values, keys] f32, each slot contiguous, slots any stride apart
    out   output        [rows, value heads, values], contiguous
- Every row of `output` is written: behind the last token, and in sequences whose slot is below 0, with zeros. Rows of
  the inputs behind the last token are not read, nor are rows of a sequence whose slot is below 0.
- Of both pools the slots in the tables are read and written in place, and no others. The state is always read: SGLang
  zeroes it when it hands a slot out. The window of the convolution is read only where the prefix is not empty. Slots
  below 0, and sequences without tokens, touch nothing. A slot that two sequences of a step share (slot 0, in a dummy
  run) holds either's result afterwards.
- A sequence's results have the same bits whatever its neighbours are, wherever it stands, and however far the rows and
  tables reach behind it. What is not a number in one sequence stays there.
- Nothing in the scratch outlives the call: all layers may share it, and inside a capture it may come from the graph's
  own pool. Scratch and tables may hold anything before the first step, but `counts`.
- With `tracking` (the prefix cache's extra buffer): a masked sequence's state after its last whole chunk of 64 counted
  from the prefix, up to its tracked length, and the inputs that a convolution there would need, go to its tracked slot.

What is not covered `refusal` tells. Target verify and draft extend are other operations.
"""

from __future__ import annotations

import dataclasses
from typing import Any

SIZES = (16, 32, 64, 128, 256)
HALVES = ("torch.bfloat16", "torch.float16")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a layer's heads on one GPU; `width` is the convolution's."""

    key_heads: int
    value_heads: int
    keys: int
    values: int
    width: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.keys + self.value_heads * self.values


def refusal(shape: Shape, *, kind: Any, activation: str | None, conv: Any, state: Any) -> str | None:
    """Why a layer whose projections are of this dtype, on these pools, cannot be run; None if it can."""
    of_state = (shape.values * shape.keys, shape.keys, 1)
    wrong = {
        f"heads of {shape.keys} keys and {shape.values} values": {shape.keys, shape.values} <= set(SIZES),
        f"{shape.value_heads} value heads on {shape.key_heads} key heads": shape.value_heads % shape.key_heads == 0,
        f"a convolution of width {shape.width}": 2 <= shape.width <= 5,
        f"the activation {activation!r}": activation in ("silu", "swish"),
        f"projections in {kind}": str(kind) in HALVES,
        f"windows in {conv.dtype} for projections in {kind}": conv.dtype == kind,
        f"windows of {tuple(conv.shape[1:])}": conv.shape[1:] == (shape.channels, shape.width - 1),
        f"states in {state.dtype}": str(state.dtype) == "torch.float32",
        f"states of {tuple(state.shape[1:])}": state.shape[1:] == (shape.value_heads, shape.values, shape.keys),
        f"states with strides {state.stride()[1:]}": state.stride()[1:] == of_state,
    }
    found = [what for what, is_right in wrong.items() if not is_right]
    return f"no kernel for {found[0]}" if found else None
