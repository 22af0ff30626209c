# SPDX-License-Identifier: Apache-2.0
"""Experts that two real ranks return for their prompts, next to those of an eager prefill."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import experts_of_another_rank as fix
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes
from tests.fixes import settings
from tests.mutated import rewritten
from tests.wheels import NEWEST

FIX = declared_in(fix)
RUNNER = "sglang/srt/model_executor/model_runner.py"
# without a replayed decode graph, with one of fewer rows than the prompt's, and with one of more than the buffer's
RIGHT = ["replayed, right"] * 3
NO_ROWS = "TypeError: unsupported operand type(s) for *: 'int' and 'NoneType'"


@pytest.mark.parametrize("release", ["0.5.16", "0.5.17", "0.5.19", "0.5.20", "0.5.22", NEWEST])
def test_a_rank_returns_the_experts_of_its_own_tokens(
    release_root: Callable[[str], pathlib.Path], release: str
) -> None:
    found = processes.beside(
        release_root(release),
        "-m",
        "tests.scenarios.returned_experts",
        timeout=600,
        **settings.only(FIX.id),
        # 0.5.16 reads freed memory without it
        SGLANG_BCG_FIX_DP_COUNTS_FREED="on",
    )[0]
    assert FIX.id in found["applied"]
    assert found["with"] == {"data parallel attention": [RIGHT, RIGHT], "none": [RIGHT, RIGHT]}
    assert found["without"]["none"] == [RIGHT, RIGHT]
    first, second = found["without"]["data parallel attention"]
    # the first rank's are at the beginning in any case
    assert first == [NO_ROWS, *RIGHT[1:]]
    assert second[:2] == [NO_ROWS, "replayed, wrong"]
    assert second[2].startswith("RuntimeError: shape mismatch")


def test_a_source_that_looks_them_up_in_another_way_is_not_guessed(
    release_root: Callable[[str], pathlib.Path],
) -> None:
    changed = rewritten(
        release_root(NEWEST), RUNNER, 'getattr(self.decode_cuda_graph_runner, "bs", None)', "output.cuda_graph_batch"
    )
    assert fix.probe(Source(changed)).verdict is Verdict.UNKNOWN
