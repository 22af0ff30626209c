"""Set-up that Mamba2 mixers need without a GPU or a scheduler, all of it SGLang's own code."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

# the kernels moved in 0.5.16 and later
CONVOLUTIONS = (
    "sglang.kernels.ops.mamba.causal_conv1d_triton",
    "sglang.srt.layers.attention.mamba.causal_conv1d_triton",
)
STATE_UPDATES = ("sglang.kernels.ops.mamba.triton_ops", "sglang.srt.layers.attention.mamba.ops")


def install(server_args: Any) -> None:
    """Call before a model runs. Calling it again does nothing new."""
    from sglang.srt.layers.attention.mamba import mamba

    # bound for CUDA, NPU and XPU only; XPU uses the same functions
    kernels = first_of(CONVOLUTIONS)
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        for spelling in (name, f"{name}_triton"):
            if not hasattr(mamba, spelling):
                setattr(mamba, spelling, getattr(kernels, name))
    # as the scheduler does, and SGLang's benchmark from 0.5.21
    first_of(STATE_UPDATES).initialize_mamba_selective_state_update_backend(server_args)


def first_of(names: tuple[str, ...]) -> ModuleType:
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    return importlib.import_module(names[-1])
