# SPDX-License-Identifier: Apache-2.0
"""The break around the mixer in parts, and drifted sources; tests/releases/test_mixers.py runs it on real releases."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.anatomy import forward_batch
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.fixes import ssm_mixer_captured as fix
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone, breaks

LAYER = "sglang/srt/models/falcon_h1.py"
BACKEND = "sglang/srt/layers/attention/hybrid_linear_attn_backend.py"
GRAPHS = "sglang/srt/model_executor/runner_backend_utils/"
CONTEXT = f"{GRAPHS}tc_piecewise_cuda_graph/context_manager.py"
DRIFTED = {
    "the layer has one more statement": ("0.5.12", LAYER, "# Mamba block\n", "x = 1\n"),
    "the layer calls something else": ("0.5.15", LAYER, "linear_attn_backend.forward(", "linear_attn_backend.run("),
    "the backend has another way in": (
        "0.5.19",
        BACKEND,
        "assert isinstance(self.forward_metadata, Mamba2",
        "f(Mamba2",
    ),
    "the batch is elsewhere": ("0.5.17", CONTEXT, "def get_tc_piecewise_forward_context(", "def get_context("),
    "the break does something new": (
        *("0.5.22", f"{GRAPHS}breakable_cuda_graph/breakable_cuda_graph.py"),
        *("capture._end_current_segment()", "capture.stop()"),
    ),
}


@pytest.mark.parametrize("drift", DRIFTED)
def test_a_drifted_source_is_unknown(drift: str) -> None:
    finding = alone.asked(declared_in(fix), *DRIFTED[drift])
    assert finding.verdict is Verdict.UNKNOWN, finding


# it is only handed on
MIXER = torch.nn.Module()


def backend(real: int) -> types.SimpleNamespace:
    # the last of them is of a request that decodes
    metadata = types.SimpleNamespace(num_prefill_tokens=real - 1, num_decodes=1)
    linear = types.SimpleNamespace(forward_metadata=metadata)
    return types.SimpleNamespace(linear_attn_backend=linear)


def original(self: Any, mixer: Any, hidden_states: Any, output: Any, layer_id: int, **rest: Any) -> tuple[Any, ...]:
    output.copy_(hidden_states + layer_id)
    return self, mixer, len(hidden_states), rest


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> breaks.Replays:
    fix.as_break.cache_clear()
    return breaks.kept(monkeypatch)


@pytest.mark.parametrize("given", [True, False])
def test_a_replay_takes_the_batch_and_the_backend_of_its_own(
    captured: breaks.Replays, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """The whole bucket of five at capture, three real tokens at replay, whose two last rows are left over."""
    seen = []

    def watched(*args: Any, **kwargs: Any) -> None:
        seen.append(original(*args, **kwargs))

    batches = [types.SimpleNamespace(attn_backend=backend(real)) for real in (5, 3)]
    for module in (forward_batch, fix):
        monkeypatch.setattr(module, "prefill_batch", lambda: batches[0])
    hidden = torch.arange(10.0).view(5, 2)
    preallocated = torch.full((5, 2), torch.nan) if given else None
    output = fix.break_round_the_mixer(
        watched, "captured backend", MIXER, hidden, preallocated, layer_id=7, forward_batch=batches[0], mup_vector="mup"
    )
    assert output is preallocated if given else output.shape == hidden.shape
    assert torch.equal(output, hidden + 7)
    batches.pop(0)
    hidden.mul_(2)
    captured[0]()
    assert torch.equal(output[:3], hidden[:3] + 7) and (output[3:] == 0).all()
    for batch, tokens, call in zip([*batches, *batches], (5, 3), seen, strict=True):
        assert call[1:3] == (MIXER, tokens) and call[3]["mup_vector"] == "mup"
        assert tokens == 5 or (call[0] is batch.attn_backend.linear_attn_backend and call[3]["forward_batch"] is batch)


@pytest.mark.parametrize(
    ("breakable", "capturing", "in_prefill"), [(False, True, True), (True, False, True), (True, True, False)]
)
def test_everything_else_is_the_original(
    captured: breaks.Replays, monkeypatch: pytest.MonkeyPatch, breakable: bool, capturing: bool, in_prefill: bool
) -> None:
    """Eager passes; warm-up and what is inside a break; decode graphs."""
    context = types.SimpleNamespace(is_in_breakable_cuda_graph=lambda: breakable)
    monkeypatch.setattr(forward_batch, "breakable_context", lambda: context)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(forward_batch, "prefill_batch", lambda: object() if in_prefill else None)
    rows = torch.ones(5, 2)
    answer = fix.break_round_the_mixer(original, "self", MIXER, rows, rows, 7, forward_batch="theirs")
    assert answer == ("self", MIXER, 5, {"forward_batch": "theirs"}) and captured == []


def test_what_comes_by_position_is_handed_on_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fix, "is_captured_into_a_prefill_graph", lambda: False)

    def named(self: Any, mixer: Any, hidden: Any, output: Any, layer_id: int, forward_batch: Any, mup: Any) -> Any:
        return forward_batch, mup

    rows = torch.ones(5, 2)
    assert fix.break_round_the_mixer(named, "self", MIXER, rows, rows, 7, "theirs", mup="mup") == ("theirs", "mup")


def test_torch_compile_still_traces_through_the_mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled prefill graphs take the same way: what stands in its place must not break the trace."""
    monkeypatch.setattr(graph_break, "load", lambda name: pytest.fail("traced into what only eager code may ask"))

    def mixer(self: None, mixer: torch.nn.Module, hidden_states: Any, output: Any, layer_id: int) -> Any:
        return hidden_states * layer_id

    def model(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = fix.break_round_the_mixer(mixer, None, MIXER, x, None, 2)
        return y + 1

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.arange(4.0)
    assert torch.equal(compiled(x), x * 2 + 1)
