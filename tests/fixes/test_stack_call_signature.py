# SPDX-License-Identifier: Apache-2.0
"""Binding by name at its edges: what stands there already, what cannot be placed, and sources that drifted."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
from torch import nn

from sglang_bcg_fixes.fixes import stack_call_signature as fix
from sglang_bcg_fixes.planning.plan import ask
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import wheels
from tests.fixes import alone
from tests.mutated import rewritten
from tests.wheels import NEWEST

FIX = declared_in(fix)
OLD_RUNNER = "sglang/srt/model_executor/breakable_cuda_graph_runner.py"
RUNNER = "sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py"
BATCH = types.SimpleNamespace(input_ids="ids", positions="positions", input_embeds=None)


class Runner:
    def __init__(self, layers: nn.Module | None) -> None:
        self.layer_model = layers

    def run_forward(self, forward_batch: Any, num_tokens: int) -> Any:
        if self.layer_model is None:
            return "the whole model"
        return self.layer_model.forward(
            forward_batch.input_ids, forward_batch.positions, forward_batch, forward_batch.input_embeds
        )

    def run(self, forward_batch: Any = BATCH) -> Any:
        return fix.call_layers_by_name(Runner.run_forward, self, forward_batch, 8)


class BatchFirst(nn.Module):
    def forward(self, input_ids: Any, forward_batch: Any, position_ids: Any, inputs_embeds: Any = "default") -> Any:
        assert "forward" in vars(self)
        return input_ids, position_ids, forward_batch, inputs_embeds


class OtherNames(nn.Module):
    """A custom model's own spelling: right as it is called, and nothing can be placed by name."""

    def forward(self, tokens: Any, places: Any, batch: Any, vectors: Any = "default") -> Any:
        assert "forward" not in vars(self), "right code is left alone"
        return tokens, places, batch, vectors


class OtherNameForEmbeddings(nn.Module):
    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, vectors: Any = "default") -> Any:
        assert "forward" not in vars(self), "right code is left alone"
        return input_ids, positions, forward_batch, vectors


class ProxyFirst(nn.Module):
    """A stack with NemotronH's parameters."""

    def forward(
        self, input_ids: Any, positions: Any, forward_batch: Any, pp_proxy_tensors: Any = None, inputs_embeds: Any = 0
    ) -> Any:
        assert pp_proxy_tensors is None
        return input_ids, positions, forward_batch, inputs_embeds


class NoEmbeddings(nn.Module):
    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        return input_ids, positions, forward_batch


class NeedsMore(nn.Module):
    def forward(self, input_ids: Any, forward_batch: Any, positions: Any, states: Any) -> None: ...


class Fails(nn.Module):
    def forward(self, input_ids: Any, forward_batch: Any, positions: Any) -> None:
        raise KeyError("in the model")


class Fits(nn.Module):
    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, inputs_embeds: Any = "default") -> Any:
        assert "forward" not in vars(self), "right code is left alone"
        return input_ids, positions, forward_batch, inputs_embeds


def test_both_spellings_and_any_order() -> None:
    assert Runner(BatchFirst()).run() == ("ids", "positions", BATCH, None)


def test_what_nobody_asks_for_is_left_out_if_it_is_none() -> None:
    assert Runner(NoEmbeddings()).run() == ("ids", "positions", BATCH)


def test_what_cannot_be_placed_is_an_error_that_says_what_to_do() -> None:
    with_images = types.SimpleNamespace(**vars(BATCH) | {"input_embeds": "embeddings"})
    expected = f"NoEmbeddings.forward has no parameter for input_embeds. Start with .*{FIX.flag}=off"
    with pytest.raises(TypeError, match=expected):
        Runner(NoEmbeddings()).run(with_images)
    with pytest.raises(TypeError, match=r"NeedsMore.forward has a parameter states, which"):
        Runner(NeedsMore()).run()


def test_layers_that_take_the_call_are_left_alone() -> None:
    assert Runner(Fits()).run() == ("ids", "positions", BATCH, None)


@pytest.mark.parametrize("layers", [OtherNames(), OtherNameForEmbeddings()])
def test_so_are_layers_with_names_of_their_own_that_take_it_by_position(layers: nn.Module) -> None:
    with_images = types.SimpleNamespace(**vars(BATCH) | {"input_embeds": "embeddings"})
    for batch in (BATCH, with_images):
        assert Runner(layers).run(batch) == ("ids", "positions", batch, batch.input_embeds)


def test_embeddings_do_not_land_in_the_place_of_something_else() -> None:
    with_images = types.SimpleNamespace(**vars(BATCH) | {"input_embeds": "embeddings"})
    assert Runner(ProxyFirst()).run(with_images) == ("ids", "positions", with_images, "embeddings")


def test_a_graph_of_the_whole_model_is_left_alone() -> None:
    assert Runner(None).run() == "the whole model"


@pytest.mark.parametrize("layers", [BatchFirst(), Fails()])
def test_nothing_stays_behind(layers: nn.Module) -> None:
    try:
        Runner(layers).run()
    except KeyError as error:
        assert error.args == ("in the model",), "an error of the model is not ours to change"
    assert "forward" not in vars(layers)


def test_what_stood_there_is_called_and_put_back() -> None:
    """SGLang leaves a bound method there after each replay; others decorate it."""
    layers = BatchFirst()
    calls = []

    @functools.wraps(layers.forward)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return BatchFirst.forward(layers, *args, **kwargs)

    vars(layers)["forward"] = decorated
    assert Runner(layers).run() == ("ids", "positions", BATCH, None)
    assert layers.forward is decorated and len(calls) == 1


def test_what_takes_everything_is_called_as_the_runner_calls_it() -> None:
    layers = BatchFirst()
    vars(layers)["forward"] = lambda *args: args
    assert Runner(layers).run() == ("ids", "positions", BATCH, None)


def test_a_keyword_is_right_where_any_is_taken() -> None:
    def forward(input_ids: Any, positions: Any, forward_batch: Any, **rest: Any) -> None: ...

    parameters = fix.live_parameters(forward)
    assert parameters is not None
    call = fix.Call(3, frozenset({"input_embeds"}))
    assert fix.misfit(parameters, call) is None
    named = fix.by_name(parameters, ("ids", "positions", BATCH), {"input_embeds": "embeddings"})
    assert named["input_embeds"] == "embeddings"


# release, file, what is there, what would be there, and what the probe has to say
DRIFTED = {
    "the layers are called twice": (
        *("0.5.12.post1", OLD_RUNNER, "output = self.layer_model.forward("),
        "output = self.layer_model.forward(x); output = self.layer_model.forward(",
    ),
    "the runner calls something else": ("0.5.14", RUNNER, "self.layer_model.forward(", "self.stack.forward("),
    "one argument more": ("0.5.18", RUNNER, "forward_batch.input_embeds,\n                )", "None, None)"),
    "other names by signature": (NEWEST, RUNNER, 'in ("input_embeds", "inputs_embeds"):', "in ():"),
    "no names by signature": ("0.5.20", RUNNER, "def _build_layer_model_forward_kwargs(", "def build("),
}


@pytest.mark.parametrize("drift", DRIFTED)
def test_a_drifted_runner_is_unknown(drift: str) -> None:
    finding = alone.asked(FIX, *DRIFTED[drift])
    assert finding.verdict is Verdict.UNKNOWN, finding


def test_two_calls_are_unknown_in_any_form() -> None:
    release, file, old, new = DRIFTED["the layers are called twice"]
    assert alone.verdict("stack_call_signature", release, file, old, new) is Verdict.UNKNOWN


def test_a_model_that_is_mended_is_no_longer_named() -> None:
    root = wheels.unpacked("0.5.23")
    before, after = "forward_batch: ForwardBatch,\n        positions: torch.Tensor,", "positions, forward_batch,"
    mended = rewritten(root, "sglang/srt/models/phi.py", before + "\n        inputs_embeds", after + " inputs_embeds")
    assert "PhiModel" in ask(FIX, Source(Folder(root))).reason
    finding = ask(FIX, Source(mended))
    assert finding.verdict is Verdict.AFFECTED and "PhiModel" not in finding.reason
