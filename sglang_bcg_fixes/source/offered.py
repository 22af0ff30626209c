# SPDX-License-Identifier: Apache-2.0
"""The releases that have an option of SGLang's, as tests record them: to be read by people."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from collections.abc import Collection

from sglang_bcg_fixes.source import verdicts

FILE = pathlib.Path(__file__).with_suffix(".json")


@functools.cache
def recorded() -> dict[str, list[str]]:
    """By release, those options that a workaround of ours names."""
    found: dict[str, list[str]] = json.loads(FILE.read_text())
    return found


def has_option(release: str, option: str) -> bool:
    return option in recorded().get(release, ())


def spans(releases: Collection[str]) -> str:
    """Releases in words: "0.5.11 to 0.5.13, 0.5.15"."""
    runs = itertools.groupby(verdicts.recorded(), key=lambda release: release in releases)
    named = [list(run) for is_one, run in runs if is_one]
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in named)
