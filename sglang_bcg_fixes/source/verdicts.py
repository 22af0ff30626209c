# SPDX-License-Identifier: Apache-2.0
"""The verdicts on every release, as tests record them: to be read by people. A server asks its own source."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from collections.abc import Iterator

FILE = pathlib.Path(__file__).with_suffix(".json")


@functools.cache
def recorded() -> dict[str, dict[str, str]]:
    """By release, from the oldest to the newest, the verdict on each defect."""
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return found


def spans(defect: str) -> Iterator[tuple[str, str]]:
    """Consecutive releases with the same verdict on a defect, and the verdict; none on one of another package."""
    verdicts = [(release, row[defect]) for release, row in recorded().items() if defect in row]
    for verdict, of in itertools.groupby(verdicts, key=lambda item: item[1]):
        names = [name for name, _ in of]
        yield names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", verdict
