"""The parts of the fix on small modules; tests/releases/test_kinds_of_request.py runs it on the real runner."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from sglang_bcg_fixes import layer_stack
from sglang_bcg_fixes.fixes import single_request_capture as fix
from tests import processes


class Layers(torch.nn.Module):
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **extras):
        self.calls = getattr(self, "calls", 0) + 1
        return torch.stack([input_ids, positions], 1).float()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Layers()


class Graph:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


def batch_of(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(input_ids=torch.arange(tokens), positions=torch.arange(tokens) + 100)


@pytest.fixture
def captured() -> fix.CapturedLayers:
    return fix.CapturedLayers(layer_stack.LayerStack("model", Model().model, "positions"), rows=16)


def test_every_size_is_captured_into_one_buffer(captured: fix.CapturedLayers) -> None:
    outputs = [captured.run(batch.input_ids, batch.positions, batch) for batch in map(batch_of, (4, 16, 8))]
    assert [len(output) for output in outputs] == [4, 16, 8]
    assert {output.untyped_storage().data_ptr() for output in outputs} == {captured.buffers[0].data_ptr()}
    assert captured.buffers[0].shape == (16, 2)
    assert torch.equal(outputs[2], torch.stack([torch.arange(8), torch.arange(8) + 100], 1).float())


def test_nested_outputs_have_a_buffer_for_each_part(captured: fix.CapturedLayers) -> None:
    captured.stack.module.forward = lambda **_: (torch.ones(4, 2), [torch.zeros(4, 3), None])
    hidden, (auxiliary, nothing) = captured.run(*[None] * 3)
    assert len(captured.buffers) == 2
    assert hidden.shape == (4, 2) and auxiliary.shape == (4, 3) and nothing is None


def test_the_models_call_of_its_layers_replays(captured: fix.CapturedLayers) -> None:
    graph, batch, layers = Graph(), batch_of(4), captured.stack.module
    with captured.replayed(graph, "captured", batch):
        assert layers.forward(batch.input_ids, batch.positions, batch) == "captured"
        assert layers.forward(batch.input_ids, forward_batch=batch, positions=batch.positions, pp=None) == "captured"
        assert layers.forward(batch.input_ids, batch.positions, batch, None) == "captured"
    assert graph.replays == 3
    assert not hasattr(layers, "calls") and "forward" not in vars(layers)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"input_embeds": torch.zeros(4, 2)}, "input_embeds"),
        ({"deepstack": torch.zeros(4, 2)}, "deepstack"),
        ({"positions": torch.arange(4)}, "positions"),
        ({"input_ids": torch.arange(4)}, "input_ids"),
    ],
)
def test_what_the_graph_would_not_see_is_computed_and_said_once(
    captured: fix.CapturedLayers, caplog: pytest.LogCaptureFixture, change: dict, name: str
) -> None:
    graph, batch, layers = Graph(), batch_of(4), captured.stack.module
    given = {"input_ids": batch.input_ids, "positions": batch.positions, "forward_batch": batch} | change
    with caplog.at_level(logging.WARNING), captured.replayed(graph, "captured", batch):
        for _ in range(2):
            assert torch.is_tensor(layers.forward(**given))
    assert graph.replays == 0 and layers.calls == 2
    assert len(caplog.messages) == 1
    assert f"model is called with another '{name}'" in caplog.text
    assert "SGLANG_BCG_FIX_SINGLE_REQUEST_CAPTURE=off" in caplog.text


def test_a_failing_request_leaves_the_layers_as_they_were(captured: fix.CapturedLayers) -> None:
    layers = captured.stack.module
    layers.forward = mine = layers.forward
    with pytest.raises(RuntimeError, match="out of memory"), captured.replayed(Graph(), None, batch_of(1)):
        raise RuntimeError("out of memory")
    assert layers.forward is mine


def test_no_answer_lies_in_the_buffers(captured: fix.CapturedLayers) -> None:
    batch = batch_of(4)
    hidden = captured.run(batch.input_ids, batch.positions, batch)
    logits = torch.ones(1, 8)
    kept_hidden, kept_logits = captured.detached((hidden[:3], logits))
    captured.buffers[0].fill_(float("nan"))
    assert not kept_hidden.isnan().any()
    assert kept_logits is logits


CAPTURABLE = {
    "server_args": {"enable_lora": False, "lora_paths": None, "enable_dp_attention": False, "pp_size": 1},
    "model_config": {"is_encoder_decoder": False},
}


def model_runner(**changes: object) -> SimpleNamespace:
    arguments = {name: value for name, value in changes.items() if name in CAPTURABLE["server_args"]}
    configuration = {name: value for name, value in changes.items() if name in CAPTURABLE["model_config"]}
    rest = {name: value for name, value in changes.items() if name not in {**arguments, **configuration}}
    return SimpleNamespace(
        model=Model(),
        server_args=SimpleNamespace(**CAPTURABLE["server_args"] | arguments),
        model_config=SimpleNamespace(**CAPTURABLE["model_config"] | configuration),
        **{"is_multimodal": False, "use_mla_backend": False} | rest,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"enable_lora": True},
        {"lora_paths": ["a"]},
        {"enable_dp_attention": True},
        {"pp_size": 2},
        {"is_encoder_decoder": True},
        {"is_multimodal": True},
        {"use_mla_backend": True},
    ],
)
def test_what_cannot_be_captured_rightly_is_not_captured(change: dict, caplog: pytest.LogCaptureFixture) -> None:
    fix.refuse_configuration(model_runner())
    runner = SimpleNamespace(model_runner=model_runner(**change), attention_layers=[], max_num_tokens=16)
    captures = []
    with caplog.at_level(logging.WARNING):
        fix.warm_up(lambda self: captures.append("warm-up"), runner)
        fix.capture_all(lambda self: captures.append("capture"), runner)
    assert captures == []
    assert len(caplog.messages) == 1
    assert f"no prefill graphs for {__name__}.Model, prefill runs eagerly" in caplog.text
    assert "SGLANG_BCG_FIX_SINGLE_REQUEST_CAPTURE=off" in caplog.text


# in a process of its own on the real 0.5.11, whose enumerations and layers are wanted
ON_THE_RELEASE = """
import json, sys
from types import SimpleNamespace
from sglang_on_cpu import one_batch
one_batch.import_sglang()
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_bcg_fixes.fixes import single_request_capture as fix

runner = SimpleNamespace(**{fix.STATE: object()})
asked = []
def admitted(self, batch):
    asked.append(batch.batch_size)
    return batch.accepted
def can_run(**changes):
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, batch_size=3, accepted=True,
                            **dict.fromkeys(fix.LEFT_OUT))
    vars(batch).update(changes)
    answer = fix.can_run(admitted, runner, batch)
    assert batch.batch_size == 3
    return answer
modes = {mode.name: can_run(forward_mode=mode) for mode in ForwardMode}
left_out = {name: can_run(**{name: [1]}) for name in fix.LEFT_OUT}
refused = can_run(accepted=False)
setattr(runner, fix.STATE, None)
unresolved = can_run()
modes = sorted(name for name, ok in modes.items() if ok)
json.dump([modes, left_out, refused, unresolved, sorted(set(asked))], sys.stdout)
"""


def test_on_the_release_modes_and_fields_are_told_apart(release_root) -> None:
    process = processes.on_cpu(release_root("0.5.11"), "-c", ON_THE_RELEASE, timeout=120)
    assert process.returncode == 0, process.stderr[-3000:]
    modes, left_out, refused, unresolved, asked = json.loads(process.stdout.splitlines()[-1])
    assert modes == ["EXTEND", "MIXED"]
    assert left_out and not any(left_out.values())
    assert refused is False and unresolved is False
    assert asked == [1]
