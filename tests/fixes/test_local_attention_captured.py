# SPDX-License-Identifier: Apache-2.0
"""Real runners with full prefill graphs of local layers: prompts within their chunk, and beyond it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import local_attention_captured as fix
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes
from tests.fixes import settings
from tests.mutated import rewritten
from tests.wheels import NEWEST

FIX = declared_in(fix)
BACKEND = "sglang/srt/layers/attention/flashattention_backend.py"
# of each way in which a release asks whether a batch may be replayed
RELEASES = ("0.5.15", "0.5.16", "0.5.17", "0.5.20", "0.5.22", NEWEST)
REPLAYED, EAGER, WRONG = [1, True], [0, True], [1, False]
WITHIN = ("within", "of the chunk", "two of the chunk", "within behind a prefix")
BEYOND = ("beyond", "one of two beyond", "beyond behind a prefix")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("flag", ["on", "off"])
def test_only_what_lies_within_the_chunk_is_replayed(
    release_root: Callable[[str], pathlib.Path], release: str, flag: str
) -> None:
    arguments = ("-m", "tests.scenarios.full_prefill", "chunks")
    found, _ = processes.beside(release_root(release), *arguments, **settings.only(FIX.id, flag))
    assert found["applied"] == ([FIX.id] if flag == "on" else [])
    beyond = EAGER if flag == "on" else WRONG
    assert found["found"] == {**dict.fromkeys(WITHIN, REPLAYED), **dict.fromkeys(BEYOND, beyond)}


def test_a_source_that_plans_for_local_layers_is_fixed(release_root: Callable[[str], pathlib.Path]) -> None:
    old = "m.max_seq_len_k = self.max_context_len"
    new = f"{old}; m.local_attn_metadata = self.local_attn_builder.build()"
    assert fix.probe(Source(rewritten(release_root(NEWEST), BACKEND, old, new))).verdict is Verdict.FIXED
