# SPDX-License-Identifier: Apache-2.0
"""Move the fragments of changes/ to CHANGELOG.md, under a version; `make changelog V=0.2.0`."""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import re
import textwrap

REPOSITORY = pathlib.Path(__file__).parent.parent
CHANGELOG = REPOSITORY / "CHANGELOG.md"
FRAGMENTS = REPOSITORY / "changes"
HEADING = re.compile(r"^## ", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="such as 0.2.0")
    version = parser.parse_args().version
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?((a|b|rc)\d+)?", version):
        parser.error(f"'{version}' is not a version; use numbers such as 0.2.0")
    old = CHANGELOG.read_text()
    if re.search(rf"^## {re.escape(version)}\b(?!\.)", old, re.MULTILINE):
        parser.error(f"CHANGELOG.md has version {version} already; choose another one")
    files = sorted(file for file in FRAGMENTS.glob("*.md") if file.name != "README.md")
    if not files:
        parser.error("changes/ has no fragment; write changes/SUBJECT.md for each change that a user notices")
    empty = [file.name for file in files if not file.read_text().strip()]
    if empty:
        parser.error(f"changes/{empty[0]} is empty; write one or two sentences, or delete it")
    section = f"## {version} ({datetime.date.today()})\n\n" + "".join(map(bullets, files))
    replace(CHANGELOG, with_section(old, section))
    for file in files:
        file.unlink()
    print(f"{len(files)} changes moved to CHANGELOG.md under {version}")
    return 0


def bullets(file: pathlib.Path) -> str:
    """A bullet of the whole fragment, or each of those that it has."""
    texts = (" ".join(text.split()) for text in re.split(r"^- ", file.read_text(), flags=re.MULTILINE))
    return "".join(bullet(text) for text in texts if text)


def bullet(text: str) -> str:
    wrapped = textwrap.fill(
        text, 120, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return f"{wrapped}\n"


def with_section(changelog: str, section: str) -> str:
    """Put the section before the newest version's, or at the end."""
    newest = HEADING.search(changelog)
    if newest is None:
        return f"{changelog.rstrip()}\n\n{section}"
    return f"{changelog[: newest.start()]}{section}\n{changelog[newest.start() :]}"


def replace(file: pathlib.Path, text: str) -> None:
    """Write a file whole or not at all: the fragments are deleted after this."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    os.replace(draft, file)


if __name__ == "__main__":
    raise SystemExit(main())
