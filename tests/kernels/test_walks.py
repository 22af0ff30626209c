# SPDX-License-Identifier: Apache-2.0
"""A step of any number of sequences is walked by one launch, in the finest parts that have a multiprocessor each."""

from __future__ import annotations

import pytest
import torch

from sglang_bcg_fixes.kernels.lightning_extend import Shape as Lightning
from sglang_bcg_fixes.kernels.lightning_extend import triton as lightning
from sglang_bcg_fixes.kernels.linear_extend import generations
from sglang_bcg_fixes.kernels.linear_extend.walks import Heads, Walk, launches, of_few_sequences
from sglang_bcg_fixes.kernels.mamba2_extend import Shape as Mamba2
from sglang_bcg_fixes.kernels.mamba2_extend import triton as mamba2

BFLOAT16, FLOAT = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
MOST = 512
LAYERS: list[tuple[Heads, mamba2.Tuning | lightning.Tuning]] = [
    *(
        (shape, mamba2.tuning_for(shape))
        for shape in (Mamba2(128, 8, 64, 128, 4), Mamba2(16, 1, 64, 128, 4), Mamba2(24, 1, 128, 256, 4))
    ),
    *(
        (shape, lightning.tuning_for(shape, q))
        for shape in (Lightning(32, 128), Lightning(8, 128))
        for q in (BFLOAT16, FLOAT)
    ),
]


@pytest.mark.parametrize(("shape", "tuning"), LAYERS, ids=str)
def test_every_number_of_sequences_is_walked_once(shape: Heads, tuning: mamba2.Tuning | lightning.Tuning) -> None:
    found = list(launches(tuning.few, tuning.many, shape, MOST))
    for number in range(1, MOST + 1):
        (walk,) = (walk for walk, least, most in found if least <= number <= most)
        assert walk is tuning.many or number * shape.heads * shape.head // walk.part_of(shape) <= walk.programs


def test_no_walk_is_launched_that_a_step_never_needs() -> None:
    walks = [Walk(132, 4, 3, part) for part in (16, 32, 64)]
    # one sequence of so many heads is too much for each
    assert of_few_sequences(walks, Lightning(256, 128)) == ()
    # heads of 48 are walked in parts of 16 by all of them
    assert of_few_sequences(walks, Lightning(8, 48)) == (walks[0],)
    assert [walk.part for walk in of_few_sequences(walks, Lightning(8, 128))] == [16, 64]
    few, many = Walk(132, 4, 3, 64), Walk(264, 4, 2, 64)
    assert list(launches([few], many, Lightning(1, 64), 132)) == [(few, 1, 132)]


# rows of a part with many sequences, and with few: up to how many, by rows of a part
@pytest.mark.parametrize(
    ("heads", "q", "many", "few"),
    [
        (32, BFLOAT16, 128, {32: 1, 64: 2}),
        (8, BFLOAT16, 128, {16: 2, 64: 8}),
        (32, FLOAT, 32, {32: 1}),
        (8, FLOAT, 32, {16: 2, 32: 4}),
    ],
)
def test_parts_of_lightning_attention(heads: int, q: torch.Tensor, many: int, few: dict[int, int]) -> None:
    shape = Lightning(heads, 128)
    tuning = lightning.tuning_for(shape, q)
    assert tuning.many.part == many and {walk.part: walk.most_sequences(shape) for walk in tuning.few} == few


def test_parts_stay_small_on_newer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "is_newer_than_hopper", lambda tensor: True)
    shape = Lightning(32, 128)
    assert lightning.tuning_for(shape, BFLOAT16) == lightning.tuning_for(shape, FLOAT)
