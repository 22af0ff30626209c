# SPDX-License-Identifier: Apache-2.0
"""The notes of docs/answers.md, against the recorded files; the page itself is generated from them."""

from __future__ import annotations

import json
from typing import Any

import answers_page
import pytest

Place = tuple[str, str]
SERVERS = answers_page.servers()
EXPLAINED = [place for place, cell in answers_page.cells().items() if not cell.is_right]
SAME_AS_STOCK, MIXTURE, MASK, COMPILED, WITHOUT_GRAPHS = range(1, len(answers_page.NOTES) + 1)


def arms(place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """The worst server of each arm."""
    of_arm = SERVERS[place]
    stock, patched = (min(of_arm[arm], key=lambda server: int(server["equal"])) for arm in ("stock", "patched"))
    return stock, patched


@pytest.mark.parametrize("place", EXPLAINED, ids="-".join)
def test_a_note_is_true_of_the_cell(place: Place) -> None:
    (stock, patched), cell, note = arms(place), answers_page.cells()[place], answers_page.note_of(*place)
    prefill = patched["counts"].get("prefill", {})
    if note == SAME_AS_STOCK or (note == COMPILED and cell.stock != "no start"):
        assert stock["not_equal"] == patched["not_equal"]
    elif note == MIXTURE:
        assert patched["selfcheck"]["verdict"] == "right" and prefill["replayed"]
        assert patched["equal"] > stock["equal"]
    elif note == MASK:
        assert cell.stock == cell.patched and "dies" in cell.patched
    elif note == WITHOUT_GRAPHS:
        assert patched["equal"] == patched["requests"] and not prefill["replayed"]
        assert prefill["reasons"] == {"fix vlm_embeds_dropped": prefill["refused"]}
        assert any("Boolean value of Tensor" in line for line in stock["log_tail"])
    else:
        assert note == COMPILED and int(cell.patched) > 0


def test_without_torch_compile_all_are_equal() -> None:
    for release in ("0.5.14", "0.5.15", "0.5.15.post1", "0.5.16"):
        found = json.loads((answers_page.RESULTS / f"verify-no-dynamo-{release}.json").read_text())
        patched = [server for server in found["servers"] if server["arm"] == "patched"]
        assert patched and all(server["equal"] == server["requests"] for server in patched), release


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"ending": "no answer to generate within 90 s", "exit": None}, "hangs"),
        ({"ending": "no answer to generate (Connection refused)", "exit": -9}, "dies"),
        ({"ending": "as asked", "equal": "3 of 4"}, "3 of 4 right"),
        ({"ending": "as asked", "equal": [["rank 0, 9 tokens", 0.1], ["rank 1, 9 tokens", 0.5]]}, "50% right"),
        ({"ending": "as asked", "found": "ended", "seconds": 7.7}, "ended after 8 s"),
        ({"ending": "as asked", "found": 60}, "60 answered"),
    ],
)
def test_what_two_ranks_did_is_said_in_words(row: dict[str, Any], said: str) -> None:
    assert answers_page.what_ranks_did(row).endswith(said)


def test_a_cell_that_is_not_right_and_has_no_note_is_noticed() -> None:
    found = answers_page.cells()
    assert not answers_page.unexplained(found)
    place = ("phi_prefill_graph", "0.5.23")
    wrong = answers_page.Cell(99, "no start", "98")
    assert answers_page.unexplained(found | {place: wrong}) == [place]
    right = answers_page.Cell(99, "99", "99")
    assert answers_page.unexplained(found | {EXPLAINED[0]: right}) == [EXPLAINED[0]]
