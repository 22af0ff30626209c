# SPDX-License-Identifier: Apache-2.0
"""Batches that a prefill graph may not serve: does the runner replay them, and what do the layers get?

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m tests.releases.graph_admission WHAT

The model is a small Llama, the runner, the capture and the replay are SGLang's. For images, its embeddings go through
SGLang's routine for multimodal models; in the place of a vision tower stand other embeddings than the text's, and
M-RoPE is a model that takes the second of three positions, routers are Bailing's own choice between two of them, and
experts are Ernie's. For adapters, SGLang's LoRA manager wraps the projection behind attention.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

from cpu_sglang import graphs, one_batch, prefill
from sglang_bcg_fixes.fixes import vlm_embeds_dropped
from tests.releases import kinds_of_request

LENGTHS = [6]
SERVERS: dict[str, dict[str, Any]] = {
    "images": {},
    "ranks": {},
    "checkpoints": {},
    "adapters": {
        "enable_lora": True,
        "lora_backend": "triton",
        "max_lora_rank": 4,
        "lora_target_modules": ["o_proj"],
        "max_loras_per_batch": 2,
    },
}


class Between:
    """A language model of its own between the multimodal model and the layers, as InternVL and LLaVA have."""

    def __init__(self, layers: Any) -> None:
        self.model = layers

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def __call__(self, input_ids: Any, forward_batch: Any, input_embeds: Any, positions: Any) -> Any:
        return self.model(input_ids, positions, forward_batch, input_embeds)


def make_multimodal(loaded: one_batch.LoadedModel) -> None:
    """Llama, embedded by SGLang's routine for images, with layers that add deepstack embeddings as Qwen3-VL's do."""
    from sglang.srt.managers import mm_utils

    model, model_runner = loaded.model_runner.model, loaded.model_runner
    layers, plain = model.model, model.model.forward
    model_runner.is_multimodal = model_runner.model_config.is_multimodal = True
    model.use_deepstack, model.num_deepstack_embeddings, model.is_mrope_enabled = {}, 0, False
    model.route = lambda hidden, forward_batch: hidden
    # what the layers of some models take beside the embeddings
    model.beside = lambda input_ids, forward_batch: {}
    layers.get_input_embeddings = lambda: layers.embed_tokens
    # plain, so that it is no part of the model
    model.__dict__["config_of_runner"] = model_runner.model_config

    def see(input_ids: Any, **_: Any) -> Any:
        embeddings = layers.embed_tokens(input_ids)
        return 2 * embeddings, {"input_deepstack_embeds": embeddings}

    def run_layers(
        input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None, pp_proxy_tensors: Any = None,
        input_deepstack_embeds: Any = None,
    ) -> Any:  # fmt: skip
        if positions.ndim == 2:
            positions = positions[1]
        if input_deepstack_embeds is not None:
            input_embeds = input_embeds + input_deepstack_embeds
        if input_embeds is not None:
            input_embeds = model.route(input_embeds, forward_batch)
        return plain(input_ids, positions, forward_batch, input_embeds)

    def forward(input_ids: Any, positions: Any, forward_batch: Any, **_: Any) -> Any:
        hidden = mm_utils.general_mm_embed_routine(
            input_ids=input_ids,
            forward_batch=forward_batch,
            language_model=getattr(model, "language_model", layers),
            multimodal_model=model,
            positions=forward_batch.mrope_positions if model.is_mrope_enabled else positions,
            use_deepstack=model.use_deepstack,
            **model.beside(input_ids, forward_batch),
        )
        return model.logits_processor(input_ids, hidden, model.lm_head, forward_batch)

    mm_utils.embed_mm_inputs = see
    layers.forward, model.forward = run_layers, forward


def as_text(batch: Any, model: Any) -> None:
    if model.is_mrope_enabled:
        batch.mrope_positions = batch.positions.expand(3, -1).clone()


def with_image(batch: Any, model: Any) -> None:
    import torch

    as_text(batch, model)
    if model.is_mrope_enabled:
        batch.mrope_positions[1:] = batch.positions // 2
    batch.mm_token_modalities = torch.ones(len(batch.input_ids), dtype=torch.int8)
    there, absent = (lambda: True), (lambda: False)
    batch.mm_inputs = [
        types.SimpleNamespace(
            mm_items=[],
            contains_image_inputs=there,
            contains_video_inputs=absent,
            contains_audio_inputs=absent,
            contains_mm_input=there,
        )
        for _ in LENGTHS
    ]


def between(model: Any) -> None:
    model.language_model = Between(model.model)


def three_positions(model: Any) -> None:
    model.is_mrope_enabled = True


def deepstack(model: Any) -> None:
    model.use_deepstack, model.num_deepstack_embeddings = {"image": True}, 1


def routers(model: Any) -> None:
    """Bailing's choice of a router, with two that differ; nothing before 0.5.21."""
    from sglang.srt.models import bailing_moe

    model.use_deepstack, model.num_deepstack_embeddings = {}, 0
    if not hasattr(bailing_moe, "multi_gate_triton_kernel"):
        return
    bailing_moe.create_multi_gate_mm_indices = lambda modalities: modalities
    bailing_moe.multi_gate_triton_kernel = lambda hidden, *_: (3 * hidden, None)
    block = mock.MagicMock(multi_gate=True, gate=mock.MagicMock(side_effect=lambda hidden: hidden))
    choose = bailing_moe.BailingMoESparseMoeBlock._forward_gate
    model.route = lambda hidden, forward_batch: choose(block, hidden, forward_batch)[0]
    model.config_of_runner.requires_mm_token_modalities = True


def experts(model: Any) -> None:
    """Ernie's choice of experts, of which those for images differ, by a mask that the layers are given."""
    import torch
    from sglang.srt.models.ernie45_moe_vl import Ernie4_5_VLMoeMoE

    model.config_of_runner.requires_mm_token_modalities = False
    model.route = lambda hidden, forward_batch: hidden
    block = mock.MagicMock(moe_num_shared_experts=0, tp_size=1, hidden_size=model.config.hidden_size)
    for kind, factor in (("text", 1), ("vision", 3)):
        setattr(block, f"{kind}_experts_gate", lambda hidden: (hidden, None))
        setattr(block, f"{kind}_experts", lambda hidden_states, topk_output, factor=factor: factor * hidden_states)
    run_layers = model.model.forward

    def run_masked_layers(
        input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None, pp_proxy_tensors: Any = None,
        visual_token_mask: Any = None,
    ) -> Any:  # fmt: skip
        hidden = model.model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        hidden = Ernie4_5_VLMoeMoE.forward(block, hidden, visual_token_mask)
        return run_layers(input_ids, positions, forward_batch, hidden)

    def mask(input_ids: Any, forward_batch: Any) -> dict[str, Any]:
        return {"visual_token_mask": torch.full((len(input_ids), 1), bool(forward_batch.contains_mm_inputs()))}

    model.model.forward, model.beside = run_masked_layers, mask


# how a model comes to its layers
KINDS: dict[str, Callable[[Any], None]] = {
    "by keyword": lambda model: None,
    "between": between,
    "M-RoPE": three_positions,
    "deepstack": deepstack,
    "routers": routers,
    # it leaves other layers behind
    "experts": experts,
}
CHANGES: dict[str, Callable[[Any, Any], None]] = {"text": as_text, "image": with_image}


def images(loaded: one_batch.LoadedModel) -> dict[str, Any]:
    model = loaded.model_runner.model
    make_multimodal(loaded)
    found = {}
    for kind, make in KINDS.items():
        make(model)
        eager = {name: kinds_of_request.run(loaded, LENGTHS, change) for name, change in CHANGES.items()}
        prefill.capture_prefill(loaded.model_runner)
        for name, change in CHANGES.items():
            before = graphs.counters.replays
            answer = kinds_of_request.attempt(loaded, LENGTHS, change)
            found[f"{kind}, {name}"] = (compared(eager[name], answer), graphs.counters.replays > before)
        forget(loaded.model_runner)
    return found


def ranks(loaded: one_batch.LoadedModel) -> dict[str, Any]:
    """Ask the runner if it would replay a batch alone, and beside a second rank with another batch."""
    model_runner = loaded.model_runner
    make_multimodal(loaded)
    found = {}
    for kind, make in KINDS.items():
        make(model_runner.model)
        runner = prefill.capture_prefill(model_runner)
        admits = getattr(runner, "can_run_graph", None) or runner.can_run
        batches = {name: batch_of(loaded, change) for name, change in CHANGES.items()}
        for name, batch in batches.items():
            found[f"{kind}, {name}"] = [admits(batch)]
        agreed = all(vote(runner, batch) for batch in batches.values())
        for name, batch in batches.items():
            batch.global_num_tokens_cpu = [len(batch.input_ids)] * len(batches)
            # other options give a batch the tokens of all ranks, too; all of them then have this batch
            for is_shared, decided in ((True, agreed), (False, vote(runner, batch))):
                batch.can_run_dp_breakable_cuda_graph = batch.can_run_dp_prefill_cuda_graph = decided
                with mock.patch.object(vlm_embeds_dropped, "attends_in_parallel", lambda _, known=is_shared: known):
                    found[f"{kind}, {name}"].append(admits(batch))
        forget(model_runner)
    return found


def batch_of(loaded: one_batch.LoadedModel, change: Callable[[Any, Any], None]) -> Any:
    batches: list[Any] = []

    def keep(batch: Any, model: Any) -> None:
        change(batch, model)
        # a run takes the images away from its own
        batches.append(copy.copy(batch))

    kinds_of_request.run(loaded, LENGTHS, keep)
    return batches[0]


def vote(runner: Any, batch: Any) -> bool:
    """The vote on its batch that a rank gives the others, asked as SGLang asks it."""
    ask = getattr(runner, "can_replay_locally", None)
    if ask is None:
        return True
    given = {
        "batch_size": batch.batch_size,
        "num_tokens": len(batch.input_ids),
        "input_embeds": None,
        "replace_embeds": None,
        "prefix_lens": batch.extend_prefix_lens_cpu,
        "is_target_verify": False,
        "capture_hidden_mode": None,
        "return_logprob": False,
        "contains_mm_inputs": batch.contains_mm_inputs(),
    }
    asked = inspect.signature(ask).parameters
    return bool(ask(**{name: value for name, value in given.items() if name in asked}))


def forget(model_runner: Any) -> None:
    """The graphs, and what the model was made to be."""
    forget_graphs(model_runner)
    vars(model_runner.model).pop("language_model", None)
    model_runner.model.is_mrope_enabled = False


def compared(eager: dict[str, Any], answer: dict[str, Any] | str) -> str:
    """Embeddings are handed on for the draft model alone, and SGLang leaves them out where there is none."""
    if isinstance(answer, str):
        return answer
    equal = bool((answer["next_token_logits"] == eager["next_token_logits"]).all())
    return "right" if equal else "wrong"


def forget_graphs(model_runner: Any) -> None:
    for name in ("piecewise_cuda_graph_runner", "prefill_cuda_graph_runner"):
        if hasattr(model_runner, name):
            setattr(model_runner, name, None)


def checkpoints(loaded: one_batch.LoadedModel) -> dict[str, Any]:
    """Tell if the layers get a batch with the mask, and if a graph was replayed."""
    import torch
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    model_runner = loaded.model_runner
    model, seen = model_runner.model, {}
    plain = model.forward

    def forward(input_ids: Any, positions: Any, forward_batch: Any, **kwargs: Any) -> Any:
        seen["mask"] = forward_batch.mamba_track_mask is not None
        return plain(input_ids, positions, forward_batch, **kwargs)

    def wanting(wanted: bool) -> Callable[[Any, Any], None]:
        def change(batch: Any, model: Any) -> None:
            batch.mamba_track_mask = torch.tensor([wanted])
            batch.mamba_track_indices = batch.mamba_track_seqlens = torch.tensor([1])

        return change

    def observe(backend: Any, wanted: bool) -> tuple[bool, bool]:
        linear = backend.__new__(backend) if backend else None
        model_runner.attn_backend.linear_attn_backend = linear
        before = graphs.counters.replays
        kinds_of_request.run(loaded, LENGTHS, wanting(wanted))
        return seen["mask"], graphs.counters.replays > before

    model.forward = forward
    prefill.capture_prefill(model_runner)
    found = {
        "Mamba2, checkpoint": observe(Mamba2AttnBackend, True),
        "Mamba2, none": observe(Mamba2AttnBackend, False),
        "gated delta net, checkpoint": observe(GDNAttnBackend, True),
        "attention only, checkpoint": observe(None, True),
    }
    if hasattr(model_runner, "prefill_cuda_graph_runner"):
        # as SGLang decides without speculative decoding: then its graphs carry the mask
        type(model_runner.prefill_cuda_graph_runner)._is_mamba_track_enabled = lambda self: True
        prefill.capture_prefill(model_runner)
        found["Mamba2, carried"] = observe(Mamba2AttnBackend, True)
    return found


def adapters(loaded: one_batch.LoadedModel) -> dict[str, Any]:
    """Compare answers with and without an adapter to eager ones, and tell if a graph was replayed."""
    manager = loaded.model_runner.lora_manager
    adapter = load_adapter(manager)

    def using(name: str | None) -> Callable[[Any, Any], None]:
        def change(batch: Any, model: Any) -> None:
            batch.lora_ids = [name]
            manager.fetch_new_loras({name})
            manager.prepare_lora_batch(batch)

        return change

    kinds = {"with an adapter": using(adapter), "without": using(None)}
    # the one without comes last, as in the warm-up that real servers run before they capture
    eager = {kind: kinds_of_request.run(loaded, LENGTHS, change) for kind, change in kinds.items()}
    logits = [answer["next_token_logits"] for answer in eager.values()]
    assert not (logits[0] == logits[1]).all(), "the adapter does nothing"
    prefill.capture_prefill(loaded.model_runner)
    found = {}
    for lucky in (True, False):
        graphs.freed_memory_is_garbage = not lucky
        for kind, change in kinds.items():
            before = graphs.counters.replays
            answer = kinds_of_request.attempt(loaded, LENGTHS, change)
            memory = "freed memory is as it was" if lucky else "freed memory is another's"
            found[f"{kind}, {memory}"] = (compared(eager[kind], answer), graphs.counters.replays > before)
    return found


def load_adapter(manager: Any) -> str:
    import torch
    from sglang.srt.lora.lora_registry import LoRARef

    rank, rows = manager.max_lora_rank, torch.Generator().manual_seed(0)
    sizes = {"A": (rank, 64), "B": (64, rank)}
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{side}.weight": torch.randn(size, generator=rows)
        for layer in range(manager.base_hf_config.num_hidden_layers)
        for side, size in sizes.items()
    }
    reference = LoRARef(lora_name="adapter", lora_path="given as tensors", pinned=False)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj"]}
    done = manager.load_lora_adapter_from_tensors(reference, weights, config)
    assert done.success, done.error_message
    return str(reference.lora_id)


def main(what: str) -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    kinds_of_request.forget_pinned_memory()
    loaded = one_batch.load("llama", max_running_requests=8, **SERVERS[what])
    one_batch.randomize(loaded.model_runner.model)
    graphs.freed_memory_is_garbage = True
    observers = {"images": images, "ranks": ranks, "checkpoints": checkpoints, "adapters": adapters}
    print("RESULT", json.dumps(observers[what](loaded)))


if __name__ == "__main__":
    main(*sys.argv[1:])
