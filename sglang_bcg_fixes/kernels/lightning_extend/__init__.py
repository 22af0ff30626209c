# SPDX-License-Identifier: Apache-2.0
"""Extend of a lightning attention layer, from rotated queries to its output, for captured graphs: its forms' contract.

    Tables                                 static buffers of a step, filled before each replay without a sync
    extend(q, k, v, ...)                   one layer: output, state, checkpoint
    can_keep_checkpoints()                 tell whether `extend` writes states from inside an extend
    refusal(shape, ...)                    the reason a layer is not supported, asked once

`seg_la.py` runs SGLang's own kernels with the launch of the largest batch; `triton.py` does it in launches of ours.

For `extend`:

- Tables, pools, padding and checkpoints are as `gdn_extend` says: sequences are back to back from row 0, rows without a
  token are zeros, and a state is read only if there is a prefix. `seg_la` writes no checkpoint before the first token.
    in    q, k, v       [rows, heads, head] of one dtype, any row stride, heads contiguous
          decay         [heads] fp32, above 0, any shape; scale: of the output
    pool  state         [slots, heads, head, head] f32|bf16: of a key, then of a value
    out   the answer    [rows, heads * head], of the inputs' dtype
- Of a token, of a head:
    state = exp(-decay) state + k^T v        output = scale q state
"""

from __future__ import annotations

import dataclasses
from typing import Any

# of heads, which SGLang's kernel for decode takes
SIZES = (128,)
KEPT = ("torch.float32", "torch.bfloat16")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Number and size of the heads of a layer on one GPU."""

    heads: int
    head: int


def refusal(shape: Shape, q: Any, k: Any, v: Any, state: Any) -> str | None:
    """Return the reason a layer with these inputs, on this pool, is not supported, or None."""
    inner = shape.heads * shape.head
    wrong = {
        f"heads of {shape.head}": shape.head in SIZES,
        # a row is summed by as many threads as a power of two
        f"{shape.heads} heads": inner & (inner - 1) == 0,
        f"{k.shape[1]} heads of keys for {shape.heads} of queries": k.shape == q.shape == v.shape,
        f"queries in {q.dtype}, keys in {k.dtype} and values in {v.dtype}": q.dtype == k.dtype == v.dtype,
        "projections whose heads are not contiguous": all(each.stride()[1:] == (shape.head, 1) for each in (q, k, v)),
        f"states in {state.dtype}": str(state.dtype) in KEPT,
        f"states of {tuple(state.shape[1:])}": state.shape[1:] == (shape.heads, shape.head, shape.head),
        "strided state pools": state.is_contiguous(),
    }
    found = [what for what, is_right in wrong.items() if not is_right]
    return f"no kernel for {found[0]}" if found else None
