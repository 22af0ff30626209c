# SPDX-License-Identifier: Apache-2.0
"""What the README says of answers and times, against the recorded files."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests import processes
from tests.wheels import NEWEST
from tests.wheels import RELEASES as ALL_RELEASES

README = (processes.REPOSITORY / "README.md").read_text()
RESULTS = processes.REPOSITORY / "benchmarks" / "results"
CASES = {
    "Qwen3-Next, prefill graphs": "qwen3_next_prefill_graph",
    "Qwen3-Next, warm prefix cache": "qwen3_next_prefix_cache",
    "Qwen3.5, prefill graphs": "qwen3_5_prefill_graph",
    "Qwen3.5, default flags": "qwen3_5_by_default",
    "Qwen3.5 without images, prefill graphs": "qwen3_5_text_prefill_graph",
    "Qwen3.5 without images, default flags": "qwen3_5_text_by_default",
    "Falcon-H1, prefill graphs": "falcon_h1_prefill_graph",
    "Falcon-H1, warm prefix cache": "falcon_h1_checkpoints",
    "Several requests in one prefill": "llama_several_requests",
    "GPT-OSS, padded decode graphs": "gpt_oss_decode_padding",
    "GPT-OSS, prefill graphs": "gpt_oss_breakable_start",
    "EAGLE: drafts accepted as without the graph": "eagle_triton_draft_extend",
    "Qwen3-Next, adaptive speculation": "qwen3_next_adaptive_speculation",
    "Phi, prefill graphs": "phi_prefill_graph",
    "Cohere, prefill graphs": "cohere_prefill_graph",
    "Kimi-Linear, prefill graphs": "kimi_linear_prefill_graph",
}
# of the table of times, the arm of each column
TIMES_FILE = "bench-quiet-0.5.23.jsonl"
STOCK, PATCHED, KERNEL = (f"breakable graphs, {name}" for name in ("stock", "patched", "patched, delta net inside"))
TIMES = ("no prefill graphs", STOCK, PATCHED, KERNEL)
Found = dict[str, Any]


class Row(NamedTuple):
    case: str
    release: str
    of: str
    stock: str
    patched: str
    note: str


def table_with(column: str) -> list[list[str]]:
    """The cells of the one table whose header has this column, without its first two lines."""
    lines = README.splitlines()
    (header,) = (
        number
        for number, (line, below) in enumerate(itertools.pairwise(lines))
        if below.startswith("|---") and f" {column} |" in line
    )
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[header + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


# an en dash
NOT_RUN = "\u2013"
CELL = re.compile(r"(.+) → \*\*(.+)\*\*(?: \((\d)\))?")
(RELEASES,) = (line.split(" | ")[2:] for line in README.splitlines() if line.startswith("| what is asked | of |"))
RELEASES = [release.strip(" |") for release in RELEASES]


def parts(pattern: re.Pattern[str], text: str) -> tuple[Any, ...]:
    found = pattern.fullmatch(text)
    assert found, text
    return found.groups()


def rows() -> Iterator[Row]:
    for name, of, *cells in table_with(NEWEST):
        label, note = parts(re.compile(r"(.+?)(?: \((\d)\))?"), name)
        for release, cell in zip(RELEASES, cells, strict=True):
            stock, patched, own = parts(CELL, cell) if cell != NOT_RUN else (NOT_RUN, NOT_RUN, None)
            yield Row(CASES[label], release, of, stock, patched, own or note or "")


def newest() -> dict[tuple[str, str], dict[str, list[Found]]]:
    """By release and case, the servers of each arm in the newest file that has the case; special settings apart."""
    files = [json.loads(file.read_text()) for file in RESULTS.glob("verify-*.json") if "no-dynamo" not in file.name]
    found: dict[tuple[str, str], dict[str, list[Found]]] = {}
    for file in sorted(files, key=lambda file: file["date"]):
        of_file: dict[tuple[str, str], dict[str, list[Found]]] = {}
        # one that was cut off shows nothing
        for server in (server for server in file["servers"] if not server["ending"].startswith("interrupted")):
            arms = of_file.setdefault((file["sglang"], server["case"]), {})
            arms.setdefault(server["arm"], []).append(server)
        found |= of_file
    return found


RECORDED = newest()


def said_of(server: Found) -> str:
    """Word one server as the table does."""
    if "before it served" in server["why"]:
        return "no start"
    if "proves nothing" in server["why"]:
        return "no replay"
    if "while it served" in server["why"]:
        return f"{server['equal']}, dies" if server["equal"] else "dies"
    return str(server["equal"])


def test_the_table_begins_with_the_newest_release() -> None:
    assert RELEASES[0] == NEWEST and sorted(RELEASES, key=ALL_RELEASES.index, reverse=True) == RELEASES


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: f"{row.release}-{row.case}")
def test_the_table_says_what_was_recorded(row: Row) -> None:
    arms = RECORDED.get((row.release, row.case), {})
    for arm, said in (("stock", row.stock), ("patched", row.patched)):
        assert {said_of(server) for server in arms.get(arm, ())} == ({said} - {NOT_RUN})
    assert {str(server["requests"]) for server in arms.get("patched", ())} <= {row.of}


def test_no_recorded_failure_is_left_out() -> None:
    told = {(row.release, row.case) for row in rows()}
    bad = {
        place
        for place, arms in RECORDED.items()
        if any(
            said_of(server) != str(server["requests"]) for arm in ("stock", "patched") for server in arms.get(arm, ())
        )
    }
    assert bad <= told, sorted(bad - told)


def test_what_is_not_all_equal_has_a_note_and_is_what_stock_gives() -> None:
    worth = {"dies": -1, "no start": -1, "no replay": -1}
    for row in rows():
        if row.patched in (row.of, NOT_RUN):
            continue
        assert row.note, row
        if row.stock != row.patched:
            # stock does not start: nothing to compare with
            assert row.note == "5" and row.stock == "no start" and int(row.patched) > worth[row.stock]
        elif row.note in ("1", "5"):
            arms = RECORDED[row.release, row.case]
            assert arms["stock"][0]["not_equal"] == arms["patched"][0]["not_equal"], row
        else:
            assert row.note in ("3", "4")


def test_releases_with_a_gpu_run_are_named() -> None:
    assert "On a GPU, in six releases so far." in README and len(RELEASES) == 6
    assert set(RELEASES) == {release for release, _ in RECORDED}


def test_the_runs_are_of_the_commits_and_gpus_that_are_named() -> None:
    text = " ".join(README.split())
    said = re.search(
        r"on (\S+): 0\.5\.23 with the fixes of commit (\w+) on an (H\d+), the others .* (\w+) on (H\d+)s\.", text
    )
    assert said
    date, newest_commit, newest_gpu, commit, gpu = said.groups()
    for release in RELEASES:
        found = json.loads((RESULTS / f"verify-{release}.json").read_text())
        wanted = (newest_commit, newest_gpu) if release == NEWEST else (commit, gpu)
        assert found["commit"] == wanted[0] and found["gpu"].split()[1] == wanted[1], release
        assert found["date"].startswith(date)


def medians(measured: str) -> dict[tuple[str, int], float]:
    lines = [json.loads(line) for line in (RESULTS / TIMES_FILE).read_text().splitlines()]
    return {(line["arm"], line["tokens"]): line["median"] for line in lines if line.get("measured") == measured}


def test_times_are_the_recorded_medians() -> None:
    table = table_with("no prefill graphs")
    assert len(table) == 4
    first = medians("time to first token")
    for tokens, *cells in table:
        wanted = [f"{first[arm, int(tokens.replace(',', ''))]:.1f}" for arm in TIMES]
        assert [cell.strip("*") for cell in cells] == wanted, tokens


def test_throughputs_are_the_recorded_medians() -> None:
    of_arm = {arm: median for (arm, _), median in medians("output throughput").items()}
    kernel, patched = (of_arm[arm] / of_arm[STOCK] for arm in (KERNEL, PATCHED))
    assert f"stock with our kernel ({kernel:.2f}), and {patched:.2f} of it without" in " ".join(README.split())


def accuracies(release: str, arm: str) -> set[str]:
    (of_arm,) = (
        server
        for server in json.loads((RESULTS / f"accuracy-{release}.json").read_text())["servers"]
        if server["arm"] == arm and server["phases"]
    )
    return {f"{100 * phase['accuracy']:.1f} %" for phase in of_arm["phases"].values()}


@pytest.mark.parametrize("row", table_with("replay refused"), ids=lambda row: row[0])
def test_accuracies_are_the_recorded_ones(row: list[str]) -> None:
    release = row[0].partition(" ")[0]
    stock, patched, refused = (cell.strip("*") for cell in row[1:4])
    if "dies" not in stock:
        assert accuracies(release, "stock") == {stock}
    assert accuracies(release, "patched") == {patched} and accuracies(release, "reference") == {refused}
