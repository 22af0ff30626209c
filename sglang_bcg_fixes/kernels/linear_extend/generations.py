# SPDX-License-Identifier: Apache-2.0
"""The GPUs that a Triton implementation is made for, by the major number of their compute capability."""

from __future__ import annotations

from typing import Any

import torch

from sglang_bcg_fixes.model import Accepted, Rejected

HOPPER, BLACKWELL = 9, 10


def is_one_of(device: int, *generations: int) -> Accepted | Rejected:
    """Tell whether the GPU is of one of these generations, whose shared memory holds the tiles."""
    if torch.version.hip is not None:
        return Rejected("it is made for NVIDIA's GPUs")
    major, minor = torch.cuda.get_device_capability(device)
    if major in generations:
        return Accepted()
    names = " and ".join(f"sm_{generation}0" for generation in generations)
    return Rejected(f"it is made for {names}, and this is an sm_{major}{minor}")


def is_newer_than_hopper(tensor: Any) -> bool:
    """Tell whether a tensor is on such a GPU, for which Triton compiles products in another way."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] > HOPPER
