# SPDX-License-Identifier: Apache-2.0
"""The answer that a prefill runner makes after a replay, from the one that the model has made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL, PREFILL
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.model import How, PatchPoint
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.source.tree import Source

TRIM = f"{PREFILL}._trim_logits_output"
REPLAYS = (f"{OLD_PREFILL}.replay", f"{PREFILL}.execute")


def answer_maker(source: Source) -> Definition:
    return source.need(TRIM, *REPLAYS)


def trims(source: Source) -> bool:
    """True where a method of its own makes the answer; before, the replay does."""
    return source.find(TRIM) is not None


def runs_the_model(source: Source) -> bool:
    """True where Python of the model runs at a replay; before, its graphs hold the whole model."""
    return trims(source) or "self.model_runner.model.forward" in answer_maker(source).calls


def points(when_trimming: Callable[..., Any], when_replaying: Callable[..., Any]) -> tuple[PatchPoint, PatchPoint]:
    """Patch what makes the answer, in each release the one of the two that does."""
    return (
        PatchPoint((TRIM,), How.AROUND, when_trimming, needed=trims),
        PatchPoint(REPLAYS, How.AROUND, when_replaying, needed=lambda source: not trims(source)),
    )


@contextlib.contextmanager
def passed_through(runner: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Have the runner take what `change` makes of the model's answer, while the context lasts."""
    # a compiler would see another function in place of forward, and recompile the model
    if runner.layer_model is None:
        yield
        return
    model = runner.model_runner.model
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        return change(forward(*args, **kwargs))

    with replaced(model, "forward", watched):
        yield
