# SPDX-License-Identifier: Apache-2.0
"""Models that no prefill graph may be captured of, whose runner votes for no replay, and batches that run eagerly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.runners import (
    MAY_REPLAY,
    MAY_REPLAY_BY_RANK,
    RESOLVE,
    makes_breakable_graphs,
    makes_full_graphs,
)
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import How, PatchPoint, flag_of
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.source.tree import Source, absent

logger = logging.getLogger("sglang_bcg_fixes")

Capture = Callable[[Callable[..., None], Any], None]
Vote = Callable[..., bool]


def refusing(fix_id: str, reason: Callable[[Any], str]) -> tuple[Capture, Vote]:
    """Build what stands round a capture, and round the question if a batch may be replayed.

    `reason` looks at a runner of breakable graphs and says why its model is refused; an empty one captures it.
    """
    # attribute on the runner that caches the refusal
    refused_by = f"bcg_fixes_refused_by_{fix_id}"

    def is_refused(runner: Any) -> bool:
        """Decide once for each runner, which is asked before each prefill, and log the reason of a refusal."""
        if refused_by not in vars(runner):
            why = reason(runner) if makes_breakable_graphs(runner) else ""
            setattr(runner, refused_by, bool(why))
            if why:
                warn(fix_id, type(runner.model_runner.model), why)
        refused: bool = getattr(runner, refused_by)
        return refused

    def unless_refused(original: Callable[..., None], self: Any) -> None:
        if not is_refused(self):
            original(self)

    def never_if_refused(original: Callable[..., bool], self: Any, *args: Any, **kwargs: Any) -> bool:
        return not is_refused(self) and original(self, *args, **kwargs)

    return unless_refused, never_if_refused


def refusing_in_full_graphs(is_wrong: Callable[[Any, int, int], bool]) -> tuple[PatchPoint, PatchPoint]:
    """Patch both questions if a batch may be replayed, for runners of graphs without breaks.

    `is_wrong` is asked about a runner, the longest cached prefix of a batch, and its longest sequence. A data parallel
    rank votes before the length of each is known: it takes all new tokens to be one request's.
    """

    def by_rank(
        original: Callable[..., bool], self: Any, *, prefix_lens: Any, num_tokens: int | None, **rest: Any
    ) -> bool:
        can_replay = original(self, prefix_lens=prefix_lens, num_tokens=num_tokens, **rest)
        # a vote does not know it; where a batch is there, the other question has the last word
        if not can_replay or rest.get("capture_hidden_mode") is not None or not makes_full_graphs(self):
            return can_replay
        prefix = max(prefix_lens or (0,))
        return not is_wrong(self, prefix, prefix + (num_tokens or 0))

    def by_batch(original: Callable[..., bool], self: Any, forward_batch: Any) -> bool:
        can_replay = original(self, forward_batch)
        # a group has voted: a rank of it must not decide anew
        if not can_replay or not makes_full_graphs(self) or forward_batch.global_num_tokens_cpu is not None:
            return can_replay
        prefix = max(forward_batch.extend_prefix_lens_cpu or (0,))
        return not is_wrong(self, prefix, int(forward_batch.seq_lens_cpu.max()))

    return (
        PatchPoint((MAY_REPLAY[1],), How.AROUND, by_batch),
        PatchPoint((MAY_REPLAY_BY_RANK,), How.AROUND, by_rank, needed=has_a_vote),
    )


def none_without_breaks(source: Source) -> Finding | None:
    """The finding of a probe about graphs without breaks where a release has none."""
    resolve = source.find(RESOLVE)
    if resolve is None or "FullCudaGraphBackend" not in resolve.calls:
        return absent("every prefill graph of this release has breaks", *([resolve] if resolve else []))
    return None


def questions(source: Source) -> tuple[Definition, ...]:
    """Both questions that `refusing_in_full_graphs` patches, where they are."""
    # without a vote no group replays such a graph
    vote = source.find(MAY_REPLAY_BY_RANK)
    return (source.need(MAY_REPLAY[1]), *([vote] if vote else []))


def has_a_vote(source: Source) -> bool:
    """False before 0.5.17: no rank of a group replays a graph without breaks there."""
    return source.find(MAY_REPLAY_BY_RANK) is not None


def warn(fix_id: str, model: type, why: str) -> None:
    logger.warning(
        "bcg-fixes %s: no prefill graphs for %s.%s, prefill runs eagerly: %s. The answers are right; %s ends this "
        "warning. If you know better, %s=off captures it",
        fix_id,
        model.__module__,
        model.__qualname__,
        why,
        " or ".join(way.flags for way in PREFILL_GRAPHS_OFF),
        flag_of(fix_id),
    )
