# SPDX-License-Identifier: Apache-2.0
"""The statements of the README and docs/evidence.md about answers and times, against the recorded files."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source import served, verdicts
from tests import processes
from tests.wheels import NEWEST
from tests.wheels import RELEASES as ALL_RELEASES

README = (processes.REPOSITORY / "README.md").read_text()
EVIDENCE = (processes.REPOSITORY / "docs" / "evidence.md").read_text()
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
# of the table of times: the columns, and the file, case and measurement of each line
TIMES = ("stock without prefill graphs", "stock", "stock again", "bcg_fixes")
LARGE, LARGE_IMAGES = (f"serving-{name}qwen3_5_35b_a3b-0.5.23.jsonl" for name in ("", "images-"))
LOADS = (("chat-like", 1024), ("prefill-heavy", 4096))
ALONE, BESIDE, IMAGES = (f"serving-{name}qwen3_5_4b-0.5.23.jsonl" for name in ("again-", "", "images-"))
MEASURED = (
    *((ALONE, "first token", tokens, 1) for tokens in (253, 1021, 4093, 8189)),
    *((IMAGES, "first token, with an image", tokens, 1) for tokens in (509, 1021)),
    (BESIDE, "chat-like", 1024, 64),
    *((BESIDE, "prefill-heavy", 4096, clients) for clients in (16, 64)),
)
Found = dict[str, Any]
Arms = dict[str, list[Found]]


class Row(NamedTuple):
    case: str
    release: str
    of: str
    stock: str
    patched: str
    note: str


def table_with(column: str) -> list[list[str]]:
    """The cells of the one table whose header has this column, without its first two lines."""
    lines = EVIDENCE.splitlines()
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
# of each table of answers, its releases
TABLES = [
    [release.strip(" |") for release in line.split(" | ")[2:]]
    for line in EVIDENCE.splitlines()
    if line.startswith("| what is asked | of |")
]
RELEASES = [release for table in TABLES for release in table]


def parts(pattern: re.Pattern[str], text: str) -> tuple[Any, ...]:
    found = pattern.fullmatch(text)
    assert found, text
    return found.groups()


def rows() -> Iterator[Row]:
    for releases in TABLES:
        for name, of, *cells in table_with(releases[0]):
            label, note = parts(re.compile(r"(.+?)(?: \((\d)\))?"), name)
            for release, cell in zip(releases, cells, strict=True):
                stock, patched, own = parts(CELL, cell) if cell != NOT_RUN else (NOT_RUN, NOT_RUN, None)
                yield Row(CASES[label], release, of, stock, patched, own or note or "")


def files_of_the_table() -> list[pathlib.Path]:
    """List what was run whole, and what was run again where SGLang lacked a package."""
    return [RESULTS / f"verify-{release}.json" for release in RELEASES] + sorted(RESULTS.glob("verify-again-*.json"))


def newest() -> dict[tuple[str, str], Arms]:
    """Servers of each arm in the newest file that has the case, by release and case."""
    files = [json.loads(file.read_text()) for file in files_of_the_table()]
    found: dict[tuple[str, str], Arms] = {}
    for file in sorted(files, key=lambda file: file["date"]):
        of_file: dict[tuple[str, str], Arms] = {}
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
    assert RELEASES[0] == NEWEST
    for table in TABLES:
        assert sorted(table, key=ALL_RELEASES.index, reverse=True) == table


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: f"{row.release}-{row.case}")
def test_the_table_says_what_was_recorded(row: Row) -> None:
    arms = RECORDED.get((row.release, row.case), {})
    for arm, said in (("stock", row.stock), ("patched", row.patched)):
        found = {said_of(server) for server in arms.get(arm, ())}
        # of two servers the table has the worse
        assert said == (min(found, key=int) if all(map(str.isdigit, found)) and found else "".join(found) or NOT_RUN)
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


def is_right_and_replays_nothing(arms: Arms) -> None:
    (patched,), (stock,) = arms["patched"], arms["stock"]
    prefill = patched["counts"]["prefill"]
    assert patched["equal"] == patched["requests"] and not prefill["replayed"]
    assert prefill["reasons"] == {"fix vlm_embeds_dropped": prefill["refused"]}
    assert any("Boolean value of Tensor" in line for line in stock["log_tail"])


# what else than stock's answers a note tells
NOTES = {"6": is_right_and_replays_nothing}


def test_what_is_not_all_equal_has_a_note_and_is_what_stock_gives() -> None:
    worth = {"dies": -1, "no start": -1, "no replay": -1}
    for row in rows():
        if row.patched in (row.of, NOT_RUN):
            continue
        assert row.note, row
        if row.note == "3":
            # the graph's kernels are not those of eager prefill, and the self-check knows by how much they may differ
            patched, stock = (
                min(RECORDED[row.release, row.case][arm], key=lambda server: int(server["equal"]))
                for arm in ("patched", "stock")
            )
            assert patched["selfcheck"]["verdict"] == "right" and patched["counts"]["prefill"]["replayed"]
            asked = patched["requests"]
            assert f"gives {asked - stock['equal']} of {asked} another token" in " ".join(EVIDENCE.split())
            assert f"(fixes/kda_raw_beta.md) {asked - patched['equal']}." in EVIDENCE
            assert patched["equal"] > stock["equal"]
            continue
        if row.note in NOTES:
            NOTES[row.note](RECORDED[row.release, row.case])
            continue
        if row.stock != row.patched:
            # stock does not start: nothing to compare with
            assert row.note == "5" and row.stock == "no start" and int(row.patched) > worth[row.stock]
        elif row.note in ("1", "5"):
            arms = RECORDED[row.release, row.case]
            assert arms["stock"][0]["not_equal"] == arms["patched"][0]["not_equal"], row
        else:
            assert row.note == "4"


def test_the_forms_of_kernels_explain_what_one_server_answered_otherwise() -> None:
    before = json.loads((RESULTS / "verify-again-0.5.16.json").read_text())["servers"]
    (red,) = (row for row in before if (row["case"], row["arm"]) == (CASES["Kimi-Linear, prefill graphs"], "patched"))
    servers = json.loads((RESULTS / "kimi_forms-0.5.16.json").read_text())["servers"]
    requests = [[(row["part"], row["length"], row["place"]) for row in each["requests"]] for each in servers.values()]
    places = [int(re.findall(r"token (\d+)", row["difference"])[0]) for row in red["not_equal"]]
    of_red = [(row["part"], row["length"], place) for row, place in zip(red["not_equal"], places, strict=True)]
    assert len(of_red) == 21 and all(each in ([], of_red) for each in requests) and requests.count(of_red) == 6
    for number in range(1, 5):
        assert servers[f"form {number} patched-1"] == servers[f"form {number} reference-1"]
    assert "the one patched server gave 21 of 99 another token" in " ".join(EVIDENCE.split())


def test_releases_with_a_gpu_run_are_named() -> None:
    assert "On a GPU, in twelve releases so far. On the other four," in EVIDENCE
    assert len(set(RELEASES)) == 12 == len(ALL_RELEASES) - 4
    assert set(RELEASES) == {release for release, _ in RECORDED}


def test_every_run_is_of_the_commit_the_day_and_the_gpu_that_are_named() -> None:
    said = re.findall(r"On (\S+) the fixes of commit (\w+) ran on (?:an )?(H\d+)s? in ", " ".join(EVIDENCE.split()))
    assert len(said) == len(TABLES)
    again = re.search(r"later that day those of (\w+) ran .*? on (\S+) with", " ".join(EVIDENCE.split()))
    assert again
    for file in files_of_the_table():
        found = json.loads(file.read_text())
        (run,) = (run for run, releases in zip(said, TABLES, strict=True) if found["sglang"] in releases)
        if (found["commit"], found["sglang"]) == again.groups():
            run = (run[0], again.group(1), run[2])
        assert (found["date"][:10], found["commit"], found["gpu"].split()[1]) == run, file.name


def test_a_later_commit_gave_the_same_table() -> None:
    said = re.search(r"later that day those of (\w+) gave the same in (\S+), but for", " ".join(EVIDENCE.split()))
    assert said and said.group(2) == "0.5.17"
    for file in sorted(RESULTS.glob("reverify-*.json")):
        found = json.loads(file.read_text())
        assert found["commit"] == said.group(1)
        # SGLang 0.5.17 starts no speculation without it
        lacking = {each["case"] for each in found["servers"] if "No module named 'deep_gemm'" in each["why"]}
        assert not lacking or found["sglang"] == "0.5.17", lacking
        for server in found["servers"]:
            if server["arm"] in ("stock", "patched") and server["case"] not in lacking:
                before = RECORDED[found["sglang"], server["case"]][server["arm"]]
                assert said_of(server) in {said_of(each) for each in before}, (file.name, server["case"])


def rounds_of(file: str, measured: str, tokens: int, clients: int, arm: str) -> list[float]:
    lines = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()[1:]]
    (row,) = (
        line
        for line in lines
        if (line["measured"], line["tokens"], line["sequences"], line["arm"]) == (measured, tokens, clients, arm)
    )
    assert row["verdict"] == "green" and len(row["details"]["rounds"]) == 5
    return sorted(taken[measured] for taken in row["details"]["rounds"])


def test_times_are_the_recorded_medians() -> None:
    table = table_with("stock again")
    for (label, *cells), (file, measured, tokens, clients) in zip(table, MEASURED, strict=True):
        medians = [rounds_of(file, measured, tokens, clients, arm)[2] for arm in TIMES]
        form = "{:.1f}" if clients == 1 else "{:,.0f}"
        assert [cell.strip("*") for cell in cells] == [form.format(median) for median in medians], label
        assert f"{tokens:,}" in label and (clients == 1 or f"{clients} clients" in label)
        assert ("image" in label) == ("image" in measured)


def test_the_kernel_is_what_makes_first_tokens_earlier() -> None:
    for file, measured, tokens, clients in MEASURED[:4]:
        ours, stock = (rounds_of(file, measured, tokens, clients, arm)[2] for arm in ("bcg_fixes", "stock"))
        arms = ("stock", "stock again")
        chance = [time for arm in arms for time in rounds_of(file, measured, tokens, clients, arm)]
        without = rounds_of(file, measured, tokens, clients, "bcg_fixes without its kernels")[2]
        assert ours < stock and min(chance) <= without <= max(chance), (measured, tokens)


def test_where_nothing_is_claimed_rounds_differ_by_more_than_servers() -> None:
    for file in (ALONE, BESIDE):
        every = [rounds_of(file, "chat-like", 1024, 16, arm) for arm in TIMES]
        medians = [rounds[2] for rounds in every]
        assert max(medians) - min(medians) < max(rounds[-1] - rounds[0] for rounds in every)


def test_the_times_of_35b_a3b_are_the_recorded_medians() -> None:
    text = " ".join(EVIDENCE.split())
    for tokens in (253, 1021, 4093):
        ours, stock, again = (rounds_of(LARGE, "first token", tokens, 1, arm)[2] for arm in (TIMES[3], *TIMES[1:3]))
        assert re.search(
            rf"of {tokens:,}( tokens comes)? after \*\*{ours:.1f}\*\*( ms)? \((stock )?{stock:.1f} and", text
        )
        assert f"{stock:.1f} and {again:.1f})" in text and ours < min(stock, again)
    page = (RESULTS / "README.md").read_text()
    alone, images = (
        [json.loads(line) for line in (RESULTS / file).read_text().splitlines()[1:]] for file in (LARGE, LARGE_IMAGES)
    )
    for line in alone + [line for line in images if line["measured"] == "first token, with an image"]:
        form = "{:.1f}" if line["sequences"] == 1 else "{:,.0f}"
        assert form.format(line["median"]) in page, line


def test_where_35b_a3b_gains_nothing_the_rounds_of_all_servers_overlap() -> None:
    cases = [("first token", 8189, 1)] + [(name, size, count) for name, size in LOADS for count in (16, 64)]
    for case in cases:
        ours, *stock = (rounds_of(LARGE, *case, arm) for arm in (TIMES[3], *TIMES[1:3]))
        assert all(ours[0] <= rounds[-1] and rounds[0] <= ours[-1] for rounds in stock), case


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


def range_of(server: dict[str, Any], phases: list[str]) -> str:
    shares = sorted({f"{100 * server['phases'][name]['accuracy']:.1f}" for name in phases})
    return f"{' to '.join(dict.fromkeys((shares[0], shares[-1])))} %"


@pytest.mark.parametrize("row", table_with("no replay allowed"), ids=lambda row: row[0])
def test_accuracies_with_mamba2_are_the_recorded_ones(row: list[str]) -> None:
    release, _, cache = row[0].partition(", ")
    found = json.loads((RESULTS / f"accuracy-mamba2-{release}.json").read_text())["servers"]
    servers = {server["arm"]: server for server in found}
    phases = [name for name in servers["stock"]["phases"] if name.startswith("warm") == (cache == "warm")]
    for arm, cell in zip(("stock", "eager", "kernels", "reference"), row[1:5], strict=True):
        assert cell.strip("*") == range_of(servers[arm], phases)
    differing = sum(servers["kernels"]["phases"][name]["differs_from"]["reference"] for name in phases)
    assert row[5] == f"**{differing}** of {len(phases)} x 1,319"
    assert servers["kernels"]["applied"] and not servers["stock"]["applied"] and not servers["eager"]["applied"]


@pytest.mark.parametrize("row", table_with("with breaks"), ids=lambda row: row[0])
def test_accuracies_of_models_without_graphs_are_the_recorded_ones(row: list[str]) -> None:
    model, release, *caches = row[0].split(", ")
    file = RESULTS / f"accuracy-{model.split()[0].lower()}-{release}.json"
    servers = {server["arm"]: server for server in json.loads(file.read_text())["servers"]}
    phases = [name for name in servers["stock"]["phases"] if caches in ([], ["warm" if "warm" in name else "cold"])]
    for arm, cell in zip(("stock", "patched", "kernels", "reference"), row[1:5], strict=True):
        assert cell.strip("*") == range_of(servers[arm], phases)
    differing = [servers["kernels"]["phases"][name]["differs_from"]["reference"] for name in phases]
    assert row[5] == f"**{sum(differing)}** of {len(differing)} x 1,319"
    # stock replays nothing, and the others nearly everything
    assert not servers["stock"]["counts"].get("prefill") and not servers["stock"]["applied"]
    assert servers["kernels"]["counts"]["prefill"]["replayed"] > 1900


# of the table of what breaks: the architectures of each line that are in the recorded tables
BREAKING = {
    "Falcon-H1": ["FalconH1ForCausalLM"],
    "Gemma 3n, text": ["Gemma3nForCausalLM"],
    "MiniCPM-SALA": ["MiniCPMSALAForCausalLM"],
    "Phi 1 and 2": ["PhiForCausalLM"],
    "Persimmon": ["PersimmonForCausalLM"],
    "Sarvam-MLA": ["SarvamMLAForCausalLM"],
    "Kimi-Linear, Kimi K3": ["KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"],
    "GLM-Image": ["GlmImageForConditionalGeneration"],
    "Dots3": ["Dots3NoteForCausalLM"],
}
DEFAULT = {served.BY_DEFAULT: "yes", served.IF_ASKED_FOR: "if graphs are asked for"}


def lines_below(header: str, text: str) -> list[list[str]]:
    _, _, rest = text.partition(header)
    rows = itertools.takewhile(lambda line: line.startswith("|"), rest.splitlines()[2:])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_readme_names_what_breaks_on_the_newest_release_and_by_what_it_is_fixed() -> None:
    assert f"## What breaks on {NEWEST} today" in README
    shown = lines_below("| model | with default flags |", README)
    page = (processes.REPOSITORY / "docs" / "graphs_by_model.md").read_text()
    recorded = {name: fixes for name, _, fixes in lines_below("| architecture | stock | the plugin's fix |", page)}
    affected = {fix for fix, verdict in verdicts.recorded()[NEWEST].items() if verdict == "affected"}
    for model, default, _, fixes in shown:
        named = set(re.findall(r"\[(\w+)\]", fixes))
        assert named <= affected, model
        for architecture in BREAKING.get(model, ()):
            assert DEFAULT[served.graphs(NEWEST, [architecture])] == default, model
            assert named == set(re.findall(r"\[(\w+)\]", recorded[architecture])), model
    named_models = {name for names in BREAKING.values() for name in names} | {"KimiK3LinearForCausalLM"}
    assert set(BREAKING) < {row[0] for row in shown} and set(recorded) == named_models


def test_the_readme_fits_two_screens_and_its_times_are_those_of_the_evidence() -> None:
    table = [line for line in README.splitlines() if line.startswith("|") and line.endswith("** |")]
    assert len(table) == 5 and set(table) <= set(EVIDENCE.splitlines())
    assert len(README.splitlines()) <= 100


def test_the_readme_shows_doctors_answer_as_its_page_does() -> None:
    (example,) = re.findall(r"^```\n(\$ bcg-fixes doctor .+?)^```$", README, re.MULTILINE | re.DOTALL)
    assert NEWEST in example
    assert example in (processes.REPOSITORY / "docs" / "launches.md").read_text()


def test_the_readme_shows_the_log_line_of_its_page() -> None:
    (line,) = (line for line in README.splitlines() if line.startswith("bcg-fixes 0.1.0: sglang "))
    assert line in (processes.REPOSITORY / "docs" / "status.md").read_text().splitlines() and len(line) <= 200


def test_the_readme_counts_what_has_no_fix() -> None:
    without = [fix.id for fix in registry.discover().fixes if not fix.patches]
    assert len(without) == 5 and "Five known defects have no fix" in README
