# SPDX-License-Identifier: Apache-2.0
"""Lightning attention in fp32, token by token: slow, and simple enough to be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tests.kernels.linear_reference import side_by_side


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of one extend step of a layer, sequences back to back.

    q, k, v [tokens, heads, head]; decay [heads]; the state [heads, head, head] of each sequence.
    """

    lengths: Sequence[int]
    q: Any
    k: Any
    v: Any
    decay: Any
    scale: float
    state: Any


def recurrent(inputs: Inputs, kind: Any = None) -> tuple[Any, Any]:
    """Return the outputs of all tokens and the states after each sequence, in fp32 or in the dtype `kind`."""
    import torch

    kind = kind or torch.float32
    lengths = torch.tensor(inputs.lengths, device=inputs.state.device)
    q, k, v = (side_by_side(each.to(kind), inputs.lengths) for each in (inputs.q, inputs.k, inputs.v))
    kept = (-inputs.decay.to(kind)).exp()[:, None, None]
    state, output = inputs.state.to(kind).clone(), torch.zeros_like(v)
    for number in range(max(inputs.lengths)):
        after = state * kept + k[:, number, :, :, None] * v[:, number, :, None]
        state = torch.where((lengths > number)[:, None, None, None], after, state)
        output[:, number] = inputs.scale * (q[:, number, :, :, None] * state).sum(-2)
    real = torch.cat([row[:length] for row, length in zip(output, inputs.lengths, strict=True)])
    return real, state
