# SPDX-License-Identifier: Apache-2.0
"""The short convolution of linear layers, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def side_by_side(tensor: Any, lengths: Sequence[int]) -> Any:
    """Pad sequences that are back to back to [sequences, longest, ...]."""
    import torch

    return torch.nn.utils.rnn.pad_sequence(tensor.split(list(lengths)), batch_first=True)


def convolved(inputs: Any, lengths: Sequence[int], weights: Any, bias: Any, conv: Any) -> tuple[Any, Any]:
    """Return what `summed` does, with SiLU applied to the convolution."""
    from torch.nn import functional

    sums, windows = summed(inputs, lengths, weights, bias, conv)
    return functional.silu(sums), windows


def summed(inputs: Any, lengths: Sequence[int], weights: Any, bias: Any, conv: Any) -> tuple[Any, Any]:
    """Return the convolution of each token, and the windows after each sequence.

    All tensors have the dtype to compute in: inputs [tokens, channels], weights [channels, width], bias [channels] or
    None, conv [sequences, channels, width - 1].
    """
    import torch

    sums, windows = [], []
    for before, after in zip(conv, inputs.split(list(lengths)), strict=True):
        window = torch.cat([before, after.T], 1)
        # not torch's convolution, which may use TF32
        taps = torch.stack([window[:, tap : tap + len(after)] for tap in range(weights.shape[1])], -1)
        result = (taps * weights[:, None]).sum(-1)
        if bias is not None:
            result = result + bias[:, None]
        sums.append(result.T)
        windows.append(window[:, -before.shape[1] :])
    return torch.cat(sums), torch.stack(windows)
