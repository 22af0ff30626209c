# SPDX-License-Identifier: Apache-2.0
"""Titles, which every list and page prints, name the symptom: short, and without the words of the source."""

from __future__ import annotations

import re

import pytest

from sglang_bcg_fixes.cli.harmless import HARMLESS
from sglang_bcg_fixes.cli.pip_faults import FAULTS
from sglang_bcg_fixes.planning import registry

KNOWN = registry.discover()
TITLES = {
    **{fix.id: fix.title for fix in KNOWN.fixes},
    **{kernel.op: kernel.title for kernel in KNOWN.kernels},
    **{spot.id: spot.title for spot in HARMLESS},
    **{fault.id: fault.title for fault in FAULTS},
}
LONGEST = 90
INTERNAL = re.compile(
    r"\b(breaks?|captured?|captures|forms?|latent|mend(s|ed)?|read back|rows?|segments?|slots?|told|weak)\b",
    re.IGNORECASE,
)


def test_every_title_is_looked_at() -> None:
    assert len(TITLES) == len(KNOWN.fixes) + len(KNOWN.kernels) + len(HARMLESS) + len(FAULTS)
    assert len(set(TITLES.values())) == len(TITLES)


@pytest.mark.parametrize(("name", "title"), TITLES.items(), ids=list(TITLES))
def test_a_title_is_a_symptom_on_one_line(name: str, title: str) -> None:
    assert len(title) <= LONGEST and not title.endswith("."), f"{name}: {len(title)} characters: {title}"
    found = INTERNAL.search(title)
    assert not found, f"{name}: say what a user sees, not {found.group()!r}: {title}"
