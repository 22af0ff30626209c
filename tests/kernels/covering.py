# SPDX-License-Identifier: Apache-2.0
"""Some rows of a table of options, in which any two values meet that meet in the table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tests import processes

Options = Mapping[str, Hashable]
Row = TypeVar("Row", bound=Options)


def rows(table: Sequence[Row], alone: Collection[str] = ()) -> list[Row]:
    """Choose rows; a value of an option that is named in `alone` need not meet the others' values, only be there."""
    chosen: list[Row] = []
    missing = {meeting for row in table for meeting in meetings(row, alone)}
    while missing:
        chosen.append(max(table, key=lambda row: len(missing.intersection(meetings(row, alone)))))
        missing.difference_update(meetings(chosen[-1], alone))
    return chosen


def meetings(row: Options, alone: Collection[str] = ()) -> Iterator[Hashable]:
    yield from (item for item in row.items() if item[0] in alone)
    yield from itertools.combinations(((name, value) for name, value in row.items() if name not in alone), 2)


def table(**options: Sequence[Hashable]) -> list[dict[str, Any]]:
    """List every combination of values."""
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def compiled(script: str, everything: bool) -> list[dict[str, Any]]:
    """Run a script that compiles rows of its table, and return what it has found of each kernel."""
    arguments = ("--everything",) if everything else ()
    done = processes.python("-m", script, *arguments, environment={"TRITON_INTERPRET": "0"}, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
