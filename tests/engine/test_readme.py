# SPDX-License-Identifier: Apache-2.0
"""The statements of the README and docs/evidence.md about times and accuracy, against the recorded files."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source import served, verdicts
from tests import processes
from tests.wheels import NEWEST

README = (processes.REPOSITORY / "README.md").read_text()
EVIDENCE = (processes.REPOSITORY / "docs" / "evidence.md").read_text()
RESULTS = processes.REPOSITORY / "benchmarks" / "results"
# of the table of times: the columns, and the file, case and measurement of each line
TIMES = ("stock without prefill graphs", "stock", "stock again", "bcg_fixes")
LARGE = "serving-qwen3_5_35b_a3b-0.5.23.jsonl"
LOADS = (("chat-like", 1024), ("prefill-heavy", 4096))
DENSE, INSIDE = "attention-qwen3_1_7b-0.5.23.jsonl", "bcg_fixes with attention inside"
ALONE, BESIDE, IMAGES = (f"serving-{name}qwen3_5_4b-0.5.23.jsonl" for name in ("again-", "", "images-"))
MEASURED = (
    *((ALONE, "first token", tokens, 1) for tokens in (253, 1021, 4093, 8189)),
    *((IMAGES, "first token, with an image", tokens, 1) for tokens in (509, 1021)),
    (DENSE, "first token", 61, 1),
    (DENSE, "first token behind 4,096 cached", 61, 1),
    (BESIDE, "chat-like", 1024, 64),
    *((BESIDE, "prefill-heavy", 4096, clients) for clients in (16, 64)),
)


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


def test_the_forms_of_kernels_explain_what_one_server_answered_otherwise() -> None:
    before = json.loads((RESULTS / "verify-again-0.5.16.json").read_text())["servers"]
    (red,) = (row for row in before if (row["case"], row["arm"]) == ("kimi_linear_prefill_graph", "patched"))
    servers = json.loads((RESULTS / "kimi_forms-0.5.16.json").read_text())["servers"]
    requests = [[(row["part"], row["length"], row["place"]) for row in each["requests"]] for each in servers.values()]
    places = [int(re.findall(r"token (\d+)", row["difference"])[0]) for row in red["not_equal"]]
    of_red = [(row["part"], row["length"], place) for row, place in zip(red["not_equal"], places, strict=True)]
    assert len(of_red) == 21 and all(each in ([], of_red) for each in requests) and requests.count(of_red) == 6
    for number in range(1, 5):
        assert servers[f"form {number} patched-1"] == servers[f"form {number} reference-1"]
    assert "the one patched server gave 21 of 99 another token" in " ".join(EVIDENCE.split())


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
        # by default since then
        arms = (*TIMES[:-1], INSIDE) if file == DENSE else TIMES
        medians = [rounds_of(file, measured, tokens, clients, arm)[2] for arm in arms]
        form = "{:.1f}" if clients == 1 else "{:,.0f}"
        assert [cell.strip("*") for cell in cells] == [form.format(median) for median in medians], label
        assert f"{tokens:,}" in label and (clients == 1 or f"{clients} clients" in label)
        assert ("image" in label) == ("image" in measured) and ("1.7B" in label) == (file == DENSE)
        assert ("behind 4,096" in label) == ("behind 4,096" in measured)


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


def test_where_35b_a3b_gains_nothing_the_rounds_of_all_servers_overlap() -> None:
    cases = [("first token", 8189, 1)] + [(name, size, count) for name, size in LOADS for count in (16, 64)]
    for case in cases:
        ours, *stock = (rounds_of(LARGE, *case, arm) for arm in (TIMES[3], *TIMES[1:3]))
        assert all(ours[0] <= rounds[-1] and rounds[0] <= ours[-1] for rounds in stock), case


def servers_of(release: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"accuracy-{release}.json").read_text())["servers"]  # type: ignore[no-any-return]


def accuracies(release: str, arm: str) -> set[str]:
    (of_arm,) = (server for server in servers_of(release) if server["arm"] == arm and server["phases"])
    return {f"{100 * phase['accuracy']:.1f} %" for phase in of_arm["phases"].values()}


@pytest.mark.parametrize("row", table_with("replay refused"), ids=lambda row: row[0])
def test_accuracies_are_the_recorded_ones(row: list[str]) -> None:
    release = row[0].partition(" ")[0]
    stock, patched, refused, differing = (cell.strip("*") for cell in row[1:5])
    if "dies" not in stock:
        assert accuracies(release, "stock") == {stock}
    assert accuracies(release, "patched") == {patched} and accuracies(release, "reference") == {refused}
    (server,) = (each for each in servers_of(release) if each["arm"] == "patched" and each["phases"])
    found = [phase["differs_from"]["reference"] for phase in server["phases"].values()]
    assert len(found) == 6 and int(differing) == sum(found)


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
    assert row[5] == f"**{differing}**" and len(phases) == (4 if cache == "warm" else 2)
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
    assert row[5] == f"**{sum(differing)}**" and len(differing) == {(): 6, ("cold",): 2, ("warm",): 4}[tuple(caches)]
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
    assert len(without) == 7 and "Seven known defects have no fix" in README
