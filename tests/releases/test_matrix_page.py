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

from sglang_bcg_fixes.source import verdicts
from tests.wheels import NEWEST, RELEASES

TEXT = matrix_page.PAGE.read_text()
DATA: dict[str, Any] = json.loads(re.findall(r'<script id="data" type="application/json">(.*)</script>', TEXT)[0])
SCRIPT = re.findall(r"<script>\n(.*?)</script>", TEXT, re.DOTALL)[0]
QWEN = "Qwen3_5MoeForConditionalGeneration"


def test_the_page_is_made_of_the_recorded_verdicts() -> None:
    assert matrix_page.page(DATA) == TEXT, "run python tools/matrix_page.py"
    for number, name in enumerate(DATA["defects"]):
        row = [matrix_page.LETTERS[found[name]] for found in verdicts.recorded().values()]
        assert DATA["verdicts"][number] == "".join(row)
    assert set(DATA["defects"]) == set(next(iter(verdicts.recorded().values())))
    assert DATA["releases"] == list(RELEASES)


@pytest.mark.parametrize("release", ["0.5.12.post1", NEWEST])
def test_a_model_is_told_of_what_doctor_tells_it(release: str) -> None:
    told = {name: row[RELEASES.index(release)] for name, row in DATA["models"].items()}
    found = matrix_page.of_release(release)
    assert {name: found.get(name) for name in told} == {
        name: None if number is None else DATA["sets"][number] for name, number in told.items()
    }, "run python tools/matrix_page.py"


@pytest.mark.skipif(not shutil.which("node"), reason="no node to run the page's script")
@pytest.mark.parametrize(
    ("model", "release", "told", "shown"),
    [
        ("", "", f"of {len(DATA['defects'])} defects are in one release or another.", None),
        ("", NEWEST, f"defects are in SGLang {NEWEST}.", "expanded_form_captured"),
        (QWEN, NEWEST, f"defects concern {QWEN} on SGLang {NEWEST}, with default flags.", "slots_not_exchanged"),
        ("KimiK3ForConditionalGeneration", "0.5.11", "KimiK3ForConditionalGeneration is not in SGLang 0.5.11.", None),
        ("Misspelt", NEWEST, "No model of that name is known here.", "expanded_form_captured"),
    ],
)
def test_the_page_filters(model: str, release: str, told: str, shown: str | None, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "page.js"
    call = f"seen({json.dumps(DATA)}, {json.dumps(model)}, {json.dumps(release)})"
    program.write_text(f"{SCRIPT}\nconsole.log(JSON.stringify({call}))")
    done = subprocess.run(["node", str(program)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert told in found["told"]
    rows = {name: row for name, row in zip(DATA["defects"], found["rows"], strict=True) if row}
    assert shown is None or release in rows[shown]
    if model == QWEN:
        # what other models have there is not shown
        assert "expanded_form_captured" not in rows and all(row == [release] for row in rows.values())


def test_the_page_works_alone_and_names_its_parts() -> None:
    assert not re.search(r"(src|href)=\"(https?:)?//", TEXT)
    assert TEXT.count('scope="row"') == len(DATA["defects"]) and TEXT.count('scope="col"') == len(RELEASES) + 2
    assert 'role="status"' in TEXT and "<caption>" in TEXT
    links = re.findall(r'<a href="([^"]+)"', TEXT)
    assert len(links) == len(DATA["defects"])
    # read, and not just there: so that the ledger sees that this rests on them
    assert all((matrix_page.PAGE.parent / link).read_bytes() for link in links)
