# SPDX-License-Identifier: Apache-2.0
"""On which sources a GPU has run each kernel, from kernels/proven.json: by release, the file of results that shows it.

kernels/worth.json has what it took there of the time of SGLang's own code, the least and the most at all sizes.

As with a verdict, the source counts and not its version: one whose every definition that the kernel rests on is that of
such a release is proven too.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterable
from typing import Any

from sglang_bcg_fixes.source import forms
from sglang_bcg_fixes.source.finding import Finding

FOLDER = pathlib.Path(__file__).parents[1] / "kernels"
FILE, WORTH = FOLDER / "proven.json", FOLDER / "worth.json"


@functools.cache
def table() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return found


@functools.cache
def times() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(WORTH.read_text())
    return found


def share_of_time(op: str, finding: Finding) -> tuple[float, float] | None:
    """Tell the least and the most, of the newest release with the source that was found; None if none was measured."""
    rows = times().get(op, {})
    measured = with_the_source(rows, finding)
    return tuple(rows[measured[-1]]["times"]) if measured else None


def is_proven(op: str, finding: Finding) -> bool:
    """Tell whether results of this source are recorded; the kernel of another package has its own say."""
    if op not in table():
        return True
    return bool(with_the_source(table()[op], finding))


def with_the_source(rows: Iterable[str], finding: Finding) -> list[str]:
    """Choose the releases, in their order, whose every definition is the one that was found."""
    return forms.with_all(rows, (item.form for item in finding.evidence))
