# SPDX-License-Identifier: Apache-2.0
"""docs/matrix.html says what was recorded and what doctor would say, and filters it."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

import matrix_page
import pytest

from sglang_bcg_fixes.concern import Harm
from sglang_bcg_fixes.source import verdicts
from tests.wheels import NEWEST, RELEASES

TEXT = matrix_page.PAGE.read_text()
DATA: dict[str, Any] = json.loads(re.findall(r'<script id="data" type="application/json">(.*)</script>', TEXT)[0])
SCRIPT = re.findall(r"<script>\n(.*?)</script>", TEXT, re.DOTALL)[0]
QWEN = "Qwen3_5MoeForConditionalGeneration"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="no node to run the page's script")


def test_the_page_is_made_of_the_recorded_verdicts() -> None:
    assert matrix_page.page(DATA) == TEXT, "run python tools/matrix_page.py"
    for number, name in enumerate(DATA["defects"]):
        row = [matrix_page.LETTERS[found[name]] for found in verdicts.recorded().values()]
        assert DATA["verdicts"][number] == "".join(row)
    assert (
        DATA["harms"] == [[harm.name.lower(), harm.value] for harm in Harm]
        and DATA["published"] == matrix_page.PUBLISHED
    )
    assert set(DATA["defects"]) == set(next(iter(verdicts.recorded().values())))
    assert DATA["releases"] == list(RELEASES)


@pytest.mark.parametrize("release", ["0.5.12.post1", NEWEST])
def test_a_model_is_told_of_what_doctor_tells_it(release: str) -> None:
    told = {name: row[RELEASES.index(release)] for name, row in DATA["models"].items()}
    found = matrix_page.of_release(release)
    assert {name: found.get(name) for name in told} == {
        name: None if number is None else DATA["sets"][number] for name, number in told.items()
    }, "run python tools/matrix_page.py"


def of_page(call: str, folder: pathlib.Path) -> Any:
    """Run a call of the page's script, where `data` is the page's."""
    program = folder / "page.js"
    program.write_text(f"{SCRIPT}\nconst data = {json.dumps(DATA)};\nconsole.log(JSON.stringify({call}))")
    return json.loads(subprocess.run(["node", str(program)], capture_output=True, text=True, check=True).stdout)


@needs_node
@pytest.mark.parametrize(
    ("model", "release", "told", "shown"),
    [
        ("", "all", "Any model on all releases: ", None),
        ("", NEWEST, f"Any model on SGLang {NEWEST}: ", "expanded_form_captured"),
        (QWEN, NEWEST, f"{QWEN} on SGLang {NEWEST}, with default flags: ", "slots_not_exchanged"),
        ("Qwen/Qwen3.5-35B-A3B-FP8", NEWEST, f"Qwen3.5-35B-A3B ({QWEN}) on SGLang {NEWEST}", "slots_not_exchanged"),
        ("KimiK3ForConditionalGeneration", "0.5.11", "KimiK3ForConditionalGeneration is not in SGLang 0.5.11.", None),
        ("DeepSeek-V4-Pro", NEWEST, "(DeepseekV4ForCausalLM) has no row here. Ask bcg-fixes doctor", None),
        ("Misspelt", NEWEST, "No model of that name is known here. Any model", "expanded_form_captured"),
        ("Falcon-H1", NEWEST, "No model of that name is known here. Is it Falcon-H1-0.5B-Instruct, ", None),
    ],
)
def test_the_page_filters(model: str, release: str, told: str, shown: str | None, tmp_path: pathlib.Path) -> None:
    found = of_page(f"seen(data, {json.dumps(model)}, {json.dumps(release)})", tmp_path)
    assert told in found["told"]
    rows = {name: row for name, row in zip(DATA["defects"], found["rows"], strict=True) if row}
    assert shown is None or release in rows[shown]
    assert found["count"] == len(rows)
    if model == QWEN:
        # what other models have there is not shown
        assert "expanded_form_captured" not in rows and all(row == [release] for row in rows.values())


@needs_node
def test_a_sentence_counts_each_harm_and_what_is_fixed(tmp_path: pathlib.Path) -> None:
    found = of_page(f"seen(data, '', '{NEWEST}')", tmp_path)
    there = [number for number, row in enumerate(found["rows"]) if row]
    of_each = [sum(DATA["harm"][number] == harm for number in there) for harm in range(len(DATA["harms"]))]
    said = ", ".join(f"{says}: {count}" for count, (_, says) in zip(of_each, DATA["harms"], strict=True) if count)
    fixed = sum(DATA["plugin"][number] == matrix_page.FIXED for number in there)
    assert found["told"].endswith(f"{len(there)} defects ({said}). The plugin fixes {fixed} of them.")


@needs_node
def test_published_names_are_found(tmp_path: pathlib.Path) -> None:
    wanted = {name: one for one, names in matrix_page.PUBLISHED.items() for name in names}
    asked = [typed for name in wanted for typed in (name, f"of/{name}-FP8", name.upper())]
    found = of_page(f"{json.dumps(asked)}.map((typed) => meant(data, typed)?.architecture)", tmp_path)
    assert dict(zip(asked, found, strict=True)) == {
        typed: one for name, one in wanted.items() for typed in (name, f"of/{name}-FP8", name.upper())
    }
    known = ["Falcon-H1-7B", "Llama-3.1-8B", "openai/gpt-oss-20b", "deepseek-v3", "Qwen3_5MoeForConditionalGeneration"]
    assert of_page(f"{json.dumps(known)}.map((typed) => meant(data, typed)?.architecture)", tmp_path) == [
        "FalconH1ForCausalLM",
        "LlamaForCausalLM",
        "GptOssForCausalLM",
        "DeepseekV3ForCausalLM",
        QWEN,
    ]
    assert of_page("['', 'FP8', '-', 'Qwen'].map((typed) => meant(data, typed))", tmp_path) == [None] * 4


def test_published_models_are_of_architectures_of_a_release() -> None:
    registry = json.loads(pathlib.Path(__file__).with_name("registry_graphs.json").read_text())["architectures"]
    assert matrix_page.PUBLISHED.keys() <= registry.keys() | DATA["models"].keys()
    names = [name.lower() for names in matrix_page.PUBLISHED.values() for name in names]
    assert len(set(names)) == len(names) >= 60
    # most of them have rows
    assert len(matrix_page.PUBLISHED.keys() & DATA["models"].keys()) > 120


@needs_node
@pytest.mark.parametrize("model", ["", "Qwen3.5-35B-A3B", "a/b c&release=0.5.11#é+%"])
@pytest.mark.parametrize("release", ["0.5.12.post1", "all"])
def test_an_address_holds_the_choice(model: str, release: str, tmp_path: pathlib.Path) -> None:
    choice = {"model": model, "release": release}
    made, found = of_page(f"[address({json.dumps(choice)}), chosen(data, address({json.dumps(choice)}))]", tmp_path)
    assert made.startswith("#") and not re.search(r"\s", made) and found == choice


@needs_node
@pytest.mark.parametrize("hash_", ["", "#", "#release=0.4.0", "#release="])
def test_without_a_release_it_is_the_newest(hash_: str, tmp_path: pathlib.Path) -> None:
    assert of_page(f"chosen(data, {json.dumps(hash_)})", tmp_path) == {"model": "", "release": NEWEST}


@pytest.mark.skipif(not CHROMIUM, reason="no chromium to open the page")
@pytest.mark.parametrize(("release", "columns"), [("0.5.15.post1", ["0.5.15.post1"]), ("all", list(RELEASES))])
def test_a_browser_shows_what_the_address_holds(release: str, columns: list[str], tmp_path: pathlib.Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    address = f"{matrix_page.PAGE.as_uri()}#model=Falcon-H1-7B&release={release}"
    done = subprocess.run([str(CHROMIUM), *options, address], capture_output=True, text=True, check=True, timeout=120)
    told = re.findall(r'<p id="told" role="status">(.*?)</p>', done.stdout)
    assert told and told[0].startswith("Falcon-H1-7B-Instruct (FalconH1ForCausalLM) on ")
    head = re.findall(r'<th scope="col" data-release="([^"]+)"( hidden="")?>', done.stdout)
    assert [name for name, hidden in head if not hidden] == columns and len(head) == len(RELEASES)
    rows = re.findall(r'<tr data-harm="(\w+)"( hidden="")?>.*?fixes/(\w+)\.md', done.stdout)
    shown = [(harm, name) for harm, hidden, name in rows if not hidden]
    assert ("wrong", "ssm_mixer_captured") in shown and len(shown) < len(rows) == len(DATA["defects"])
    # the worst first
    kinds = [kind for kind, _ in DATA["harms"]]
    assert [harm for harm, _ in shown] == sorted((harm for harm, _ in shown), key=kinds.index)


def test_the_page_works_alone_and_names_its_parts() -> None:
    assert not re.search(r"(src|href)=\"(https?:)?//", TEXT)
    assert TEXT.count('scope="row"') == len(DATA["defects"]) and TEXT.count('scope="col"') == len(RELEASES) + 3
    assert 'role="status"' in TEXT and "<caption>" in TEXT
    links = re.findall(r'<a href="([^"]+)"', TEXT)
    assert len(links) == len(DATA["defects"]) + 1
    # read, and not just there: so that the ledger sees that this rests on them
    assert all((matrix_page.PAGE.parent / link).read_bytes() for link in links)
