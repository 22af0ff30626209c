# SPDX-License-Identifier: Apache-2.0
"""A small model on several ranks with data parallel attention, and each rank's batch."""

from __future__ import annotations

import gc
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from cpu_sglang import architectures, graphs, one_batch, prefill, ranks
from tests.releases import kinds_of_request

# of the prompts of each data parallel rank
LENGTHS = ([5], [6, 5])


def prepare() -> None:
    """Import the release and its plugins once, before processes are forked for the ranks."""
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    # it imports what fixes wait for
    one_batch._import_benchmark()
    gc.collect()
    gc.freeze()


def load(rank: ranks.Rank, architecture: str, **server_args: Any) -> one_batch.LoadedModel:
    """Load it with random weights; llama will not do, since it has no data parallel attention."""
    kinds_of_request.forget_pinned_memory()
    config = {**architectures.CONFIGURATIONS[architecture].config, "architectures": [architecture]}
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(config))
        loaded = rank.load(folder, **{"dp_size": len(LENGTHS), "enable_dp_attention": True} | server_args)
    one_batch.randomize(loaded.model_runner.model)
    return loaded


def of_each(number: int, serve: Callable[[ranks.Rank], Any], *seconds: int) -> Any:
    """Results of each rank, or why there are none."""
    try:
        return ranks.each(number, serve, *seconds)
    except ranks.NotAllAnswered as error:
        return str(error)


def judged(act: Callable[[], Any], expected: Any) -> tuple[bool, bool]:
    """Tell whether a graph is replayed for it, and whether it gives what is expected."""
    before = graphs.counters.replays
    right = bool((act() == expected).all())
    return graphs.counters.replays > before, right


def answer(loaded: one_batch.LoadedModel, rank: ranks.Rank, steps: int) -> Any:
    """Logits of this rank's batch; all ranks must take as many steps."""
    parts = loaded.model_runner.server_args.dp_size
    return one_batch.generate(loaded, prefill._prompts(LENGTHS[rank.number * parts // rank.count]), steps)[1]
