# SPDX-License-Identifier: Apache-2.0
"""The parts of the fix on small modules; tests/releases/test_kinds_of_request.py runs it on the real runner."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.anatomy import layer_stack
from sglang_bcg_fixes.fixes import single_request_capture as fix
from tests import processes, wheels

# in a process of its own on the real 0.5.11, whose enumerations and layers are wanted
PARTS = ("-m", "tests.scenarios.single_request_parts")


class Layers(torch.nn.Module):
    calls = 0

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        **extras: Any,
    ) -> torch.Tensor:
        self.calls += 1
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
    return SimpleNamespace(
        input_ids=torch.arange(tokens), positions=torch.arange(tokens) + 100, mrope_positions=None, input_embeds=None
    )


STACK = layer_stack.LayerStack
# what the layers are given comes from the batch
UNREAD = (torch.empty(0), torch.empty(0))
TEXT: dict[str, str | None] = {"input_ids": "input_ids", "positions": "positions", "forward_batch": fix.ITSELF}


@pytest.fixture
def captured() -> fix.CapturedLayers:
    return fix.CapturedLayers(STACK("model", Model().model), 16, TEXT)


def test_every_size_is_captured_into_one_buffer(captured: fix.CapturedLayers) -> None:
    outputs = [captured.run(batch.input_ids, batch.positions, batch) for batch in map(batch_of, (4, 16, 8))]
    assert [len(output) for output in outputs] == [4, 16, 8]
    assert {output.untyped_storage().data_ptr() for output in outputs} == {captured.buffers[0].data_ptr()}
    assert captured.buffers[0].shape == (16, 2)
    assert torch.equal(outputs[2], torch.stack([torch.arange(8), torch.arange(8) + 100], 1).float())


def test_nested_outputs_have_a_buffer_for_each_part(captured: fix.CapturedLayers) -> None:
    captured.stack.module.forward = lambda **_: (torch.ones(4, 2), [torch.zeros(4, 3), None])
    hidden, (auxiliary, nothing) = captured.run(*UNREAD, batch_of(4))
    assert len(captured.buffers) == 2
    assert hidden.shape == (4, 2) and auxiliary.shape == (4, 3) and nothing is None


def test_the_models_call_of_its_layers_replays(captured: fix.CapturedLayers) -> None:
    graph, batch, layers = Graph(), batch_of(4), captured.stack.module
    with captured.replayed(graph, "captured", batch):
        assert layers.forward(batch.input_ids, batch.positions, batch) == "captured"
        assert layers.forward(batch.input_ids, forward_batch=batch, positions=batch.positions, pp=None) == "captured"
        assert layers.forward(batch.input_ids, batch.positions, batch, None) == "captured"
    assert graph.replays == 3
    assert layers.calls == 0 and "forward" not in vars(layers)


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
    captured: fix.CapturedLayers, caplog: pytest.LogCaptureFixture, change: dict[str, Any], name: str
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


HANDED: dict[str, str | None] = {
    "input_ids": None,
    "positions": "mrope_positions",
    "forward_batch": fix.ITSELF,
    "input_embeds": "input_embeds",
}


def multimodal_batch_of(tokens: int) -> SimpleNamespace:
    batch = batch_of(tokens)
    batch.mrope_positions = torch.arange(3 * tokens).view(3, tokens)
    batch.input_embeds = torch.ones(tokens, 2)
    return batch


@pytest.fixture
def multimodal() -> fix.CapturedLayers:
    return fix.CapturedLayers(STACK("model", Model().model), 16, HANDED)


def call_of(batch: SimpleNamespace) -> dict[str, Any]:
    positions, embeddings = batch.mrope_positions, batch.input_embeds
    return {"input_ids": None, "positions": positions, "forward_batch": batch, "input_embeds": embeddings}


def test_layers_of_a_multimodal_model_are_captured_with_what_it_hands_them(multimodal: fix.CapturedLayers) -> None:
    given = {}
    multimodal.stack.module.forward = lambda **arguments: given.update(arguments) or torch.ones(4, 2)
    batch = multimodal_batch_of(4)
    multimodal.run(batch.input_ids, batch.positions, batch)
    assert given.keys() == call_of(batch).keys()
    assert all(given[name] is value for name, value in call_of(batch).items())


def test_text_of_a_multimodal_model_replays(multimodal: fix.CapturedLayers) -> None:
    graph, batch, layers = Graph(), multimodal_batch_of(4), multimodal.stack.module
    with multimodal.replayed(graph, "captured", batch):
        assert layers.forward(**call_of(batch)) == "captured"
        assert layers.forward(**call_of(batch), input_deepstack_embeds=None) == "captured"
    assert graph.replays == 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"input_embeds": torch.ones(4, 2)}, "input_embeds"),
        ({"input_embeds": None}, "input_embeds"),
        ({"positions": torch.arange(4)}, "positions"),
        ({"input_ids": torch.arange(4)}, "input_ids"),
        ({"input_deepstack_embeds": torch.ones(4, 2)}, "input_deepstack_embeds"),
    ],
)
def test_what_a_multimodal_graph_would_not_see_is_computed(
    multimodal: fix.CapturedLayers, caplog: pytest.LogCaptureFixture, change: dict[str, Any], name: str
) -> None:
    graph, batch = Graph(), multimodal_batch_of(4)
    multimodal.stack.module.forward = lambda **_: "computed"
    with caplog.at_level(logging.WARNING), multimodal.replayed(graph, "captured", batch):
        assert multimodal.stack.module.forward(**call_of(batch) | change) == "computed"
    assert graph.replays == 0
    assert f"another '{name}'" in caplog.text


def test_embeddings_that_do_not_come_are_not_replayed(multimodal: fix.CapturedLayers) -> None:
    batch = multimodal_batch_of(4)
    given = call_of(batch)
    del given["input_embeds"]
    assert multimodal.unlike_capture(given, multimodal.arguments(batch)) == "input_embeds"


def test_a_batch_without_what_was_captured_is_not_replayed(multimodal: fix.CapturedLayers) -> None:
    batch = multimodal_batch_of(4)
    batch.mrope_positions = None
    assert multimodal.unlike_capture(call_of(batch), multimodal.arguments(batch)) == "positions"


EMBEDDED: dict[str, str | None] = {
    "input_ids": None,
    "positions": "positions",
    "forward_batch": fix.ITSELF,
    "input_embeds": fix.COMPUTED,
}


def embedded_call_of(batch: SimpleNamespace, embeddings: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": None, "positions": batch.positions, "forward_batch": batch, "input_embeds": embeddings}


@pytest.fixture
def embedded() -> fix.CapturedLayers:
    return fix.CapturedLayers(STACK("model", Model().model), 16, EMBEDDED, torch.full((16, 2), torch.nan))


def test_embeddings_that_the_model_computes_are_captured_in_a_buffer(embedded: fix.CapturedLayers) -> None:
    given = {}
    embedded.stack.module.forward = lambda **arguments: given.update(arguments) or torch.ones(4, 2)
    embedded.run(*UNREAD, batch_of(4))
    assert given["input_embeds"].shape == (4, 2)
    assert embedded.embeddings is not None
    assert given["input_embeds"].data_ptr() == embedded.embeddings.data_ptr()


def test_embeddings_that_the_model_computes_are_copied_before_each_replay(embedded: fix.CapturedLayers) -> None:
    buffer, read = embedded.embeddings, list[torch.Tensor]()
    assert buffer is not None
    graph = SimpleNamespace(replay=lambda: read.append(buffer.clone()))
    for tokens, value in ((4, 1.0), (8, 2.0)):
        batch = batch_of(tokens)
        with embedded.replayed(graph, "captured", batch):
            call = embedded_call_of(batch, torch.full((tokens, 2), value))
            assert embedded.stack.module.forward(**call) == "captured"
        assert torch.equal(read.pop()[:tokens], torch.full((tokens, 2), value))


@pytest.mark.parametrize("wrong", [None, torch.ones(1, 2), torch.ones(4, 2, dtype=torch.float64)])
def test_embeddings_that_the_buffer_does_not_take_are_computed_with(embedded: fix.CapturedLayers, wrong: Any) -> None:
    graph, batch = Graph(), batch_of(4)
    embedded.stack.module.forward = lambda **_: "computed"
    with embedded.replayed(graph, "captured", batch):
        assert embedded.stack.module.forward(**embedded_call_of(batch, wrong)) == "computed"
    assert embedded.embeddings is not None
    assert graph.replays == 0 and embedded.embeddings.isnan().all()


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


def test_a_replay_takes_the_smallest_graph_that_fits() -> None:
    found, _ = processes.beside(wheels.unpacked("0.5.11"), "-m", "tests.scenarios.replayed_sizes")
    smallest = {1: 4, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 15: 16, 16: 16}
    assert found == [[tokens, [size], True] for tokens, size in smallest.items()]


CAPTURABLE: dict[str, dict[str, Any]] = {
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
        {"use_mla_backend": True},
    ],
)
def test_what_cannot_be_captured_rightly_is_not_captured(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    fix.refuse_configuration(model_runner())
    fix.refuse_configuration(model_runner(is_multimodal=True))
    runner = SimpleNamespace(model_runner=model_runner(**change), attention_layers=[], max_num_tokens=16)
    captures = []
    with caplog.at_level(logging.WARNING):
        fix.warm_up(lambda self: captures.append("warm-up"), runner)
        fix.capture_all(lambda self: captures.append("capture"), runner)
    assert captures == []
    assert len(caplog.messages) == 1
    assert f"no prefill graphs for {__name__}.Model, prefill runs eagerly" in caplog.text
    assert "SGLANG_BCG_FIX_SINGLE_REQUEST_CAPTURE=off" in caplog.text


def test_on_the_release_modes_and_fields_are_told_apart() -> None:
    found, _ = processes.beside(wheels.unpacked("0.5.11"), *PARTS, "admitted", timeout=120)
    modes, left_out, refused, images, unresolved, asked = found
    assert modes == ["EXTEND", "MIXED"]
    assert left_out and not any(left_out.values())
    assert refused is False and images is False and unresolved is False
    assert asked == [1]


def test_on_the_release_what_a_model_hands_its_layers_is_told_by_the_buffers() -> None:
    found, _ = processes.beside(wheels.unpacked("0.5.11"), *PARTS, "handed over", timeout=120)
    assert found["embeddings"] == [HANDED, None]
    assert found["computed"] == [EMBEDDED, [16, 2, "torch.float64", 0.0]]
    assert found["text"] == [TEXT, None]
    said = "Unresolved: model is called with a '{}' that lies in no buffer of the graphs"
    assert found["elsewhere"] == said.format("positions")
    assert found["extra"] == said.format("extras")
    assert found["of another length"] == said.format("input_embeds")
    assert found["not called"] == "Unresolved: model is not called for a batch of text"
    assert found["fails"] == "ValueError: no images"
