# SPDX-License-Identifier: Apache-2.0
"""Links of the pages lead somewhere, and no section of a fix's page is empty."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests import processes

REPOSITORY = processes.REPOSITORY
FOLDERS = (".", "benchmarks", "changes", "cpu_sglang", "docs", "examples")
PAGES = sorted(
    page for folder in FOLDERS for page in (REPOSITORY / folder).glob("*.md" if folder == "." else "**/*.md")
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: pathlib.Path) -> set[str]:
    """Anchors of a page's headings, as forges make them: the second of the same name ends in -1."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE):
        stem = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(stem)}(-\d+)?", anchor) is not None for anchor in found)
        found.add(f"{stem}-{count}" if count else stem)
    return found


def broken(page: pathlib.Path) -> list[str]:
    # a fragment of changes/ becomes a line of CHANGELOG.md
    moves = page.parent.name == "changes" and page.name != "README.md"
    folder = REPOSITORY if moves else page.parent
    bad = []
    for link in LINK.findall(without_code(page.read_text())):
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else page
        if not link.startswith("https://") and (not target.exists() or (anchor and anchor not in anchors(target))):
            bad.append(link)
    return bad


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_to_a_file_and_a_heading(page: pathlib.Path) -> None:
    assert not broken(page)


def test_a_link_to_nothing_is_found(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A b!\n## Same\n## Same\n[1](#a-b) [2](#same-1) [3](page.md#same) [4](#same-2) [5](gone.md) `[6](x)`"
    )
    assert broken(page) == ["#same-2", "gone.md"]


def test_nothing_is_said_to_be_on_an_index_yet() -> None:
    texts = [*PAGES, *(REPOSITORY / "sglang_bcg_fixes").rglob("*.py"), *(REPOSITORY / "tools").glob("*.py")]
    from_an_index = re.compile(r"(?:pip|uv|pipx)\s+(?:\w+\s+)?(?:install|run)\s[^`\n]*sglang[-_]bcg[-_]fixes(?!-)")
    assert from_an_index.search("uv pip install -U sglang-bcg-fixes") and len(texts) > 200
    assert not [str(file) for file in texts if from_an_index.search(file.read_text())]


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs" / "fixes").glob("*.md")), ids=lambda page: page.stem)
def test_every_section_of_a_fix_page_has_text(page: pathlib.Path) -> None:
    sections = re.split(r"^## .*\n", page.read_text(), flags=re.MULTILINE)[1:]
    assert sections and all(map(str.strip, sections))
