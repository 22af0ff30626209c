# SPDX-License-Identifier: Apache-2.0
"""Measurements as lines of JSON. A row with wrong answers has no numbers, so none can be quoted."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.bench.timing import Spread

GREEN, RED = "green", "red"
HOT, COLD = "hot", "cold"
TOKENS_PER_SECOND = "tokens/s"


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement; `l2` is empty if the cache was left alone, `details` hold everything else known."""

    part: str
    measured: str
    unit: str
    arm: str
    shape: str
    tokens: int
    sequences: int
    verdict: str
    why: str = ""
    l2: str = ""
    rounds: int = 0
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def case(self) -> tuple[str, int, int]:
        return self.shape, self.tokens, self.sequences

    def with_times(self, spread: Spread) -> Row:
        return self if self.verdict != GREEN else dataclasses.replace(self, **dataclasses.asdict(spread))


def speed_up(base: Row | None, row: Row | None) -> float | None:
    """Factor over the base, or None where either is wrong or was not measured."""
    if base is None or row is None or base.verdict != GREEN or row.verdict != GREEN:
        return None
    if not base.median or not row.median:
        return None
    return row.median / base.median if row.unit == TOKENS_PER_SECOND else base.median / row.median


class File:
    """A header, then rows, each written as soon as it is known."""

    def __init__(self, path: pathlib.Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        path.write_text(json.dumps({"header": header}) + "\n")

    def add(self, found: Sequence[Row]) -> None:
        with self.path.open("a") as out:
            out.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in found)


def read(path: pathlib.Path) -> tuple[dict[str, Any], list[Row]]:
    first, *rest = path.read_text().splitlines()
    return json.loads(first)["header"], [Row(**json.loads(line)) for line in rest]


def cases(rows: Sequence[Row]) -> list[tuple[str, int, int]]:
    """Distinct (shape, tokens, sequences), in order of appearance."""
    return list(dict.fromkeys(row.case for row in rows))


def find(rows: Sequence[Row], arm: str, measured: str, case: tuple[str, int, int], l2: str = "") -> Row | None:
    for row in rows:
        if row.case == case and (row.arm, row.measured, row.l2) == (arm, measured, l2):
            return row
    return None


def number(value: float | None, form: str = ".0f") -> str:
    return "-" if value is None else format(value, form)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(line[index]) for line in (head, *lines)) for index in range(len(head))]
    for line in (head, *lines):
        yield "  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True))
