# SPDX-License-Identifier: Apache-2.0
"""A hybrid model that is small enough for any machine: Qwen3-Next, four layers, random weights, no tokenizer.

SGLang's own `--load-format dummy` draws weights so small that the residual stream drowns the layers, and a wrong layer
would not show in the output. These are larger. Uses only the standard library, no torch.
"""

from __future__ import annotations

import array
import json
import math
import pathlib
import random
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

SEED = 0
SPREAD = 0.08

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "torch_dtype": "float16",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    # layers 0, 1 and 2 are linear attention, layer 3 is full attention
    "full_attention_interval": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    # 128 wherever GPU kernels are picky about the head size
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "use_cache": True,
}

Draw = Callable[[random.Random], float]
Tensor = tuple[str, tuple[int, ...], Draw]


def around(mean: float, spread: float) -> Draw:
    return lambda source: source.gauss(mean, spread)


def log_of_decay(source: random.Random) -> float:
    return math.log(source.uniform(1, 16))


def tensors() -> Iterator[Tensor]:
    hidden, vocabulary = CONFIG["hidden_size"], CONFIG["vocab_size"]
    weight = around(0, SPREAD)
    # most of this model's norms scale by one plus their weight
    norm_offset = around(0, 0.1)
    yield "model.embed_tokens.weight", (vocabulary, hidden), weight
    for layer in range(CONFIG["num_hidden_layers"]):
        is_full_attention = (layer + 1) % CONFIG["full_attention_interval"] == 0
        attention = full_attention if is_full_attention else linear_attention
        for name, shape, draw in (*attention(), *mixture_of_experts()):
            yield f"model.layers.{layer}.{name}", shape, draw
        yield f"model.layers.{layer}.input_layernorm.weight", (hidden,), norm_offset
        yield f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,), norm_offset
    yield "model.norm.weight", (hidden,), norm_offset
    yield "lm_head.weight", (vocabulary, hidden), weight


def full_attention() -> Iterator[Tensor]:
    hidden, head = CONFIG["hidden_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    weight, norm_offset = around(0, SPREAD), around(0, 0.1)
    # twice as wide, because it also projects the output gate
    yield "self_attn.q_proj.weight", (2 * queries, hidden), weight
    yield "self_attn.k_proj.weight", (keys, hidden), weight
    yield "self_attn.v_proj.weight", (keys, hidden), weight
    yield "self_attn.o_proj.weight", (hidden, queries), weight
    yield "self_attn.q_norm.weight", (head,), norm_offset
    yield "self_attn.k_norm.weight", (head,), norm_offset


def linear_attention() -> Iterator[Tensor]:
    hidden, value_heads = CONFIG["hidden_size"], CONFIG["linear_num_value_heads"]
    keys = CONFIG["linear_num_key_heads"] * CONFIG["linear_key_head_dim"]
    values = value_heads * CONFIG["linear_value_head_dim"]
    weight = around(0, SPREAD)
    yield "linear_attn.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden), weight
    yield "linear_attn.in_proj_ba.weight", (2 * value_heads, hidden), weight
    yield "linear_attn.conv1d.weight", (2 * keys + values, 1, CONFIG["linear_conv_kernel_dim"]), around(0, 0.5)
    yield "linear_attn.A_log", (value_heads,), log_of_decay
    yield "linear_attn.dt_bias", (value_heads,), around(1, 0.1)
    yield "linear_attn.norm.weight", (CONFIG["linear_value_head_dim"],), around(1, 0.1)
    yield "linear_attn.out_proj.weight", (hidden, values), weight


def mixture_of_experts() -> Iterator[Tensor]:
    hidden = CONFIG["hidden_size"]
    weight = around(0, SPREAD)
    yield "mlp.gate.weight", (CONFIG["num_experts"], hidden), weight
    yield "mlp.shared_expert_gate.weight", (1, hidden), weight
    experts = {f"mlp.experts.{number}": CONFIG["moe_intermediate_size"] for number in range(CONFIG["num_experts"])}
    for name, inner in {"mlp.shared_expert": CONFIG["shared_expert_intermediate_size"], **experts}.items():
        yield f"{name}.gate_proj.weight", (inner, hidden), weight
        yield f"{name}.up_proj.weight", (inner, hidden), weight
        yield f"{name}.down_proj.weight", (hidden, inner), weight


def write(folder: pathlib.Path) -> None:
    """Write config.json and model.safetensors; a folder that already has both is left alone."""
    config = json.dumps(CONFIG, indent=1)
    # written last, so its presence vouches for the weights
    config_file = folder / "config.json"
    if config_file.exists() and config_file.read_text() == config:
        return
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(SEED)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    content = bytearray()
    for name, shape, draw in tensors():
        values = array.array("f", (draw(source) for _ in range(math.prod(shape))))
        if sys.byteorder == "big":
            values.byteswap()
        begin = len(content)
        content += values.tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (begin, len(content))}
    described = json.dumps(header).encode()
    # the format requires tensors to begin at a multiple of eight
    described += b" " * (-len(described) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(described)) + described + bytes(content))
    config_file.write_text(config)
