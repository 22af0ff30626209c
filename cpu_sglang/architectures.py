# SPDX-License-Identifier: Apache-2.0
"""A tiny configuration for each architecture that a release can build and run on the CPU.

Tests of single defects use those in models/; here each differs from its family's own as little as size allows.
"""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass, field
from typing import Any

MODELS = pathlib.Path(__file__).parent / "models"


@dataclass(frozen=True)
class Configuration:
    """Contents of config.json, and the server's arguments."""

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
# a backend that supports windows, sinks or latent attention
FLASH = {"attention_backend": "fa3"}
# Triton's interpreter takes most of the time, so one layer of each kind
GATED_DELTA: dict[str, Any] = {
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
MROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    }
}
MROPE_ALL: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
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
TWO_ROPES: dict[str, Any] = {
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


ONE_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
WINDOWS: dict[str, Any] = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
GELU: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
GEMMA4: dict[str, Any] = {
    **WINDOWS,
    "sliding_window": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "swa_num_key_value_heads": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
    "num_kv_shared_layers": 0,
    "moe_intermediate_size": 32,
}
KIMI_LINEAR: dict[str, Any] = {
    **EXPERTS,
    **LATENT,
    "num_hidden_layers": 2,
    "v_head_dim": 16,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
}
KIMI_DELTA = {
    "kda_layers": [1],
    "full_attn_layers": [2],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
# dense: the router multiplies halves into floats, which a CPU cannot
MINIMAX_M3: dict[str, Any] = {
    **EXPERTS,
    "moe_layer_freq": [0, 0, 0],
    "n_shared_experts": 1,
    "dense_intermediate_size": 128,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rotary_dim": 8,
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 0, 0],
        "sparse_index_dim": 16,
        "sparse_num_index_heads": 2,
        "sparse_block_size": 16,
        "sparse_topk_blocks": 2,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
    },
}
NANBEIGE: dict[str, Any] = {"attention_dropout": 0.0, "num_loops": 2, "skip_loop_final_norm": False}
INTERN_TOWER = {"norm_type": "layer_norm", "qkv_bias": True, "qk_normalization": False, "initializer_factor": 1.0}
LLAVA: dict[str, Any] = {
    **SIZES,
    "model_type": "llava",
    "vision_config": {**TOWER, "model_type": "clip_vision_model"},
    "mm_vision_tower": "clip",
    "mm_hidden_size": 48,
}
SHORT_CONV: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
MINICPM: dict[str, Any] = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32}
BAILING: dict[str, Any] = {
    "embedding_dropout": 0.0,
    "num_shared_experts": 1,
    "use_qkv_bias": False,
    "use_bias": False,
    **ONE_ROPE,
}
ENCODER: dict[str, Any] = {"hidden_act": "gelu", "position_embedding_type": "absolute", "num_key_value_heads": 4}
AUDIO: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "output_dim": 64,
}
JET: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 2,
    "layer_types": ["jet", "attn"],
    **ONE_ROPE,
    "efficient_attention_config": {
        "jet": {
            "mode": "chunk",
            "expand_v": 2.0,
            "num_heads": 2,
            "head_dim": 16,
            "norm_eps": 1e-5,
            "conv_size": 4,
            "dconv_generator_reduction": 8,
            "dconv_implementation": "triton",
        }
    },
}
STEP: dict[str, Any] = {
    "num_attention_groups": 2,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "moe_layers_enum": "1,2",
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 64,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": 16,
    },
    "moe_router_scaling_factor": 1.0,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "use_head_wise_attn_gate": True,
    "partial_rotary_factors": [0.5, 1.0, 1.0],
    "swiglu_limits": [0, 0, 0],
    "swiglu_limits_shared": [0, 0, 0],
    "yarn_only_types": ["full_attention"],
    "rope_theta": [10000.0] * 3,
}
EMBEDS = {"is_embedding": True}
CONFIGURATIONS: dict[str, Configuration] = {
    "LlamaForCausalLM": text("llama"),
    "LlamaEmbeddingModel": text("llama", EMBEDS),
    "LlamaForSequenceClassification": text("llama", EMBEDS, num_labels=3),
    "LlamaForSequenceClassificationWithNormal_Weights": text("llama", EMBEDS, num_labels=4),
    "LlamaForClassification": text("llama", EMBEDS, classification_out_size=3),
    "TorchNativeLlamaForCausalLM": text("llama"),
    "Llama4ForCausalLM": text(
        # dense: SGLang has no CPU experts that are weighted at their input
        "llama4_text",
        FLASH | {"dtype": "bfloat16"},
        **EXPERTS,
        intermediate_size_mlp=128,
        interleave_moe_layer_step=100,
    ),
    "Llama4ForConditionalGeneration": image(
        "llama4",
        "llama4_text",
        FLASH | {"dtype": "bfloat16"},
        {"model_type": "llama4_vision_model"},
        **EXPERTS,
        intermediate_size_mlp=128,
        interleave_moe_layer_step=100,
    ),
    "MistralForCausalLM": text("mistral"),
    "MistralLarge3ForCausalLM": text("deepseek_v3", FLASH, **ROUTED, **LATENT),
    "Mistral3ForConditionalGeneration": image("mistral3", "mistral", tower={"model_type": "pixtral"}),
    "PixtralForConditionalGeneration": image(
        "llava",
        "mistral",
        tower={"model_type": "pixtral", "image_token_id": 10, "num_channels": 3, "rope_theta": 10000.0},
    ),
    "Ministral3ForCausalLM": text("ministral3"),
    "MixtralForCausalLM": text("mixtral", **EXPERTS),
    "QuantMixtralForCausalLM": text("mixtral", **EXPERTS),
    "QWenLMHeadModel": text("qwen", layer_norm_epsilon=1e-6, intermediate_size=256, num_key_value_heads=4),
    "Qwen2ForCausalLM": text("qwen2"),
    "Qwen2MoeForCausalLM": text("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=32),
    "Qwen2ForSequenceClassification": text("qwen2", EMBEDS, num_labels=3),
    "Qwen2ForRewardModel": text("qwen2", EMBEDS),
    "Qwen2VLForConditionalGeneration": image(
        "qwen2_vl",
        "qwen2_vl_text",
        tower={"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2, "in_chans": 3},
        **MROPE_ALL,
    ),
    "Qwen2_5_VLForConditionalGeneration": image("qwen2_5_vl", "qwen2_5_vl_text", **MROPE_ALL),
    "Qwen2AudioForConditionalGeneration": Configuration(
        {
            "model_type": "qwen2_audio",
            "torch_dtype": "float16",
            "text_config": {**SIZES, "model_type": "qwen2"},
            "audio_config": AUDIO,
        }
    ),
    "Qwen3ForCausalLM": text("qwen3"),
    "Qwen3MoeForCausalLM": text("qwen3_moe", **EXPERTS),
    "Qwen3NextForCausalLM": text("qwen3_next", **{**EXPERTS, **GATED_DELTA, "partial_rotary_factor": 0.25}),
    "Qwen3_5ForCausalLM": text("qwen3_5_text", **{**GATED_DELTA, **MROPE}),
    "Qwen3_5MoeForCausalLM": text("qwen3_5_moe_text", **{**EXPERTS, **GATED_DELTA, **MROPE}),
    "Qwen3_5ForConditionalGeneration": image("qwen3_5", "qwen3_5_text", **{**GATED_DELTA, **MROPE}),
    "Qwen3_5MoeForConditionalGeneration": image(
        "qwen3_5_moe", "qwen3_5_moe_text", **{**EXPERTS, **GATED_DELTA, **MROPE}
    ),
    "Qwen3Model": text("qwen3", EMBEDS),
    "Qwen3ForSequenceClassification": text("qwen3", EMBEDS, num_labels=3),
    "Qwen3ForRewardModel": text("qwen3", EMBEDS),
    "Qwen3VLForConditionalGeneration": image(
        "qwen3_vl", "qwen3_vl_text", tower={"deepstack_visual_indexes": [1]}, **MROPE_ALL
    ),
    "Qwen3VLMoeForConditionalGeneration": image(
        "qwen3_vl_moe", "qwen3_vl_moe_text", tower={"deepstack_visual_indexes": [1]}, **{**EXPERTS, **MROPE_ALL}
    ),
    "Qwen3ASRForConditionalGeneration": Configuration(
        {
            "model_type": "qwen3_asr",
            "torch_dtype": "float16",
            "thinker_config": {
                "model_type": "qwen3_asr_thinker",
                "text_config": {**SIZES, "model_type": "qwen3"},
                "audio_config": AUDIO,
            },
        }
    ),
    "Qwen3OmniMoeForConditionalGeneration": Configuration(
        {
            "model_type": "qwen3_omni_moe",
            "torch_dtype": "float16",
            "thinker_config": {
                "text_config": {**SIZES, **EXPERTS, **MROPE_ALL, "model_type": "qwen3_omni_moe_text"},
                "vision_config": TOWER,
                "audio_config": AUDIO,
            },
        }
    ),
    "SDARForCausalLM": text("sdar"),
    "SDARMoeForCausalLM": text("sdar_moe", **EXPERTS),
    "DeepseekV2ForCausalLM": text(
        "deepseek_v2", FLASH, **{**ROUTED, **LATENT, "topk_method": "greedy", "scoring_func": "softmax"}
    ),
    "DeepseekV3ForCausalLM": text("deepseek_v3", FLASH, **ROUTED, **LATENT),
    "DeepseekV32ForCausalLM": text("deepseek_v3", FLASH, **{**ROUTED, **LATENT, **SPARSE}),
    # dense: SGLang has a kernel for its experts on CUDA only
    "DeepseekForCausalLM": text("deepseek", **{**ROUTED, "first_k_dense_replace": 3}),
    "SarvamMLAForCausalLM": text("sarvam_mla", FLASH, **{**ROUTED, **LATENT}, num_shared_experts=1, **ONE_ROPE),
    "KimiVLForConditionalGeneration": image(
        "kimi_vl", "deepseek_v3", FLASH, {"model_type": "moonvit"}, **{**ROUTED, **LATENT}
    ),
    "KimiK25ForConditionalGeneration": image(
        "kimi_k25",
        "deepseek_v3",
        FLASH,
        {
            "vt_hidden_size": 48,
            "vt_intermediate_size": 64,
            "vt_num_attention_heads": 2,
            "vt_num_hidden_layers": 2,
            "text_hidden_size": 64,
            "mm_hidden_size": 48,
        },
        **{**ROUTED, **LATENT},
        architectures=["DeepseekV3ForCausalLM"],
    ),
    "KimiK3LinearForCausalLM": text(
        "kimi_linear", FLASH, **KIMI_LINEAR, linear_attn_config={**KIMI_DELTA, "num_heads": 2}
    ),
    "KimiK3ForConditionalGeneration": image(
        "kimi_k3",
        "kimi_linear",
        FLASH,
        {
            "vt_num_attention_heads": 2,
            "vt_num_hidden_layers": 1,
            "vt_hidden_size": 48,
            "vt_intermediate_size": 64,
            "qkv_hidden_size": 48,
        },
        **KIMI_LINEAR,
        linear_attn_config={**KIMI_DELTA, "num_heads": 2},
    ),
    "KimiLinearForCausalLM": text("kimi_linear", FLASH, **KIMI_LINEAR, linear_attn_config=KIMI_DELTA),
    "LongcatFlashForCausalLM": text(
        "longcat_flash",
        FLASH,
        **{**ROUTED, **LATENT, "q_lora_rank": 64, "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0}},
        num_layers=2,
        ffn_hidden_size=128,
        expert_ffn_hidden_size=32,
        moe_topk=2,
        zero_expert_num=0,
    ),
    "Glm4ForCausalLM": text("glm4"),
    "Glm4MoeForCausalLM": text("glm4_moe", **ROUTED),
    "Glm4MoeLiteForCausalLM": text("glm4_moe_lite", FLASH, **{**ROUTED, **LATENT, "q_lora_rank": 64}),
    "Glm4vForConditionalGeneration": image("glm4v", "glm4v_text", **MROPE_ALL),
    "Glm4vMoeForConditionalGeneration": image("glm4v_moe", "glm4v_moe_text", **{**ROUTED, **MROPE_ALL}),
    "GlmOcrForConditionalGeneration": image("glm_ocr", "glm_ocr_text", **MROPE_ALL),
    "GlmAsrForConditionalGeneration": Configuration(
        {
            "model_type": "glmasr",
            "torch_dtype": "float16",
            "text_config": {**SIZES, "model_type": "llama"},
            "audio_config": {
                **TOWER,
                "model_type": "glmasr_encoder",
                "intermediate_size": 256,
                "hidden_size": 64,
                "num_key_value_heads": 2,
                "num_mel_bins": 16,
                "max_position_embeddings": 32,
                "head_dim": 32,
            },
        }
    ),
    "GlmImageForConditionalGeneration": image("glm_image", "glm_image_text", **MROPE_ALL),
    "Gemma2ForCausalLM": text("gemma2", **GELU, query_pre_attn_scalar=16),
    "Gemma3ForCausalLM": text("gemma3_text", hidden_activation="gelu_pytorch_tanh", **TWO_ROPES),
    "Gemma3ForConditionalGeneration": image("gemma3", "gemma3_text", **TWO_ROPES),
    "Gemma4ForCausalLM": text("gemma4_text", {"attention_backend": "triton"}, **GEMMA4),
    "GemmaForCausalLM": text("gemma", hidden_act="gelu_pytorch_tanh"),
    "Gemma2ForSequenceClassification": text("gemma2", EMBEDS, **GELU, num_labels=3),
    "Gemma4ForConditionalGeneration": image("gemma4", "gemma4_text", {"attention_backend": "triton"}, **GEMMA4),
    "EmbeddingGemmaModel": text("gemma3_text", EMBEDS, hidden_activation="gelu_pytorch_tanh", **TWO_ROPES),
    # its last layers read the KV cache of earlier ones, as in every checkpoint
    "Gemma3nForCausalLM": text(
        "gemma3n_text",
        FLASH,
        hidden_activation="gelu_pytorch_tanh",
        num_hidden_layers=4,
        intermediate_size=[128] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.95, 0.0] * 2,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
    ),
    "GptOssForCausalLM": in_models("gpt_oss", FLASH),
    "MiniMaxM2ForCausalLM": text("minimax_m2", **EXPERTS, scoring_func="sigmoid"),
    "MiniMaxM3SparseForCausalLM": text("minimax_m3", FLASH, **MINIMAX_M3),
    "MiniMaxM3SparseForConditionalGeneration": image(
        "minimax_m3_vl",
        "minimax_m3",
        FLASH,
        {
            "num_channels": 3,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
            "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
            "position_embedding_type": "rope",
            "rope_mode": "3d",
            "rope_theta": 10000.0,
            "vision_segment_max_frames": 4,
        },
        **MINIMAX_M3,
    ),
    "BailingMoeV2_5ForCausalLM": in_models("bailing_full", FLASH),
    "BailingMoeV2ForCausalLM": text(
        "bailing_moe_v2",
        **ROUTED,
        **BAILING,
        use_qk_norm=True,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    ),
    "BailingMoEForCausalLM": text("bailing_moe", **ROUTED, **BAILING, norm_head=False),
    "BailingMoeV3ForCausalLM": in_models("bailing_full", FLASH, short_conv_kernel_size=4, num_hidden_layers=2),
    "SarvamMoEForCausalLM": text("sarvam_moe", **ROUTED, **BAILING),
    "LLaDA2MoeModelLM": text(
        "llada2_moe", **ROUTED, **BAILING, score_function="sigmoid", moe_router_enable_expert_bias=True
    ),
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
    "GraniteForCausalLM": text("granite"),
    "GraniteMoeForCausalLM": text("granitemoe", **EXPERTS),
    "Lfm2ForCausalLM": text("lfm2", **SHORT_CONV),
    "Lfm2MoeForCausalLM": text("lfm2_moe", **EXPERTS, num_dense_layers=1, **SHORT_CONV),
    "Lfm2BidirectionalModel": text("lfm2", EMBEDS, **SHORT_CONV),
    "Lfm2VlForConditionalGeneration": image(
        "lfm2_vl", "lfm2", tower={"model_type": "siglip2_vision_model"}, **SHORT_CONV
    ),
    "JetNemotronForCausalLM": text("jet_nemotron", {"dtype": "bfloat16"}, **JET),
    "JetVLMForConditionalGeneration": image("jet_vlm", "jet_nemotron", {"dtype": "bfloat16"}, **JET),
    "ZayaForCausalLM": text(
        "zaya",
        **EXPERTS,
        num_hidden_layers=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        zaya_mlp_expansion=16,
        tie_word_embeddings=True,
    ),
    "Mamba2ForCausalLM": text(
        "mamba2",
        num_hidden_layers=2,
        state_size=16,
        conv_kernel=4,
        expand=2,
        n_groups=1,
        num_heads=4,
        head_dim=32,
        chunk_size=16,
        layer_norm_epsilon=1e-6,
    ),
    "PhiForCausalLM": in_models("phi"),
    "Phi3ForCausalLM": text("phi3"),
    "PhiMoEForCausalLM": text("phimoe", **EXPERTS),
    "Phi3SmallForCausalLM": in_models("phi3_small"),
    "CohereForCausalLM": in_models("cohere"),
    "Cohere2ForCausalLM": text("cohere2"),
    "Cohere2MoeForCausalLM": text("cohere2_moe", **EXPERTS),
    "Cohere2VisionForConditionalGeneration": image(
        "cohere2_vision", "cohere2_moe", tower={"model_type": "siglip_vision_model"}, **EXPERTS
    ),
    "Olmo2ForCausalLM": text("olmo2"),
    "OlmoeForCausalLM": text("olmoe", **EXPERTS, num_key_value_heads=4),
    "OlmoForCausalLM": text("olmo", num_key_value_heads=4),
    "Ernie4_5_ForCausalLM": text("ernie4_5"),
    # dense: its router bias has two dimensions, and the CPU path takes one
    "Ernie4_5_MoeForCausalLM": text(
        "ernie4_5_moe", **EXPERTS, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=4
    ),
    "ExaoneForCausalLM": text("exaone", layer_norm_epsilon=1e-6, num_layers=3, activation_function="silu"),
    "ExaoneMoEForCausalLM": text(
        "exaone_moe", FLASH, **ROUTED, num_shared_experts=1, is_moe_layer=[False, True, True], **WINDOWS
    ),
    "Exaone4ForCausalLM": text(
        "exaone4",
        FLASH,
        sliding_window=64,
        sliding_window_pattern="LG",
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "HunYuanMoEV1ForCausalLM": text(
        "hunyuan_v1_moe", **EXPERTS, moe_topk=2, num_shared_expert=1, use_mixed_mlp_moe=True
    ),
    "HYV3ForCausalLM": text(
        "hy_v3",
        **EXPERTS,
        num_shared_experts=1,
        first_k_dense_replace=1,
        route_norm=True,
        router_scaling_factor=1.0,
        enable_moe_fp32_combine=False,
    ),
    "MiMoForCausalLM": text("mimo"),
    "MiMoV2ForCausalLM": text(
        "mimo_v2",
        FLASH,
        **{**ROUTED, "moe_layer_freq": [0, 1, 1]},
        hybrid_layer_pattern=[0, 1, 0],
        v_head_dim=16,
        swa_head_dim=16,
        swa_v_head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        sliding_window=64,
        sliding_window_size=64,
        layernorm_epsilon=1e-6,
        attention_bias=False,
    ),
    "MiniCPMForCausalLM": text("minicpm", **MINICPM),
    "MiniCPM3ForCausalLM": text("minicpm3", FLASH, **{**LATENT, "q_lora_rank": 64}, **MINICPM),
    "MiniCPMSALAForCausalLM": in_models("minicpm_sala"),
    "MiniCPMV4_6ForConditionalGeneration": image("minicpmv4_6", "qwen3_5_text", **{**GATED_DELTA, **MROPE}),
    "InternLM2ForCausalLM": text("internlm2"),
    "InternLM2ForRewardModel": text("internlm2", EMBEDS),
    "InternVLChatModel": Configuration(
        {
            "model_type": "internvl_chat",
            "torch_dtype": "float16",
            "llm_config": {**SIZES, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
            "vision_config": {**TOWER, **INTERN_TOWER, "use_flash_attn": False},
            "downsample_ratio": 0.5,
            "ps_version": "v2",
        }
    ),
    "InternS1ForConditionalGeneration": image(
        "internvl",
        "qwen3",
        None,
        {
            **INTERN_TOWER,
            "image_size": [56, 56],
            "patch_size": [14, 14],
            "attention_bias": True,
            "drop_path_rate": 0.0,
            "dropout": 0.0,
        },
        architectures=["Qwen3ForCausalLM"],
    ),
    "InternS1ProForConditionalGeneration": image("qwen3_vl_moe", "qwen3_vl_moe_text", **{**EXPERTS, **MROPE_ALL}),
    "Step3p5ForCausalLM": text("step3p5", FLASH, **STEP),
    "Step3VLForConditionalGeneration": image(
        "step3_vl",
        "step3_text",
        None,
        {"output_hidden_size": 64},
        num_attention_groups=1,
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=32,
        share_expert_dim=32,
        share_q_dim=32,
        moe_layers_enum="1,2",
        norm_expert_weight=False,
    ),
    "Step3p7ForConditionalGeneration": image(
        "step3p7", "step3p5", FLASH, {"width": 48, "layers": 1, "heads": 2, "mlp_ratio": 2.0}, **STEP
    ),
    # any other size uses ALiBi instead of a rotary embedding, on CUDA only
    "BaichuanForCausalLM": text(
        "baichuan",
        num_hidden_layers=1,
        hidden_size=4096,
        intermediate_size=64,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
    ),
    "ChatGLMModel": text(
        "chatglm",
        num_layers=3,
        padded_vocab_size=128,
        ffn_hidden_size=128,
        kv_channels=16,
        seq_length=256,
        multi_query_attention=True,
        multi_query_group_num=2,
        add_qkv_bias=True,
        rmsnorm=True,
    ),
    "XverseForCausalLM": text("xverse"),
    "OrionForCausalLM": text("orion"),
    "Starcoder2ForCausalLM": in_models("starcoder2"),
    "StableLmForCausalLM": text("stablelm"),
    "SolarForCausalLM": text("solar", bskcn_1=[0], bskcn_2=[1], bskcn_3=[1], bskcn_4=[2], bskcn_tv=[0.9, 0.8]),
    "ArceeForCausalLM": text("arcee", hidden_act="relu2"),
    "ApertusForCausalLM": text("apertus", {"dtype": "bfloat16"}, hidden_act="xielu", torch_dtype="bfloat16"),
    # dense, like DeepseekForCausalLM
    "AfmoeForCausalLM": text("afmoe", **EXPERTS, num_dense_layers=3, num_shared_experts=1, sliding_window=64),
    "LagunaForCausalLM": text(
        "laguna",
        FLASH,
        **EXPERTS,
        shared_expert_intermediate_size=32,
        sliding_window=64,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "MellumForCausalLM": text(
        "mellum", FLASH, **EXPERTS, **TWO_ROPES, **WINDOWS, max_window_layers=3, mlp_layer_types=["sparse"] * 3
    ),
    "BeamForCausalLM": text("beam", FLASH, **ROUTED, **WINDOWS, mlp_layer_types=["dense", "sparse", "sparse"]),
    "IQuestLoopCoderForCausalLM": text("iquestloopcoder", loop_num=2, loop_window_size=64),
    "IQuestQ1ForCausalLM": text(
        "iquest_q1",
        FLASH,
        **EXPERTS,
        num_hidden_layers=2,
        dense_intermediate_size=128,
        first_layers_types=["full_attention"],
        hybrid_layers_types_block=["sliding_attention"],
        num_hybrid_layers_block=1,
        last_layers_types=[],
        sliding_window=64,
        rotary_dim=16,
    ),
    "Spark2_5ForCausalLM": text("spark2_5", FLASH, sliding_window=64),
    "XllmForCausalLM": text("xllm", {"dtype": "bfloat16"}, num_experts=0),
    "K2HorizonForCausalLM": text(
        "k2_horizon", {"dtype": "bfloat16"}, num_experts=0, mlp_only_layers=[0, 1, 2], **ONE_ROPE
    ),
    "NanbeigeForCausalLM": text("nanbeige", **NANBEIGE),
    "NanbeigeForSequenceClassification": text("nanbeige", EMBEDS, **NANBEIGE, num_labels=3),
    "HrmTextForCausalLM": text("hrm_text", H_cycles=1, L_cycles=2, num_key_value_heads=4),
    "TeleFLMForCausalLM": text("teleflm", use_mup=True, input_mult=1.0, output_mult=1.0, mup_scale_factor=1.0),
    "Grok1ForCausalLM": text(
        "grok-1", **EXPERTS, num_hidden_layers=2, embedding_multiplier_scale=8.0, output_multiplier_scale=0.5
    ),
    "PersimmonForCausalLM": in_models("persimmon"),
    "GPT2LMHeadModel": text("gpt2", n_embd=64, n_layer=3, n_head=4, n_positions=256, num_key_value_heads=4),
    "GPTBigCodeForCausalLM": text("gpt_bigcode", n_embd=64, n_layer=3, n_head=4, n_positions=256),
    "GPTJForCausalLM": text(
        "gptj", n_embd=64, n_layer=3, n_head=4, n_positions=256, rotary_dim=8, num_key_value_heads=4
    ),
    "OPTForCausalLM": text("opt", ffn_dim=128, word_embed_proj_dim=64, num_key_value_heads=4),
    "BertModel": text("bert", EMBEDS, **ENCODER),
    "BertForSequenceClassification": text("bert", EMBEDS, **ENCODER, num_labels=3),
    "XLMRobertaModel": text("xlm-roberta", EMBEDS, **ENCODER),
    "XLMRobertaForSequenceClassification": text("xlm-roberta", EMBEDS, **ENCODER, num_labels=3),
    "CLIPModel": image(
        "clip",
        "clip_text_model",
        EMBEDS,
        {"model_type": "clip_vision_model", "hidden_act": "quick_gelu"},
        num_key_value_heads=4,
        hidden_act="quick_gelu",
    ),
    "WhisperForConditionalGeneration": text(
        "whisper", **AUDIO, num_key_value_heads=4, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=128
    ),
    "PaddleOCRVLForConditionalGeneration": Configuration(
        {**SIZES, **MROPE_ALL, "model_type": "paddleocr_vl", "vision_config": TOWER}
    ),
    "DotsOCRForCausalLM": Configuration(
        {
            **SIZES,
            "model_type": "dots_ocr",
            "vision_config": {**TOWER, "embed_dim": 48, "hidden_size": 64, "num_dummy_heads": 0},
        }
    ),
    "DotsVLMForCausalLM": Configuration(
        {
            **SIZES,
            **ROUTED,
            **LATENT,
            "model_type": "dots_vlm",
            "vision_config": {**TOWER, "embed_dim": 48, "hidden_size": 64, "num_dummy_heads": 0},
        },
        FLASH,
    ),
    "LightOnOCRForConditionalGeneration": image("lighton_ocr", "qwen3", tower={"model_type": "pixtral"}),
    "MllamaForConditionalGeneration": image(
        "mllama", "mllama_text_model", tower={"model_type": "mllama_vision_model"}, cross_attention_layers=[1]
    ),
    "LlavaLlamaForCausalLM": Configuration(
        {**SIZES, "model_type": "llava", "mm_vision_tower": "clip", "mm_hidden_size": 48}
    ),
    "LlavaQwenForCausalLM": Configuration({**LLAVA, "text_config": {**SIZES, "model_type": "qwen2"}}),
    "LlavaMistralForCausalLM": Configuration({**LLAVA, "text_config": {**SIZES, "model_type": "mistral"}}),
    "LlavaVidForCausalLM": Configuration(
        {**LLAVA, "text_config": {**SIZES, "model_type": "llama"}, "num_frames": 2, "mm_spatial_pool_stride": 2}
    ),
    "LlavaForConditionalGeneration": image("llava", "mistral", tower={"model_type": "pixtral"}),
    "YiVLForCausalLM": Configuration({**LLAVA, "text_config": {**SIZES, "model_type": "llama"}}),
    "NVILAForConditionalGeneration": image("llava", "qwen2", tower={"model_type": "siglip_vision_model"}),
    "NVILALiteForConditionalGeneration": image("llava", "qwen2", tower={"model_type": "siglip_vision_model"}),
    "LocateAnythingForConditionalGeneration": image("locateanything", "qwen2"),
    "Cosmos3EdgeForConditionalGeneration": image("cosmos3_edge", "cosmos3_edge_text", **MROPE_ALL, hidden_act="relu2"),
    "Cosmos3ForConditionalGeneration": image(
        "cosmos3_omni", "qwen3_vl_text", tower={"deepstack_visual_indexes": [1]}, **MROPE_ALL
    ),
    "TransformersForCausalLM": text("llama"),
    "TransformersEmbeddingModel": text("llama", EMBEDS),
    "TransformersForSequenceClassification": text("llama", EMBEDS, num_labels=3),
    "TransformersMoEForCausalLM": text("qwen3_moe", **EXPERTS),
    "TransformersMoEEmbeddingModel": text("qwen3_moe", EMBEDS, **EXPERTS),
    "TransformersMoEForSequenceClassification": text("qwen3_moe", EMBEDS, **EXPERTS, num_labels=3),
    "TransformersMultiModalForCausalLM": image("qwen2_5_vl", "qwen2_5_vl_text", **MROPE_ALL),
    "TransformersMultiModalMoEForCausalLM": image("qwen3_vl_moe", "qwen3_vl_moe_text", **{**EXPERTS, **MROPE_ALL}),
    "TransformersMultiModalEmbeddingModel": image("qwen2_5_vl", "qwen2_5_vl_text", EMBEDS, **MROPE_ALL),
    "TransformersMultiModalForSequenceClassification": image(
        "qwen2_5_vl", "qwen2_5_vl_text", EMBEDS, **MROPE_ALL, num_labels=3
    ),
    "TransformersMultiModalMoEEmbeddingModel": image(
        "qwen3_vl_moe", "qwen3_vl_moe_text", EMBEDS, **{**EXPERTS, **MROPE_ALL}
    ),
    "TransformersMultiModalMoEForSequenceClassification": image(
        "qwen3_vl_moe", "qwen3_vl_moe_text", EMBEDS, **{**EXPERTS, **MROPE_ALL}, num_labels=3
    ),
}
# name -> the architecture whose class has all of its methods
SAME_CODE: dict[str, str] = {
    "BailingMoeForCausalLM": "BailingMoEForCausalLM",
    "Contriever": "BertModel",
    "ExaoneMoeForCausalLM": "ExaoneMoEForCausalLM",
    "GraniteMoeSWAForCausalLM": "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM": "GraniteMoeForCausalLM",
    "GraniteSWAForCausalLM": "GraniteForCausalLM",
    "Grok1ModelForCausalLM": "Grok1ForCausalLM",
    "HunYuanDenseV1ForCausalLM": "HunYuanMoEV1ForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "InternS2PreviewForConditionalGeneration": "Qwen3_5MoeForConditionalGeneration",
    "MiMoV2FlashForCausalLM": "MiMoV2ForCausalLM",
    "MiniCPMV4_7ForConditionalGeneration": "MiniCPMV4_6ForConditionalGeneration",
    "MistralModel": "LlamaEmbeddingModel",
    "NemotronHPuzzleForCausalLM": "NemotronHForCausalLM",
    "TorchNativePhi3ForCausalLM": "TorchNativeLlamaForCausalLM",
}
NEEDS_CUDA = "its code asks for CUDA, or for kernels that are there on CUDA only"
NEEDS_PACKAGE = "it imports a package that is not among the requirements here"
NEEDS_TRANSFORMERS = "it imports what the release of transformers here does not have"
NEEDS_CODE = "its configuration is made by code that comes with its weights"
OF_A_DRAFT = "a draft takes the hidden states of a target, and runs in tests of its own: test_draft_states_dropped.py"
UNTRIED = "no tiny configuration has been written for it yet"
UNABLE: dict[str, tuple[str, ...]] = {
    NEEDS_CUDA: (
        "DbrxForCausalLM",
        "Dots3NoteForCausalLM",
        "FalconMambaForCausalLM",
        "GlmMoeDsaForCausalLM",
        "HYV4ForCausalLM",
        "MambaForCausalLM",
        "MossVLForConditionalGeneration",
        "XverseMoeForCausalLM",
    ),
    NEEDS_PACKAGE: (
        "DeepseekVL2ForCausalLM",
        "Gemma3nForConditionalGeneration",
        "InklingForConditionalGeneration",
        "InklingForConditionalGenerationMTP",
        "MiDashengLMModel",
        "MindSporeForCausalLM",
        "VoxtralForConditionalGeneration",
    ),
    NEEDS_TRANSFORMERS: ("MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration"),
    NEEDS_CODE: (
        "DeciLMForCausalLM",
        "Ernie4_5_VLMoeForConditionalGeneration",
        "MiniCPMV",
        "Sarashina2VisionForCausalLM",
    ),
    OF_A_DRAFT: ("LlamaForCausalLMEagle",),
}
# name -> the reason why it is not run here
NOT_RUN: dict[str, str] = dict.fromkeys(
    pathlib.Path(__file__).with_name("untried_architectures.txt").read_text().split(), UNTRIED
) | {name: why for why, names in UNABLE.items() for name in names}
