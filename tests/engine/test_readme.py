# SPDX-License-Identifier: Apache-2.0
"""Claims of the README and docs/evidence.md against the recorded files; their tables are generated from these."""

from __future__ import annotations

import itertools
import json
import re

import evidence_page as page

from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source import served, verdicts
from tests import processes
from tests.wheels import NEWEST

README = (processes.REPOSITORY / "README.md").read_text()
LOADS = (("chat-like", 1024), ("prefill-heavy", 4096))


def test_the_forms_of_kernels_explain_what_one_server_answered_otherwise() -> None:
    before = json.loads((page.RESULTS / "verify-again-0.5.16.json").read_text())["servers"]
    (red,) = (row for row in before if (row["case"], row["arm"]) == ("kimi_linear_prefill_graph", "patched"))
    servers = json.loads((page.RESULTS / "kimi_forms-0.5.16.json").read_text())["servers"]
    requests = [[(row["part"], row["length"], row["place"]) for row in each["requests"]] for each in servers.values()]
    places = [int(re.findall(r"token (\d+)", row["difference"])[0]) for row in red["not_equal"]]
    of_red = [(row["part"], row["length"], place) for row, place in zip(red["not_equal"], places, strict=True)]
    assert len(of_red) == 21 and all(each in ([], of_red) for each in requests) and requests.count(of_red) == 6
    for number in range(1, 5):
        assert servers[f"form {number} patched-1"] == servers[f"form {number} reference-1"]


def test_the_kernel_is_what_makes_first_tokens_earlier() -> None:
    for line in page.MEASURED[:4]:
        assert line.file == page.ALONE
        ours, stock = (line.rounds(arm)[2] for arm in (page.OURS, page.STOCK))
        chance = [time for arm in (page.STOCK, page.AGAIN) for time in line.rounds(arm)]
        without = line.rounds("bcg_fixes without its kernels")[2]
        assert ours < stock and min(chance) <= without <= max(chance), line.label


def test_first_tokens_come_sooner_where_a_number_is_bold() -> None:
    for line in (line for line in page.MEASURED if line.clients == 1):
        assert line.rounds(page.OURS)[2] < min(line.rounds(arm)[2] for arm in (page.STOCK, page.AGAIN)), line.label


def test_where_nothing_is_claimed_rounds_differ_by_more_than_servers() -> None:
    for file in (page.ALONE, page.BESIDE):
        every = [page.Measured(file, "chat-like", 1024, 16).rounds(arm) for arm in page.ARMS]
        medians = [rounds[2] for rounds in every]
        assert max(medians) - min(medians) < max(rounds[-1] - rounds[0] for rounds in every)


def test_where_35b_a3b_gains_nothing_the_rounds_of_all_servers_overlap() -> None:
    cases = [("first token", 8189, 1)] + [(name, size, count) for name, size in LOADS for count in (16, 64)]
    for case in cases:
        ours, *stock = (page.Measured(page.LARGE, *case).rounds(arm) for arm in (page.OURS, page.STOCK, page.AGAIN))
        assert all(ours[0] <= rounds[-1] and rounds[0] <= ours[-1] for rounds in stock), case


def test_six_runs_of_each_trained_model_are_counted() -> None:
    for release in page.WITH_FIXES:
        found = page.servers(release)
        assert len(found[page.PATCHED]["phases"]) == 6
        # one number stands for all six
        for arm in (page.PATCHED, page.REFUSED):
            assert " to " not in page.right(found[arm], list(found[arm]["phases"]))


def test_stock_that_never_served_is_not_said_to_die_at_a_replay() -> None:
    ends = {"0.5.12.post1": "dies", "0.5.13.post1": "no start"}
    stock = {release: page.servers(release)[page.STOCK] for release in ends}
    assert {release: page.right(server, list(server["phases"])) for release, server in stock.items()} == ends
    replays = {release: server["counts"].get("prefill", {}).get("replayed", 0) for release, server in stock.items()}
    assert replays == {"0.5.12.post1": 1, "0.5.13.post1": 0}


def test_mamba2_had_our_kernel_and_stock_no_fix() -> None:
    for release in page.WARM:
        found = page.servers(f"mamba2-{release}")
        assert len(page.warm(found)) == 4 and found[page.KERNELS]["applied"]
        assert not found[page.STOCK]["applied"] and not found[page.EAGER]["applied"]


def test_stock_granite_replays_nothing_and_the_others_nearly_everything() -> None:
    found = page.servers("granite-0.5.17")
    assert len(page.warm(found)) == 4
    assert not found[page.STOCK]["counts"].get("prefill") and not found[page.STOCK]["applied"]
    assert found[page.KERNELS]["counts"]["prefill"]["replayed"] > 1900


# of the table of what breaks: the architectures of each line that are in the recorded tables
BREAKING = {
    "Falcon-H1": ["FalconH1ForCausalLM"],
    "Gemma 3n, text": ["Gemma3nForCausalLM"],
    "MiniCPM-SALA": ["MiniCPMSALAForCausalLM"],
    "Phi 1 and 2, Persimmon": ["PhiForCausalLM", "PersimmonForCausalLM"],
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
    text = (processes.REPOSITORY / "docs" / "graphs_by_model.md").read_text()
    recorded = {name: fixes for name, _, fixes in lines_below("| architecture | stock | the plugin's fix |", text)}
    affected = {fix for fix, verdict in verdicts.recorded()[NEWEST].items() if verdict == "affected"}
    for model, default, _, fixes in shown:
        named = set(re.findall(r"\[(\w+)\]", fixes))
        assert named <= affected, model
        for architecture in BREAKING.get(model, ()):
            assert DEFAULT[served.graphs(NEWEST, [architecture])] == default, model
            assert named == set(re.findall(r"\[(\w+)\]", recorded[architecture])), model
    named_models = {name for names in BREAKING.values() for name in names} | {"KimiK3LinearForCausalLM"}
    assert set(BREAKING) < {row[0] for row in shown} and set(recorded) == named_models


def test_the_readme_fits_two_screens() -> None:
    assert len(README.splitlines()) <= 110


def test_the_readme_shows_doctors_answer_as_its_page_does() -> None:
    (example,) = re.findall(r"^```\n(\$ bcg-fixes doctor .+?)^```$", README, re.MULTILINE | re.DOTALL)
    assert NEWEST in example
    assert example in (processes.REPOSITORY / "docs" / "doctor.md").read_text()


def test_the_readme_shows_the_log_line_of_its_page() -> None:
    (line,) = (line for line in README.splitlines() if line.startswith("bcg-fixes 0.1.0: sglang "))
    assert line in (processes.REPOSITORY / "docs" / "selfcheck.md").read_text().splitlines() and len(line) <= 200


def test_the_readme_counts_what_has_no_fix() -> None:
    without = [fix.id for fix in registry.discover().fixes if not fix.patches]
    assert len(without) == 7 and "Seven known defects have no fix" in README
