# SPDX-License-Identifier: Apache-2.0
"""Decode batches that are padded to a captured size: the real buffers and the real KV pool, red and green."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_bcg_fixes.source.tree import Folder, Source
from tests import processes, wheels

RELEASES = ("0.5.11", "0.5.12", "0.5.12.post1")
PIECEWISE = "sglang.srt.model_executor.piecewise_cuda_graph_runner:PiecewiseCudaGraphRunner.__init__"
FIXES = ("DECODE_REQ_INDICES_STALE", "SWA_STALE_PADDING")


def run(release: str, scenario: str, **environ: str) -> Any:
    arguments = ("-m", "tests.scenarios.padded_decode", scenario)
    whole = {"SGLANG_BCG_FIXES": "strict", **environ}
    return processes.beside(wheels.unpacked(release), *arguments, timeout=300, environment=whole)[0]


def off(*names: str) -> dict[str, str]:
    return {f"SGLANG_BCG_FIX_{name}": "off" for name in names}


@pytest.mark.parametrize("release", RELEASES)
def test_without_the_fixes_padded_rows_keep_what_an_earlier_batch_left(release: str) -> None:
    found = run(release, "rows", **off(*FIXES))
    assert found["whole"] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert found["rows"] == [1, 2, 3, 4]
    # 0.5.12 mended the slots itself
    assert found["slots"] == ([5, 6, 7, 8] if release == "0.5.11" else [5, 6, 7, 0])


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("alone", [None, *FIXES])
def test_with_the_fixes_padded_rows_are_nobodys(release: str, alone: str | None) -> None:
    found = run(release, "rows", **off(*(name for name in FIXES if alone not in (None, name))))
    assert found["whole"] == [[1, 2, 3, 4], [5, 6, 7, 8]], "a batch that is not padded is filled in as before"
    assert found["rows"] == [1, 2, 3, 4 if alone == "SWA_STALE_PADDING" else 0]
    stale = release == "0.5.11" and alone == "DECODE_REQ_INDICES_STALE"
    assert found["slots"] == [5, 6, 7, 8 if stale else 0]


def test_without_the_fix_a_padded_replay_overwrites_another_requests_slot() -> None:
    assert run("0.5.11", "slots", **off("SWA_STALE_PADDING")) == {"untouched": False, "written": [True] * 3}


@pytest.mark.parametrize("release", RELEASES)
def test_with_the_fix_a_padded_replay_leaves_every_other_slot_alone(release: str) -> None:
    assert run(release, "slots") == {"untouched": True, "written": [True] * 3}


@pytest.mark.parametrize("release", ["0.5.12", "0.5.12.post1"])
def test_without_the_fix_the_breakable_runner_does_not_start(release: str) -> None:
    assert "out_cache_loc_swa has different dtype" in run(release, "start", **off("SWA_STALE_PADDING"))


@pytest.mark.parametrize("release", RELEASES)
def test_with_the_fix_the_breakable_runner_shares_the_decode_buffer(release: str) -> None:
    assert run(release, "start") == ["torch.int64" if release == "0.5.11" else "torch.int32"]


def test_the_first_releases_int64_slots_store_what_eager_ones_do() -> None:
    found = run("0.5.11", "stored_by_type")
    assert found["types"] == ["torch.int32", "torch.int64"]
    assert found["same"] == [True] * 4
    assert found["slots"] == [[5, 6, 8, 15]] * 4
    # the kernel that a GPU stores with, and the third runner, whose constructor wants a whole model
    folder = Folder(wheels.unpacked("0.5.11"))
    kernel = folder.read("sglang/jit_kernel/csrc/elementwise/kvcache.cuh")
    assert kernel and "with_dtype<int32_t, int64_t>(indice_dtype)" in kernel
    piecewise = Source(folder).need(PIECEWISE).need_assignment_to("out_cache_loc_swa")
    assert piecewise.mentions("torch.int64")
