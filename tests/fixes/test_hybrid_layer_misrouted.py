"""What the probe of the routing fix answers on drifted sources, and which of its points a release needs."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import hybrid_layer_misrouted as fix
from sglang_bcg_fixes.model import Verdict
from sglang_bcg_fixes.patching import modules_of
from sglang_bcg_fixes.plan import decide, with_needed_points
from sglang_bcg_fixes.probe import Folder, Source, ask
from tests.mutated import rewritten
from tests.wheels import RELEASES

Root = Callable[[str], pathlib.Path]
CONFIG = "sglang/srt/configs/model_config.py"
CACHED = "sglang/srt/utils/hf_transformers/config.py"
BACKEND = "sglang/srt/layers/attention/hybrid_linear_attn_backend.py"
BAILING = "sglang/srt/models/bailing_moe_linear.py"
BY_ID = "return layer_id in self.full_attn_layers"

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
    "a method looks ids up otherwise": (
        "0.5.11",
        BACKEND,
        "layer_id in self.full_attn_layers",
        "self.is_full(layer_id)",
    ),
    "a method has one more statement": ("0.5.12.post1", BACKEND, "is_linear_attn =", "x = 1; is_linear_attn ="),
    "the method is asked for more": (
        "0.5.13",
        BACKEND,
        "layer_id: Optional[int] = None\n",
        "layer_id=None, mode=None\n",
    ),
    "the route looks at a name that is new": ("0.5.23", BACKEND, BY_ID, f"layer.is_sparse or {BY_ID[7:]}"),
    "the route looks at a mark that is new": ("0.5.16", BACKEND, BY_ID, "return not getattr(layer, 'is_linear', 0)"),
    "the route is decorated": ("0.5.14", BACKEND, "    def _is_full_attn(", "    @remembered\n    def _is_full_attn("),
    "the linear backend is made of more": ("0.5.23", BACKEND, "(self, model_runner: ModelRunner)", "(self, r, layers)"),
    "Bailing's layers are made otherwise": ("0.5.20", BAILING, "self.attn = RadixAttention(", "self.attn = Lightning("),
    "Bailing's layers have another name": (
        "0.5.20",
        BAILING,
        "self.attn = RadixAttention(",
        "self.core = RadixAttention(",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_drifted_source_is_unknown(release_root: Root, mutant: str) -> None:
    release, *change = MUTANTS[mutant]
    finding = ask(fix.FIX, Source(rewritten(release_root(release), *change)))
    assert finding.verdict is Verdict.UNKNOWN, finding


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_gets_the_points_that_it_needs(release_root: Root, release: str) -> None:
    source = Source(Folder(release_root(release)))
    finding = ask(fix.FIX, source)
    applied = with_needed_points(decide(fix.FIX, "auto", finding), source).fix
    shared = RELEASES.index(release) < RELEASES.index("0.5.14")
    one_method = RELEASES.index(release) >= RELEASES.index("0.5.13")
    expected = [f"{fix.RUNNERS_CONFIG}._config_draft_model"] if shared else []
    expected += [fix.LINEAR_BACKEND, *([fix.ROUTE] if one_method else fix.OLD_ROUTES)]
    assert finding.verdict is Verdict.AFFECTED
    assert ("share one cached configuration" in finding.reason) is shared
    assert [point.where[0] for point in applied.patches] == expected
    # nothing of a process that only reads flags, and no model: those would be imported with it
    assert set(modules_of(applied)) == {fix.MODULE, *([fix.RUNNERS_CONFIG.partition(":")[0]] if shared else [])}


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


def test_a_runner_without_a_model_marks_nothing() -> None:
    backend = types.SimpleNamespace()
    fix.note_what_ids_do_not_tell(None, backend, types.SimpleNamespace(is_draft_worker=True))
    assert backend.is_draft_worker is True
