# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's metadata in one launch, against what each release's own backend fills: every integer, on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.kernels.fa_metadata.declaration import KERNEL, MODULE
from sglang_bcg_fixes.model import Accepted, Choice, Rejected
from sglang_bcg_fixes.planning import plan, registry
from sglang_bcg_fixes.source import tree
from sglang_bcg_fixes.source.finding import Verdict
from tests import mutated, processes
from tests.wheels import since

Root = Callable[[str], pathlib.Path]
Found = dict[str, Any]

# one of each form that the backend's methods have had
RELEASES = (
    *("0.5.11", "0.5.12.post1", "0.5.13", "0.5.14", "0.5.15.post1", "0.5.16"),
    *("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21"),
    *since("0.5.23"),
)
MUTATED = "0.5.12.post1"
# the first release whose eager step can do without lengths on the host
BLIND = "0.5.16"

MUTANTS = {
    "counts a step less": ('"draft decode", delta=backend.speculative_step_id + 1', '"draft decode", delta=0'),
    "forgets drafts before a replay": (
        'self.tables("verify", metadata, delta=delta)',
        'self.tables("verify", metadata)',
    ),
    "keeps the last page": (
        "drop_last=self.page_size > 1)\n        metadata.max",
        "drop_last=False)\n        metadata.max",
    ),
    "takes one query for each": ("        metadata.max_seq_len_q = new\n        expand", "        expand"),
    "forgets what was accepted": ("return self.for_every_row(new), max(on_host) if on_host else 1", "return 1, 1"),
    "forgets the window's pages": (
        '        found: dict[str, Any] = {"swa_page_table": metadata',
        '        return {}\n        found = {"x": metadata',
    ),
    "begins with the encoder's": ("row_start=self.encoder_lens,", ""),
    "forgets the encoder's own": ("        self.encoder(metadata)\n        return metadata", "        return metadata"),
    "takes the whole for the chunk": ("mapping=self.mapping,\n            zero_tail=True", "zero_tail=True"),
    "sees padded rows": ("live_rows=self.spec_info.positions.numel(),", ""),
    "sums what is new twice": ("        metadata.cu_seqlens_q = metadata.cu_seqlens_k\n", "        pass\n"),
    "forgets the window's tree": (
        "        if backend.has_swa:\n            backend._init",
        "        if False:\n            backend._init",
    ),
    "tells too long a bound": (
        "metadata.max_seq_len_k = self.longest + delta",
        "metadata.max_seq_len_k = self.longest + delta + 1",
    ),
    "lists a step more": (
        "DraftExpand(\n            self.seq_lens,\n            batch.out_cache_loc",
        "DraftExpand(\n            self.seq_lens + 1,\n            batch.out_cache_loc",
    ),
}


@functools.cache
def run(observer: str, root: pathlib.Path) -> Found:
    program = ("-m", "tests.scenarios.fa_metadata_steps", observer, json.dumps(MUTANTS))
    found: Found
    found, _ = processes.beside(root, *program, timeout=600, environment={KERNEL.flag: "triton"})
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_every_integer_is_sglangs_own(release: str, release_root: Root) -> None:
    found = run("observe", release_root(release))
    assert found["outcome"] == ["triton", "applied"]
    assert found["steps"] >= 70
    assert found["differences"] == []
    assert found["left"] == {}


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_not_known_to_be_equal_is_left_and_said(release: str, release_root: Root) -> None:
    odd = run("observe", release_root(release))["odd"]
    for reason, (equal, said) in odd.items():
        assert equal, reason
        assert said == [reason]
    assert ("lengths that the host does not know" in odd) == (RELEASES.index(release) >= RELEASES.index(BLIND))


@pytest.mark.parametrize("release", RELEASES)
def test_chunks_of_local_attention_are_right_in_pages_too(release: str, release_root: Root) -> None:
    found = run("observe", release_root(release))
    assert all(found["mended"].values()), found["mended"]
    # SGLang's own: page ids were looked up as slots, and then only in graphs with a pool for windows
    place = RELEASES.index(release)
    eager = ["eager", "eager, pool"] if place < RELEASES.index("0.5.20") else []
    assert found["wrong"] == [*eager, *(["replay, pool"] if place < RELEASES.index("0.5.23") else [])]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_differs(mutant: str, release_root: Root) -> None:
    assert run("observe_mutants", release_root(MUTATED))[mutant]


PATH = f"{MODULE.replace('.', '/')}.py"
START = "        metadata = FlashAttentionMetadata()\n"
# one more statement in a method that would be changed
DRIFTED = f"{START}        drifted = True\n"


def choice(files: tree.Files, **environ: str) -> Choice:
    known = registry.discover()
    made = plan.make(known, flags.read(known.fixes, known.kernels, environ), tree.Source(files))
    return next(each for each in made.kernels if each.op == KERNEL.op)


def test_a_source_that_nobody_has_read_keeps_its_own(release_root: Root) -> None:
    root = release_root(RELEASES[-1])
    named = {KERNEL.flag: "triton"}
    assert choice(tree.Folder(root), **named).impl
    drifted = choice(mutated.rewritten(root, PATH, START, DRIFTED), **named)
    assert drifted.impl is None
    assert "init_forward_metadata" in drifted.reason and "has not been read yet" in drifted.reason
    assert set(drifted.rejected) == {impl.name for impl in KERNEL.impls}


def test_a_source_that_somebody_has_read_since_is_served(release_root: Root, tmp_path: pathlib.Path) -> None:
    mutated.write(release_root(RELEASES[-1]), PATH, START, DRIFTED, tmp_path)
    found = run("observe_once_it_is_read", tmp_path)
    assert found["outcome"] == ["triton", "applied"]
    assert found["differences"] == [] and found["left"] == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self._get_swa_write_locations(forward_batch)", "self._get_other_locations(forward_batch)"),
        ("metadata.swa_out_cache_loc = swa_out_cache_loc", "metadata.swa_out_cache_loc = swa_out_cache_loc + 1"),
    ],
)
def test_a_source_with_a_rule_that_nobody_knows_keeps_its_own(release_root: Root, old: str, new: str) -> None:
    # whoever records its form has not seen that it takes another rule
    source = tree.Source(mutated.rewritten(release_root(RELEASES[-1]), PATH, old, new))
    finding = plan.ask(KERNEL, source)
    assert finding.verdict is Verdict.UNKNOWN
    assert "another way to find the slots of sliding windows" in finding.reason


def answering(answer: Accepted | Rejected) -> Callable[[], Accepted | Rejected]:
    return lambda: answer


def test_auto_takes_cuda_or_else_triton(release_root: Root) -> None:
    # where a GPU has shown what it is worth
    files = tree.Folder(release_root("0.5.15.post1"))
    source = tree.Source(files)
    for answer, name in ((Accepted(), "cuda"), (Rejected("no driver"), "triton")):
        impls = [dataclasses.replace(impl, accepts=answering(answer)) for impl in KERNEL.impls[:1]]
        kernel = dataclasses.replace(KERNEL, impls=(*impls, *KERNEL.impls[1:]))
        auto = plan.choose(kernel, "auto", plan.ask(KERNEL, source))
        assert auto.impl and auto.impl.name == name
        assert "for tests" in auto.rejected["reference"]
    assert auto.rejected["cuda"] == "no driver"
    assert choice(files, **{KERNEL.flag: "triton"}).impl
    assert choice(files, **{KERNEL.flag: "reference"}).impl
    assert choice(files, **{KERNEL.flag: "off"}).impl is None
    assert choice(files, SGLANG_BCG_FIXES="off").impl is None
