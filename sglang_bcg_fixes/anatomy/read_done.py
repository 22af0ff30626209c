# SPDX-License-Identifier: Apache-2.0
"""The event that tells the scheduler that a step has read its tables, and backends that read them in the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

BARRIER = "sglang.srt.managers.scheduler:Scheduler._apply_war_barrier"
# how a runner records its event, and how it says where the reads of its backend end
RECORDED, DECLARED = "read_done.record()", "SharedReadEnds.POST_REPLAY"
IN_GRAPH = "init_forward_metadata_in_graph"
# a model runner's attribute, the older name first
EVENTS = ("war_fastpath_read_done_event", "shared_read_done_event")
# backends inside another
PARTS = (
    *("primary", "sparse", "dense"),
    *("decode_backend", "prefill_backend"),
    *("full_attn_backend", "linear_attn_backend", "short_conv_backend"),
)


def record_again(model_runner: Any) -> None:
    """Let the scheduler wait for what this stream has been given by now, if it would wait for an event at all."""
    for name in EVENTS:
        event = getattr(model_runner, name, None)
        if event is not None:
            event.record()


def preparing_in_graph(backend: Any) -> Iterator[Any]:
    """Yield the backends that prepare metadata in a captured graph: it reads the tables when it is replayed."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    # in FlashInfer's backend some of these names are those of its kernels
    parts = [part for name in PARTS if isinstance(part := getattr(backend, name, None), AttentionBackend)]
    if parts:
        for part in parts:
            yield from preparing_in_graph(part)
    elif getattr(type(backend), IN_GRAPH) is not getattr(AttentionBackend, IN_GRAPH):
        yield backend
