# SPDX-License-Identifier: Apache-2.0
"""On which sources a GPU has run each kernel, from kernels/proven.json: by release, the file of results that shows it.

As with a verdict, the source counts and not its version: one whose every definition that the kernel rests on is that of
such a release is proven too.
"""

from __future__ import annotations

import functools
import json
import pathlib

from sglang_bcg_fixes.source import forms
from sglang_bcg_fixes.source.finding import Finding

FILE = pathlib.Path(__file__).parents[1] / "kernels" / "proven.json"


@functools.cache
def table() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return found


def is_proven(op: str, finding: Finding) -> bool:
    """Tell whether results of this source are recorded; the kernel of another package has its own say."""
    if op not in table():
        return True
    having = [forms.releases_with(item.form) for item in finding.evidence]
    return bool(set(table()[op]).intersection(*having))
