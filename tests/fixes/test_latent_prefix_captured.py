# SPDX-License-Identifier: Apache-2.0
"""Real runners with full prefill graphs of latent attention: batches behind a prefix, and without one."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import latent_prefix_captured as fix
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes
from tests.fixes import settings
from tests.mutated import rewritten
from tests.wheels import NEWEST

FIX = declared_in(fix)
RUNNER = "sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py"
# without a captured prefix, and with one
RELEASES = ("0.5.16", "0.5.17", "0.5.20", "0.5.22", NEWEST)
REPLAYED, EAGER, WRONG = [1, True], [0, True], [1, False]
WITHOUT = ("no prefix", "two without")
BEHIND = ("as long a prefix", "a longer prefix", "a shorter prefix")
# a captured prefix of fewer tokens has the absorbed form
THRESHOLD = "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD"


def found(root: pathlib.Path, flag: str, threshold: str = "1") -> dict[str, list[object]]:
    environment = {**settings.only(FIX.id, flag), THRESHOLD: threshold}
    told, _ = processes.beside(root, "-m", "tests.scenarios.full_prefill", "latent_prefixes", **environment)
    assert told["applied"] == ([FIX.id] if flag == "on" else [])
    batches: dict[str, list[object]] = told["found"]
    return batches


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("flag", ["on", "off"])
def test_a_prefix_that_the_graph_does_not_take_runs_eagerly(
    release_root: Callable[[str], pathlib.Path], release: str, flag: str
) -> None:
    behind = EAGER if flag == "on" else WRONG
    expected = {**dict.fromkeys(WITHOUT, REPLAYED), **dict.fromkeys(BEHIND, behind)}
    assert found(release_root(release), flag) == expected


@pytest.mark.parametrize("release", ["0.5.17", NEWEST])
def test_a_prefix_in_the_absorbed_form_is_replayed(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    assert found(release_root(release), "on", threshold="4096") == dict.fromkeys((*WITHOUT, *BEHIND), REPLAYED)


def test_a_source_that_captures_the_length_of_a_prefix_is_fixed(release_root: Callable[[str], pathlib.Path]) -> None:
    old = "        forward_batch.extend_prefix_lens_cpu = prefix_lens_cpu\n"
    new = old + "        forward_batch.seq_lens_cpu = sum(prefix_lens_cpu)\n"
    assert fix.probe(Source(rewritten(release_root(NEWEST), RUNNER, old, new))).verdict is Verdict.FIXED
