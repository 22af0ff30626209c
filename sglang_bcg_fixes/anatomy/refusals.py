# SPDX-License-Identifier: Apache-2.0
"""Models that no prefill graph may be captured of: their runner captures nothing and votes for no replay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.runners import makes_breakable_graphs
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import flag_of

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
