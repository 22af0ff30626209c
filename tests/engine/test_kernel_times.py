# SPDX-License-Identifier: Apache-2.0
"""Choices and statements about kernels, against what GPUs recorded; docs/kernel_times.md is generated from it."""

from __future__ import annotations

import re
from typing import Any

import kernel_times_page as page
import torch

from benchmarks import sanitizer
from benchmarks.bench.mamba2_layer import SHAPES
from sglang_bcg_fixes.fixes.hybrids_without_graphs import measured
from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.kernels.mamba2_extend import cuda, triton
from tests import processes

PAGE = " ".join((processes.REPOSITORY / "docs" / "kernels.md").read_text().split())


def rows_of(file: str) -> list[dict[str, Any]]:
    return page.header(file)["rows"]  # type: ignore[no-any-return]


def test_a_tuning_of_mamba2_is_chosen_where_it_pays() -> None:
    found: page.Times = {}
    for row in rows_of("mamba2_tuning.json"):
        # some need more shared memory than there is
        if "layer_us" in row:
            found.setdefault((row["shape"], row["tokens"], row["sequences"]), {})[row["tuning"]] = row["layer_us"]
    once, anew, alone = [], [], []
    for (name, tokens, sequences), times in found.items():
        shape = SHAPES[name].of_kernel
        assert triton.tuning_for(shape).relates is (shape.states == 256)
        share = times["relates True"] / times["relates False"]
        # the smaller of the two with 256 states has fewer parts that would each compute the products of a chunk
        once += [share] if name == "falcon_h1_7b" and tokens >= 1024 else []
        anew += [share] if shape.states < 256 else []
        alone += [times["as it is"] / times["few none"]] if sequences == 1 and "few none" in times else []
    assert len(once) == 6 and max(once) < 1 and len(anew) == 21 and min(anew) > 1
    assert len(alone) == 20 and max(alone) < 1


def test_the_scratch_of_segments_is_as_large_as_said() -> None:
    for name, said in (("nemotron_h_8b_tp8", "5 MB with one of eight ranks"), ("falcon_h1_7b", "32 MB with Falcon")):
        shape, tables = SHAPES[name].of_kernel, metadata.Tables(8192, 8, "meta")
        scratch = cuda.Scratch.for_rows(8192, tables, shape, torch.bfloat16, triton.tuning_for(shape))
        size = sum(each.numel() * each.element_size() for each in (scratch.carries, scratch.befores))
        assert said.startswith(f"{size / 1e6:.0f} MB") and said in PAGE


def test_the_sanitizers_watched_all_that_they_should_and_racecheck_alone_reports() -> None:
    found = {each: rows_of(f"{each}_sanitizer.json") for each in ("gdn", "mamba2")}
    watched = {(each.tool, each.kernels, each.steps) for each in sanitizer.watched(sanitizer.MAMBA2)}
    assert {(row["tool"], row["kernels"], row["steps"]) for row in found["mamba2"]} == watched
    assert len(found["mamba2"]) == len(watched)
    for kernel, rows in found.items():
        assert {row["tool"] for row in rows} == {"memcheck", "synccheck", "initcheck", "racecheck"}
        assert all(re.fullmatch(r"(\d steps, 0 faults(, )?)+", row["steps_said"]) for row in rows)
        red = [row for row in rows if row["verdict"] != "green"]
        assert {(row["tool"], row["kernels"]) for row in red} == {("racecheck", f"bcg_{kernel}")}
        assert not any("prepare" in name for row in red for name in row["reports"])


def test_random_steps_were_right_and_some_had_a_sequence_that_is_cut() -> None:
    found = page.header("mamba2_extend-cuda.json")
    steps = [each for each in found.values() if isinstance(each, dict) and "faults" in each]
    assert len(steps) == 4 and not any(each["faults"] for each in steps)
    assert sum(each["steps with a sequence that is cut"] for each in steps) == 15
    worst = page.header("gdn_extend-hardly_forget-65536.json")["hardly forget"]["errors"]["output"]["worst"]
    assert f"at most {worst:.4f} of the values' size" in PAGE and worst < 0.005


def test_no_answer_is_another_with_mamba2_in_cuda() -> None:
    for family in ("mamba2", "granite"):
        servers = page.header(f"accuracy-{family}-cuda-0.5.23.json")["servers"]
        (server,) = (each for each in servers if each["arm"] == "kernels")
        assert server["environment"]["SGLANG_BCG_KERNEL_MAMBA2_EXTEND"] == "cuda" and len(server["phases"]) == 6
        assert server["counts"]["prefill"]["replayed"] > 1900
        assert all(each["differs_from"] == {"reference": 0, "eager": 0} for each in server["phases"].values())


def of_16_clients(model: str, load: str, *runs: str) -> list[float]:
    """Shares of the tokens per second of the middle server without our graphs."""
    shares = []
    for run in runs:
        for (_, _, clients), arms in page.cases(f"serving-{run}{model}-0.5.23.jsonl", load).items():
            ours, middle = page.beside_others(arms, page.median)
            shares += [each / middle for each in ours] if clients == 16 else []
    return shares


def test_what_granite_and_lfm2_gain_under_load_is_what_was_recorded() -> None:
    granite, lfm2 = "granite_4_h_micro", "lfm2_1_2b"
    first, later = (of_16_clients(granite, "chat-like", *runs) for runs in (("again-", "asks-"), ("16-", "16-again-")))
    varied, by_default = (of_16_clients(granite, "varied", *runs) for runs in (("16-", "16-again-"), ("default-",)))
    of_lfm2 = of_16_clients(lfm2, "chat-like", "", "asks-", "16-", "twelve-")
    varied_of_lfm2 = of_16_clients(lfm2, "varied", "16-")
    assert [len(each) for each in (first, later, varied, by_default, of_lfm2, varied_of_lfm2)] == [2, 4, 4, 2, 5, 2]
    # by default LFM2 is left without graphs
    assert max(of_lfm2) < 1 < min(varied_of_lfm2)
    assert min(*first, *later) < 1 < max(*first, *later) < min(*varied, *by_default)
    assert (
        "with prompts of one length Granite loses or gains little, varied lengths gain. LFM2 loses with one length"
        in PAGE
    )


def test_what_is_captured_by_default_gained_and_long_prompts_may_lose_by_breaks() -> None:
    def shares(file: str, arm: str) -> list[float]:
        return page.shares(page.medians(f"bench-{file}.jsonl", "time to first token"), arm, page.WITHOUT)

    inside = shares("0.5.23-granite_4_h_micro", page.INSIDE)
    # alone, with 253, 1,021 and 4,093 tokens
    assert measured.MEASURED["GraniteMoeHybridForCausalLM"] == 4096 and max(inside[:3]) < 0.5
    breaks = {model: shares(f"0.5.17-{model}", page.BREAKS) for model in ("granite_4_h_micro", "lfm2_1_2b", "ling_2_5")}
    long = {model: found[-1] for model, found in breaks.items()}
    assert all(found[0] < 1 for found in breaks.values()) and 1 < long["ling_2_5"] == max(long.values())
