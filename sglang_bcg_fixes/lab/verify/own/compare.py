# SPDX-License-Identifier: Apache-2.0
"""Compare the answers of an arm with those of the arm without replays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

EQUAL, EXPLAINED, DIFFERENT, MISSING, REFUSED, NOT_ASKED = (
    "equal",
    "explained",
    "different",
    "missing",
    "refused",
    "not asked",
)
STATES = (EQUAL, EXPLAINED, DIFFERENT, MISSING, REFUSED)
# of a logprob: one step of bfloat16 where a logit is 16 or more, by other kernels or in another batch
ROUNDING = 0.125
# what differs by more shows a defect, which excuses nothing
LARGEST_BOUND = 1.0
Answer = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Compared:
    name: str
    state: str
    difference: str = ""


def bound_of(stock: Mapping[str, Answer], again: Mapping[str, Answer], eager: Mapping[str, Answer]) -> float:
    """The largest difference of a logprob that rounding explains.

    Two stock servers round differently by chance of what they compute together. So does the server without replays
    where it answers a prompt alone, together with others, and behind its cached beginning.
    """
    pairs = [(stock[name], again[name]) for name in stock.keys() & again.keys()]
    first: dict[str, Answer] = {}
    pairs += [(first.setdefault(answer["asked"], answer), answer) for answer in eager.values()]
    noise = (gap for one, other in pairs if one["asked"] == other["asked"] for gap in gaps_of(one, other))
    return max(ROUNDING, min(max(noise, default=0.0), LARGEST_BOUND))


def gaps_of(one: Answer, other: Answer) -> list[float]:
    """Differences of logprobs up to the first other token, and of both candidates there."""
    if "error" in one or "error" in other:
        return []
    apart = first_apart(one["tokens"], other["tokens"])
    found = [gap_of(a, b) for a, b in zip(one["logprobs"][:apart], other["logprobs"][:apart], strict=False)]
    if apart < min(len(one["tokens"]), len(other["tokens"])):
        found += [gap_at(answer, apart, one["tokens"][apart], other["tokens"][apart]) for answer in (one, other)]
    return [gap for gap in found if not math.isnan(gap)]


def compare(mine: Mapping[str, Answer], reference: Mapping[str, Answer], bound: float) -> list[Compared]:
    return [
        one(name, mine[name], answer, bound) if name in mine else Compared(name, MISSING, "no answer")
        for name, answer in reference.items()
    ]


def one(name: str, mine: Answer, reference: Answer, bound: float) -> Compared:
    if mine["asked"] != reference["asked"]:
        # the turn before was answered otherwise, and that is counted there
        return Compared(name, NOT_ASKED)
    if "error" in mine and "error" in reference:
        return Compared(name, REFUSED, mine["error"])
    if "error" in mine or "error" in reference:
        return Compared(name, DIFFERENT, mine.get("error") or f"answered; without replays {reference['error']}")
    ours, theirs = mine["tokens"], reference["tokens"]
    if not ours and not theirs:
        return Compared(name, REFUSED, "an answer without a token")
    if (ours, mine["logprobs"]) == (theirs, reference["logprobs"]) and all(map(is_number, mine["logprobs"])):
        return Compared(name, EQUAL)
    apart = first_apart(ours, theirs)
    for place, (a, b) in enumerate(zip(mine["logprobs"][:apart], reference["logprobs"][:apart], strict=False)):
        # not a number is no small difference either
        if not gap_of(a, b) <= bound:
            return Compared(name, DIFFERENT, f"token {place}: logprob {shown(a)} instead of {shown(b)}")
    if apart == len(ours) == len(theirs):
        return Compared(name, EXPLAINED, "logprobs are rounded otherwise")
    if apart in (len(ours), len(theirs)):
        return Compared(name, DIFFERENT, f"{len(ours)} tokens instead of {len(theirs)}")
    what = f"token {apart}: {ours[apart]!r} instead of {theirs[apart]!r}"
    gaps = [gap_at(answer, apart, ours[apart], theirs[apart]) for answer in (mine, reference)]
    if all(gap <= bound for gap in gaps):
        return Compared(name, EXPLAINED, f"{what}: a tie")
    return Compared(name, DIFFERENT, what)


def first_apart(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def gap_at(answer: Answer, place: int, one: Any, other: Any) -> float:
    """The difference of two candidates' logprobs, not a number where one is not among the likeliest."""
    rows = answer["top"][place] if place < len(answer["top"]) else []
    found = {row[1]: row[0] for row in rows}
    return gap_of(found.get(one), found.get(other))


def is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def gap_of(one: float | None, other: float | None) -> float:
    return abs(one - other) if is_number(one) and is_number(other) else math.nan  # type: ignore[operator]


def shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def counted(compared: Sequence[Compared]) -> dict[str, int]:
    return {state: sum(each.state == state for each in compared) for state in STATES}
