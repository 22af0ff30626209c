# SPDX-License-Identifier: Apache-2.0
"""Ranks that work together on each layer, and what one of them tells the others."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def tensor_parallel_ranks() -> int:
    from sglang.srt.distributed import parallel_state

    return int(parallel_state.get_tp_group().world_size)


def attends_in_parallel(arguments: Any) -> bool:
    """Tell whether ranks attend to batches of their own; from 0.5.22 on a size says it, given or resolved."""
    name = "sglang.srt.runtime_context"
    context = importlib.import_module(name) if importlib.util.find_spec(name) else None
    get_parallel = getattr(context, "get_parallel", None)
    sized = (arguments, get_parallel()) if get_parallel else (arguments,)
    return bool(arguments.enable_dp_attention) or any(int(getattr(each, "attn_dp_size", 1) or 1) > 1 for each in sized)


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
