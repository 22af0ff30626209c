# SPDX-License-Identifier: Apache-2.0
"""Several ranks of one server on this machine: forked processes whose collectives are gloo's.

The groups, what ranks tell each other of a batch, and the calls of collectives are SGLang's. A collective goes on the
tape of a captured graph as a kernel does, so a replay in which another rank takes no part waits for it, as on GPUs.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import one_batch

# after the last one of them was to write where it waits
SECONDS_FOR_STACKS = 5


class NotAllAnswered(Exception):
    """A rank waits for another one or has crashed: the answer or the stack of each."""


@dataclass(frozen=True)
class Rank:
    number: int
    count: int
    port: int

    def load(self, model: str, **server_args: Any) -> one_batch.LoadedModel:
        """This rank's part of a model, with tensor parallelism over all ranks."""
        ranks = {"tp_size": self.count, "attention_backend": "fa3"}
        loaded = one_batch.load_rank(model, ranks | server_args, self.number, self.port)
        from sglang.srt.distributed import parallel_state

        for reference in parallel_state._groups.values():
            group = reference()
            if group is not None:
                # what cannot be made without NCCL, and is taken for one that is there while a graph is captured
                group.pynccl_comm = None
        prepare = loaded.benchmark.prepare_synthetic_inputs_for_latency_test

        def prepare_as_a_server(*arguments: Any) -> Any:
            requests = prepare(*arguments)
            for request in requests:
                # the benchmark numbers its requests, and 0.5.23 asks how their names begin
                request.rid = str(request.rid)
            return requests

        loaded.benchmark.prepare_synthetic_inputs_for_latency_test = prepare_as_a_server
        return loaded


def each(count: int, act: Callable[[Rank], Any], seconds: float = 200) -> list[Any]:
    """Fork a process for each rank; return what each gave, or its exception as text.

    Ranks that take longer wait for each other: that raises NotAllAnswered with the stack of each.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        stacks = [pathlib.Path(folder, str(number)) for number in range(count)]
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        processes = [
            context.Process(target=be, args=(Rank(number, count, port), act, pipes[number][1], stacks[number], seconds))
            for number in range(count)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        until = time.monotonic() + seconds + SECONDS_FOR_STACKS
        found = [received(receiver, max(until - time.monotonic(), 0)) for receiver, _ in pipes]
        ended = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        if None in found:
            told = [
                f"rank {number}: {answer or f'{how(ended[number])} {stacks[number].read_text()}'}"
                for number, answer in enumerate(found)
            ]
            raise NotAllAnswered("\n".join([f"not every rank has answered within {seconds:.0f} s", *told]))
    return [answer for (answer,) in found]


def how(status: int | None) -> str:
    return "still running" if status is None else f"exit status {status}"


def received(receiver: Any, seconds: float) -> Any:
    """The answer of a rank, in a tuple; None where it ended without one."""
    try:
        return receiver.recv() if receiver.poll(seconds) else None
    except EOFError:
        return None


def be(rank: Rank, act: Callable[[Rank], Any], sender: Any, stacks: pathlib.Path, seconds: float) -> None:
    with stacks.open("w") as file:
        # a rank that ended here would end those that wait for it, before they have written their own
        faulthandler.dump_traceback_later(seconds, file=file)
        # SGLang wants a NUMA node for each rank, or to be told
        mine = itertools.cycle(sorted(os.sched_getaffinity(0)))
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(next(mine)) for _ in range(rank.count))
        try:
            answer = act(rank)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        sender.send((answer,))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
