# SPDX-License-Identifier: Apache-2.0
"""Extend of a gated short convolution, between its two gates, for captured graphs: its implementations' contract.

    Tables, Scratch                        as in gdn_extend, whose tables these are
    extend(inputs, ...)                    one layer: convolution and windows
    refusal(shape, ...)                    the reason a layer is not supported, asked once

`stepwise.py` does it in plain torch and fp32; `triton.py` in one launch.

For `extend`:

- Launches, tables, pools, padding and the independence of a sequence's bits are as `gdn_extend` says.
- Sequences are back to back from row 0.
    in    inputs        [rows, channels] bf16|f16, any row stride: what the first gate lets through
          conv_weights  [channels, width]; bias [channels] or None
    pool  conv          [slots, channels, width - 1], any strides
    out   output        [rows, channels], contiguous, of the inputs' dtype; zero where a row has no token
- Nothing is activated. A window is read only if there is a prefix.
- There are no checkpoints: SGLang's own layers write none.
- Both gates and the projections are SGLang's own, captured beside it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

HALVES = ("torch.bfloat16", "torch.float16")
# channels of a tile
LEAST_TILE = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """Channels of a layer on one GPU, and the width of its convolution."""

    channels: int
    width: int


def refusal(shape: Shape, *, kind: Any, conv: Any) -> str | None:
    """Return the reason a layer with hidden states of this dtype, on this pool, is not supported, or None."""
    wrong = {
        f"{shape.channels} channels": shape.channels > 0 and shape.channels % LEAST_TILE == 0,
        f"a convolution of width {shape.width}": 2 <= shape.width <= 5,
        f"hidden states in {kind}": str(kind) in HALVES,
        f"windows in {conv.dtype} for hidden states in {kind}": conv.dtype == kind,
        f"windows of {tuple(conv.shape[1:])}": conv.shape[1:] == (shape.channels, shape.width - 1),
    }
    found = [what for what, is_right in wrong.items() if not is_right]
    return f"no kernel for {found[0]}" if found else None
