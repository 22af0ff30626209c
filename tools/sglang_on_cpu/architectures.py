"""A tiny configuration for each architecture that a release can build and run on the CPU.

Beside those in models/, which tests of single defects use: here each differs from its family's own as little as size
allows.
"""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass, field
from typing import Any

MODELS = pathlib.Path(__file__).parent / "models"


@dataclass(frozen=True)
class Configuration:
    """What stands in config.json, and what the server is started with."""

    config: dict[str, Any]
    server_args: dict[str, Any] = field(default_factory=dict)


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
# a backend that knows windows, sinks or latent attention
FLASH = {"attention_backend": "fa3"}
# kernels run by Triton's interpreter take most of the time, so one layer of each kind is enough
GATED_DELTA = {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "head_dim": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    }
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rope_scaling": None,
}
ROUTED: dict[str, Any] = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
}
SPARSE = {"q_lora_rank": 64, "index_topk": 64, "index_head_dim": 128, "index_n_heads": 4}
TOWER = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_heads": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "patch_size": 14,
    "image_size": 56,
    "deepstack_visual_indexes": [],
    "fullatt_block_indexes": [1],
}
TWO_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}


def text(model_type: str, server_args: dict[str, Any] | None = None, **config: Any) -> Configuration:
    return Configuration(SIZES | {"model_type": model_type} | config, server_args or {})


def image(
    model_type: str,
    text_type: str,
    server_args: dict[str, Any] | None = None,
    tower: dict[str, Any] | None = None,
    **text: Any,
) -> Configuration:
    config = {
        "model_type": model_type,
        "text_config": {**SIZES, "model_type": text_type, **text},
        "vision_config": {**TOWER, **(tower or {})},
        "torch_dtype": "float16",
    }
    return Configuration(config, server_args or {})


def in_models(folder: str, server_args: dict[str, Any] | None = None, **config: Any) -> Configuration:
    known: dict[str, Any] = json.loads((MODELS / folder / "config.json").read_text())
    return Configuration({**known, "torch_dtype": "float16", **config}, server_args or {})


EMBEDS = {"is_embedding": True}
CONFIGURATIONS: dict[str, Configuration] = {
    "LlamaForCausalLM": text("llama"),
    "Qwen3ForCausalLM": text("qwen3"),
    "Qwen3MoeForCausalLM": text("qwen3_moe", **EXPERTS),
    "Qwen3NextForCausalLM": text("qwen3_next", **{**EXPERTS, **GATED_DELTA, "partial_rotary_factor": 0.25}),
    "Qwen3_5ForCausalLM": text("qwen3_5_text", **{**GATED_DELTA, **MROPE}),
    "Qwen3_5MoeForCausalLM": text("qwen3_5_moe_text", **{**EXPERTS, **GATED_DELTA, **MROPE}),
    "Qwen3_5ForConditionalGeneration": image("qwen3_5", "qwen3_5_text", **{**GATED_DELTA, **MROPE}),
    "Qwen3_5MoeForConditionalGeneration": image(
        "qwen3_5_moe", "qwen3_5_moe_text", **{**EXPERTS, **GATED_DELTA, **MROPE}
    ),
    "DeepseekV2ForCausalLM": text(
        "deepseek_v2", FLASH, **{**ROUTED, **LATENT, "topk_method": "greedy", "scoring_func": "softmax"}
    ),
    "DeepseekV3ForCausalLM": text("deepseek_v3", FLASH, **ROUTED, **LATENT),
    "DeepseekV32ForCausalLM": text("deepseek_v3", FLASH, **{**ROUTED, **LATENT, **SPARSE}),
    "FalconH1ForCausalLM": in_models("falcon_h1"),
    "NemotronHForCausalLM": in_models("nemotron_h", num_hidden_layers=2, hybrid_override_pattern="M*"),
    "GraniteMoeHybridForCausalLM": text(
        "granitemoehybrid",
        **{**EXPERTS, "shared_intermediate_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
        layer_types=["mamba", "attention"],
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=16,
    ),
    "Lfm2ForCausalLM": text("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"], conv_L_cache=3),
    "BailingMoeV2_5ForCausalLM": in_models("bailing_full", FLASH),
    "BailingMoeV2ForCausalLM": text(
        "bailing_moe_v2",
        **ROUTED,
        embedding_dropout=0.0,
        num_shared_experts=1,
        use_qkv_bias=False,
        use_bias=False,
        use_qk_norm=True,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "KimiLinearForCausalLM": text(
        "kimi_linear",
        FLASH,
        **{**EXPERTS, **LATENT, "num_hidden_layers": 2, "v_head_dim": 16},
        num_experts_per_token=2,
        num_shared_experts=1,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        routed_scaling_factor=1.0,
        moe_renormalize=True,
        moe_router_activation_func="sigmoid",
        num_expert_group=1,
        topk_group=1,
        linear_attn_config={
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    ),
    "MiniMaxM2ForCausalLM": text("minimax_m2", **EXPERTS, scoring_func="sigmoid"),
    "GptOssForCausalLM": in_models("gpt_oss", FLASH),
    "Gemma2ForCausalLM": text(
        "gemma2", hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=16
    ),
    "Gemma3ForCausalLM": text("gemma3_text", hidden_activation="gelu_pytorch_tanh", **TWO_ROPES),
    "Gemma3ForConditionalGeneration": image("gemma3", "gemma3_text", **TWO_ROPES),
    "Gemma4ForCausalLM": text(
        "gemma4_text",
        {"attention_backend": "triton"},
        hidden_activation="gelu_pytorch_tanh",
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=8,
        global_head_dim=16,
        num_global_key_value_heads=2,
        swa_num_key_value_heads=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=128,
        num_kv_shared_layers=0,
        moe_intermediate_size=32,
    ),
    "PhiForCausalLM": in_models("phi"),
    "Phi3ForCausalLM": text("phi3"),
    "CohereForCausalLM": in_models("cohere"),
    "Cohere2ForCausalLM": text("cohere2"),
    "Olmo2ForCausalLM": text("olmo2"),
    "OlmoeForCausalLM": text("olmoe", **EXPERTS, num_key_value_heads=4),
    "Glm4ForCausalLM": text("glm4"),
    "Glm4MoeForCausalLM": text("glm4_moe", **ROUTED),
    "MistralForCausalLM": text("mistral"),
    "MixtralForCausalLM": text("mixtral", **EXPERTS),
    "Llama4ForCausalLM": text(
        # dense: SGLang has no experts on the CPU that are weighted at their input
        "llama4_text",
        FLASH | {"dtype": "bfloat16"},
        **EXPERTS,
        intermediate_size_mlp=128,
        interleave_moe_layer_step=100,
    ),
    "LlamaEmbeddingModel": text("llama", EMBEDS),
    "LlamaForSequenceClassification": text("llama", EMBEDS, num_labels=3),
}
# name -> the architecture whose class has all of its methods
SAME_CODE: dict[str, str] = {
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "InternS2PreviewForConditionalGeneration": "Qwen3_5MoeForConditionalGeneration",
    "MistralModel": "LlamaEmbeddingModel",
    "NemotronHPuzzleForCausalLM": "NemotronHForCausalLM",
}
OF_A_DRAFT = "a draft takes the hidden states of a target, and runs in tests of its own: tests/fixes/draft_server.py"
UNTRIED = "no tiny configuration has been written for it yet"
# name -> why it is not run here
NOT_RUN: dict[str, str] = dict.fromkeys(
    pathlib.Path(__file__).with_name("untried_architectures.txt").read_text().split(), UNTRIED
) | {"LlamaForCausalLMEagle": OF_A_DRAFT}
