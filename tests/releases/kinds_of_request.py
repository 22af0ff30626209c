# SPDX-License-Identifier: Apache-2.0
"""A release's prefill runner on each kind of batch: does it replay, and is the answer the eager one?

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m tests.releases.kinds_of_request OUT.json SERVER

A batch is built by SGLang, then given the properties that its kind has, and run twice by the same ModelRunner: before
anything is captured, and after. Every tensor of the answer is compared.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from cpu_sglang import graphs, one_batch, prefill

RAGGED = {
    "one request": [6],
    "fills its bucket": [8],
    "two requests": [3, 4],
    "four requests": [1, 1, 1, 5],
    "six requests": [2] * 6,
    "the first again": [6],
}
SERVERS: dict[str, dict[str, Any]] = {
    "generation": {},
    "embedding": {"is_embedding": True},
    "classification": {
        "is_embedding": True,
        "json_model_override_args": json.dumps({"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}),
    },
    "eagle3 target": {},
}


Change = Callable[[Any, Any], None]


class Answered(Exception):
    """Leaves SGLang's benchmark before it samples: an embedding has no logits."""


def as_it_is(batch: Any, model: Any) -> None:
    pass


def mixed(batch: Any, model: Any) -> None:
    batch.forward_mode = type(batch.forward_mode).MIXED


def hidden_states_of_all_tokens(batch: Any, model: Any) -> None:
    batch.capture_hidden_mode = type(batch.capture_hidden_mode).FULL


def hidden_states_of_last_tokens(batch: Any, model: Any) -> None:
    batch.capture_hidden_mode = type(batch.capture_hidden_mode).LAST


def input_embeddings(batch: Any, model: Any) -> None:
    # other values than the embeddings of the ids, so that a release which drops them is wrong
    batch.input_embeds = 2 * model.get_input_embeddings()(batch.input_ids)


def logprobs_from(start: Callable[[int], int]) -> Callable[[Any, Any], None]:
    def change(batch: Any, model: Any) -> None:
        lengths = [int(length) for length in batch.extend_seq_lens_cpu]
        batch.return_logprob = True
        batch.extend_logprob_start_lens_cpu = [start(length) for length in lengths]
        batch.top_logprobs_nums = [0] * len(lengths)
        batch.token_ids_logprobs = [None] * len(lengths)
        wanted = [
            token
            for sequence, length in zip(batch.input_ids.split(lengths), lengths, strict=True)
            for token in sequence[start(length) :]
        ]
        batch.extend_input_logprob_token_ids_gpu = batch.input_ids.new_tensor([int(token) for token in wanted])

    return change


KINDS = {
    "mixed with decoding": mixed,
    "hidden states, all tokens": hidden_states_of_all_tokens,
    "hidden states, last token": hidden_states_of_last_tokens,
    "input embeddings": input_embeddings,
    "logprobs of the output": logprobs_from(lambda length: length),
    "logprobs of the prompt": logprobs_from(lambda length: 0),
}


def run(loaded: one_batch.LoadedModel, lengths: list[int], change: Callable[[Any, Any], None]) -> dict[str, Any]:
    """The tensors of the answer to one batch."""
    import numpy
    import torch

    model_runner = loaded.model_runner
    seen: dict[str, Any] = {}

    def forward(forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        change(forward_batch, model_runner.model)
        output = type(model_runner).forward(model_runner, forward_batch, *args, **kwargs)
        answer = getattr(output, "logits_output", None) or (output[0] if isinstance(output, tuple) else output)
        for field in dataclasses.fields(answer):
            value = getattr(answer, field.name)
            if isinstance(value, torch.Tensor):
                seen[field.name] = value.float().clone()
        raise Answered

    model_runner.forward = forward
    prompts = [numpy.array(prompt, dtype=numpy.int32) for prompt in prefill._prompts(lengths)]
    try:
        with torch.no_grad():
            loaded.runner.clear()
            loaded.runner.extend(
                loaded.benchmark.prepare_synthetic_inputs_for_latency_test(len(prompts), max(lengths), prompts)
            )
    except Answered:
        pass
    finally:
        del model_runner.forward
    return seen


def attempt(*arguments: Any) -> dict[str, Any] | str:
    try:
        return run(*arguments)
    except Exception as error:
        # what a server would answer with, or end at
        return repr(error)


def difference(eager: dict[str, Any] | str, graph: dict[str, Any] | str) -> float | str:
    """The largest one in any tensor, or what is not there to compare."""
    if isinstance(eager, str) or isinstance(graph, str):
        return f"eager: {eager if isinstance(eager, str) else 'answers'}; graph: {graph}"[:500]
    # a replay may give more than was asked for: releases from 0.5.12 add the pooled hidden states to a classification
    if any(name not in graph or eager[name].shape != graph[name].shape for name in eager):
        return f"eager: {shapes(eager)}; graph: {shapes(graph)}"
    return max(float((eager[name] - graph[name]).abs().max()) for name in eager if eager[name].numel())


def shapes(answer: dict[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in answer.items()}


def forget_pinned_memory() -> None:
    """Prompt logprobs and LoRA ask for it, and there is none without a GPU."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    for name in ("tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    tensor_type: Any = torch.Tensor
    tensor_type.pin_memory = lambda self: self


def main(out: str, server: str) -> None:
    sglang = one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    forget_pinned_memory()
    loaded = one_batch.load("llama", dtype="bfloat16", max_running_requests=8, **SERVERS[server])
    model = loaded.model_runner.model
    one_batch.randomize(model)
    if server == "eagle3 target":
        model.set_eagle3_layers_to_capture([0, 1])
    cases: list[tuple[str, list[int], Change]] = [(name, lengths, as_it_is) for name, lengths in RAGGED.items()]
    cases += [(f"{kind}: {lengths}", lengths, KINDS[kind]) for kind in KINDS for lengths in ([6], [3, 4])]
    eager = [attempt(loaded, lengths, change) for _, lengths, change in cases]
    graphs.freed_memory_is_garbage = True
    report: dict[str, Any] = {"release": sglang.__version__, "server": server, "cases": {}}
    try:
        runner = prefill.capture_prefill(loaded.model_runner)
    except Exception as error:
        report["no graphs"] = repr(error)
    else:
        buffers = {tensor.untyped_storage().data_ptr() for tensor in outputs_of(runner)}
        report["output buffers"] = len(buffers)
    for (name, lengths, change), expected in zip(cases, eager, strict=True):
        before = graphs.counters.replays
        answer = attempt(loaded, lengths, change)
        report["cases"][name] = {
            "replayed": graphs.counters.replays > before,
            "answers": sorted(expected) if isinstance(expected, dict) else expected,
            "difference": difference(expected, answer),
        }
    pathlib.Path(out).write_text(json.dumps(report, indent=1))


def outputs_of(runner: Any) -> list[Any]:
    import torch

    kept = getattr(runner, "output_buffers", {}).values()
    parts = [part for value in kept for part in (value if isinstance(value, tuple) else [value])]
    return [part for part in parts if isinstance(part, torch.Tensor)]


if __name__ == "__main__":
    main(*sys.argv[1:])
