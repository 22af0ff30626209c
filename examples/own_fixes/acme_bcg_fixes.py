# SPDX-License-Identifier: Apache-2.0
"""AcmeRouter keeps the number of tokens of the batch that was captured

Symptom: With prefill graphs, our model weighs experts wrongly in every batch of another size than the captured one.
Cause: AcmeRouter.scale counts tokens once and keeps the number, so a graph replays with that of its capture.
Change: Before each call the kept number is forgotten. Nothing happens where SGLang has no AcmeRouter.
Remove when: Our fork counts tokens in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_bcg_fixes.api import hookimpl
from sglang_bcg_fixes.model import Retired
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, fixed

MODULE = "sglang.srt.models.acme"
SCALE = f"{MODULE}:AcmeRouter.scale"


def probe(source: Source) -> Finding:
    if not source.has_module(MODULE):
        return absent("this SGLang is not our fork")
    scale = source.need(SCALE)
    if scale.mentions("self.tokens"):
        return affected("scale keeps the number of tokens", scale)
    return fixed("scale counts tokens in each call", scale)


def count_anew(original: Callable[..., Any], self: Any, weights: Sequence[float]) -> Any:
    vars(self).pop("tokens", None)
    return original(self, weights)


FIX = Fix(
    id="acme_router_counts_once",
    doc=__doc__,
    probe=probe,
    # the forms that somebody has read; doctor shows that of yours in brackets
    known={"bdd4708d4457": "our fork, up to now"},
    patches=(PatchPoint((SCALE,), How.AROUND, count_anew),),
)


@hookimpl
def bcg_fixes() -> list[Fix]:
    return [FIX]


@hookimpl
def bcg_retired_flags() -> list[Retired]:
    # our version 0.9 had it under another name; from our 1.2 on a server with the old one does not start
    old = "SGLANG_BCG_FIX_ACME_ROUTER_KEEPS_TOKENS"
    return [Retired(old, since="1.0", refused_from="1.2", why="it says what the fix does now", now=FIX.flag)]
