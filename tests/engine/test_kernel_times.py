# SPDX-License-Identifier: Apache-2.0
"""The tables of times in docs/kernels.md are what was recorded."""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import sanitizer
from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.kernels.mamba2_extend import Shape, cuda, triton
from sglang_bcg_fixes.lab.bench import mamba2_layer
from tests import processes

PAGE = (processes.REPOSITORY / "docs" / "kernels.md").read_text()
SECTION = " ".join(PAGE.partition("## Mamba2")[2].partition("## Lightning")[0].split())
RESULTS = processes.REPOSITORY / "benchmarks" / "results"
STEPS = ((256, 1), (1024, 1), (4096, 1), (8192, 1), (8192, 4), (8192, 64), (16384, 1))
SHAPES = {"Nemotron-H-8B": "nemotron_h_8b", "Falcon-H1-7B": "falcon_h1_7b"}
SGLANG, BEFORE, NOW = "sglang, captured", "bcg_fixes triton, captured", "as it is"

Times = dict[tuple[str, int, int], dict[str, float]]


def of_a_layer() -> Times:
    found: Times = {}
    for line in (RESULTS / "bench-0.5.15.post1-mamba2.jsonl").read_text().splitlines()[1:]:
        row: dict[str, Any] = json.loads(line)
        assert row["verdict"] == "green"
        if row["measured"].startswith("device") and row["l2"] == "hot":
            found.setdefault((row["shape"], row["tokens"], row["sequences"]), {})[row["arm"]] = row["median"]
    return found


def of_tunings() -> Times:
    found: Times = {}
    for row in json.loads((RESULTS / "mamba2_tuning.json").read_text())["rows"]:
        # some need more shared memory than there is
        if "layer_us" in row:
            found.setdefault((row["shape"], row["tokens"], row["sequences"]), {})[row["tuning"]] = row["layer_us"]
    return found


def test_the_table_and_its_range_are_recorded() -> None:
    layer, tunings = of_a_layer(), of_tunings()
    lines = PAGE.splitlines()
    for title, shape in SHAPES.items():
        start = next(number for number, line in enumerate(lines) if line.startswith(f"| {title}, SGLang |"))
        rows = (lambda case: layer[case][SGLANG], lambda case: layer[case][BEFORE], lambda case: tunings[case][NOW])
        for line, of in zip(lines[start : start + 3], rows, strict=True):
            cells = [cell.strip(" *") for cell in line.strip("|").split("|")][1:]
            told = {step: cell for step, cell in zip(STEPS, cells, strict=True) if cell}
            assert told == {step: f"{of((shape, *step)):,.0f}" for step in told}, (title, line)
            assert len(told) >= 6
    gains = [layer[case][SGLANG] / each[NOW] for case, each in tunings.items() if case in layer]
    said = re.search(r"It is (\S+) to (\d+) times as fast at the (\d+) points that both have", SECTION)
    assert said and said.groups() == (f"{min(gains):.1f}", f"{max(gains):.0f}", str(len(gains)))
    assert f"Every one of {len(layer)} points is within 1.1 times" in SECTION


def most_of_few(shape: Shape) -> int:
    return max((walk.most_sequences(shape) for walk in triton.tuning_for(shape).few), default=0)


def test_what_the_walks_of_few_sequences_gain_and_cost_is_recorded() -> None:
    alone, too_many = [], []
    for (shape, _, sequences), each in of_tunings().items():
        if "few none" in each:
            share = each[NOW] / each["few none"]
            few = most_of_few(mamba2_layer.SHAPES[shape].of_kernel)
            alone += [share] if sequences == 1 else []
            too_many += [share] if sequences > few else []
    assert len(alone) == 20 and len(too_many) == 13
    assert f"One sequence takes {min(alone):.2f} to {max(alone):.2f} of the time without them." in SECTION
    costs = f"they cost {round(100 * (min(too_many) - 1))} to {round(100 * (max(too_many) - 1))} %"
    assert costs in SECTION


def test_where_products_of_a_chunk_are_computed_once_is_where_it_pays() -> None:
    shares: dict[bool, list[float]] = {}
    for (shape, tokens, _), each in of_tunings().items():
        is_large = mamba2_layer.SHAPES[shape].states == 256
        assert triton.tuning_for(mamba2_layer.SHAPES[shape].of_kernel).relates is is_large
        # the smaller of the two with 256 states has fewer parts that would each compute them
        if not is_large or (shape == "falcon_h1_7b" and tokens >= 1024):
            shares.setdefault(is_large, []).append(each["relates True"] / each["relates False"])
    assert len(shares[True]) == 6 and len(shares[False]) == 21
    low, high, least, most = (of(shares[kind]) for kind in (True, False) for of in (min, max))
    assert f"takes {low:.2f} to {high:.2f} of the time without it with Falcon-H1-7B from 1,024 tokens on" in SECTION
    assert f"and {least:.2f} to {most:.2f} of it with 128 states" in SECTION
    whole = json.loads((RESULTS / "mamba2_tuning.json").read_text())["rows"]
    (row,) = (
        row
        for row in whole
        if (row["shape"], row["tokens"], row["sequences"], row["tuning"]) == ("nemotron_h_8b", 8192, 1, NOW)
    )
    parts = "of Nemotron-H's {layer_us:.0f}, `prepare` takes {prepare_us:.0f}"
    assert parts.format(**row) in SECTION and f"and `advance` {row['advance_us']:.0f}," in SECTION


ARMS = {
    "no prefill graphs": "no prefill graphs",
    "breaks": "breakable graphs, patched",
    "inside": "breakable graphs, patched, linear layers inside",
}
SERVERS = {
    "Granite 4": "granite_4_h_micro",
    "LFM2": "lfm2_1_2b",
    "Ling 2.5": "ling_2_5",
    "Kimi-Linear": "kimi_linear_48b",
}


def test_the_table_of_other_hybrid_families_is_recorded() -> None:
    lines = set(PAGE.partition("## Servers of other hybrid families")[2].splitlines())
    gaps = []
    for title, model in SERVERS.items():
        times: dict[tuple[str, int, int], str] = {}
        for line in (RESULTS / f"bench-0.5.17-{model}.jsonl").read_text().splitlines()[1:]:
            row: dict[str, Any] = json.loads(line)
            if row["arm"] == "breakable graphs, stock":
                # the self-check took its graphs away
                assert row["why"] == "proves nothing: no prefill pass was replayed"
                continue
            assert row["verdict"] == "green"
            times[row["arm"], row["tokens"], row["sequences"]] = (
                f"{row['median']:.1f}" if row["unit"] == "ms" else f"{row['median']:,.0f}"
            )
            gaps.append(row["details"]["answers"]["largest_gap"])
        for name, arm in ARMS.items():
            cells = [times[arm, tokens, 1] for tokens in (253, 1021, 4093, 8189)] + [times[arm, 1021, 16]]
            assert f"| {title}: {name} | {' | '.join(cells)} |" in lines, title
    assert f"within {max(gaps):.2f} of the first logprobs" in PAGE


SERVED = {
    "stock": "stock",
    "stock again": "stock again",
    "graphs turned off": "stock without prefill graphs",
    "`auto`": "bcg_fixes",
}
# of each model: its prompts alone, clients that ask once, and clients that ask four times
FILES = {
    "Granite 4": [f"serving-{run}granite_4_h_micro-0.5.23.jsonl" for run in ("", "again-", "asks-")],
    "LFM2": [f"serving-{run}lfm2_1_2b-0.5.23.jsonl" for run in ("", "", "asks-")],
}
CHANGE = " ".join(hybrids_without_graphs.FIX.section("Change").split())
LENGTHS = (253, 260, 1021, 1025, 4093, 4097, 8189)
CHATS = ("chat-like", 1024, 16)
LOADS = (CHATS, ("chat-like", 1024, 64), ("prefill-heavy", 4096, 16), ("prefill-heavy", 4096, 64))
Served = dict[tuple[str, int, int], dict[str, dict[str, Any]]]


def served(file: str) -> Served:
    found: Served = {}
    for line in (RESULTS / file).read_text().splitlines()[1:]:
        row = json.loads(line)
        if row["median"] is not None:
            found.setdefault((row["measured"], row["tokens"], row["sequences"]), {})[row["arm"]] = row
    return found


def speed(row: dict[str, Any]) -> float:
    return float(row["median"])


def shares_of_the_middle_one(*cases: dict[str, dict[str, Any]], of: Callable[..., float] = speed) -> list[float]:
    found, ours = [], ("bcg_fixes", "bcg_fixes again")
    for case in cases:
        middle = statistics.median(of(row) for arm, row in case.items() if arm not in ours)
        found += [of(case[arm]) / middle for arm in ours if arm in case]
    return found


def test_the_tables_of_servers_as_users_start_them_are_recorded() -> None:
    lines, replayed, of_chats = set(PAGE.splitlines()), [], {}
    for title, files in FILES.items():
        alone, once, four = map(served, files)
        for name, arm in SERVED.items():
            first = [alone[prompt][arm] if (prompt := ("first token", each, 1)) in alone else {} for each in LENGTHS]
            cells = [f"{row['median']:.1f}" if row else "" for row in first]
            assert f"| {title}: {name} | {' | '.join(cells)} |" in lines
            cells = [
                f"{each[load][arm]['median']:,.0f}" if load in each else "" for load in LOADS for each in (once, four)
            ]
            assert f"| {title}: {name} | {' | '.join(cells)} |" in lines
        for (measured, _, _), case in alone.items():
            if measured == "first token" and case[SERVED["`auto`"]]["details"]["prefills"]["eager"] == 0:
                replayed += shares_of_the_middle_one(case)
        of_chats[title] = shares_of_the_middle_one(once[CHATS], four[CHATS])
        for found in (once, four):
            slowest = min(row["median"] for row in found[CHATS].values())
            assert found[CHATS][SERVED["`auto`"]]["median"] == slowest
    behind = [share for shares in of_chats.values() for share in shares]
    assert len(replayed) == 8 and len(behind) == 4
    words = " ".join(PAGE.split())
    assert f"in {min(replayed):.2f} to {max(replayed):.2f} of the time of the middle one" in words
    assert f"at {min(behind):.2f} to {max(behind):.2f} of the middle one" in words
    granite = of_chats["Granite 4"]
    assert f"it gave {min(granite):.2f} to {max(granite):.2f} in the first two runs" in CHANGE


def test_the_table_of_16_clients_is_recorded() -> None:
    runs = ("16-granite_4_h_micro", "16-again-granite_4_h_micro", "16-lfm2_1_2b", "twelve-lfm2_1_2b")
    granite, again, lfm2, twelve = (served(f"serving-{run}-0.5.23.jsonl") for run in runs)
    varied = ("varied", 1024, 16)
    of_granite = (granite[CHATS], again[CHATS], granite[varied], again[varied])
    columns = (*of_granite, lfm2[CHATS], twelve[CHATS], lfm2[varied])
    arms = {**SERVED, "`auto` again": "bcg_fixes again", "the plugin, without graphs": "bcg_fixes without its kernels"}
    for name, arm in arms.items():
        cells = (f"{column[arm]['median']:,.0f}" if arm in column else "" for column in columns)
        assert f"| {name} | {' | '.join(cells)} |" in PAGE

    def rounds(name: str) -> Callable[[dict[str, Any]], float]:
        return lambda row: statistics.median(each[name] for each in row["details"]["rounds"])

    def told(values: list[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f}"

    words = " ".join(PAGE.split())
    of_one_length = [shares_of_the_middle_one(*of_granite[:2]), shares_of_the_middle_one(lfm2[CHATS], twelve[CHATS])]
    of_varied = [shares_of_the_middle_one(*of_granite[2:]), shares_of_the_middle_one(lfm2[varied])]
    said = "Granite gives {} of the middle one without graphs, LFM2 {}. **Where they do not, Granite gives {} times its"
    assert said.format(*map(told, [*of_one_length, of_varied[0]])) in words
    assert f"tokens per second, LFM2 {told(of_varied[1])} times**" in words
    waits = [shares_of_the_middle_one(*some, of=rounds("median_ttft_ms")) for some in (of_granite[2:], (lfm2[varied],))]
    assert "the median first token comes after {} of the time, LFM2's after {}".format(*map(told, waits)) in words
    steps = shares_of_the_middle_one(*columns, of=rounds("median_itl_ms"))
    assert f"time between two tokens is {told(steps)} times as long" in words
    assert f"Granite gave {told(of_varied[0])} times the tokens per second of one without graphs" in CHANGE
    assert f"and {told(of_one_length[0])} in those after them" in CHANGE
    first_runs = shares_of_the_middle_one(*(served(file)[CHATS] for file in FILES["LFM2"][1:]))
    of_lfm2 = told(of_varied[1]), told([*first_runs, *of_one_length[1]])
    assert "gave {} times the tokens per second with varied lengths, and {} with one".format(*of_lfm2) in CHANGE
    prefills = [sum(twelve[CHATS][arm]["details"]["prefills"].values()) for arm in ("bcg_fixes", "stock")]
    assert "needed {} prefills in place of {} in the twelve rounds".format(*prefills) in words


def test_the_table_of_servers_with_our_defaults_is_recorded() -> None:
    file = RESULTS / "serving-default-granite_4_h_micro-0.5.23.jsonl"
    assert json.loads(file.read_text().splitlines()[0])["header"]["flags_of_ours"] == {}
    found = served(file.name)
    arms = ("stock", "stock without prefill graphs", "bcg_fixes", "bcg_fixes again")
    for title, load, form in (
        ("first token of 253 tokens alone, ms", ("first token", 253, 1), "{:.1f}"),
        ("varied lengths, tokens/s", ("varied", 1024, 16), "{:,.0f}"),
    ):
        assert f"| {title} | {' | '.join(form.format(found[load][arm]['median']) for arm in arms)} |" in PAGE
    assert CHATS not in found
    of_sglang, ours = (
        sorted(round(found["first token", 253, 1][arm]["details"]["seconds_to_start"]) for arm in some)
        for some in (arms[:2], arms[2:])
    )
    ready = "Granite was ready after {} and {} s, SGLang's own servers after {} and {} s"
    assert ready.format(*ours, *of_sglang) in " ".join(PAGE.split())


def test_the_table_of_lightning_attention_is_recorded() -> None:
    section = PAGE.partition("## Lightning attention")[2].partition("## Kimi delta attention")[0]
    cells, words = re.sub(r"\*\*", "", section), " ".join(section.split())
    rows = json.loads((RESULTS / "lightning_extend.json").read_text())["times"]
    cases = ((256, 1), (1024, 1), (8192, 1), (16384, 1), (8192, 8), (8192, 64), (256, 64))
    shares: dict[str, list[float]] = {}
    for kind in ("bfloat16", "fp32"):
        of_kind = {
            (row["tokens"], row["sequences"]): row
            for row in rows
            if row["dtype"] == f"torch.{kind.replace('fp', 'float')}"
        }
        for name in ("SGLang's", "seg_la", "triton"):
            title = name if name == "SGLang's" else f"`{name}`"
            assert f"| {kind}, {title} | {' | '.join(f'{of_kind[case][name]:,.0f}' for case in cases)} |" in cells
        shares[kind] = [row["triton"] / row["SGLang's"] for row in of_kind.values()]
    half, wide = shares["bfloat16"], sorted(shares["fp32"])
    faster, slower = [each for each in wide if each < 1], [each for each in wide if each > 1]
    assert len(half) == len(wide) == 15 and len(faster) == 11
    assert f"takes {min(half):.2f} to {max(half):.2f} of the time of SGLang's kernels at all 15 points" in words
    assert (
        f"in fp32 {faster[0]:.2f} to {faster[-1]:.2f} at 11 of 15 and {slower[0]:.2f} to {slower[-1]:.2f} at" in words
    )
    of_one_launch = [row["seg_la"] / row["SGLang's"] for row in rows]
    assert f"takes {min(of_one_launch):.1f} to {max(of_one_launch):.1f} times as long" in words
    assert all(row["seg_la has SGLang's bits"] for row in rows)
    steps = json.loads((RESULTS / "lightning_extend-steps.json").read_text())["steps"]
    assert list(steps.values()) == [{"steps": 12, "faults": []}] * 3


def test_the_table_of_short_convolutions_is_recorded() -> None:
    rows = {
        (row["tokens"], row["sequences"]): row
        for row in json.loads((RESULTS / "short_conv_extend.json").read_text())["times"]
    }
    cases = [rows[case] for case in ((256, 1), (1024, 1), (8192, 1), (16384, 1), (8192, 8), (8192, 64))]
    for name, around in (("SGLang's", ""), ("triton", "**")):
        title = f"`{name}`" if around else name
        cells = " | ".join(f"{around}{row[name]:.0f}{around}" for row in cases)
        assert f"| {title} | {cells} |" in PAGE


def test_the_table_of_kimi_delta_attention_is_recorded() -> None:
    first, now = (
        {(row["tokens"], row["sequences"]): row for row in json.loads((RESULTS / file).read_text())["times"]}
        for file in ("kda_extend-before.json", "kda_extend-times.json")
    )
    cases = ((256, 1), (256, 64), (1024, 1), (8192, 1), (8192, 8), (8192, 64))
    section = PAGE.partition("## Kimi delta attention")[2].partition("## Short convolutions")[0]
    for title, around, of in (
        ("SGLang's", "", lambda case: now[case]["SGLang's"]),
        ("before", "", lambda case: first[case]["triton"]),
        ("`triton`", "**", lambda case: now[case]["triton"]),
    ):
        cells = " | ".join(f"{around}{of(case):,.0f}{around}" for case in cases)
        assert f"| {title} | {cells} |" in section


OF_HEADS = {
    "16, 32": "qwen3_next",
    "8, 16": "qwen3_next_tp2",
    "4, 8": "qwen3_next_tp4",
    "2, 8": "qwen3_5_397b_tp8",
    "2, 4": "qwen3_next_tp8",
}


def test_the_table_of_the_delta_net_is_recorded() -> None:
    times = {
        (row["shape"], row["tokens"], row["sequences"], row["variant"]): row
        for row in json.loads((RESULTS / "gdn_variants-16_warps.json").read_text())["rows"]
    }
    table = PAGE.partition("| key, value heads | tokens | sequences |")[2].partition("\n\n")[0]
    shares, met = [], []
    for line in table.splitlines()[2:]:
        heads, tokens, sequences, *_, now, goal = (cell.strip() for cell in line.strip("|").split("|"))
        case = (OF_HEADS[heads], int(tokens.replace(",", "")), int(sequences))
        new, old = times[(*case, "e3")], times[(*case, "before")]
        assert new["verdict"] == old["verdict"] == "green"
        assert now == f"**{new['layer_us']:.1f}**"
        shares.append(new["layer_us"] / old["layer_us"])
        met.append(new["layer_us"] / float(goal))
    assert len(shares) == 12 and min(met) > 1 and sorted(met)[1] < 1.015
    assert f"It takes {min(shares):.2f} to {max(shares):.2f} of the time of the day before" in PAGE
    alone = times["qwen3_next", 16384, 1, "e3"]
    assert f"`prepare` takes {alone['prepare_us']:.0f} us and `advance` {alone['advance_us']:.0f}." in PAGE


def share_of(times: Times, case: tuple[str, int, int], over: str, under: str) -> float:
    return times[case][over] / times[case][under]


def test_the_delta_net_beside_sglangs_kernels_is_recorded() -> None:
    def of_a_layer(file: str) -> tuple[Times, dict[tuple[str, int, int], float]]:
        times, floors = Times(), {}
        for line in (RESULTS / file).read_text().splitlines()[1:]:
            row: dict[str, Any] = json.loads(line)
            case = (row["shape"], row["tokens"], row["sequences"])
            if row["measured"].startswith("device") and row["l2"] == "hot":
                times.setdefault(case, {})[row["arm"]] = row["median"]
                floors[case] = row["details"]["floor_us"]
        return times, floors

    (now, floors), (before, _) = map(of_a_layer, ("bench-0.5.23-layer-16_warps.jsonl", "bench-0.5.23-layer.jsonl"))
    arms = (SGLANG, BEFORE, "bcg_fixes cuda, captured")
    table = PAGE.partition("| tokens | sequences | SGLang's | `triton` | `cuda` | floor |")[2].partition("\n\n")[0]
    lines = table.splitlines()[2:]
    assert len(lines) == 8 and len(now) == 20
    for line in lines:
        tokens, sequences, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        case = ("qwen3_next", int(tokens.replace(",", "")), int(sequences))
        assert cells == [*(f"{now[case][arm]:,.0f}" for arm in arms), f"{floors[case]:.1f}"], line

    def told(of: Callable[[Any], float], form: str = "{:.1f}") -> str:
        shares = [of(case) for case in now]
        return f"{form.format(min(shares))} to {form.format(max(shares))}"

    words, (_, triton, cuda) = " ".join(PAGE.split()), arms
    of_sglang, of_triton = (told(functools.partial(share_of, now, over=each, under=cuda)) for each in (SGLANG, triton))
    faster = f"`cuda` is {of_sglang} times as fast as SGLang's kernels and {of_triton} times as fast as `triton`"
    assert f"{faster}, and takes {told(lambda case: now[case][cuda] / floors[case])} times the floor" in words
    of_then = told(lambda case: now[case][SGLANG] / before[case][SGLANG], "{:.2f}")
    assert f"SGLang's are {of_then} times those of two days before" in words


def test_numbers_of_sequences_that_do_not_divide_the_gpu_are_recorded() -> None:
    rows = {row["sequences"]: row for row in json.loads((RESULTS / "gdn_variants-uneven.json").read_text())["rows"]}
    assert all(row["verdict"] == "green" for row in rows.values())

    def share(sequences: int) -> float | None:
        low, high = (4, 8) if sequences < 8 else (8, 16)
        if sequences in (low, high):
            return None
        least, most = (rows[each]["layer_us"] for each in (low, high))
        return float(rows[sequences]["layer_us"] / (least + (most - least) * (sequences - low) / (high - low)))

    shares = {each: share(each) for each in rows}
    for title, cells in (
        ("sequences", [str(each) for each in rows]),
        ("a layer", [f"{row['layer_us']:.1f}" for row in rows.values()]),
        ("`advance` of it", [f"{row['advance_us']:.1f}" for row in rows.values()]),
        ("of what is expected", [f"{each:.2f}" if each else "" for each in shares.values()]),
    ):
        assert f"| {title} | {' | '.join(cells)} |".replace("|  |", "| |") in PAGE, title
    assert [each for each, found in shares.items() if found and found > 1.15] == [5]


def test_faults_of_todays_delta_net_are_recorded() -> None:
    def faults(file: str, shape: str) -> list[str]:
        found = json.loads((RESULTS / file).read_text())[shape]
        return [fault for fault in found["faults"] if int(re.findall(r"seed (\d+)", fault)[0]) < 40]

    words = " ".join(PAGE.split())
    (fault,), (before, *_) = (
        faults(file, "qwen3_5_4b") for file in ("gdn_extend-16_warps-qwen3_5_4b.json", "gdn_extend-56.json")
    )
    assert not faults("gdn_extend-16_warps-small.json", "small")
    what, off = fault.rsplit(" ", 1)
    assert before.startswith(what)
    assert f"one was off, by {float(off):.4f}, which was off by {float(before.split()[-1]):.4f} before" in words
    worst = []
    for tokens, suffix in ((16384, ""), (65536, "-65536")):
        found = json.loads((RESULTS / f"gdn_extend-hardly_forget{suffix}.json").read_text())["hardly forget"]
        assert (found["tokens"], found["seeds"]) == (tokens, 10)
        worst.append(max(each["worst"] for each in found["errors"].values()))
    first, second = worst
    assert f"[{first:.4f} after 16,384 tokens]" in words and f"[{second:.4f} after 65,536]" in words
    assert f": {first / 0.005:.2f} and {second / 0.005:.2f} of the tolerance" in words


def test_what_compute_sanitizer_says_of_the_delta_net_is_recorded() -> None:
    rows = json.loads((RESULTS / "gdn_sanitizer.json").read_text())["rows"]
    (red,) = (row for row in rows if row["verdict"] != "green")
    assert (red["tool"], red["steps"], red["summary"]) == (
        *("racecheck", "segments"),
        ["RACECHECK SUMMARY: 6 hazards displayed (6 errors, 0 warnings)"],
    )
    tools = {
        tool: sorted(row["steps"] for row in rows if row["tool"] == tool) for tool in {row["tool"] for row in rows}
    }
    both = ["random", "segments"]
    assert tools == {"memcheck": both, "synccheck": both, "initcheck": both, "racecheck": ["random", *both]}
    assert all(row["steps_said"] == f"{3 if row['steps'] == 'random' else 1} steps, 0 faults" for row in rows)


def test_the_tables_of_servers_on_0_5_23_are_recorded() -> None:
    def cells(file: str, arm: str) -> list[str]:
        rows = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()[1:]]
        assert all(row["verdict"] == "green" for row in rows)
        mine = {(row["tokens"], row["sequences"]): row for row in rows if row["arm"] == arm}
        times = [f"{mine[tokens, 1]['median']:.1f}" for tokens in (253, 1021, 4093, 8189)]
        return [*times, f"{mine[1021, 16]['median']:,.0f}"]

    columns = [
        *(cells("bench-0.5.23-nemotron_h_8b.jsonl", ARMS[name]) for name in ("no prefill graphs", "inside")),
        *(cells("bench-0.5.23-nemotron_h_8b-breaks.jsonl", arm) for arm in ARMS.values()),
        *(cells("bench-0.5.23-falcon_h1_7b.jsonl", arm) for arm in ARMS.values()),
    ]
    page = PAGE.replace("**", "")
    for row in zip(*columns, strict=True):
        assert f" | {' | '.join(row)} |" in page, row
    for name, arm in ARMS.items():
        assert f"| Ling 2.5: {name} | {' | '.join(cells('bench-0.5.23-ling_2_5.jsonl', arm))} |" in page
    arms = ("stock without prefill graphs", "bcg_fixes", "bcg_fixes again")
    asked = served("serving-falcon_h1_7b-0.5.23.jsonl")
    for tokens in (253, 1021, 4093, 8189):
        alone = [f"{asked['first token', tokens, 1][arm]['median']:.1f}" for arm in arms]
        assert f"| first token, {tokens:,} tokens, ms | {' | '.join(alone)} |" in page
    loaded = [f"{asked['varied', 1024, 16][arm]['median']:,.0f}" for arm in arms]
    assert f"| 16 clients, varied lengths, tokens/s | {' | '.join(loaded)} |" in page


def test_what_states_in_bfloat16_cost_is_recorded() -> None:
    half, full = (
        {
            (row["tokens"], row["sequences"]): row["layer_us"]
            for row in json.loads((RESULTS / f"gdn_tuning-{kind}.json").read_text())["rows"]
            if row["tuning"] == "chosen"
        }
        for kind in ("bfloat16", "float32")
    )
    shares = [half[case] / full[case] for case in full]
    words = " ".join(PAGE.split())
    assert f"A layer took [{min(shares):.2f} to {max(shares):.2f} times as long]" in words
    alone = [" / ".join(f"{found[tokens, 1]:.0f}" for tokens in (256, 4096, 8192)) for found in (half, full)]
    assert f"A layer took {alone[0]} us" in words and f"it took {alone[1]} with fp32" in words
    assert f"and {half[256, 64]:.0f} in place of {full[256, 64]:.0f} for 256 tokens in 64" in words


FORMS = ("triton", "cuda")
VARIANTS = {
    "Nemotron-H-8B": "nemotron_h_8b",
    "Falcon-H1-7B": "falcon_h1_7b",
    "one of eight ranks of Nemotron-H-8B": "nemotron_h_8b_tp8",
    "one of two ranks of Falcon-H1-34B": "falcon_h1_34b_tp2",
}
SIZES = ((256, 1), (1024, 1), (4096, 1), (8192, 1), (16384, 1), (8192, 4), (8192, 8), (256, 8), (8192, 64))
LONG = ("nemotron_h_8b", 8192, 1, "cuda")


def test_the_table_of_mamba2_in_cuda_is_recorded() -> None:
    found = json.loads((RESULTS / "mamba2_variants.json").read_text())["rows"]
    assert {row["verdict"] for row in found} == {"green"} and {row["variant"] for row in found} == set(FORMS)
    times = {(row["shape"], row["tokens"], row["sequences"], row["variant"]): row["layer_us"] for row in found}
    assert len(times) == len(found) == len(VARIANTS) * len(SIZES) * len(FORMS)
    lines = PAGE.splitlines()
    for title, shape in VARIANTS.items():
        start = lines.index(next(line for line in lines if line.startswith(f"| {title}, `triton` |")))
        for line, form, other in zip(lines[start : start + 2], FORMS, reversed(FORMS), strict=True):
            told = [cell.strip() for cell in line.strip("|").split("|")][1:]
            for cell, size in zip(told, SIZES, strict=True):
                mine, others = times[(shape, *size, form)], times[(shape, *size, other)]
                assert cell == (f"**{mine:,.0f}**" if mine < others else f"{mine:,.0f}"), (line, size)
    shares = [times[(*case, "cuda")] / times[(*case, "triton")] for case in {each[:-1] for each in times}]
    faster = sum(share < 1 for share in shares)
    assert f"takes {min(shares):.2f} to {max(shares):.2f} of the time, and less at {faster} of {len(shares)}" in SECTION
    (long,) = (row for row in found if (row["shape"], row["tokens"], row["sequences"], row["variant"]) == LONG)
    assert (
        f"of Nemotron-H's {long['layer_us']:.0f} us at 8,192 tokens `prepare` takes {long['prepare_us']:.0f}" in SECTION
    )
    assert f"and `advance` {long['advance_us']:.0f}, whose" in SECTION
    errors = {form: [row["errors"]["output"] for row in found if row["variant"] == form] for form in FORMS}
    assert errors["cuda"] == errors["triton"] and f"at most {max(errors['cuda']):.4f}" in SECTION


def test_the_scratch_of_segments_is_as_large_as_said() -> None:
    for shape, said in (("nemotron_h_8b_tp8", "5 MB with one of eight ranks"), ("falcon_h1_7b", "32 MB with Falcon")):
        sizes, tables = mamba2_layer.SHAPES[shape].of_kernel, metadata.Tables(8192, 8, "meta")
        scratch = cuda.Scratch.for_rows(8192, tables, sizes, torch.bfloat16, triton.tuning_for(sizes))
        size = sum(each.numel() * each.element_size() for each in (scratch.carries, scratch.befores))
        assert said.startswith(f"{size / 1e6:.0f} MB") and said in SECTION


def test_random_steps_of_mamba2_in_cuda_were_right_and_some_were_cut() -> None:
    found = json.loads((RESULTS / "mamba2_extend-cuda.json").read_text())
    steps = {name: found[name] for name in VARIANTS.values()}
    assert found["form"] == "cuda" and all(each["steps"] == 8 and not each["faults"] for each in steps.values())
    cut = sum(each["steps with a sequence that is cut"] for each in steps.values())
    assert (
        f"Eight random steps of each of four shapes were right, replayed and each sequence alone; {cut} of" in SECTION
    )


def test_the_sanitizers_said_of_mamba2_in_cuda_what_is_told() -> None:
    rows = json.loads((RESULTS / "mamba2_sanitizer.json").read_text())["rows"]
    watched = {(each.tool, each.kernels, each.steps) for each in sanitizer.watched(sanitizer.MAMBA2)}
    assert {(row["tool"], row["kernels"], row["steps"]) for row in rows} == watched and len(rows) == len(watched)
    assert all(re.fullmatch(r"(\d steps, 0 faults(, )?)+", row["steps_said"]) for row in rows)
    red = [row for row in rows if row["verdict"] == "red"]
    assert {(row["tool"], row["kernels"]) for row in red} == {("racecheck", "bcg_mamba2")}
    hazards = [sum(map(int, re.findall(r"(\d+) (?:error|warning)s?\b", *row["summary"]))) for row in red]
    assert f"In the others it reports {min(hazards)} to {max(hazards)} hazards: accesses of the ring" in SECTION
    assert all("ring" not in name and "prepare" not in name for row in red for name in row["reports"])


IN_BOTH_FORMS = {
    "without graphs": "no prefill graphs",
    "breaks": "breakable graphs, patched",
    "inside, `triton`": "breakable graphs, patched, linear layers inside, in Triton",
    "inside, `cuda`": "breakable graphs, patched, linear layers inside",
}


def test_the_table_of_servers_with_both_forms_is_recorded() -> None:
    lines = PAGE.splitlines()
    sooner: list[bool] = []
    for title, model in {
        "Falcon-H1": "falcon_h1_7b",
        "Nemotron-H": "nemotron_h_8b",
        "Granite": "granite_4_h_micro",
    }.items():
        rows = [json.loads(line) for line in (RESULTS / f"bench-0.5.23-{model}-cuda.jsonl").read_text().splitlines()]
        assert all(row["verdict"] == "green" for row in rows[1:])
        times = {(row["arm"], row["tokens"], row["sequences"]): row["median"] for row in rows[1:]}
        in_triton, in_cuda = (
            [times[IN_BOTH_FORMS[f"inside, `{form}`"], tokens, 1] for tokens in (253, 1021, 4093, 8189)]
            for form in ("triton", "cuda")
        )
        sooner += [mine < other for mine, other in zip(in_cuda, in_triton, strict=True)]
        for name, arm in IN_BOTH_FORMS.items():
            # Falcon-H1's replays are refused
            is_there = (arm, 253, 1) in times
            arm = arm if is_there else "breakable graphs, replay refused"
            assert is_there or title == "Falcon-H1"
            cells = [f"{times[arm, tokens, 1]:.1f}" for tokens in (253, 1021, 4093, 8189)]
            assert f"| {title}: {name} | {' | '.join(cells)} | {times[arm, 1021, 16]:,.0f} |" in lines, title
    assert f"In servers {sum(sooner)} of {len(sooner)} first tokens come sooner with it" in SECTION


def test_no_answer_of_the_accuracy_models_is_another_with_mamba2_in_cuda() -> None:
    for family in ("mamba2", "granite"):
        found = json.loads((RESULTS / f"accuracy-{family}-cuda-0.5.23.json").read_text())["servers"]
        (kernels,) = (server for server in found if server["arm"] == "kernels")
        assert kernels["environment"]["SGLANG_BCG_KERNEL_MAMBA2_EXTEND"] == "cuda" and len(kernels["phases"]) == 6
        assert kernels["counts"]["prefill"]["replayed"] > 1900
        for phase in kernels["phases"].values():
            assert phase["differs_from"] == {"reference": 0, "eager": 0}, family


def test_the_table_of_two_ranks_is_recorded() -> None:
    lines = (RESULTS / "serving-tp2-qwen3_5_4b-0.5.23.jsonl").read_text().splitlines()
    header, *found = map(json.loads, lines)
    assert header["header"]["server_arguments"] == [
        "--tp-size=2",
        "--enforce-disable-flashinfer-allreduce-fusion",
    ]
    part = PAGE.partition("\nTwo ranks: ")[2].partition("###")[0]
    told = {
        "stock": "SGLang",
        "bcg_fixes": "with bcg_fixes",
        "stock without prefill graphs": "SGLang without prefill graphs",
    }
    gaps: dict[str, list[float]] = {arm: [] for arm in told}
    for arm, title in told.items():
        mine = [row for row in found if row["arm"] == arm]
        assert [row["tokens"] for row in mine] == [253, 1021, 4093, 8189]
        mark = "**" if arm == "bcg_fixes" else ""
        cells = " | ".join(f"{mark}{row['median']:.1f}{mark}" for row in mine)
        assert f"| {title} | {cells} |" in part
        for row in mine:
            assert (
                row["verdict"] == "green" and row["details"]["answers"]["equal"] == row["details"]["answers"]["of"] == 8
            )
            assert (row["details"]["prefills"]["eager"] == 0) is (arm != "stock without prefill graphs")
            gaps[arm].append(row["details"]["answers"]["largest_gap"])
    assert f"Logprobs are at most {max(gaps['bcg_fixes']):.2f} from those with bcg_fixes" in " ".join(part.split())
    assert not any(gaps["stock"])
    logs = (RESULTS / "serving-tp2-qwen3_5_4b-0.5.23.txt").read_text().partition("== stock\n")
    for log, said in ((logs[0], "took 1.87 GB and 51 s"), (logs[2], "SGLang's 12.99 GB and 72 s")):
        captured = re.findall(r"elapsed=([\d.]+) s, mem usage=([\d.]+) GB", log)
        assert len(captured) == 2
        for seconds, size in captured:
            assert f"{size} GB and {float(seconds):.0f} s" in said
        assert said in " ".join(part.split())
    compiled = [f"{float(seconds):.1f}" for seconds in re.findall(r"compiled by NVRTC 13.0 in ([\d.]+) s", logs[0])]
    assert f"{' and '.join(compiled)} are NVRTC's" in " ".join(part.split())
