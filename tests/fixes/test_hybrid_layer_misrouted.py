# SPDX-License-Identifier: Apache-2.0
"""The shared-configuration probe on drifted sources, and what counts as a copy."""

from __future__ import annotations

import types

import pytest

from sglang_bcg_fixes.fixes import hybrid_layer_misrouted as fix
from sglang_bcg_fixes.model import modules_of
from sglang_bcg_fixes.planning.plan import ask, decide
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import wheels
from tests.fixes import alone
from tests.wheels import RELEASES

FIX = declared_in(fix)
CONFIG = "sglang/srt/configs/model_config.py"
CACHED = "sglang/srt/utils/hf_transformers/config.py"

MUTANTS = {
    "the draft is configured before the text": (
        "0.5.12",
        CONFIG,
        "        self.hf_text_config = get_hf",
        "        self._config_draft_model()\n        self.hf_text_config = get_hf",
    ),
    "the draft is configured elsewhere": ("0.5.13", CONFIG, "self._config_draft_model()", "configure(self)"),
    "the draft is configured with a parameter": (
        "0.5.11",
        CONFIG,
        "_config_draft_model(self)",
        "_config_draft_model(s)",
    ),
    "the configuration is made otherwise": ("0.5.11", CONFIG, "self.hf_config = get_config(", "self.hf_config = load("),
    "the configuration is not cached": ("0.5.12", CACHED, "@lru_cache_frozenset(maxsize=32)", ""),
    "the configuration is copied otherwise": ("0.5.14", CONFIG, "copy.deepcopy(\n", "copy.copy(\n"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_drifted_source_is_unknown(mutant: str) -> None:
    finding = alone.asked(FIX, *MUTANTS[mutant])
    assert finding.verdict is Verdict.UNKNOWN, finding


@pytest.mark.parametrize("release", RELEASES)
def test_only_where_the_configuration_is_shared_is_it_copied(release: str) -> None:
    source = Source(Folder(wheels.unpacked(release)))
    decision = decide(FIX, "auto", ask(FIX, source))
    shared = RELEASES.index(release) < RELEASES.index("0.5.14")
    assert decision.finding.verdict is (Verdict.AFFECTED if shared else Verdict.FIXED)
    # nothing of a process that only reads flags, and no model: those would be imported with it
    assert set(modules_of(FIX)) == {fix.RUNNERS_CONFIG.partition(":")[0]}


@pytest.mark.parametrize("nested", [False, True])
def test_a_drafts_two_configurations_are_copied_as_one(nested: bool) -> None:
    whole = types.SimpleNamespace(layers=[0, 1])
    whole.text = types.SimpleNamespace(layers=[0, 1]) if nested else whole
    target = types.SimpleNamespace(is_draft_model=False, hf_config=whole, hf_text_config=whole.text)
    draft = types.SimpleNamespace(is_draft_model=True, hf_config=whole, hf_text_config=whole.text)
    fix.give_the_draft_its_own(target)
    fix.give_the_draft_its_own(draft)
    assert target.hf_config is whole and target.hf_text_config is whole.text
    assert draft.hf_config is not whole and draft.hf_text_config is draft.hf_config.text
    draft.hf_text_config.layers.clear()
    assert target.hf_text_config.layers == [0, 1]
