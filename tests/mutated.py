# SPDX-License-Identifier: Apache-2.0
"""A release with one file changed, as somebody's fork or the next version would have it."""

from __future__ import annotations

import pathlib

from sglang_bcg_fixes.source.tree import Files, Folder


class Mutated:
    """Files of which one has another text."""

    def __init__(self, files: Files, path: str, text: str) -> None:
        self.files = files
        self.path = path
        self.changed = text

    def read(self, path: str) -> str | None:
        return self.changed if path == self.path else self.files.read(path)

    def modules(self, folder: str) -> list[str]:
        return self.files.modules(folder)


def write(root: pathlib.Path, path: str, old: str, new: str, folder: pathlib.Path) -> None:
    """Have the release with the first such piece of one file replaced in `folder`; the rest are links."""
    here = pathlib.Path()
    for part in pathlib.PurePath(path).parts:
        (folder / here).mkdir(parents=True, exist_ok=True)
        for entry in (root / here).iterdir():
            if entry.name != part:
                (folder / here / entry.name).symlink_to(entry)
        here = here / part
    text = (root / path).read_text()
    assert old in text, f"{path} has no {old!r} to rewrite"
    (folder / path).write_text(text.replace(old, new, 1))


def rewritten(root: pathlib.Path, path: str, old: str, new: str) -> Mutated:
    """The release in this folder with a piece of one file replaced; the piece must be there."""
    files = Folder(root)
    text = files.read(path)
    assert text and old in text, f"{path} has no {old!r} to rewrite"
    return Mutated(files, path, text.replace(old, new))
