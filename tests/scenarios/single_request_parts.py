# SPDX-License-Identifier: Apache-2.0
"""Parts of single_request_capture that need a release. Argument: the name of one of PARTS."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cpu_sglang import one_batch
from sglang_bcg_fixes.anatomy import layer_stack
from sglang_bcg_fixes.fixes import single_request_capture as fix
from tests.fixes.test_single_request_capture import Model, multimodal_batch_of
from tests.scenarios import telling


def what_is_admitted() -> list[Any]:
    """Batches that may be replayed, by mode and by what they carry, and the sizes that SGLang sees."""
    one_batch.import_sglang(with_graphs=True)
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = SimpleNamespace(**{fix.STATE: object()})
    asked = []

    def admitted(self: Any, batch: Any) -> Any:
        asked.append(batch.batch_size)
        return batch.accepted

    def can_run(**changes: Any) -> Any:
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            batch_size=3,
            accepted=True,
            contains_mm_inputs=lambda: False,
            **dict.fromkeys(fix.LEFT_OUT),
        )
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
    replayed = sorted(name for name, ok in modes.items() if ok)
    return [replayed, left_out, refused, images, unresolved, sorted(set(asked))]


class Calling(Model):
    """A model that calls its layers as it is told to."""

    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, input_ids: Any, positions: Any, batch: Any) -> Any:
        return self.call(self.model, batch)


def fail(layers: Any, batch: Any) -> None:
    raise ValueError("no images")


CALLS: dict[str, Callable[[Any, Any], Any]] = {
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


def what_is_handed_over() -> dict[str, Any]:
    """Arguments of the layers and the buffer that the fix finds for each call, or its reason for none."""
    one_batch.import_sglang(with_graphs=True)
    return {name: handed_over(call) for name, call in CALLS.items()}


def handed_over(call: Callable[[Any, Any], Any]) -> Any:
    model, batch = Calling(call), multimodal_batch_of(4)
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(model=model),
        capture_num_tokens=[4],
        attention_layers=[],
        quant_config=None,
        moe_layers=[],
        moe_fusions=[],
        max_num_tokens=16,
        _build_capture_forward_batch=lambda tokens: batch,
    )
    try:
        handed, buffer = fix.handed_over(runner, layer_stack.LayerStack("model", model.model))
        return [handed, buffer if buffer is None else [*buffer.shape, str(buffer.dtype), buffer.sum().item()]]
    except (layer_stack.Unresolved, ValueError) as reason:
        return f"{type(reason).__name__}: {reason}"
    finally:
        assert "forward" not in vars(model.model) and model.model.calls == 0


PARTS: dict[str, Callable[[], Any]] = {"admitted": what_is_admitted, "handed over": what_is_handed_over}

if __name__ == "__main__":
    telling.result(PARTS[sys.argv[1]]())
