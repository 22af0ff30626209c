# SPDX-License-Identifier: Apache-2.0
"""The CUDA implementation of fa_metadata: its source on the host, compiled for three architectures, and its packing."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.kernels.cuda import nvrtc
from sglang_bcg_fixes.kernels.fa_metadata import cuda, reference
from sglang_bcg_fixes.kernels.fa_metadata.jobs import FaMetadata
from sglang_bcg_fixes.kernels.fa_metadata.program import PROGRAM
from tests.kernels import fa_metadata_cases as cases
from tests.kernels import headers, on_host

SEEDS = 60
MANY = cases.Sizes(rows=2500, tokens=3000, locations=3000, draft_tokens=80)
# several tiles of sums, several blocks for a row, several rounds of a warp
MANY_SEEDS = {"fa_metadata": 10, "draft_expand": 3, "verify_expand": 2, "local_attention": 5}
ARCHITECTURES = ("80", "90a", "100a")
PARAMETERS = {
    "bcg_fa_metadata": ("FaMetadata", cuda.FA_METADATA),
    "bcg_draft_expand": ("DraftExpand", cuda.DRAFT_EXPAND),
    "bcg_verify_expand": ("VerifyExpand", cuda.VERIFY_EXPAND),
    "bcg_local_attention": ("LocalAttention", cuda.LOCAL_ATTENTION),
}


def build(header: pathlib.Path, folder: pathlib.Path) -> cuda.Kernels:
    if not on_host.compiler():
        pytest.skip("no g++ here, which runs the CUDA source on the host")
    library = on_host.build(header, {kernel: f"bcg::{name}" for kernel, (name, _) in PARAMETERS.items()}, folder)

    def launcher(kernel: str) -> on_host.Launch:
        threads = cuda.VERIFY_THREADS if kernel == "bcg_verify_expand" else cuda.THREADS
        return on_host.launcher(library, kernel, threads, PARAMETERS[kernel][1])

    return cuda.Kernels(
        **{kernel.removeprefix("bcg_"): launcher(kernel) for kernel in PARAMETERS},
        # few, so that several teams share a row, and take turns
        busy_threads=1024,
    )


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda.Kernels:
    return build(PROGRAM.file, tmp_path_factory.mktemp("on_host"))


@pytest.fixture
def host(kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch) -> cuda.Kernels:
    monkeypatch.setattr(cuda, "on_device", lambda device: kernels)
    return kernels


@pytest.mark.parametrize("operation", cases.OPERATIONS)
def test_random_cases_equal_the_reference(operation: str, host: cuda.Kernels) -> None:
    for seed in range(SEEDS):
        assert not cases.differences(operation, seed, cuda, reference, cases.Sizes(), "cpu")


@pytest.mark.parametrize("operation", cases.OPERATIONS)
def test_many_rows_and_wide_tables_equal_the_reference(operation: str, host: cuda.Kernels) -> None:
    for seed in range(MANY_SEEDS[operation]):
        assert not cases.differences(operation, seed, cuda, reference, MANY, "cpu")


def call(operation: str, inputs: dict[str, Any], **shapes: tuple[int, ...]) -> cases.Call:
    outputs = {name: torch.full(shape, cases.SENTINEL, dtype=torch.int32) for name, shape in shapes.items()}
    return cases.Call(operation, inputs, outputs, outputs)


def long_branches() -> cases.Call:
    """More slots than a warp has lanes, and a run of equal pages across its end."""
    slots = {"seq_lens": torch.tensor([5, 64]), "out_cache_loc": torch.arange(200, 200 + 6 * 70), "page_size": 64}
    numbers = {"topk": 3, "steps": 70, "length": 67}
    return call("draft_expand", slots | numbers, cache_seqlens=(6,), page_table=(6, 70))


def many_sums() -> cases.Call:
    """More requests than are summed at once."""
    lengths = torch.arange(2500) % 7
    inputs: dict[str, Any] = {
        "seq_lens": lengths,
        "req_pool_indices": lengths * 0,
        "req_to_token": torch.ones(1, 8).int(),
    }
    inputs |= {"page_size": 1, "extend_lens": lengths % 3}
    sums = {"cu_seqlens_k": (2501,), "cu_seqlens_q": (2501,)}
    return call("fa_metadata", inputs, cache_seqlens=(2500,), page_table=(2500, 8), **sums)


def wide_rows(page_size: int, window: bool) -> cases.Call:
    """Several blocks for a row, each of which comes round again; every third slot is missing."""
    slots = torch.arange(4 * 9001, dtype=torch.int32).view(4, 9001)
    slots[:, ::3] = -1
    inputs = {"seq_lens": torch.tensor([8999, 4000]), "req_pool_indices": torch.tensor([2, 1]), "req_to_token": slots}
    shapes = {"cache_seqlens": (2,), "cu_seqlens_k": (3,), "page_table": (2, 9001 // page_size)}
    if window:
        inputs["mapping"] = torch.arange(4 * 9001).flip(0)
        shapes["swa_page_table"] = shapes["page_table"]
    return call("fa_metadata", inputs | {"page_size": page_size, "zero_tail": True}, **shapes)


def many_drafts(requests: int, draft_tokens: int) -> cases.Call:
    """More rows than are summed at once."""
    lengths, rows = torch.arange(requests) % 5, requests * draft_tokens
    flags = torch.rand(int((lengths + draft_tokens).sum()) * draft_tokens, generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"seq_lens": lengths, "req_pool_indices": lengths, "custom_mask": flags < 0.5}
    inputs |= {"req_to_token": torch.arange(5 * 99).view(5, 99).int(), "draft_tokens": draft_tokens}
    inputs["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    shapes = {"cache_seqlens": (rows,), "cu_seqlens_k": (rows + 1,), "cu_seqlens_q": (rows + 1,)}
    return call("verify_expand", inputs, **shapes, page_table=(rows, draft_tokens))


CHOSEN = {
    "long branches": long_branches,
    "many sums": many_sums,
    "wide rows": lambda: wide_rows(1, False),
    "wide rows, window": lambda: wide_rows(1, True),
    "wide rows, pages": lambda: wide_rows(2, True),
    "flags counted twice": lambda: many_drafts(100, 8),
    "flags counted once": lambda: many_drafts(10, 40),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_cases_equal_the_reference(name: str, host: cuda.Kernels) -> None:
    assert not cases.differences_in(CHOSEN[name](), cuda, reference)


@pytest.mark.parametrize("operation", cases.OPERATIONS)
def test_the_grid_and_the_parameters_follow_from_shapes_alone(
    operation: str, host: cuda.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare launches: what a graph keeps of one must not depend on the tensors' contents."""
    for seed in range(SEEDS):
        call = cases.draw(operation, random.Random(seed))
        launches = []
        for _ in range(2):
            kept: list[tuple[Any, ...]] = []
            recorded = {
                field.name: lambda *numbers, name=field.name, kept=kept: kept.append((name, *numbers))
                for field in dataclasses.fields(cuda.Kernels)
                if field.name != "busy_threads"
            }
            monkeypatch.setattr(cuda, "on_device", lambda device, r=recorded: dataclasses.replace(host, **r))
            call.run(cuda)
            launches.append(kept)
            for tensor in call.tensors().values():
                tensor.zero_()
        assert launches[0] == launches[1] and launches[0]


def test_only_lengths_that_are_rewritten_in_place_cost_a_second_launch(
    host: cuda.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[int] = []
    counted = dataclasses.replace(host, fa_metadata=lambda *numbers: launches.append(numbers[0]))
    monkeypatch.setattr(cuda, "on_device", lambda device: counted)
    lengths, other = torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    table = torch.zeros(3, 8, dtype=torch.int32)

    def count(cache: torch.Tensor, **more: Any) -> int:
        launches.clear()
        cuda.fa_metadata(FaMetadata(lengths, lengths, table, cache, None, table, 1, **more))
        return len(launches)

    assert [count(lengths), count(other), count(other, delta=1), count(other, drop_last=True)] == [1, 1, 1, 1]
    assert [count(lengths, delta=1), count(lengths, drop_last=True)] == [2, 2]


def test_few_flags_are_counted_twice_and_many_wait_for_the_rows(
    host: cuda.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[str] = []
    names = ("fa_metadata", "verify_expand")
    counting: dict[str, Any] = {name: lambda *_, n=name: launches.append(n) for name in names}
    counted = dataclasses.replace(host, **counting)
    monkeypatch.setattr(cuda, "on_device", lambda device: counted)
    many_drafts(100, 8).run(cuda)
    assert launches == ["verify_expand"]
    many_drafts(10, 40).run(cuda)
    assert launches == ["verify_expand", "verify_expand", "fa_metadata"]


# one mistake each that a reviewer could overlook; those that read or write elsewhere would end this process
MUTANTS = {
    "a sum without the earlier tiles": ("carry_k += sums.all;", ""),
    "no barrier between the warps' sums": ("of_warps[warp] = sum;\n    __syncthreads();", "of_warps[warp] = sum;"),
    "a sum that counts itself": ("Sums sums = {sum - value, 0};", "Sums sums = {sum, 0};"),
    "a copy without its head": ("if (team.rank < head) out[team.rank] = __ldg(in + team.rank);", ""),
    "a copy without its tail": (
        "if (team.rank < count - tail) out[tail + team.rank] = __ldg",
        "if (false) out[0] = __ldg",
    ),
    "a tail that is not zeroed": ("if (table) zero(table + live, width - live, team);", ""),
    "a missing slot that is looked up": (
        "slot < 0 ? -1 : __ldg(reinterpret_cast<const int*>(mapping) + 2 * i64(slot))",
        "__ldg(reinterpret_cast<const int*>(mapping) + 2 * i64(slot < 0 ? 0 : slot))",
    ),
    "a translation without its head": ("gather(table, swa_table, slots, mapping, 0, head, team);", ""),
    "a translation without its tail": (
        "gather(table ? table + tail : nullptr, swa_table + tail, slots + tail, mapping, 0, live - tail, team);",
        "",
    ),
    "a slot that is translated as its neighbour": ("in_window(mapping, slot[j].y)", "in_window(mapping, slot[j].x)"),
    "a page too few": ("(count + (i64(1) << shift) - 1) >> shift", "count >> shift"),
    "the draft's others first": ("sees ? seen_place", "!sees ? seen_place"),
    "runs that meet at a warp's end": ("lane == 0 ? page_before : neighbour", "neighbour"),
    "a page that is listed twice": ("(job.page_shift == 0 || place == 0 || page != before)", "true"),
    "equal slots that are joined": ("job.page_shift == 0 || place == 0", "place == 0"),
    "i64 read as i32": ("place << (wide ? 1 : 0)", "place"),
    "teams of a row that overlap": ("(part << job.team_shift) + own", "own"),
    "zeroes instead of locations": ("to = slot < 0 ? -1 : __ldg(job.mapping + slot);", ""),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_cases_see_a_mistake(mutant: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutated = build(headers.mutant(PROGRAM.file, *MUTANTS[mutant], tmp_path), tmp_path)
    monkeypatch.setattr(cuda, "on_device", lambda device: mutated)

    assert next(faults(), None), f"nothing sees {mutant}"


def faults() -> Iterator[str]:
    """Faults that the cases find in the CUDA implementation."""
    for name in CHOSEN:
        yield from headers.seen(functools.partial(cases.differences_in, CHOSEN[name](), cuda, reference))
    for seed in range(SEEDS):
        for operation in cases.OPERATIONS:
            call = (operation, seed, cuda, reference, cases.Sizes(), "cpu")
            yield from headers.seen(functools.partial(cases.differences, *call))


@pytest.mark.parametrize("kernel", PARAMETERS)
def test_the_packing_is_the_headers_struct(kernel: str) -> None:
    name, layout = PARAMETERS[kernel]
    headers.assert_packs(layout, PROGRAM.file, name)


def test_the_constants_are_the_headers() -> None:
    text = PROGRAM.file.read_text()
    found = {name: int(value) for name, value in re.findall(r"\bk(\w+) = (\d+)[;,]", text)}
    expected = {
        "Threads": cuda.THREADS,
        "VerifyThreads": cuda.VERIFY_THREADS,
        "Warp": cuda.WARP,
        "WideSeqLens": cuda.WIDE_SEQ_LENS,
        "WideReqPoolIndices": cuda.WIDE_REQ_POOL_INDICES,
        "WideRowStart": cuda.WIDE_ROW_START,
        "WideExtendLens": cuda.WIDE_EXTEND_LENS,
        "WideOutCacheLoc": cuda.WIDE_OUT_CACHE_LOC,
        "DropLast": cuda.DROP_LAST,
        "ZeroTail": cuda.ZERO_TAIL,
    }
    headers_own = ("InFlight", "TranslatedInFlight", "FlagsInFlight", "Items")
    assert found == expected | {name: found[name] for name in headers_own}
    assert sorted(PROGRAM.kernels) == sorted(re.findall(r"__global__ void __launch_bounds__\(.*?\)\s*(\w+)\(", text))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc_compiles_it_without_a_warning_or_a_spill(architecture: str, tmp_path: pathlib.Path) -> None:
    for file in sorted(PROGRAM.file.parent.iterdir()):
        log = headers.nvcc_log(file, architecture, tmp_path)
        assert headers.resources(log) == dict.fromkeys(PARAMETERS, headers.NOTHING_SPILLED), log


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc_compiles_it_without_a_warning_or_a_spill(architecture: str, nvrtc_13: nvrtc.Compiler) -> None:
    log = headers.nvrtc_log(PROGRAM.source(), PROGRAM.header, architecture, nvrtc_13)
    assert headers.resources(log) == dict.fromkeys(PARAMETERS, headers.NOTHING_SPILLED), log
