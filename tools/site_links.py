# SPDX-License-Identifier: Apache-2.0
"""The pages of the site beside those of docs/, and where their links lead: mkdocs calls this for each page.

README is the first page. What a page links to becomes part of the site: a text as a page, a picture or another file as
it is, a folder without a README as a list of its files. Where pyproject.toml names a repository, files and folders
outside docs/ that are neither texts nor pictures are shown there instead.
"""

from __future__ import annotations

import pathlib
import posixpath
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
    # pytest and `make site` bring it there
    import tomli as tomllib

REPOSITORY = pathlib.Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
# the first page
FIRST = REPOSITORY / "README.md"
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"(!?)\[([^][]*)\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")
OF_TEXT = re.compile(r'href="(?!\w+:)([^"#]+\.md)(#[^"]*)?"')
# what a page says of itself in a checkout only
OF_CHECKOUT = re.compile(r"<!-- checkout -->.*?<!-- /checkout -->\n?", re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
LONG_WORD = re.compile(r"(?<=[>\s])[\w./=-]{16,}(?=[<\s])")


def on_config(config: Any) -> Any:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    config.repo_url = str(settings["tool"]["sglang-bcg-fixes"]["repository"]).rstrip("/") or None
    return config


def on_files(files: Any, config: Any) -> Any:
    pages = [FIRST, *(pathlib.Path(file.abs_src_path) for file in files if file.is_documentation_page())]
    # grows while it is read
    for page in pages:
        add(files, config, page)
        for found in LINK.finditer(CODE.sub("", page.read_text())):
            target = target_of(page.parent, found[3])
            if is_elsewhere(target, config.repo_url) and not found[1]:
                continue
            # of a list, each file is there too
            for part in (target, *contents(target)) if target.is_dir() else (target,):
                if part.suffix != ".md":
                    add(files, config, part)
                elif part not in pages:
                    pages.append(part)
    return files


def add(files: Any, config: Any, target: pathlib.Path) -> None:
    """Make a file or a list of files part of the site, unless it is one."""
    place = place_of(target)
    if files.get_file_from_path(place) is None:
        if target.is_dir():
            files.append(File.generated(config, place, content=list_of(target)))
        else:
            files.append(File.generated(config, place, abs_src_path=str(target)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.abs_src_path is None:
        return markdown
    source = pathlib.Path(page.file.abs_src_path)
    # a comment before the heading would hide it from the list of pages
    markdown = re.sub(r"\A<!--.*?-->\s*", "", markdown)
    return outside_code(markdown, lambda text: LINK.sub(lambda found: led(found, source, config.repo_url), text))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    return TABLE.sub(lambda table: LONG_WORD.sub(breakable, table[0]), html)


def breakable(word: re.Match[str]) -> str:
    """Let a long name in a table go on in the next line, which site.css allows on a narrow screen."""
    return re.sub(r"(?<=\w)[_./=-](?=\w)", r"\g<0><wbr>", word[0])


def on_post_build(config: Any) -> None:
    # in the checkout a page like this leads to the texts that the site's pages are made of
    for page in DOCS.glob("*.html"):
        made = OF_TEXT.sub(lambda found: f'href="{page_of(DOCS / found[1])}{found[2] or ""}"', page.read_text())
        pathlib.Path(config.site_dir, page.name).write_text(OF_CHECKOUT.sub("", made))


def led(found: re.Match[str], source: pathlib.Path, repository: str | None) -> str:
    """Write one link of a text as the site has it."""
    is_picture, words, path, anchor = found[1], found[2], found[3], found[4] or ""
    target = target_of(source.parent, path)
    if not is_picture and is_elsewhere(target, repository):
        kind = "tree" if target.is_dir() else "blob"
        place = target.relative_to(REPOSITORY).as_posix()
        return f"[{words}]({repository}/{kind}/v{__version__}/{place}{anchor})"
    place = posixpath.relpath(place_of(target), posixpath.dirname(place_of(source)) or ".")
    return f"{is_picture}[{words}]({place}{anchor})"


def is_elsewhere(target: pathlib.Path, repository: str | None) -> bool:
    return bool(repository) and target.suffix != ".md" and not target.is_relative_to(DOCS)


def place_of(target: pathlib.Path) -> str:
    """Say where the site has a file or folder of the repository, among what its pages are made of."""
    if target == FIRST:
        return "index.md"
    place = target.relative_to(DOCS if target.is_relative_to(DOCS) else REPOSITORY)
    return (place / "index.md" if target.is_dir() else place).as_posix()


def page_of(text: pathlib.Path) -> str:
    place = re.sub(r"(^|/)README\.md$", r"\1index.md", place_of(text))
    return place.removesuffix(".md") + ".html"


def list_of(folder: pathlib.Path) -> str:
    """Write a page that leads to each file of a folder."""
    lines = [f"# {folder.relative_to(REPOSITORY).as_posix()}", ""]
    lines += [f"- [{file.name}]({file.name})" for file in contents(folder)]
    return "\n".join(lines) + "\n"


def contents(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def target_of(folder: pathlib.Path, path: str) -> pathlib.Path:
    """Find what a link of a text in this folder leads to: a file, or a folder without a README."""
    target = (folder / path).resolve()
    if not target.exists() or not target.is_relative_to(REPOSITORY):
        raise PluginError(f"{folder.relative_to(REPOSITORY)} has a link to {path}, which the repository does not have")
    return target / "README.md" if (target / "README.md").is_file() else target


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text as it is changed with its code put away, which may be the words of a link."""
    code: list[str] = []

    def put_away(found: re.Match[str]) -> str:
        code.append(found[0])
        return f"\0{len(code) - 1}\0"

    return re.sub("\0(\\d+)\0", lambda found: code[int(found[1])], change(CODE.sub(put_away, text)))
