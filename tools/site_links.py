# SPDX-License-Identifier: Apache-2.0
"""Links of docs/ that lead to a file outside it, or to a folder: mkdocs calls this for each page of the site.

A link to a page that a folder has as its README stays one. Any other leads into the repository, where pyproject.toml
names one, and is otherwise shown as the path. A picture becomes part of the site.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from sglang_bcg_fixes import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    # pytest brings it there
    import tomli as tomllib

REPOSITORY = pathlib.Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"(!?)\[([^][]*)\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")
OF_TEXT = re.compile(r'href="(?!\w+:)([^"#]+)\.md(#[^"]*)?"')
# pictures of other folders, in the site
PICTURES = "pictures"


def on_config(config: Any) -> Any:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    config.repo_url = str(settings["tool"]["sglang-bcg-fixes"]["repository"]).rstrip("/") or None
    return config


def on_files(files: Any, config: Any) -> Any:
    for page in [file for file in files if file.is_documentation_page()]:
        folder = pathlib.Path(page.abs_src_path).parent
        for found in LINK.finditer(CODE.sub("", page.content_string)):
            target = target_of(folder, found[3])
            if found[1] and not target.is_relative_to(DOCS):
                place = f"{PICTURES}/{target.name}"
                if files.get_file_from_path(place) is None:
                    files.append(File.generated(config, place, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    folder = pathlib.Path(page.file.abs_src_path).parent
    # a comment before the heading would hide it from the list of pages
    markdown = re.sub(r"\A<!--.*?-->\s*", "", markdown)
    return outside_code(markdown, lambda text: LINK.sub(lambda found: led(found, folder, config.repo_url), text))


def on_post_build(config: Any) -> None:
    # in the checkout a page like this leads to the texts that the site's pages are made of
    for page in DOCS.glob("*.html"):
        made = OF_TEXT.sub(r'href="\1.html\2"', page.read_text())
        pathlib.Path(config.site_dir, page.name).write_text(made)


def led(found: re.Match[str], folder: pathlib.Path, repository: str | None) -> str:
    """One link as the site has it."""
    is_picture, words, path, anchor = found[1], found[2], found[3], found[4] or ""
    target = target_of(folder, path)
    if target.is_dir() and target.is_relative_to(DOCS) and (target / "README.md").is_file():
        return f"[{words}]({path.rstrip('/')}/README.md{anchor})"
    if target.is_relative_to(DOCS) and not target.is_dir():
        return found[0]
    if is_picture:
        return f"![{words}]({os.path.relpath(DOCS / PICTURES / target.name, folder)})"
    place = target.relative_to(REPOSITORY).as_posix()
    if repository:
        kind = "tree" if target.is_dir() else "blob"
        return f"[{words}]({repository}/{kind}/v{__version__}/{place}{anchor})"
    return f"{words} (`{place}`)"


def target_of(folder: pathlib.Path, path: str) -> pathlib.Path:
    target = (folder / path).resolve()
    if not target.exists() or not target.is_relative_to(REPOSITORY):
        raise PluginError(f"{folder.relative_to(REPOSITORY)} has a link to {path}, which the repository does not have")
    return target


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text as it is changed with its code put away, which may be the words of a link."""
    code: list[str] = []

    def put_away(found: re.Match[str]) -> str:
        code.append(found[0])
        return f"\0{len(code) - 1}\0"

    return re.sub("\0(\\d+)\0", lambda found: code[int(found[1])], change(CODE.sub(put_away, text)))
