# SPDX-License-Identifier: Apache-2.0
"""Prefill of small multimodal models on 0.5.11: which batches replay, and is the answer the eager one?

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m tests.releases.multimodal_prefill OUT.json MODEL

A text batch goes through SGLang's own benchmark, two steps of it, so that the states that the prefill leaves are read
too. Other batches are given their images or positions by SGLang's own types.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from cpu_sglang import graphs, one_batch, prefill
from tests.releases import kinds_of_request

TEXT = {
    "one request": [11],
    "two requests": [6, 5],
    "four requests": [1, 1, 1, 5],
    "fills its bucket": [8],
    "the first again": [11],
}
# patches of an image in time, height and width; four of them are one token
GRID = (1, 4, 4)
IMAGE_TOKENS = 4
SHARED = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_interleaved": True}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
MODELS = {
    "dense": ("Qwen3_5ForConditionalGeneration", "qwen3_5", {}),
    "experts": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", EXPERTS),
    # attention in every layer, and deepstack embeddings
    "no states": ("Qwen3VLForConditionalGeneration", "qwen3_vl", {}),
}


def configuration(model: str) -> dict[str, Any]:
    architecture, model_type, more = MODELS[model]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "float32",
        "image_token_id": 120,
        "video_token_id": 121,
        "vision_start_token_id": 122,
        "vision_end_token_id": 123,
        "text_config": {
            "model_type": f"{model_type}_text",
            **SHARED,
            **more,
            "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {
            "model_type": model_type,
            "hidden_size": 32,
            "intermediate_size": 64,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0] if model == "no states" else [],
        },
    }


def positions_of_their_own(batch: Any, model: Any) -> None:
    """Three different rows for each token, and other ones in every request."""
    import torch

    lengths = [int(length) for length in batch.extend_seq_lens_cpu]
    rows = [torch.arange(length) * step + request for request, length in enumerate(lengths) for step in (1, 2, 3)]
    batch.mrope_positions = torch.cat([torch.stack(rows[start : start + 3]) for start in range(0, len(rows), 3)], 1)


def image_in_the_first_request(batch: Any, model: Any, seed: int = 7) -> None:
    import torch
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs

    generator = torch.Generator().manual_seed(seed)
    vision = model.visual.patch_embed
    numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        offsets=[(1, IMAGE_TOKENS)],
        feature=torch.randn(GRID[1] * GRID[2], numbers, generator=generator),
        model_specific_data={"image_grid_thw": torch.tensor([GRID])},
    )
    item.set_pad_value()
    batch.input_ids[1 : 1 + IMAGE_TOKENS] = item.pad_value
    batch.mm_inputs = [MultimodalInputs(mm_items=[item])] + [None] * (batch.batch_size - 1)
    positions_of_their_own(batch, model)


def another_image(batch: Any, model: Any) -> None:
    image_in_the_first_request(batch, model, seed=8)


CHANGED: dict[str, tuple[list[int], Callable[[Any, Any], None]]] = {
    "positions of one request": ([6], positions_of_their_own),
    "positions of two requests": ([6, 5], positions_of_their_own),
    "positions of text": ([6, 5], kinds_of_request.as_it_is),
    "an image": ([7], image_in_the_first_request),
    "another image": ([7], another_image),
    "an image next to text": ([7, 4], image_in_the_first_request),
    "text after an image": ([7], kinds_of_request.as_it_is),
    "mixed with decoding": ([6, 5], kinds_of_request.mixed),
}


def text(loaded: one_batch.LoadedModel, lengths: list[int]) -> dict[str, Any]:
    return {"logits": one_batch.generate(loaded, prefill._prompts(lengths), 2)[1]}


def changed(loaded: one_batch.LoadedModel, lengths: list[int], change: Callable[[Any, Any], None]) -> dict[str, Any]:
    from sglang.srt.managers import mm_utils

    # an image that was seen before would not be computed
    mm_utils.init_mm_embedding_cache(1 << 20)
    return kinds_of_request.run(loaded, lengths, change)


def main(out: str, name: str) -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(configuration(name)))
        loaded = one_batch.load(folder)
    one_batch.randomize(loaded.model_runner.model)
    cases = {case: functools.partial(text, loaded, lengths) for case, lengths in TEXT.items()}
    cases |= {case: functools.partial(changed, loaded, *given) for case, given in CHANGED.items()}
    eager = {case: run() for case, run in cases.items()}
    graphs.freed_memory_is_garbage = True
    report: dict[str, Any] = {"multimodal": loaded.model_runner.is_multimodal, "cases": {}}
    try:
        runner = prefill.capture_prefill(loaded.model_runner)
    except RuntimeError as reason:
        report["no graphs"] = str(reason)
    else:
        report["breaks"] = {size: len(graph._break_fns) for size, graph in prefill.captured_graphs(runner).items()}
    for case, run in cases.items():
        before = graphs.counters.replays
        try:
            answer: dict[str, Any] | str = run()
        except Exception as error:
            # what a server would end at
            answer = repr(error)
        report["cases"][case] = {
            "replayed": graphs.counters.replays > before,
            "difference": kinds_of_request.difference(eager[case], answer),
        }
    for case, other in (("an image", "another image"), ("positions of two requests", "positions of text")):
        report[f"{case}, not {other}"] = kinds_of_request.difference(eager[case], eager[other])
    pathlib.Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
