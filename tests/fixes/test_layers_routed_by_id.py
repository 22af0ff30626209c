# SPDX-License-Identifier: Apache-2.0
"""The routing-by-id probe on drifted sources, and that a layer's kind is looked up once."""

from __future__ import annotations

import types

import pytest

from sglang_bcg_fixes.fixes import layers_routed_by_id as fix
from sglang_bcg_fixes.model import Action, modules_of
from sglang_bcg_fixes.planning.plan import ask, decide, with_needed_points
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import wheels
from tests.fixes import alone
from tests.wheels import NEWEST, RELEASES

FIX = declared_in(fix)
BACKEND = "sglang/srt/layers/attention/hybrid_linear_attn_backend.py"
BAILING = "sglang/srt/models/bailing_moe_linear.py"
BY_ID = "return layer_id in self.full_attn_layers"

MUTANTS = {
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
    "the route looks at a name that is new": (NEWEST, BACKEND, BY_ID, f"layer.is_sparse or {BY_ID[7:]}"),
    "the route looks at a mark that is new": ("0.5.16", BACKEND, BY_ID, "return not getattr(layer, 'is_linear', 0)"),
    "the route is decorated": ("0.5.14", BACKEND, "    def _is_full_attn(", "    @remembered\n    def _is_full_attn("),
    "the linear backend is made of more": (NEWEST, BACKEND, "(self, model_runner: ModelRunner)", "(self, r, layers)"),
    "Bailing's layers are made otherwise": ("0.5.20", BAILING, "self.attn = RadixAttention(", "self.attn = Lightning("),
    "Bailing's layers have another name": (
        "0.5.20",
        BAILING,
        "self.attn = RadixAttention(",
        "self.core = RadixAttention(",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_drifted_source_is_unknown(mutant: str) -> None:
    finding = alone.asked(FIX, *MUTANTS[mutant])
    assert finding.verdict is Verdict.UNKNOWN, finding


@pytest.mark.parametrize("release", RELEASES)
def test_routing_is_patched_only_where_it_is_asked_for(release: str) -> None:
    source = Source(Folder(wheels.unpacked(release)))
    finding = ask(FIX, source)
    assert finding.verdict is Verdict.LATENT
    assert decide(FIX, "auto", finding).action is decide(FIX, "off", finding).action is Action.NOT_NEEDED
    applied = with_needed_points(decide(FIX, "on", finding), source).subject
    one_method = RELEASES.index(release) >= RELEASES.index("0.5.13")
    expected = [fix.LINEAR_BACKEND, *([fix.ROUTE] if one_method else fix.OLD_ROUTES)]
    assert [point.where[0] for point in applied.patches] == expected
    assert set(modules_of(applied)) == {fix.MODULE}


class Layer:
    def __init__(self, layer_id: int) -> None:
        self.layer_id = layer_id


def test_the_kind_of_a_layer_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def by_kind(backend: object, layer: Layer) -> bool | None:
        looked.append(layer.layer_id)
        return {0: False, 1: True}.get(layer.layer_id)

    monkeypatch.setattr(fix, "is_full_by_kind", by_kind)
    layers = [Layer(number) for number in range(4)]
    backend = types.SimpleNamespace(full_attn_layers=[0, 3])
    rebuilt = types.SimpleNamespace(full_attn_layers=[2])
    for _ in range(3):
        assert [fix.belongs_to_full(backend, layer) for layer in layers] == [False, True, False, True]
    # what the kind does not tell follows the list of the backend that asks
    assert [fix.belongs_to_full(rebuilt, layer) for layer in layers] == [False, True, True, False]
    assert looked == [0, 1, 2, 3]


def test_a_runner_without_a_model_marks_nothing() -> None:
    backend = types.SimpleNamespace()
    fix.note_what_ids_do_not_tell(None, backend, types.SimpleNamespace(is_draft_worker=True))
    assert backend.is_draft_worker is True
