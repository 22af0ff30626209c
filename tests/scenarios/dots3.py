# SPDX-License-Identifier: Apache-2.0
"""A tiny Dots3 without its towers, on FlashAttention 3: eager, and with breakable prefill graphs.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 SGLANG_PLUGINS=bcg_fixes python -m tests.scenarios.dots3 LAYERS

The layers are full or sliding ones, such as `sliding,full,sliding`.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import tempfile
from typing import Any

import torch

from cpu_sglang import flash_attention, graphs, one_batch, prefill
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.anatomy.runners import PREFILL_MODULE
from tests.releases import kinds_of_request
from tests.scenarios import expanded_form, telling

ID = "dots3_attention_captured"
LATENT: dict[str, int] = {
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "v_head_dim": 32,
}
CONFIG: dict[str, Any] = {
    "model_type": "dots3_note",
    "architectures": ["Dots3NoteForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    **LATENT,
    **{f"swa_{name}": value for name, value in LATENT.items()},
    "sliding_window_size": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    # every layer is dense
    "first_k_dense_replace": 8,
    "num_nextn_predict_layers": 0,
    # its latent attention has no other
    "torch_dtype": "bfloat16",
}


class Tower(torch.nn.Module):
    """In the place of a tower, whose configuration comes with its weights."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


def load(kinds: list[str]) -> one_batch.LoadedModel:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    modeling: Any = importlib.import_module("sglang.srt.models.dots3_common.modeling")
    towers: Any = importlib.import_module("sglang.srt.models.dots3_common.dots_omni_towers")
    backend: Any = importlib.import_module("sglang.srt.layers.attention.dots_hybrid_backend")
    modeling._require_cuda = lambda: None
    towers.DotsNoteOmniAudioEncoder = towers.DotsNoteOmniVisionEncoder = Tower
    # one kernel, as on a GPU
    backend.flash_attn_varlen_func = graphs.opaque(flash_attention.flash_attn_varlen_func)
    layers = {"num_hidden_layers": len(kinds), "layer_types": [f"{kind}_attention" for kind in kinds]}
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(CONFIG | layers))
        loaded = one_batch.load(folder, attention_backend="fa3", dtype="bfloat16", page_size=64, max_total_tokens=2048)
    one_batch.randomize(loaded.model_runner.model)
    one_batch.derive(loaded.model_runner.model)
    expanded_form.write_without_a_mask()
    kinds_of_request.forget_pinned_memory()
    # what replays are prepared for is decided by this
    vars(importlib.import_module(PREFILL_MODULE))["is_cuda"] = lambda: True
    return loaded


def main(kinds: str) -> None:
    loaded = load(kinds.split(","))
    eager = [one_batch.generate(loaded, prompts, 1)[1] for prompts in expanded_form.BATCHES]
    found: dict[str, Any] = {"applied": ID in plugin.load().ledger.applied(), "right": []}
    try:
        prefill.capture_prefill(loaded.model_runner, (8, 16))
    except RuntimeError as error:
        found["capture"] = str(error)
    try:
        for prompts, logits in zip(expanded_form.BATCHES, eager, strict=True):
            found["right"].append(torch.equal(one_batch.generate(loaded, prompts, 1)[1], logits))
    except (RuntimeError, IndexError) as error:
        found["error"] = str(error)
    telling.result({**found, "replays": graphs.counters.replays})


if __name__ == "__main__":
    main(*sys.argv[1:])
