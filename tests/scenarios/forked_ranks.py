# SPDX-License-Identifier: Apache-2.0
"""Ranks without SGLang: a sum over all of them in a captured graph, and ranks that do not do the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from cpu_sglang import graphs, ranks
from tests.scenarios import named


def joined(rank: ranks.Rank) -> graphs.CUDAGraph:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{rank.port}", rank=rank.number, world_size=rank.count
    )
    return graphs.CUDAGraph()


def sums() -> Any:
    """Sums that a replay gives, of numbers that came after the capture: all of them, and in parts that are gathered."""
    graphs.install()

    def act(rank: ranks.Rank) -> Any:
        graph, number = joined(rank), torch.tensor([1.0])
        with graphs.graph(graph):
            total, parts = number * 1, torch.ones(rank.count) * number
            torch.distributed.all_reduce(total)
            # this rank's part of the output is a part of the input, as in SGLang
            own = parts.tensor_split(rank.count)[rank.number]
            torch.distributed.reduce_scatter_tensor(own, parts)
            gathered = torch.empty(rank.count)
            torch.distributed.all_gather_into_tensor(gathered, own)
            result = total + 1
        number.fill_(10.0**rank.number)
        graph.replay()
        return [result.item(), *gathered.tolist()]

    return ranks.each(3, act)


def one_alone(seconds: str) -> Any:
    """The error where one rank replays and the other does not."""
    graphs.install()

    def act(rank: ranks.Rank) -> Any:
        graph, number = joined(rank), torch.tensor([1.0])
        with graphs.graph(graph):
            torch.distributed.all_reduce(number)
        if rank.number == 0:
            replay_alone(graph)
        torch.distributed.barrier()
        return "not reached"

    def replay_alone(graph: graphs.CUDAGraph) -> None:
        graph.replay()

    try:
        return ranks.each(2, act, float(seconds))
    except ranks.NotAllAnswered as error:
        return str(error)


def ended() -> Any:
    """The answers where one rank ends while the other waits for it."""

    def act(rank: ranks.Rank) -> Any:
        joined(rank)
        if rank.number == 1:
            raise ValueError("a defect")
        torch.distributed.barrier()

    return ranks.each(2, act)


if __name__ == "__main__":
    named.run(globals())
