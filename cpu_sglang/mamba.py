# SPDX-License-Identifier: Apache-2.0
"""Set-up that Mamba2 mixers need without a GPU or a scheduler, all of it SGLang's own code."""

from __future__ import annotations

import importlib
import importlib.util
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


def allow_extra_buffer() -> dict[str, str]:
    """Let a CPU keep states for the prefix cache in an extra buffer; return the server arguments that ask for it."""
    # refused on a CPU, whose kernels SGLang knows of leave none
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    server_args.is_musa = lambda: True
    # later releases ask there
    package, hook = "sglang.srt.arg_groups", "sglang.srt.arg_groups.mamba_hook"
    if importlib.util.find_spec(package) and importlib.util.find_spec(hook):
        asking: Any = importlib.import_module(hook)
        machine = LikeMusa(asking.get_platform())
        asking.get_platform = lambda: machine
    # before 0.5.13, and since
    return dict.fromkeys(("mamba_scheduler_strategy", "mamba_radix_cache_strategy"), "extra_buffer")


class LikeMusa:
    """The machine as it is, but for this."""

    is_musa = True

    def __init__(self, machine: Any) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)


def first_of(names: tuple[str, ...]) -> ModuleType:
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    return importlib.import_module(names[-1])
