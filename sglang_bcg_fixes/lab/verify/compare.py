# SPDX-License-Identifier: Apache-2.0
"""Judge replayed graphs: pure functions from servers' answers and counters to a verdict on each arm."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from sglang_bcg_fixes.lab.verify.cases import Call, Case, Standard
from sglang_bcg_fixes.lab.verify.instruments import INSIDE
from sglang_bcg_fixes.lab.verify.servers import Outcome

Answer = dict[str, Any]

EQUAL, TOKENS_EQUAL, DIFFERS, BROKEN, MISSING = "equal", "tokens equal", "differs", "broken", "missing"
GREEN, RED, INCONCLUSIVE, FOR_INFORMATION = "green", "red", "inconclusive", "for information"


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt's outcome; `difference` says where it first differs, and by how much."""

    part: str
    length: int
    outcome: str
    difference: str = ""


@dataclasses.dataclass(frozen=True)
class Judged:
    """One server's verdict; `why` is printable, and empty only where nothing is wrong."""

    state: str
    why: str
    requests: tuple[Request, ...]

    @property
    def equal(self) -> int:
        return sum(request.outcome == EQUAL for request in self.requests)


def judge(case: Case, calls: Sequence[Call], arm: Outcome, references: Sequence[Outcome]) -> Judged:
    """Judge a server under test against the reference, or against itself where the case needs none."""
    requests = compare(case, calls, arm, references[0] if references else None)
    wrong = [request for request in requests if request.outcome != EQUAL]
    if not arm.finished:
        return Judged(RED, arm.ending, requests)
    silent = proves_nothing(case, arm)
    if silent:
        return Judged(RED, f"proves nothing: {silent}", requests)
    doubt = doubt_about(case, calls, references)
    if case.standard.needs_reference and doubt:
        return Judged(INCONCLUSIVE, doubt, requests)
    if wrong:
        return Judged(RED, f"{wrong[0].part}, {wrong[0].length} tokens: {wrong[0].difference}", requests)
    return Judged(GREEN, "", requests)


def is_only_different(case: Case, verdict: Judged, arm: Outcome) -> bool:
    """Tell whether every prompt was answered, with numbers, and some answers differ from the reference."""
    if proves_nothing(case, arm):
        return False
    outcomes = {request.outcome for request in verdict.requests}
    return verdict.state == RED and outcomes != {EQUAL} and outcomes <= {EQUAL, TOKENS_EQUAL, DIFFERS}


def is_explained_by_padding(case: Case, verdict: Judged, arm: Outcome, padded: Sequence[Outcome]) -> bool:
    """Tell whether the same code gives the same answers without a graph, on the batch with other padding.

    If so, the replay did just what it was captured from, and padded rows did not reach real ones; the remaining
    difference is that products of another size round differently.
    """
    return is_only_different(case, verdict, arm) and any(
        each.finished and not proves_nothing(case, each) and each.answers == arm.answers for each in padded
    )


def with_selfcheck(verdict: Judged, found: dict[str, Any]) -> Judged:
    """Add the result of the server's own check to the verdict on its answers."""
    said = f"self-check: {found['verdict']}: {found['reason']}"
    return dataclasses.replace(verdict, why="; ".join(part for part in (said, verdict.why) if part))


def proves_nothing(case: Case, arm: Outcome) -> str:
    """Explain why this server's answers say nothing about replay, or return an empty string."""
    if case.phase is None:
        return ""
    replayed = [line for line in arm.passes if line[0] == case.phase and line[1] == "replayed"]
    if not replayed:
        captured = any(line[1] == "captured" for line in arm.passes)
        reason = "" if captured or case.phase != "prefill" else ", and nothing was captured"
        return f"no {case.phase} pass was replayed{reason}"
    if max(line[3] for line in replayed) < case.requests:
        return f"no {case.phase} pass of {case.requests} or more requests was replayed"
    return ""


def replays_inside(arm: Outcome) -> int:
    """Count the prefills that were replayed with attention inside the graph."""
    return sum(line[:2] == [INSIDE, "replayed"] for line in arm.passes)


def never_replayed(calls: Sequence[Call], arm: Outcome, buckets: Sequence[int]) -> list[int]:
    """The buckets that a prompt fills exactly, and that no prefill was replayed in."""
    asked = {len(prompt) for call in calls for prompt in call.prompts if len(call.prompts) == 1 and call.again is None}
    replayed = {line[4] for line in arm.passes if line[:2] == ["prefill", "replayed"]}
    return sorted(asked.intersection(buckets) - replayed)


def doubt_about(case: Case, calls: Sequence[Call], references: Sequence[Outcome]) -> str:
    """Explain why the references are unreliable, or return an empty string."""
    for reference in references:
        if not reference.finished:
            return f"the reference: {reference.ending}"
        replays = sum(line[0] == case.phase and line[1] == "replayed" for line in reference.passes)
        if case.standard is Standard.BREAKS:
            if not replays or replays_inside(reference):
                return f"the reference replayed {replays} times, {replays_inside(reference)} with attention inside"
            continue
        if replays:
            return f"the reference replayed {replays} times"
        if not any(line[0] == case.phase and line[1] == "refused" for line in reference.passes):
            return "the reference refused nothing"
    for other in references[1:]:
        wrong = [request for request in compare(case, calls, other, references[0]) if request.outcome != EQUAL]
        if wrong:
            first = wrong[0]
            return (
                f"two references differ in {len(wrong)} requests, first: {first.part}, {first.length} tokens: "
                f"{first.difference}"
            )
    return ""


def compare(case: Case, calls: Sequence[Call], arm: Outcome, reference: Outcome | None) -> tuple[Request, ...]:
    """Compare every prompt by the case's standard and, where it is repeated, with its own first answer."""
    found = []
    for number, call in enumerate(calls):
        for index, prompt in enumerate(call.prompts):
            ours = answer(arm, number, index)
            differences = [] if ours else [(MISSING, "no answer")]
            if ours and has_nan(ours):
                differences.append((BROKEN, "a logprob is not a number"))
            if ours and len(ours["tokens"]) != call.new_tokens:
                differences.append((BROKEN, f"{len(ours['tokens'])} tokens instead of {call.new_tokens}"))
            if ours and case.logprobs and len(ours["logprobs"]) < len(ours["tokens"]):
                differences.append((BROKEN, f"{len(ours['logprobs'])} logprobs of {len(ours['tokens'])} tokens"))
            if ours and case.resumes and call.again is not None and not ours["cached"]:
                differences.append((BROKEN, "nothing of it was in the cache"))
            if ours and reference and case.standard.needs_reference:
                differences.append(difference(case.standard, ours, answer(reference, number, index)))
            if ours and call.again is not None:
                what, where = difference(Standard.REPEATED, ours, answer(arm, call.again, index))
                differences.append((what, f"asked again, {where}" if where else ""))
            worst = next((item for item in differences if item[0] != EQUAL), (EQUAL, ""))
            found.append(Request(call.part, len(prompt), *worst))
    return tuple(found)


def answer(outcome: Outcome, call: int, index: int) -> Answer | None:
    answers = outcome.answers
    return answers[call][index] if call < len(answers) and index < len(answers[call]) else None


def difference(standard: Standard, ours: Answer, theirs: Answer | None) -> tuple[str, str]:
    """Outcome of one comparison, and where two answers first differ."""
    if theirs is None:
        return MISSING, "nothing to compare with"
    for position, (one, other) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=False)):
        if one != other:
            return DIFFERS, f"token {position} is {one}, not {other}{gap_at(ours, theirs, position)}"
    if len(ours["tokens"]) != len(theirs["tokens"]):
        return DIFFERS, f"{len(ours['tokens'])} tokens, not {len(theirs['tokens'])}"
    if standard is Standard.TOKENS:
        return EQUAL, ""
    if standard is Standard.ACCEPTED:
        one, other = ours["verifications"], theirs["verifications"]
        if one is None or other is None:
            return BROKEN, "the server does not say how often it verified drafts"
        if one != other:
            length = len(ours["tokens"])
            return DIFFERS, f"{one} verifications for {length} tokens, not {other}"
        return EQUAL, ""
    for name in ("logprobs", "top"):
        for position, (one, other) in enumerate(zip(ours[name], theirs[name], strict=False)):
            if one != other:
                return TOKENS_EQUAL, f"{name} of token {position} differ{gap_at(ours, theirs, position)}"
        if len(ours[name]) != len(theirs[name]):
            return TOKENS_EQUAL, f"{len(ours[name])} {name}, not {len(theirs[name])}"
    return EQUAL, ""


def gap_at(ours: Answer, theirs: Answer, position: int) -> str:
    pair = [each["logprobs"][position] for each in (ours, theirs) if position < len(each["logprobs"])]
    return f" (logprob off by {abs(pair[0] - pair[1]):.3g})" if len(pair) == 2 else ""


def has_nan(found: Answer) -> bool:
    return any(value is None or math.isnan(value) for value in found["logprobs"])


def counts(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Count, per phase, replays by bucket, refusals by reason, and admitted passes that still ran eagerly."""
    found: dict[str, dict[str, Any]] = {}
    for phase, what, _, requests, detail in outcome.passes:
        kind = found.setdefault(phase, {"captured": 0, "replayed": 0, "admitted, not replayed": 0, "refused": 0})
        kind[what] += 1
        if what == "replayed":
            kind.setdefault("by bucket", collections.Counter())[str(detail)] += 1
            kind.setdefault("by requests", collections.Counter())[str(requests)] += 1
        elif what == "refused":
            kind.setdefault("reasons", collections.Counter())[detail] += 1
    return found


def fallbacks(case: Case, outcome: Outcome) -> tuple[int, str]:
    """Count passes of the case's phase that were not replayed, by reason."""
    kind = counts(outcome).get(case.phase or "", {})
    reasons = dict(kind.get("reasons", {}))
    if kind.get("admitted, not replayed"):
        reasons["admitted, not replayed"] = kind["admitted, not replayed"]
    return sum(reasons.values()), ", ".join(f"{reason} {count}" for reason, count in reasons.items())
