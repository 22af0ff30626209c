# SPDX-License-Identifier: Apache-2.0
"""Ranks that work together on each layer, and what one of them tells the others."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any


def tensor_parallel_ranks() -> int:
    from sglang.srt.distributed import parallel_state

    return int(parallel_state.get_tp_group().world_size)


def attends_in_parallel(arguments: Any) -> bool:
    """Tell whether ranks attend to batches of their own; from 0.5.22 on a size says it, given or resolved."""
    return bool(arguments.enable_dp_attention) or is_several("attn_dp_size", arguments, *resolved_sizes())


def is_several(name: str, *sized: Any) -> bool:
    """Tell whether one of these has that size, and it is above one."""
    return any(int(getattr(each, name, 1) or 1) > 1 for each in sized)


def resolved_sizes() -> list[Any]:
    """Return what holds the sizes that later releases derive from options."""
    get_parallel = getattr(runtime_context(), "get_parallel", None)
    return [get_parallel()] if get_parallel else []


@functools.cache
def runtime_context() -> Any:
    """Import the module in which later releases keep resolved options; None before."""
    name = "sglang.srt.runtime_context"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def any_rank(mine: bool) -> bool:
    """Tell whether it is so in any of the ranks; each of them must ask."""
    import torch
    from sglang.srt.distributed import parallel_state

    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return mine
    answer = torch.tensor([int(mine)])
    torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(answer.item())
