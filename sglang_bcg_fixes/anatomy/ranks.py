# SPDX-License-Identifier: Apache-2.0
"""Ranks that work together on each layer, and what one of them tells the others."""

from __future__ import annotations


def tensor_parallel_ranks() -> int:
    from sglang.srt.distributed import parallel_state

    return int(parallel_state.get_tp_group().world_size)


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
