# SPDX-License-Identifier: Apache-2.0
"""A step of any number of sequences is walked by one launch, in the finest parts that have a multiprocessor each."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.kernels.mamba2_extend import Shape, triton
from sglang_bcg_fixes.kernels.mamba2_extend.walks import Walk, launches, of_few_sequences

MOST = 512
SHAPES = (Shape(128, 8, 64, 128, 4), Shape(16, 1, 64, 128, 4), Shape(24, 1, 128, 256, 4))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_of_sequences_is_walked_once(shape: Shape) -> None:
    tuning = triton.tuning_for(shape)
    found = list(launches(tuning.few, tuning.many, shape, MOST))
    for number in range(1, MOST + 1):
        (walk,) = (walk for walk, least, most in found if least <= number <= most)
        assert walk is tuning.many or number * shape.heads * shape.head // walk.part_of(shape) <= walk.programs


def test_no_walk_is_launched_that_a_step_never_needs() -> None:
    walks = [Walk(132, 4, 3, part) for part in (16, 32, 64)]
    # one sequence of so many heads is too much for each
    assert of_few_sequences(walks, Shape(256, 1, 128, 128, 4)) == ()
    # heads of 48 are walked in parts of 16 by all of them
    assert of_few_sequences(walks, Shape(8, 1, 48, 128, 4)) == (walks[0],)
    assert [walk.part for walk in of_few_sequences(walks, Shape(8, 1, 128, 128, 4))] == [16, 64]
    few, many = Walk(132, 4, 3, 64), Walk(264, 4, 2, 64)
    assert list(launches([few], many, Shape(1, 1, 64, 128, 4), 132)) == [(few, 1, 132)]
