# SPDX-License-Identifier: Apache-2.0
"""Ways in which a model with images comes to its layers, on a small Llama.

The runner, the capture and the replay are SGLang's, and so is the routine for images where one is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cpu_sglang import graphs, prefill
from tests.releases import graph_admission, kinds_of_request
from tests.scenarios import released, telling

# as SGLang has them where an image is: no rows of the table
OUTSIDE = 1_000_000


def embed(layers: Any, input_ids: Any) -> Any:
    """Other values than the text's, so that it shows whose are used."""
    return 2 * layers.embed_tokens(input_ids.clamp(max=layers.embed_tokens.num_embeddings - 1))


def by_sglangs_routine(loaded: Any) -> None:
    from sglang.srt.managers import mm_utils

    graph_admission.make_multimodal(loaded)
    layers = loaded.model_runner.model.model
    mm_utils.embed_mm_inputs = lambda input_ids, **_: (embed(layers, input_ids), {})


def in_other_words(loaded: Any) -> None:
    """Layers that spell it inputs_embeds, of a model that embeds everything by itself."""
    model = loaded.model_runner.model
    layers, plain = model.model, type(model.model).forward

    def run_layers(input_ids: Any, positions: Any, forward_batch: Any, inputs_embeds: Any = None) -> Any:
        return plain(layers, input_ids, positions, forward_batch, inputs_embeds)

    def forward(input_ids: Any, positions: Any, forward_batch: Any, **_: Any) -> Any:
        hidden = layers(input_ids, positions, forward_batch, inputs_embeds=embed(layers, input_ids))
        return model.logits_processor(input_ids, hidden, model.lm_head, forward_batch)

    layers.forward, model.forward = run_layers, forward


def in_the_buffer(loaded: Any) -> None:
    """A model that puts images where a graph reads them, and hands its layers the token ids of everything."""
    model = loaded.model_runner.model
    layers = model.model

    def forward(input_ids: Any, positions: Any, forward_batch: Any, **_: Any) -> Any:
        embeddings = embed(layers, input_ids) if forward_batch.contains_mm_inputs() else None
        if embeddings is not None and forward_batch.input_embeds is not None:
            forward_batch.input_embeds.copy_(embeddings)
            embeddings = None
        hidden = layers(input_ids, positions, forward_batch, embeddings)
        return model.logits_processor(input_ids, hidden, model.lm_head, forward_batch)

    model.forward = forward


def with_image(batch: Any, model: Any) -> None:
    graph_admission.with_image(batch, model)
    batch.input_ids[1:3] = OUTSIDE


WAYS: dict[str, Callable[[Any], None]] = {
    "by SGLang's routine": by_sglangs_routine,
    "in other words": in_other_words,
    "in the buffer": in_the_buffer,
}
BATCHES: dict[str, tuple[list[int], Callable[[Any, Any], None]]] = {
    "an image": ([9], with_image),
    "a text": ([6, 5], kinds_of_request.as_it_is),
    "another": ([9], kinds_of_request.as_it_is),
}


def observe(loaded: Any) -> dict[str, Any]:
    """The answer of each way and batch, whether a graph gave it, and how often the table was asked."""
    model_runner = loaded.model_runner
    model = model_runner.model
    model_runner.is_multimodal = model_runner.model_config.is_multimodal = True
    asked: list[Any] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda *call: asked.append(call))
    found = {}
    for way, arrange in WAYS.items():
        arrange(loaded)
        eager = {name: kinds_of_request.run(loaded, *batch) for name, batch in BATCHES.items()}
        prefill.capture_prefill(model_runner, (16,))
        for name, batch in BATCHES.items():
            asked.clear()
            before = graphs.counters.replays
            answer = kinds_of_request.attempt(loaded, *batch)
            told = [graph_admission.compared(eager[name], answer), graphs.counters.replays > before, len(asked)]
            found[f"{way}, {name}"] = told
        graph_admission.forget_graphs(model_runner)
        for part in (model, model.model):
            vars(part).pop("forward", None)
    hook.remove()
    return found


def main() -> None:
    loaded = released.load("llama")
    telling.with_and_without(lambda: observe(loaded))


if __name__ == "__main__":
    main()
