# SPDX-License-Identifier: Apache-2.0
"""The page of what is mended has every fix once, with the releases that need it."""

from __future__ import annotations

import re

import pytest

from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source import verdicts
from tests import processes
from tests.wheels import RELEASES

PAGE = (processes.REPOSITORY / "docs" / "mended.md").read_text()
LINK = re.compile(r"\[(\w+)\]\(fixes/\1\.md\)")
# a fix that also guards a source which is not affected
GUARD = "; a guard in all"


def rows() -> list[tuple[str, str]]:
    """Each fix and what stands in its part of the second column."""
    found: list[tuple[str, str]] = []
    for line in PAGE.splitlines():
        if not line.startswith("| ["):
            continue
        names, needed, _ = (cell.strip() for cell in line.strip("|").split(" | "))
        fixes = LINK.findall(names)
        parts = needed.removesuffix(GUARD).split("; ") if len(fixes) > 1 else [needed.removesuffix(GUARD)]
        found += zip(fixes, parts * len(fixes) if len(parts) == 1 else parts, strict=True)
    return found


def releases_in(text: str) -> set[str]:
    """Releases of "0.5.11 to 0.5.13", "to 0.5.14", "all", "0.5.17, 0.5.18; 0.5.21"."""
    if text == "all":
        return set(RELEASES)
    named = set()
    for part in re.split("[,;] ", text):
        first, _, last = part.partition("to ") if part.startswith("to ") else part.partition(" to ")
        begin = RELEASES.index(first) if first else 0
        named |= set(RELEASES[begin : RELEASES.index(last or first) + 1])
    return named


@pytest.mark.parametrize(("name", "needed"), rows())
def test_a_row_names_the_releases_that_are_affected(name: str, needed: str) -> None:
    affected = {release for release, found in verdicts.recorded().items() if found[name] == "affected"}
    assert releases_in(needed) == affected


def test_every_defect_is_on_the_page_once() -> None:
    named = LINK.findall(PAGE)
    assert sorted(named) == sorted(fix.id for fix in registry.discover().fixes)
