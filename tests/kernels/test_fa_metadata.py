# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's metadata: Triton's implementation equals the reference, on Triton's interpreter."""

from __future__ import annotations

import json
import pathlib
import random
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from sglang_bcg_fixes.kernels.fa_metadata import reference
from sglang_bcg_fixes.kernels.fa_metadata import triton as implementation
from sglang_bcg_fixes.kernels.fa_metadata.jobs import DraftExpand, FaMetadata, LocalAttention, VerifyExpand
from tests import processes
from tests.kernels import fa_metadata_cases as cases
from tests.kernels.fa_metadata_mutants import MUTANTS, SMALL

BLOCKS = {"blocks as they are": {}, "small blocks": SMALL}


@pytest.fixture(params=BLOCKS, scope="module")
def blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in BLOCKS[request.param].items():
            patch.setattr(implementation, name, value)
        yield


@pytest.mark.parametrize("operation", cases.OPERATIONS)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(chance=some.randoms(use_true_random=False))
def test_random_calls(blocks: None, operation: str, chance: random.Random) -> None:
    assert cases.differences_in(cases.draw(operation, chance), implementation, reference) == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("operation", cases.OPERATIONS)
def test_many_rows(operation: str, seed: int) -> None:
    sizes = cases.Sizes(rows=2500, tokens=300, locations=9000, draft_tokens=17)
    assert cases.differences_in(cases.draw(operation, random.Random(seed), sizes), implementation, reference) == []


@pytest.mark.parametrize("page_size", [1, 64])
def test_long_rows(page_size: int) -> None:
    tokens = 262144
    lengths = torch.tensor([tokens, 3, 0, 9000], dtype=torch.int32)
    table = torch.randint(0, 9000, (4, tokens + 4), dtype=torch.int32)
    width = -(-tokens // page_size)
    call = cases.Call(
        "fa_metadata",
        {
            "seq_lens": lengths,
            "req_pool_indices": torch.tensor([2, 1, 0, 3]),
            "req_to_token": table,
            "page_size": page_size,
            "delta": 3,
            "mapping": torch.randint(0, 9000, (9000,)),
        },
        {
            "cache_seqlens": torch.zeros(4, dtype=torch.int32),
            "cu_seqlens_k": torch.zeros(5, dtype=torch.int32),
            "page_table": torch.full((4, width), -7, dtype=torch.int32),
            "swa_page_table": torch.full((4, width), -7, dtype=torch.int32),
        },
        {},
    )
    outputs = {name: tensor for name, tensor in call.outputs.items() if tensor is not None}
    call.buffers |= outputs
    assert cases.differences_in(call, implementation, reference) == []
    # by hand: the last page of the longest row, and the first column behind the short one
    assert int(outputs["page_table"][0, -1]) == int(table[2, (width - 1) * page_size]) // page_size
    assert outputs["page_table"][1, -(-6 // page_size)] == -7


@pytest.fixture(scope="module")
def noticed() -> dict[str, bool]:
    """The fate of each mutant, in a process that may die of its memory accesses."""
    found: dict[str, bool] = {}
    while len(found) < len(MUTANTS):
        left = [name for name in MUTANTS if name not in found]
        done = processes.python(
            "-m", "tests.kernels.fa_metadata_mutants", *left, environment={"TRITON_INTERPRET": "1"}, timeout=300
        )
        told = dict(line.split("\t") for line in done.stdout.splitlines())
        found |= {name: result == "True" for name, result in told.items()}
        if done.returncode < 0:
            found[left[len(told)]] = True
        else:
            assert done.returncode == 0, done.stderr[-3000:]
    return found


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, noticed: dict[str, bool]) -> None:
    assert noticed[mutant]


def test_the_reference_by_hand() -> None:
    table = torch.arange(100, dtype=torch.int32).view(2, 50)
    lengths, sums = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    pages = torch.full((2, 4), -7, dtype=torch.int32)
    requests = (torch.tensor([5, 8]), torch.tensor([1, 0]), table)
    reference.fa_metadata(FaMetadata(*requests, lengths, sums, pages, 4, delta=1))
    assert lengths.tolist() == [6, 9]
    assert sums.tolist() == [0, 6, 15]
    assert pages.tolist() == [[12, 13, -7, -7], [0, 1, 2, -7]]
    reference.fa_metadata(FaMetadata(*requests, lengths, sums, pages, 4, drop_last=True))
    assert lengths.tolist() == [4, 8]
    assert sums.tolist() == [0, 5, 13]
    local = torch.full((2, 2), -7, dtype=torch.int32)
    reference.local_attention(LocalAttention(torch.tensor([9, 8]), torch.tensor([1, 0]), table, lengths, local, 8, 4))
    assert lengths.tolist() == [1, 8]
    assert local.tolist() == [[14, -7], [0, 1]]
    # request 0 has 1 token before its draft, request 1 has 2; each row sees itself and the first
    mask = [9, 1, 0, 9, 1, 1, 9, 9, 1, 0, 9, 9, 0, 1]
    seen, all_seen, slots = torch.zeros(4).int(), torch.zeros(5).int(), torch.zeros(4, 2).int()
    before = torch.tensor([1, 2])
    total = torch.tensor([0, 1, 3], dtype=torch.int32)
    flags = torch.tensor(mask) == 1
    reference.verify_expand(VerifyExpand(before, total, torch.tensor([0, 1]), table, flags, seen, all_seen, slots, 2))
    assert seen.tolist() == [1, 2, 1, 1]
    assert all_seen.tolist() == [0, 1, 3, 4, 5]
    assert slots.tolist() == [[1, 2], [1, 2], [52, 53], [53, 52]]
    branches = torch.full((2, 3), -7, dtype=torch.int32)
    reference.draft_expand(
        DraftExpand(torch.tensor([7]), torch.tensor([7, 8, 9, 3, 20, 4]), seen[:2], branches, 4, 2, 3, 3)
    )
    assert seen[:2].tolist() == [6, 6]
    assert branches.tolist() == [[1, 2, -7], [0, 5, 1]]


WRONG: dict[str, dict[str, Any]] = {
    "page_size 3": {"page_size": 3},
    "page_size 2048": {"page_size": 2048},
    "seq_lens is torch.float32": {"seq_lens": torch.zeros(2)},
    "req_pool_indices is [1]": {"req_pool_indices": torch.zeros(1, dtype=torch.int64)},
    "cu_seqlens_k is [2]": {"cu_seqlens_k": torch.zeros(2, dtype=torch.int32)},
    "page_table is torch.int64": {"page_table": torch.zeros(2, 3, dtype=torch.int64)},
    "rows of page_table have stride 2": {"page_table": torch.zeros(2, 6, dtype=torch.int32)[:, ::2]},
    "seq_lens has stride 2": {"seq_lens": torch.zeros(4, dtype=torch.int32)[::2]},
    "delta is -1": {"delta": -1},
    "from extend_lens or from q_stride": {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)},
    "as wide as page_table": {
        "swa_page_table": torch.zeros(2, 4, dtype=torch.int32),
        "mapping": torch.zeros(9, dtype=torch.int64),
    },
    "mapping comes with": {"swa_page_table": torch.zeros(2, 3, dtype=torch.int32)},
    "come together": {"out_cache_loc": torch.zeros(1, dtype=torch.int64)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message: str) -> None:
    right: dict[str, Any] = {
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "req_pool_indices": torch.zeros(2, dtype=torch.int64),
        "req_to_token": torch.zeros(1, 5, dtype=torch.int32),
        "cache_seqlens": torch.zeros(2, dtype=torch.int32),
        "cu_seqlens_k": torch.zeros(3, dtype=torch.int32),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "page_size": 1,
    }
    FaMetadata(**right).check()
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        reference.fa_metadata(FaMetadata(**{**right, **WRONG[message]}))


def test_the_short_way_to_the_driver_leads_to_the_same_launch(tmp_path: pathlib.Path) -> None:
    """Triton's own launchers, and a driver that only keeps what it is given."""
    driver = tmp_path / "libcuda.so.1"
    source = pathlib.Path(__file__).parent / "triton_driver.c"
    named = "-Wl,-soname,libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", named, str(source), "-o", str(driver)], check=True)
    paths = {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    done = processes.python(
        "-m",
        "tests.kernels.triton_host_path",
        str(driver),
        environment={"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache"), "CASES": "8", **paths},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.partition("RESULT ")[2])
    assert found["alike"] >= 32
    assert found["direct_us"] < found["triton_us"]


def test_it_compiles_for_gpus() -> None:
    """The interpreter takes what the compiler refuses; and rows are copied 16 bytes at a time."""
    done = processes.python(
        "-m", "tests.kernels.compile_fa_metadata", environment={"TRITON_INTERPRET": "0"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "all wide", done.stdout
