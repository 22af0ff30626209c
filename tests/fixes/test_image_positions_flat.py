# SPDX-License-Identifier: Apache-2.0
"""Images of a model that takes three positions for each token: the real runner, capture and replay."""

from __future__ import annotations

import types
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import image_positions_flat as fix
from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone

ID = "image_positions_flat"
RUNNER = "sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py"
MODEL = "sglang/srt/models/cosmos3_edge.py"
MOVED = ("an image", "an image beside a text", "a text behind an image")


# on 0.5.20 the text needs text_embeds_stale as well
@pytest.mark.parametrize("release", ["0.5.20", "0.5.21", "0.5.22", "0.5.23"])
def test_every_replay_has_the_positions_of_its_own_tokens(release: str) -> None:
    found = alone.found(ID, release, "tests.scenarios.image_positions", SGLANG_BCG_FIX_TEXT_EMBEDS_STALE="on")
    assert found["applied"] == [ID, "text_embeds_stale"][: 2 if release == "0.5.20" else 1]
    assert found["positions_matter"] == dict.fromkeys(MOVED, True)
    assert found["with"] == {name: [True, "right"] for name in (*MOVED, "a text")}
    of_text = [True] if release == "0.5.20" else [True, "right"]
    assert found["without"] == {name: [True, "flat"] for name in MOVED} | {"a text": of_text}


FLAT, THREE, OF_OTHERS = object(), object(), object()


class Cosmos3EdgeForConditionalGeneration:
    pass


class Subclass(Cosmos3EdgeForConditionalGeneration):
    pass


class Asked(Cosmos3EdgeForConditionalGeneration):
    is_mrope_enabled = False


class OfYourOwn:
    pass


@pytest.mark.parametrize(
    ("model", "is_mrope", "three", "chosen", "given"),
    [
        (Subclass(), True, THREE, FLAT, THREE),
        (Asked(), True, THREE, FLAT, FLAT),
        (OfYourOwn(), True, THREE, FLAT, FLAT),
        # a buffer that no batch fills
        (Subclass(), False, THREE, FLAT, FLAT),
        (Subclass(), True, None, FLAT, FLAT),
        # of context parallelism
        (Subclass(), True, THREE, OF_OTHERS, OF_OTHERS),
    ],
)
def test_three_positions_go_to_the_model_that_takes_them_unasked(
    model: Any, is_mrope: bool, three: Any, chosen: Any, given: Any
) -> None:
    configuration = types.SimpleNamespace(model_is_mrope=is_mrope)
    runner = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model, model_config=configuration))
    batch = types.SimpleNamespace(positions=FLAT, mrope_positions=three)
    assert fix.take_three_as_the_model_does(chosen, runner, batch) is given


def test_a_model_that_says_so_needs_nothing() -> None:
    line = "self.root_config = config\n"
    assert alone.verdict(ID, "0.5.23", MODEL, line, f"self.is_mrope_enabled = {line}") is Verdict.FIXED


@pytest.mark.parametrize(
    "change",
    [
        (RUNNER, 'getattr(language_model, "is_mrope_enabled", False)', "takes_three(language_model)"),
        (MODEL, " positions = forward_batch.mrope_positions\n", " positions = three(forward_batch)\n"),
    ],
)
def test_positions_that_are_chosen_in_another_way_are_not_judged(change: tuple[str, str, str]) -> None:
    assert alone.verdict(ID, "0.5.23", *change) is Verdict.UNKNOWN
