"""What each release's own graph breaks do with memory that nobody holds, and what is kept of it with the fixes.

The ways that a tensor comes to a break are those of benchmarks/break_lifetimes.py, which asks the same on a GPU.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes
from tests.wheels import RELEASES

OUTPUT_HELD_FROM = "0.5.16"
RIGHT_ANYWAY = {
    "written_by_the_graph_before_the_break",
    "written_by_the_graph_and_read_by_two_breaks",
    "returned_by_a_break",
    "returned_by_a_break_in_a_dictionary",
}
# what the second of two breaks reads is gone when replays have given its memory to somebody else
NEEDS_THE_OUTPUT, NEEDS_THE_INPUT = "returned_by_a_break_and_read_by_the_next", "made_before_the_capture"

PROGRAM = """
import json, torch
from cpu_sglang import one_batch
one_batch.import_sglang(with_graphs=True)
from benchmarks import break_lifetimes as ways
ways.SIZES, ways.WIDTH = (16, 8, 4), 4
ways.breakable()

from sglang_bcg_fixes.anatomy import graph_pool
def observe():
    graph_pool._kept.clear()
    found = {}
    for way in ways.WAYS:
        # a graph that has gone lets go of what it kept; these are counted while it is there
        most = 0
        def counted(tensor, keep=graph_pool.keep_what_no_pool_keeps):
            nonlocal most
            keep(tensor)
            most = max(most, sum(map(len, graph_pool._kept.values())))
        keep, graph_pool.keep_what_no_pool_keeps = graph_pool.keep_what_no_pool_keeps, counted
        try:
            found[way] = [ways.observe(way, "cpu").partition(",")[0], most]
        finally:
            graph_pool.keep_what_no_pool_keeps = keep
    return found

def observe_without_a_pool():
    # as SGLang captures its first decode graphs to 0.5.13; ordinary memory has the number that stands for none
    pools, handle = torch.cuda.memory_snapshot, torch.cuda.graph_pool_handle

    def snapshot(*_):
        told = sorted(pools(), key=lambda segment: segment["address"])
        edges = [(segment["address"], segment["address"] + segment["total_size"]) for segment in told]
        gaps = zip([0, *(end for _, end in edges)], [*(begin for begin, _ in edges), 2**63])
        told += [{"address": begin, "total_size": end - begin, "segment_pool_id": (0, 0)} for begin, end in gaps]
        return told

    torch.cuda.memory_snapshot, torch.cuda.graph_pool_handle = snapshot, lambda: None
    try:
        return {way: answer for way, (answer, _) in observe().items()}
    finally:
        torch.cuda.memory_snapshot, torch.cuda.graph_pool_handle = pools, handle

stock = observe()
from sglang_bcg_fixes import plugin
process = plugin.load()
applied = process.report.ids("applied")
fixed, without_a_pool = observe(), observe_without_a_pool()
unlike = {}
for name, answer in {"everything is the pool's": True, "nothing is the pool's": False}.items():
    holds, graph_pool.PoolMemory.holds = graph_pool.PoolMemory.holds, lambda self, address: answer
    unlike[name] = observe()
    graph_pool.PoolMemory.holds = holds
read_back = {fix: process.ledger.read_back(fix) for fix in applied}
for fix in reversed(applied):
    process.ledger.undo(fix)
print("RESULT", json.dumps({
    "stock": stock, "applied": applied, "fixed": fixed, "without a pool": without_a_pool, "unlike": unlike,
    "read back": read_back, "undone": observe()}))
"""


@pytest.mark.forms_of("break_input_lifetime", "break_output_lifetime")
@pytest.mark.parametrize("release", RELEASES)
def test_what_no_pool_keeps_is_kept_and_nothing_else(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found, _ = processes.beside(
        release_root(release),
        *("-c", PROGRAM),
        SGLANG_BCG_FIXES="off",
        SGLANG_BCG_FIX_BREAK_INPUT_LIFETIME="on",
        SGLANG_BCG_FIX_BREAK_OUTPUT_LIFETIME="on",
    )
    early = RELEASES.index(release) < RELEASES.index(OUTPUT_HELD_FROM)

    wrong = {NEEDS_THE_INPUT, *([NEEDS_THE_OUTPUT] if early else [])}
    ways = RIGHT_ANYWAY | {NEEDS_THE_OUTPUT, NEEDS_THE_INPUT}
    assert found["stock"] == {way: ["wrong answer" if way in wrong else "right", 0] for way in ways}
    assert found["undone"] == found["stock"]
    assert found["applied"] == ["break_input_lifetime", *(["break_output_lifetime"] if early else [])]
    assert not any(found["read back"].values())

    assert {way: answer for way, (answer, _) in found["fixed"].items()} == dict.fromkeys(ways, "right")
    assert found["without a pool"] == dict.fromkeys(ways, "right")
    kept = {way: count for way, (_, count) in found["fixed"].items()}
    assert kept["written_by_the_graph_before_the_break"] == kept["written_by_the_graph_and_read_by_two_breaks"] == 0
    # one tensor for each of three sizes
    assert kept[NEEDS_THE_INPUT] == 3

    assert found["unlike"]["everything is the pool's"] == found["stock"]
    held_all = found["unlike"]["nothing is the pool's"]
    assert held_all["written_by_the_graph_before_the_break"] == ["right", 6]
