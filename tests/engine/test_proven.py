# SPDX-License-Identifier: Apache-2.0
"""A kernel is on by default only where GPU results are recorded for such a source."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.cli import doctor
from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.fixes.hybrids_without_graphs import mixers
from sglang_bcg_fixes.kernels.attention_extend.declaration import KERNEL as ATTENTION_EXTEND
from sglang_bcg_fixes.kernels.fa_metadata.declaration import KERNEL as FA_METADATA
from sglang_bcg_fixes.kernels.gdn_extend.declaration import KERNEL as GDN_EXTEND
from sglang_bcg_fixes.kernels.kda_extend.declaration import KERNEL as KDA_EXTEND
from sglang_bcg_fixes.kernels.mamba2_extend.declaration import KERNEL as MAMBA2_EXTEND
from sglang_bcg_fixes.kernels.mamba2_extend.declaration import MEASURED
from sglang_bcg_fixes.kernels.short_conv_extend.declaration import KERNEL as SHORT_CONV_EXTEND
from sglang_bcg_fixes.model import Accepted, Action, Choice, Decision, Fix, Kernel
from sglang_bcg_fixes.planning import plan, proven
from sglang_bcg_fixes.planning.registry import Registry, declared_in
from sglang_bcg_fixes.source import forms, releases
from sglang_bcg_fixes.source.finding import Evidence, Finding, Verdict
from tests import processes, proofs, wheels

Root = Callable[[str], pathlib.Path]
RESULTS = processes.REPOSITORY / "benchmarks" / "results"
MODELS = {"NemotronH": "nemotron_h_8b", "FalconH1": "falcon_h1_7b", "GraniteMoeHybrid": "granite_4_h_micro"}
# 0.5.12, 0.5.13 and 0.5.15 have the definitions of the releases behind them
PROVEN = {
    "gdn_extend": {
        *("0.5.11", "0.5.12", "0.5.12.post1", "0.5.15", "0.5.15.post1"),
        *("0.5.16", "0.5.17", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    },
    "fa_metadata": {"0.5.11", "0.5.12", "0.5.12.post1", "0.5.15", "0.5.15.post1"},
    "mamba2_extend": {"0.5.12", "0.5.12.post1", "0.5.15", "0.5.15.post1", "0.5.17", "0.5.22", "0.5.23"},
    "short_conv_extend": {"0.5.23"},
    "kda_extend": {"0.5.17"},
    "attention_extend": {
        *("0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14"),
        *("0.5.16", "0.5.17", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    },
}
KERNELS = {
    kernel.op: kernel
    for kernel in (FA_METADATA, GDN_EXTEND, MAMBA2_EXTEND, SHORT_CONV_EXTEND, KDA_EXTEND, ATTENTION_EXTEND)
}
FIX = declared_in(hybrids_without_graphs)
WITHOUT = ("no prefill graphs", "without prefill graphs")
# of the models that are measured: the bench's, and the releases in which kernels capture their mixers by default
SERVED = {
    *((release, model) for name, model in MODELS.items() for release in MEASURED[name]),
    *((release, "lfm2_1_2b") for release in proven.table()["short_conv_extend"]),
}


def choice(kernel: Kernel, root: pathlib.Path, **environ: str) -> Choice:
    """Choose as on a machine where every implementation can run."""
    able = dataclasses.replace(
        kernel, impls=tuple(dataclasses.replace(impl, accepts=Accepted) for impl in kernel.impls)
    )
    settings = flags.read([], [able], environ)
    (made,) = plan.make(Registry((), (able,)), settings, releases.in_folder(root)).kernels
    return made


@pytest.mark.parametrize("op", KERNELS)
def test_recorded_results_decide_what_is_on_by_default(release_root: Root, op: str) -> None:
    kernel = KERNELS[op]
    first = kernel.impls[0].name
    for release in wheels.RELEASES:
        auto = choice(kernel, release_root(release))
        if auto.finding.verdict is not Verdict.AFFECTED:
            assert auto.name == "sglang" and release not in PROVEN[op]
            continue
        assert auto.proven is (release in PROVEN[op]), release
        assert auto.proven is (op in proofs.Tree().proven(release)), "else rows there stay closed when this changes"
        assert auto.name == (first if auto.proven else "sglang"), release
        if not auto.proven:
            assert auto.rejected[first].startswith(f"only with {kernel.flag}={first}: unproven on this release")
        named = choice(kernel, release_root(release), **{kernel.flag: first})
        assert named.name == first and named.proven is auto.proven


@pytest.mark.parametrize(
    ("op", "release", "file"), [(op, *each) for op, files in proven.table().items() for each in files.items()]
)
def test_each_entry_names_results_of_its_release(op: str, release: str, file: str) -> None:
    assert op in (*KERNELS, FIX.id) and release in wheels.RELEASES
    text = (RESULTS / file).read_text()
    found = json.loads(text.splitlines()[0]) if file.endswith(".jsonl") else json.loads(text)
    header = found.get("header", found)
    assert header["sglang"] == release and header["gpu"].startswith(("NVIDIA H100", "NVIDIA H200"))
    if op == "attention_extend":
        ours = [server for server in found["servers"] if server["arm"] == "patched"]
        assert ours and all(server["verdict"] == "green" for server in ours)
        assert all(server["counts"]["attention inside"]["replayed"] > 300 for server in ours)
    elif op != "fa_metadata":
        assert any(server["arm"] == "kernels" and server["phases"] for server in found["servers"])


@pytest.mark.parametrize(("release", "model"), sorted(SERVED))
def test_servers_of_each_family_were_faster_with_it(release: str, model: str) -> None:
    # with the CUDA implementation, which came later
    kept = (f"serving-{kind}-{model}-{release}" for kind in ("again", "kept"))
    names = (f"bench-{release}-{model}-cuda", f"bench-{release}-{model}", *kept)
    file = next(file for name in names if (file := RESULTS / f"{name}.jsonl").exists())
    rows = [json.loads(line) for line in file.read_text().splitlines()][1:]
    times: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        assert row["verdict"] == "green", row["why"]
        times.setdefault((row["measured"], row["tokens"]), {})[row["arm"]] = row["median"]
    first_token, inside = "first token", ("breakable graphs, patched, linear layers inside", "bcg_fixes")
    more = {"serving-again": {260, 1025, 4097}, "serving-kept": {61}}
    lengths = {253, 1021, 4093, 8189} | more.get("-".join(file.name.split("-")[:2]), set())
    assert {tokens for measured, tokens in times if measured.endswith(first_token)} == lengths
    is_without = model != "falcon_h1_7b" and release in proven.table()[FIX.id]
    for (measured, _), arms in times.items():
        mine = [time for arm, time in arms.items() if arm.startswith(inside)]
        # SGLang makes no graphs of these there: stock is the server without
        others = [arm for arm in arms if not arm.startswith(inside)]
        compared = [arm for arm in others if arm.endswith(WITHOUT)] if is_without else others
        theirs = [arms[arm] for arm in compared]
        # of two servers of one command, what the worse has more is chance
        assert min(mine) < min(theirs) if measured.endswith(first_token) else max(mine) > max(theirs)


def test_the_page_names_what_is_on_by_default() -> None:
    page = (processes.REPOSITORY / "docs" / "kernels.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (0\.5[^|]*) \|$", page, re.MULTILINE)
    assert {op: releases.split(", ") for op, releases in rows} == {
        op: sorted(found) for op, found in PROVEN.items() if found
    }
    named = re.findall(r"\| `SGLANG_BCG_KERNEL_(\w+)` \| [^|]+ \| (SGLang's own code|on Hopper|`)", page)
    assert {op.lower() for op, default in named if default != "SGLang's own code"} == {*filter(PROVEN.get, PROVEN)}
    assert len(named) == len([op for op in PROVEN if op != FIX.id])
    newest = {name for name, measured in MEASURED.items() if {"0.5.22", "0.5.23"} <= {*measured}}
    older = {name for name, measured in MEASURED.items() if {"0.5.12.post1", "0.5.15.post1", "0.5.17"} <= {*measured}}
    assert (newest, older) == ({"GraniteMoeHybrid", "FalconH1"}, {"NemotronH", "FalconH1"})
    told = "on 0.5.22 and 0.5.23 Granite hybrid and Falcon-H1, on the others NemotronH and Falcon-H1."
    assert told in " ".join(page.split())


def test_definitions_of_two_releases_are_proven_by_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_proven(op: str, *found: str) -> bool:
        return proven.is_proven(op, Finding(Verdict.AFFECTED, "", tuple(Evidence("", "", 1, form) for form in found)))

    having = {"old": {"0.5.11"}, "new": {"0.5.23"}, "both": {"0.5.11", "0.5.23"}, "mine": set()}
    monkeypatch.setattr(forms, "releases_with", lambda form: frozenset(having[form]))
    assert is_proven("gdn_extend", "old", "both") and is_proven("gdn_extend", "both", "new")
    assert not is_proven("gdn_extend", "old", "new") and not is_proven("gdn_extend", "both", "mine")
    # which has its own say
    assert is_proven("of_another_package", "mine")


def test_the_log_and_doctor_say_what_no_gpu_has_seen(release_root: Root) -> None:
    for release, unproven in (("0.5.13", True), ("0.5.15.post1", False)):
        made = choice(FA_METADATA, release_root(release), **{FA_METADATA.flag: "cuda"})
        known = Registry((), (dataclasses.replace(FA_METADATA, impls=made.subject.impls),))
        source, named = releases.in_folder(release_root(release)), {FA_METADATA.flag: "cuda"}
        found = doctor.examine(known, flags.read([], known.kernels, named), source, installed=False)
        told = "no recorded GPU result speaks for it on this source; SGLANG_BCG_KERNEL_FA_METADATA=off keeps"
        assert (told in found.text(everything=True)) is unproven
        said = made.said("applied")
        assert said == ("cuda (applied, unproven on this release)" if unproven else "cuda (applied)")
        assert made.as_dict()["proven"] is not unproven


@pytest.mark.parametrize(("op", "release"), [(op, release) for op, rows in proven.times().items() for release in rows])
def test_what_a_kernel_is_worth_is_what_was_measured(op: str, release: str) -> None:
    row = proven.times()[op][release]
    lines = [json.loads(line) for line in (RESULTS / row["file"]).read_text().splitlines()]
    assert lines[0]["header"]["sglang"] == release and release in proven.table()[op]
    medians: dict[tuple[Any, ...], dict[str, float]] = {}
    for line in lines[1:]:
        if line["measured"] == "device time of a layer" and line["l2"] == "hot" and line["arm"].endswith(", captured"):
            case = medians.setdefault((line["shape"], line["tokens"], line["sequences"]), {})
            case[line["arm"].removesuffix(", captured")] = line["median"]
    # beside the fastest of SGLang's own at each size
    shares = [
        case["bcg_fixes cuda"] / min(median for arm, median in case.items() if arm.startswith("sglang"))
        for case in medians.values()
    ]
    assert len(shares) >= 20 and row["times"] == [round(min(shares), 2), round(max(shares), 2)]


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_a_fix_for_speed_alone_is_on_where_results_are_recorded(release_root: Root, release: str) -> None:
    is_proven = release in proven.table()[FIX.id]

    def decided(**environ: str) -> Decision[Fix]:
        source = releases.in_folder(release_root(release))
        (made,) = plan.make(Registry((FIX,), ()), flags.read([FIX], [], environ), source).fixes
        return made

    by_default, asked = decided(), decided(**{FIX.flag: "on"})
    assert by_default.action is (Action.APPLY if is_proven else Action.OFF)
    assert is_proven is (FIX.id in proofs.Tree().proven(release))
    assert is_proven or by_default.reason.startswith(f"only with {FIX.flag}=on: unproven on this release")
    assert asked.action is Action.APPLY
    bodies = {point.body for point in asked.subject.patches}
    # each of the two has its own way in, and never the other's; LFM2's layers are patched for who asks
    assert hybrids_without_graphs.admit in bodies or hybrids_without_graphs.admit_by_method in bodies
    assert mixers.break_round_the_convolution in bodies
    if is_proven:
        assert {point.body for point in by_default.subject.patches} == {hybrids_without_graphs.admit_measured}
    assert hybrids_without_graphs.admit_measured not in bodies
