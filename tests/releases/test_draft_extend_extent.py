# SPDX-License-Identifier: Apache-2.0
"""The draft model's extend step on the real attention backends of every release: how much of the cache it attends to.

Each release runs in one process, `tests/scenarios/draft_extend_extent.py`, which notes every step with two models.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cpu_sglang.draft_extend import NEW_TOKENS, Step
from tests import processes
from tests.scenarios.draft_extend_extent import ACCEPTED, AFFECTED, EVERY_STEP, EXTENT, PREFIX_ONLY, STEPS
from tests.wheels import NEWEST, RELEASES

Root = Callable[[str], pathlib.Path]
Found = dict[str, Any]

PATCHED = [
    "TritonAttnBackend.forward_extend",
    "TritonAttnBackend.init_forward_metadata",
    "TritonAttnBackend.init_forward_metadata_capture_cuda_graph",
    "TritonAttnBackend.init_forward_metadata_replay_cuda_graph",
]
# the second one has layers with a sliding window
MODELS = ("llama", "gpt_oss")
# both sides compute in 32 bits; with a wrong prefix they are a tenth and more apart
TOLERANCE = 1e-5


MUTANTS = {
    "adds the new tokens": (EXTENT, "(seq_lens - new.to", "(seq_lens + new.to"),
    "takes them off twice": (EXTENT, "(seq_lens - new.to", "(seq_lens - 2 * new.to"),
    "lets padded rows be negative": (EXTENT, ".clamp_(min=0)", ""),
    "forgets the capture": (EXTENT, "PatchPoint((CAPTURE,), How.AROUND, capture_prefix_alone),", ""),
    "forgets the replay": (EXTENT, "PatchPoint((REPLAY,), How.AROUND, replay_prefix_alone),", ""),
    "forgets the eager step": (EXTENT, "PatchPoint((EAGER,), How.AROUND, eager_prefix_alone),", ""),
    "lays all rows out alike": (EXTENT, "backend.qo_indptr[1 : len(new) + 1] = new.cumsum(0)", "pass"),
    "leaves nobody's rows unwritten": (EXTENT, "if forward_batch.forward_mode.is_draft_extend():", "if False:"),
    "adds to whole lengths": (PREFIX_ONLY, "(lengths[:rows] == prefix) * new[:rows]", "new[:rows]"),
    "adds nothing": (PREFIX_ONLY, "(lengths[:rows] == prefix) * new[:rows]", "0 * new[:rows]"),
    "forgets the host": (PREFIX_ONLY, "whole | on_host if on_host else {}", "whole"),
    "keeps what it added": (PREFIX_ONLY, "for name, value in passed.items():", "for name, value in ():"),
    "forgets what the graph computes": (
        PREFIX_ONLY,
        "with lengths(forward_batch, whole_lengths(forward_batch)):",
        "if 1:",
    ),
}
RELEASE_OF_MUTANTS = {EXTENT: "0.5.12.post1", PREFIX_ONLY: NEWEST}


@functools.cache
def run(observer: tuple[str, ...], root: pathlib.Path, models: tuple[str, ...], reports: str) -> Found:
    """One process for all tests on a release."""
    program = ("-m", "tests.scenarios.draft_extend_extent", *observer)
    found: Found
    # what lists windows has a test of its own: SGLang's listing waits for the device, which a replay here may not
    alone = {"SGLANG_BCG_REPORT_DIR": reports, "SGLANG_BCG_FIX_DRAFT_WINDOW_UNLISTED": "off"}
    found, _ = processes.beside(root, *program, *models, environment=alone, timeout=900)
    return found


def observed(release: str, root: pathlib.Path, reports: str) -> Found:
    return run(("observed", release), root, MODELS, reports)


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("reports"))


@pytest.fixture(scope="module", params=[(release, model) for release in RELEASES for model in MODELS], ids="-".join)
def on(request: pytest.FixtureRequest, release_root: Root, reports: str) -> tuple[str, Found]:
    """A release, and what was noted there with one of the models."""
    release, model = request.param
    return release, observed(release, release_root(release), reports)[model]


def misses(release: str, found: Found) -> Iterator[str]:
    """Everything that is not as it has to be, in words."""
    for backend, steps in found.items():
        for name, ways in steps.items():
            step = EVERY_STEP[name]
            for way, one in ways.items():
                for what, expected in expectations(release, backend, step, way, one).items():
                    if one[what] != expected:
                        yield f"{backend}, {name}, {way}: {what} is {one[what]}, not {expected}"
                if one.get("error", 0) > TOLERANCE and rows_are_known(release, step):
                    yield f"{backend}, {name}, {way}: {one['error']} off"


def expectations(release: str, backend: str, step: Step, way: str, one: Found) -> Found:
    pads = 0 if way in ("eager", "attended") else step.captured - len(step.new)
    ones = [1] * pads
    whole = [*wholes(step), *ones]
    # padded rows are full of new tokens and have none of them cached
    prefix = [*(max(length - new, 0) for length, new in zip(wholes(step), step.new, strict=True)), *[0] * pads]
    expected: Found = {}
    if way.endswith("runner"):
        expected |= {"passed": list(step.seq_lens), "seq_lens": whole}
        expected |= {"seq_lens_cpu": whole} if step.on_host else {}
    if "extent" in one:
        expected["extent"] = prefix if backend == "triton" else whole
        if backend != "triton" or rows_are_known(release, step):
            expected["new"] = [*step.new, *[step.width] * pads]
        # before 0.5.13 the flash backend lists its pages at the first replay
        if backend == "triton" or way != "captured" or release not in AFFECTED:
            expected["slots"] = True
            expected |= {"sums": whole} if "sums" in one else {}
    if "rest_is_finite" in one and rows_are_known(release, step):
        expected["rest_is_finite"] = True
    return expected


def wholes(step: Step) -> list[int]:
    """The lengths with their new tokens, whatever was passed."""
    if step.seq_lens != step.prefix:
        return list(step.seq_lens)
    return [length + new for length, new in zip(step.prefix, step.new, strict=True)]


def rows_are_known(release: str, step: Step) -> bool:
    """False where the Triton backend, from 0.5.13 on, takes a row for as wide as a step with topk 1 is."""
    return step.width == NEW_TOKENS or release in AFFECTED


def test_only_what_is_needed_is_changed(on: tuple[str, Found]) -> None:
    release, found = on
    affected = release in AFFECTED
    assert found["states"] == ["applied" if affected else "not needed", "not needed"]
    assert found["changed"] == (PATCHED if affected else [])
    assert found.get("left", []) == []


def test_whole_lengths_are_attended_to_once(on: tuple[str, Found]) -> None:
    release, found = on
    assert list(misses(release, found["whole"])) == []
    assert list(misses(release, found.get("attention", {}))) == []


def test_a_prefix_alone_gets_its_new_tokens_where_that_is_asked_for(on: tuple[str, Found]) -> None:
    release, found = on
    assert list(misses(release, found["prefix, on"])) == []
    assert list(misses(release, found["whole, on"])) == []
    # without the flag it is as short as it was passed; only the triton backend's eager step goes by the prefix itself
    for backend, steps in found["prefix, off"].items():
        for name, ways in steps.items():
            for way, one in ways.items():
                right = not list(misses(release, {backend: {name: {way: one}}}))
                assert right is (backend == "triton" and way == "eager"), f"{backend}, {name}, {way}: {one}"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("release", AFFECTED)
def test_without_the_fix_the_triton_backend_counts_twice(
    release: str, model: str, release_root: Root, reports: str
) -> None:
    found = observed(release, release_root(release), reports)[model]
    stock, mended = found["whole, stock"], found["whole"]
    for name, ways in stock["triton"].items():
        twice = [*STEPS[name].seq_lens, *[1] * (STEPS[name].captured - len(STEPS[name].new))]
        assert [ways[way]["extent"] for way in ("captured", "replayed", "runner")] == [twice] * 3, name
    for name, ways in found["attention, stock"]["triton"].items():
        assert ways["attended_in_graph"]["error"] > 0.1, name
        if name in ACCEPTED:
            # the lengths do hold what was accepted
            begins = zip(ACCEPTED[name].prefix, ACCEPTED[name].seq_lens, strict=True)
            assert found["positions"][name] == [position for begin, end in begins for position in range(begin, end)]
            assert ways["attended"]["error"] > 0.1 and ways["attended_in_graph"]["new"] == [NEW_TOKENS] * 4, name
        else:
            # it was right, and is what it was to the last bit
            assert ways["attended"] == found["attention"]["triton"][name]["attended"], name
    for backend in ("flash, page 1", "flash, page 16"):
        assert stock[backend] == mended[backend]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_does_not_pass(mutant: str, release_root: Root, reports: str) -> None:
    release = RELEASE_OF_MUTANTS[MUTANTS[mutant][0]]
    mutants = {name: mutant for name, mutant in MUTANTS.items() if RELEASE_OF_MUTANTS[mutant[0]] == release}
    observer = ("mutants_observed", release, json.dumps(mutants))
    found = run(observer, release_root(release), MODELS[:1], reports)[MODELS[0]]
    assert [miss for one in found[mutant] for miss in misses(release, one)]
