# SPDX-License-Identifier: Apache-2.0
"""The short convolution in fp32, sequence by sequence: slow, and simple enough to be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tests.kernels.linear_reference import summed


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of one extend step of a layer, sequences back to back.

    inputs [tokens, channels], conv_weights [channels, width], bias [channels] or None; each sequence's earlier window
    [channels, width - 1].
    """

    lengths: Sequence[int]
    inputs: Any
    conv_weights: Any
    conv: Any
    bias: Any = None


def convolved(inputs: Inputs, kind: Any = None) -> tuple[Any, Any]:
    """Return the output and the windows, in fp32, or in the dtype `kind`."""
    import torch

    kind = kind or torch.float32
    bias = None if inputs.bias is None else inputs.bias.to(kind)
    return summed(inputs.inputs.to(kind), inputs.lengths, inputs.conv_weights.to(kind), bias, inputs.conv.to(kind))
