# SPDX-License-Identifier: Apache-2.0
"""States without elements on the way to host memory and back, on a real scheduler: red, green, and other states."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests import processes
from tests.fixes import alone, settings
from tests.wheels import NEWEST

ID = "empty_states_copied"
ENDLESS, REFUSED = "RecursionError", "RuntimeError: transfer_mamba: item_size must be positive"
RIGHT = "right"
# the host held a part, so many tokens were found, and the answer is the cold one
SERVED = [True, 128, True]
# copied by SGLang's kernel for states, or by the driver
CASES = {
    ("0.5.16", "kernel"): REFUSED,
    ("0.5.20", "kernel"): REFUSED,
    ("0.5.21", "direct"): ENDLESS,
    (NEWEST, "kernel"): ENDLESS,
}
# without it a hit in the GPU's cache is wrong, too
ALSO = {"0.5.16": ["lightning_checkpoint_late"]}
POOL = "sglang/srt/mem_cache/pool_host/mamba.py"


@pytest.mark.parametrize(("release", "io_backend"), CASES)
def test_a_prefix_is_served_from_the_host(
    release_root: Callable[[str], pathlib.Path], release: str, io_backend: str
) -> None:
    fixes = [ID, *ALSO.get(release, [])]
    flags: dict[str, Any] = {}
    for name in fixes:
        flags |= settings.only(name)
    arguments = ("-m", "tests.scenarios.empty_states", io_backend)
    found, _ = processes.beside(release_root(release), *arguments, timeout=600, **flags)
    # those of the convolution, and those of the recurrence
    conv, recurrence = found["shapes"]
    assert 0 in conv and 0 not in recurrence
    assert found["applied"] == fixes
    assert found["with"] == {"empty": RIGHT, "of nothing": RIGHT, "whole": RIGHT, "served": SERVED}
    stock = dict(found["without"])
    assert stock.pop("whole") == RIGHT
    ends = CASES[release, io_backend]
    assert all(outcome.startswith(ends) for outcome in stock.values()), stock


@pytest.mark.parametrize(
    ("release", "old", "new"),
    [
        (NEWEST, "tensor.stride(0) != tensor[0].numel()", "tensor.stride(0) > tensor[0].numel()"),
        (NEWEST, "transfer_kv_mamba_lf_pf(\n", "transfer_states_lf_pf(\n"),
        (
            "0.5.20",
            "for conv_idx in range(len(self.conv_state_shapes)):",
            "for conv_idx, _ in self.conv_state_elem_sizes:",
        ),
    ],
)
def test_a_later_source_is_read_and_not_guessed(release: str, old: str, new: str) -> None:
    assert alone.verdict(ID, release, POOL, old, new) is Verdict.UNKNOWN
