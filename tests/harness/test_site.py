# SPDX-License-Identifier: Apache-2.0
"""The site of README and docs/: built strictly, every link leads somewhere, and nothing of it comes from elsewhere."""

from __future__ import annotations

import html
import html.parser
import os
import pathlib
import posixpath
import re
import subprocess
import sys

import pytest
import report
import site_links
from mkdocs.exceptions import PluginError

from tests import processes

DOCS = processes.REPOSITORY / "docs"
MADE_UP = "https://forge.example/somebody/sglang-bcg-fixes"
EXAMPLE, PICTURE = "examples/deploy/compose.yaml", "benchmarks/results/bench-0.5.23-servers.png"


class Page(html.parser.HTMLParser):
    """What a page refers to and can be referred to by."""

    def __init__(self, file: pathlib.Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.lists = 0
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given["id"]} if "id" in given else set()
        self.lists += tag == "ol"
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "src" in given or tag == "link":
            self.loaded.append(given.get("src") or given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(processes.REPOSITORY)}
    done = subprocess.run(command, cwd=processes.REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: pathlib.Path) -> dict[str, Page]:
    return {file.relative_to(site).as_posix(): Page(file) for file in site.rglob("*.html")}


def test_every_page_of_the_checkout_is_in_it(site: pathlib.Path, pages: dict[str, Page]) -> None:
    texts = {file.relative_to(DOCS).with_suffix(".html").as_posix() for file in DOCS.rglob("*.md")}
    texts = {re.sub(r"/README\.html$", "/index.html", name) for name in texts}
    others = {"404.html", "matrix.html", "index.html", "CONTRIBUTING.html", "schema/index.html"}
    assert texts | others <= pages.keys() and "examples/deploy/index.html" in pages
    assert (site / "schema" / "doctor.json").is_file() and len(texts) > 80


def test_the_first_page_is_the_readme(site: pathlib.Path) -> None:
    text = (processes.REPOSITORY / "README.md").read_text()
    # without the heading, pictures, comments, marks, and where links lead
    text = re.sub(r"(?m)^#.*$|!\[[^]]*\]\([^)]*\)|<!--.*?-->|[*`]|(?<=\])\([^)]*\)|[][]", "", text)
    sentence = re.split(r"(?<=\w)[.:] ", " ".join(text.split()))[0]
    shown = html.unescape(re.sub(r"<[^>]+>", "", (site / "index.html").read_text()))
    assert len(sentence) > 20 and sentence in " ".join(shown.split())


def test_a_folder_is_a_list_of_its_files(pages: dict[str, Page]) -> None:
    schemas = {file.name for file in (DOCS / "schema").iterdir()}
    assert schemas and schemas <= set(pages["schema/index.html"].links)


def test_each_report_for_sglang_is_listed_once(pages: dict[str, Page]) -> None:
    reports = [f"{name}.html" for name in report.names()]
    listed = [link for link in pages["upstream/index.html"].links if link in reports]
    assert reports and sorted(listed) == reports


def test_what_a_page_says_in_a_checkout_only_is_left_out(site: pathlib.Path) -> None:
    shown = (site / "matrix.html").read_text()
    assert "make site" in (DOCS / "matrix.html").read_text() and "make site" not in shown
    assert 'href="fixes/ssm_mixer_captured.html"' in shown and 'href="doctor.html"' in shown


def test_a_long_name_in_a_table_may_be_folded(site: pathlib.Path) -> None:
    shown = (site / "troubleshooting.html").read_text()
    assert ">ssm_<wbr>mixer_<wbr>captured</a>" in shown and 'href="fixes/ssm_mixer_captured.html"' in shown


def test_it_is_built_without_torch() -> None:
    command = ["make", "--dry-run", "site", "VENV=.venv-that-is-missing", "SMALL=.venv-that-is-missing-too"]
    done = subprocess.run(command, cwd=processes.REPOSITORY, capture_output=True, text=True, check=True)
    assert re.search(r"\.venv-that-is-missing-too/bin/python -m pip install .*mkdocs-material==", done.stdout)
    assert "torch" not in done.stdout and "-m mkdocs build --strict" in done.stdout


def test_every_link_leads_to_a_file_and_a_place_in_it(site: pathlib.Path, pages: dict[str, Page]) -> None:
    broken = []
    for name, page in pages.items():
        # what a server answers for a page that it does not have has absolute links
        for link in (*page.links, *page.loaded) if name != "404.html" else ():
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            target = posixpath.join(target, "index.html") if (site / target).is_dir() else target
            if not (site / target).is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{name}: {link}")
    assert not broken and sum(len(page.links) for page in pages.values()) > 5000


def test_nothing_is_loaded_from_elsewhere(pages: dict[str, Page]) -> None:
    loaded = {link for page in pages.values() for link in page.loaded}
    assert loaded and [link for link in loaded if re.match(r"(\w+:)?//", link)] == []


def test_a_numbered_list_counts_on(pages: dict[str, Page]) -> None:
    texts = {file.stem: re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL) for file in DOCS.glob("*.md")}
    wanted = {name: len(re.findall(r"^1\. ", text, re.MULTILINE)) for name, text in texts.items()}
    # each page has one for what is searched
    found = {name: pages[f"{name}.html"].lists - pages["404.html"].lists for name in wanted}
    assert found == wanted and any(wanted.values())


def test_pages_have_the_names_of_their_headings(site: pathlib.Path) -> None:
    assert "Does your model get prefill graphs?" in (site / "flags.html").read_text()


def led(text: str, repository: str | None = None) -> str:
    (found,) = site_links.LINK.finditer(text)
    return site_links.led(found, DOCS / "flags.md", repository)


@pytest.mark.parametrize(
    ("link", "alone", "with_a_repository"),
    [
        ("[a](../CONTRIBUTING.md)", "[a](CONTRIBUTING.md)", "[a](CONTRIBUTING.md)"),
        ("[a](../csrc/README.md#b)", "[a](csrc/README.md#b)", "[a](csrc/README.md#b)"),
        ("[a](../README.md)", "[a](index.md)", "[a](index.md)"),
        (f"[a](../{EXAMPLE})", f"[a]({EXAMPLE})", f"[a]({MADE_UP}/blob/v0.1.0/{EXAMPLE})"),
        ("[a](../examples/deploy)", "[a](examples/deploy/README.md)", "[a](examples/deploy/README.md)"),
        ("[a](schema)", "[a](schema/index.md)", "[a](schema/index.md)"),
        ("[a](flags.md#b)", "[a](flags.md#b)", "[a](flags.md#b)"),
        ("[a](adr)", "[a](adr/README.md)", "[a](adr/README.md)"),
        ("![a](../docs/harm.svg)", "![a](harm.svg)", "![a](harm.svg)"),
        (f"![a](../{PICTURE})", f"![a]({PICTURE})", f"![a]({PICTURE})"),
    ],
)
def test_what_leads_out_of_the_pages(link: str, alone: str, with_a_repository: str) -> None:
    assert led(link) == alone and led(link, MADE_UP) == with_a_repository


@pytest.mark.parametrize("path", ["../gone.md", "../../elsewhere", "gone.md"])
def test_a_link_to_nothing_ends_the_build(path: str) -> None:
    with pytest.raises(PluginError, match=re.escape(f"docs has a link to {path}, which the repository does not have")):
        led(f"[a]({path})")


def test_code_is_left_alone_unless_it_is_what_leads() -> None:
    text = "`[a](b)` [c](d)\n```\n[e](f)\n```\n[`g`](h)"
    changed = site_links.outside_code(text, lambda outside: site_links.LINK.sub(lambda found: f"<{found[3]}>", outside))
    assert changed == "`[a](b)` <d>\n```\n[e](f)\n```\n<h>"
    assert site_links.outside_code(text, str) == text
