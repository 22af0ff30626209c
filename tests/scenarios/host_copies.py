# SPDX-License-Identifier: Apache-2.0
"""The steps of SGLang's own overlapped scheduler that its copies to and from the host run beside.

A tiny model's steps and HiCache's host pool. Steps run at once on a CPU, and copies are none: what is told is the
order in which the streams would have them on a GPU.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import torch

from cpu_sglang import graphs, one_batch, scheduler
from sglang_bcg_fixes.anatomy.read_done import EVENTS
from tests.releases import kinds_of_request
from tests.scenarios import telling, trees

PAGE = 4
SERVER = {
    "disable_overlap_schedule": False,
    "disable_radix_cache": False,
    "page_size": PAGE,
    # the prefix that is loaded fits beside the other request's pages, without its last one
    "max_total_tokens": PAGE * 16,
    "context_length": 256,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
}
# tokens of prompts and of their answers: the first ends with a page, the other begins one
FIRST, OTHER, ANSWERED = 10 * PAGE, 5 * PAGE + 1, PAGE
AT_MOST = ANSWERED + 2


class Steps:
    """The steps launched so far with the slots that they write, and how many are known to have ended."""

    def __init__(self, own: Any) -> None:
        self.stream = own.forward_stream
        self.slots: list[set[int]] = []
        self.processed = 0
        self.scheduling = CopyStream(self)
        runner, forward = own.tp_worker.model_runner, own.model_worker.forward_batch_generation

        def launch(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.slots.append(set(batch.out_cache_loc.tolist()))
            answered = forward(batch, *args, **kwargs)
            # as a captured decode, which tells before the replay that the tables may be written
            for name in EVENTS:
                if hasattr(runner, name):
                    setattr(runner, name, graphs.Event())
            return answered

        process = own.process_batch_result

        def end(batch: Any, *args: Any, **kwargs: Any) -> Any:
            # it begins with waiting for that step
            self.processed += 1
            for asked in batch.reqs:
                if len(asked.output_ids) == ANSWERED - 1:
                    # as by a token that ends it: nobody knew when the next step was launched
                    asked.sampling_params.max_new_tokens = ANSWERED
            return process(batch, *args, **kwargs)

        own.model_worker.forward_batch_generation, own.process_batch_result = launch, end

    def beside(self, stream: CopyStream) -> list[set[int]]:
        return self.slots[max(self.processed, stream.ended, self.scheduling.ended) :]


class CopyStream(graphs.Stream):
    """A stream that may wait for the steps launched so far."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps, self.ended = steps, 0

    def wait_stream(self, stream: Any) -> None:
        if stream is self.steps.stream:
            self.ended = len(self.steps.slots)


# for each way: the stream of a controller or of its engine, what of the engine submits, and what a pool copies with
WAYS = {
    "to the host": (
        ("write_stream", "device_to_host_stream"),
        "submit_device_to_host",
        ("backup_from_device_all_layer", "backup_from_device_all_layer_physical"),
    ),
    "from the host": (
        ("load_stream", "host_to_device_stream"),
        "submit_host_to_device",
        ("load_to_device_per_layer", "load_to_device_per_layer_physical"),
    ),
}


def note_copies(controller: Any, steps: Steps) -> dict[str, list[int]]:
    """Fill in, for each way, the most steps beside a copy, and the most of its slots that they write."""
    found: dict[str, list[int]] = {}
    engine = getattr(controller, "l2_transfer_engine", None)
    for way, (streams, submits, copies) in WAYS.items():
        stream = CopyStream(steps)

        def note(
            _: Any, host: Any, device: Any, *args: Any, way: str = way, stream: Any = stream, **kwargs: Any
        ) -> None:
            beside = steps.beside(stream)
            written = set(device.tolist()) & set().union(*beside)
            found[way] = list(map(max, found.get(way, [0, 0]), [len(beside), len(written)]))

        def note_of(pool: Any, note: Any = note, copies: tuple[str, ...] = copies) -> None:
            vars(pool).update(dict.fromkeys(copies, note))

        if engine is None:
            setattr(controller, streams[0], stream)
            note_of(controller.mem_pool_host)
        else:
            setattr(engine, streams[1], stream)
            called_with(engine, submits, note_of)
    return found


def called_with(engine: Any, name: str, note_of: Callable[[Any], None]) -> None:
    submit = getattr(type(engine), name).__get__(engine)

    def noted(transfers: Any, *args: Any, **kwargs: Any) -> Any:
        for transfer in transfers:
            note_of(transfer.host_pool)
        return submit(transfers, *args, **kwargs)

    setattr(engine, name, noted)


def leave_the_device(served: scheduler.Scheduler) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree = served.scheduler.tree_cache
    tree.check_hicache_events()
    tree.evict(EvictParams(num_tokens=1 << 20))


def program(served: scheduler.Scheduler) -> dict[str, Any]:
    own = served.scheduler
    steps = Steps(own)
    # as on CUDA
    own._war_barrier_enabled, own.schedule_stream = True, steps.scheduling
    source = random.Random(0)
    first, other = ([source.randrange(3, 120) for _ in range(length)] for length in (FIRST, OTHER))

    def act() -> dict[str, Any]:
        served.forget()
        found = note_copies(own.tree_cache.cache_controller, steps)
        served.answer({"first": first}, AT_MOST)
        leave_the_device(served)
        again = {"again": [*first, other[0]]}
        assert served.answer({"other": other}, AT_MOST, later=again, after=ANSWERED)["again"].found == FIRST
        return found

    return telling.given_with_and_perhaps_without(act)


def register_no_memory() -> None:
    """Have the host's pool go without CUDA's registering of its memory."""
    registering = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    vars(torch.cuda)["cudart"] = lambda: registering


def main() -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    kinds_of_request.forget_pinned_memory()
    register_no_memory()
    given = trees.given_by_each(program, "llama", **SERVER)
    telling.result(trees.the_same(given))


if __name__ == "__main__":
    main()
