"""The parts of the fix on small modules; tests/releases/test_kinds_of_request.py runs it on the real runner."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from sglang_bcg_fixes.anatomy import layer_stack
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
    return SimpleNamespace(
        input_ids=torch.arange(tokens), positions=torch.arange(tokens) + 100, mrope_positions=None, input_embeds=None
    )


STACK = layer_stack.LayerStack
TEXT = {"input_ids": "input_ids", "positions": "positions", "forward_batch": fix.ITSELF}


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
    hidden, (auxiliary, nothing) = captured.run(None, None, batch_of(4))
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


HANDED = {
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


def call_of(batch: SimpleNamespace) -> dict:
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
    multimodal: fix.CapturedLayers, caplog: pytest.LogCaptureFixture, change: dict, name: str
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


EMBEDDED = {"input_ids": None, "positions": "positions", "forward_batch": fix.ITSELF, "input_embeds": fix.COMPUTED}


def embedded_call_of(batch: SimpleNamespace, embeddings: torch.Tensor) -> dict:
    return {"input_ids": None, "positions": batch.positions, "forward_batch": batch, "input_embeds": embeddings}


@pytest.fixture
def embedded() -> fix.CapturedLayers:
    return fix.CapturedLayers(STACK("model", Model().model), 16, EMBEDDED, torch.full((16, 2), torch.nan))


def test_embeddings_that_the_model_computes_are_captured_in_a_buffer(embedded: fix.CapturedLayers) -> None:
    given = {}
    embedded.stack.module.forward = lambda **arguments: given.update(arguments) or torch.ones(4, 2)
    embedded.run(None, None, batch_of(4))
    assert given["input_embeds"].shape == (4, 2)
    assert given["input_embeds"].data_ptr() == embedded.embeddings.data_ptr()


def test_embeddings_that_the_model_computes_are_copied_before_each_replay(embedded: fix.CapturedLayers) -> None:
    read = []
    graph = SimpleNamespace(replay=lambda: read.append(embedded.embeddings.clone()))
    for tokens, value in ((4, 1.0), (8, 2.0)):
        batch = batch_of(tokens)
        with embedded.replayed(graph, "captured", batch):
            call = embedded_call_of(batch, torch.full((tokens, 2), value))
            assert embedded.stack.module.forward(**call) == "captured"
        assert torch.equal(read.pop()[:tokens], torch.full((tokens, 2), value))


@pytest.mark.parametrize("wrong", [None, torch.ones(1, 2), torch.ones(4, 2, dtype=torch.float64)])
def test_embeddings_that_the_buffer_does_not_take_are_computed_with(embedded: fix.CapturedLayers, wrong) -> None:
    graph, batch = Graph(), batch_of(4)
    embedded.stack.module.forward = lambda **_: "computed"
    with embedded.replayed(graph, "captured", batch):
        assert embedded.stack.module.forward(**embedded_call_of(batch, wrong)) == "computed"
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


# the real runner, and how many tokens the graph has that it replays for so many
BUCKETS = """
import json
from cpu_sglang import one_batch, prefill
from tests.fixes import small_llama

loaded = small_llama.load()
batches = {sum(lengths): prefill._prompts(lengths) for lengths in ([1], [2, 1], [4], [5], [3, 5], [9], [7, 8], [16])}
eager = {tokens: one_batch.generate(loaded, prompts, 1)[1] for tokens, prompts in batches.items()}
runner, chosen = prefill.capture_prefill(loaded.model_runner, (4, 8, 16)), []

def tell(size, replay):
    def tell_and_replay():
        chosen.append(size)
        replay()
    return tell_and_replay

for size, graph in prefill.captured_graphs(runner).items():
    graph.replay = tell(size, graph.replay)
found = []
for tokens, prompts in batches.items():
    answer = one_batch.generate(loaded, prompts, 1)[1]
    found.append([tokens, list(chosen), bool((answer == eager[tokens]).all())])
    chosen.clear()
print("RESULT", json.dumps(found))
"""


def test_a_replay_takes_the_smallest_graph_that_fits(release_root) -> None:
    found, _ = processes.beside(release_root("0.5.11"), "-c", BUCKETS)
    smallest = {1: 4, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 15: 16, 16: 16}
    assert found == [[tokens, [size], True] for tokens, size in smallest.items()]


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
        {"use_mla_backend": True},
    ],
)
def test_what_cannot_be_captured_rightly_is_not_captured(change: dict, caplog: pytest.LogCaptureFixture) -> None:
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


# in a process of its own on the real 0.5.11, whose enumerations and layers are wanted
ON_THE_RELEASE = """
import json, sys
from types import SimpleNamespace
from cpu_sglang import one_batch
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
                            contains_mm_inputs=lambda: False, **dict.fromkeys(fix.LEFT_OUT))
    vars(batch).update(changes)
    answer = fix.can_run(admitted, runner, batch)
    assert batch.batch_size == 3
    return answer
modes = {mode.name: can_run(forward_mode=mode) for mode in ForwardMode}
left_out = {name: can_run(**{name: [1]}) for name in fix.LEFT_OUT}
refused = can_run(accepted=False)
images = can_run(contains_mm_inputs=lambda: True)
setattr(runner, fix.STATE, None)
unresolved = can_run()
modes = sorted(name for name, ok in modes.items() if ok)
json.dump([modes, left_out, refused, images, unresolved, sorted(set(asked))], sys.stdout)
"""


def test_on_the_release_modes_and_fields_are_told_apart(release_root) -> None:
    process = processes.on_cpu(release_root("0.5.11"), "-c", ON_THE_RELEASE, timeout=120)
    assert process.returncode == 0, process.stderr[-3000:]
    modes, left_out, refused, images, unresolved, asked = json.loads(process.stdout.splitlines()[-1])
    assert modes == ["EXTEND", "MIXED"]
    assert left_out and not any(left_out.values())
    assert refused is False and images is False and unresolved is False
    assert asked == [1]


HANDED_OVER = """
import json
from types import SimpleNamespace
from cpu_sglang import one_batch
one_batch.import_sglang()
from sglang_bcg_fixes.anatomy import layer_stack
from sglang_bcg_fixes.fixes import single_request_capture as fix
from tests.fixes.test_single_request_capture import Model, multimodal_batch_of

class Calling(Model):
    def forward(self, input_ids, positions, batch):
        return call(self.model, batch)

def handed_over(make_the_call):
    global call
    call, model, batch = make_the_call, Calling(), multimodal_batch_of(4)
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(model=model), capture_num_tokens=[4], attention_layers=[], quant_config=None,
        moe_layers=[], moe_fusions=[], max_num_tokens=16, _build_capture_forward_batch=lambda tokens: batch,
    )
    try:
        handed, buffer = fix.handed_over(runner, layer_stack.LayerStack("model", model.model))
        return [handed, buffer if buffer is None else [*buffer.shape, str(buffer.dtype), buffer.sum().item()]]
    except (layer_stack.Unresolved, ValueError) as reason:
        return f"{type(reason).__name__}: {reason}"
    finally:
        assert "forward" not in vars(model.model) and not hasattr(model.model, "calls")

def fail(layers, batch):
    raise ValueError("no images")

found = {
    "embeddings": lambda layers, batch: layers(
        input_ids=None, forward_batch=batch, input_embeds=batch.input_embeds, positions=batch.mrope_positions, pp=None
    ),
    "computed": lambda layers, batch: layers(None, batch.positions, batch, batch.input_embeds.double() + 1),
    "of another length": lambda layers, batch: layers(None, batch.positions, batch, batch.input_embeds[1:].clone()),
    "text": lambda layers, batch: layers(batch.input_ids, batch.positions, batch),
    "elsewhere": lambda layers, batch: layers(batch.input_ids, batch.positions + 1, batch),
    "extra": lambda layers, batch: layers(batch.input_ids, batch.positions, batch, deepstack=batch.input_embeds),
    "not called": lambda layers, batch: None,
    "fails": fail,
}
print("RESULT", json.dumps({name: handed_over(make_the_call) for name, make_the_call in found.items()}))
"""


def test_on_the_release_what_a_model_hands_its_layers_is_told_by_the_buffers(release_root) -> None:
    found, _ = processes.beside(release_root("0.5.11"), "-c", HANDED_OVER, timeout=120)
    assert found["embeddings"] == [HANDED, None]
    assert found["computed"] == [EMBEDDED, [16, 2, "torch.float64", 0.0]]
    assert found["text"] == [TEXT, None]
    said = "Unresolved: model is called with a '{}' that lies in no buffer of the graphs"
    assert found["elsewhere"] == said.format("positions")
    assert found["extra"] == said.format("extras")
    assert found["of another length"] == said.format("input_embeds")
    assert found["not called"] == "Unresolved: model is not called for a batch of text"
    assert found["fails"] == "ValueError: no images"
