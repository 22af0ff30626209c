# SPDX-License-Identifier: Apache-2.0
"""Tokens that the real worker of n-gram speculation generates with a model that is a recurrence."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import ngram_states_uncommitted as fix
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes
from tests.fixes import settings
from tests.mutated import rewritten
from tests.wheels import NEWEST

FIX = declared_in(fix)
WORKER = "sglang/srt/speculative/ngram_worker.py"
RIGHT = {"right": True, "wrongly cached": []}


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1", "0.5.13"])
def test_accepted_states_are_kept(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found = processes.beside(
        release_root(release), "-m", "tests.scenarios.ngram_states", timeout=600, **settings.only(FIX.id)
    )[0]
    assert found["applied"] == [FIX.id]
    # with one attention backend, and with two
    assert found["with"] == [RIGHT] * 4
    assert not any(request["right"] for request in found["without"])
    assert all(request["wrongly cached"] for request in found["without"])


def test_a_later_source_is_read_and_not_guessed(release_root: Callable[[str], pathlib.Path]) -> None:
    changed = rewritten(release_root(NEWEST), WORKER, "commit_mamba_states_after_verify(", "keep_mamba_states(")
    assert fix.probe(Source(changed)).verdict is Verdict.UNKNOWN
