# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, written as checkpoints that an unmodified SGLang loads; nothing is downloaded.

Weights are drawn at a scale at which the logits spread, so that a wrong layer shows in the answers: SGLang's own
`--load-format dummy` makes them so small that every layer vanishes behind the residual stream. A seed that follows from
the model's name makes them the same for every server. Sizes of heads are those that GPU kernels take.

    python -m sglang_bcg_fixes.lab.verify.models FOLDER NAME...
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

VOCABULARY = 2048
HIDDEN, HEADS, HEAD, INNER = 512, 4, 128, 1024
QUERIES, EXPERTS, SMALL = HEADS * HEAD, 8, 128
# DeepSeek's latent attention
RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
LATENT = f"q_lora_rank=null kv_lora_rank={RANK} qk_rope_head_dim={ROPE} qk_nope_head_dim={NOPE} v_head_dim={VALUE}"
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, Any]


def options(text: str) -> dict[str, Any]:
    """Parse config.json entries written as name=value, with JSON values."""
    return {name: json.loads(value) for name, _, value in (word.partition("=") for word in text.split())}


USUAL_OPTIONS = options(
    f"""vocab_size={VOCABULARY} hidden_size={HIDDEN} intermediate_size={INNER} num_attention_heads={HEADS}
    head_dim={HEAD} hidden_act="silu" max_position_embeddings=8192 rms_norm_eps=1e-6 tie_word_embeddings=false
    torch_dtype="bfloat16" rope_theta=10000.0 rope_parameters={{"rope_type":"default","rope_theta":10000.0}}
    bos_token_id=0 eos_token_id=1 pad_token_id=0"""
)


def weights(prefix: str = "", **shapes: tuple[int, ...]) -> Shapes:
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def norms(*names: str, size: int = HIDDEN) -> Shapes:
    return {f"{name}.weight": (size,) for name in names}


def attention(key_heads: int, query_parts: int = 1) -> Shapes:
    keys = (key_heads * HEAD, HIDDEN)
    queries = (query_parts * QUERIES, HIDDEN)
    return weights("self_attn.", q_proj=queries, k_proj=keys, v_proj=keys, o_proj=(HIDDEN, QUERIES))


def latent_attention(prefix: str) -> Shapes:
    return weights(
        prefix,
        q_proj=(HEADS * (NOPE + ROPE), HIDDEN),
        kv_a_proj_with_mqa=(RANK + ROPE, HIDDEN),
        kv_a_layernorm=(RANK,),
        kv_b_proj=(HEADS * (NOPE + VALUE), RANK),
        o_proj=(HIDDEN, HEADS * VALUE),
    )


def mlp(prefix: str, inner: int = INNER, hidden: int = HIDDEN) -> Shapes:
    return weights(prefix, gate_proj=(inner, hidden), up_proj=(inner, hidden), down_proj=(hidden, inner))


def mixture(
    prefix: str,
    shared: str,
    expert: Callable[[str], Shapes] = lambda prefix: mlp(prefix, SMALL),
    experts: int = EXPERTS,
    inner: int = SMALL,
    hidden: int = HIDDEN,
) -> Shapes:
    found = {f"{prefix}gate.weight": (experts, hidden), **mlp(f"{prefix}{shared}.", inner, hidden)}
    for index in range(experts):
        found |= expert(f"{prefix}experts.{index}.")
    return found


@dataclasses.dataclass(frozen=True)
class Model:
    """Names and shapes as in a checkpoint; values follow from the names, and `finish` sets those that cannot.

    `norm` is the weight of a norm that changes nothing, `stack` is where the layers are, `order` is the number of the
    drawn layer that each of them is, `wrap` makes a config.json of the text's configuration, and `beside` holds
    additional JSON files.
    """

    architecture: str
    model_type: str
    key_heads: int
    layers: tuple[Shapes, ...]
    ends: Shapes
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    norm: float = 1
    finish: Callable[[Tensors], Tensors] = lambda tensors: tensors
    stack: str = "model.layers."
    order: tuple[int, ...] = ()
    wrap: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    beside: Mapping[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def config_json(self) -> dict[str, Any]:
        sizes = {"num_hidden_layers": len(self.order or self.layers), "num_key_value_heads": self.key_heads}
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        return self.wrap({**names, **sizes, **USUAL_OPTIONS, **self.config})

    def tensors(self, seed: int) -> Tensors:
        import torch

        shapes = dict(self.ends)
        for number, layer in enumerate(self.layers):
            shapes |= {f"{self.stack}{number}.{name}": shape for name, shape in layer.items()}
        source = torch.Generator().manual_seed(seed)
        found = self.finish({name: values(name, shape, self.norm, source) for name, shape in shapes.items()})
        found = {name: each.to(torch.bfloat16).contiguous() for name, each in found.items()}
        return self.repeated(found) if self.order else found

    def repeated(self, drawn: Tensors) -> Tensors:
        found = {name: each for name, each in drawn.items() if not name.startswith(self.stack)}
        for layer, number in enumerate(self.order):
            start = f"{self.stack}{number}."
            for name, each in drawn.items():
                if name.startswith(start):
                    # tensors of a checkpoint share no memory
                    found[f"{self.stack}{layer}.{name.removeprefix(start)}"] = each.clone()
        return found


def values(name: str, shape: tuple[int, ...], norm: float, source: Any) -> Any:
    import torch

    last = name.rpartition(".")[2]
    if "norm" in name:
        return torch.full(shape, norm if last == "weight" else 0)
    if last == "A_log":
        # recurrences that forget slowly, so that a wrong state stays visible
        return (torch.rand(shape, generator=source) * 1.9 + 0.1).log()
    if last in ("D", "dt_bias"):
        return torch.full(shape, 1.0 if last == "D" else -2.0)
    drawn = torch.randn(shape, generator=source)
    if "embed" in name:
        return drawn
    if name.startswith("lm_head.w"):
        return drawn * 0.15
    return drawn * (0.05 if last.endswith("bias") else shape[-1] ** -0.5)


def with_gated_norms_of_one(tensors: Tensors) -> Tensors:
    """Set gated norms to one; its other norms scale by one plus their weight."""
    return {name: each + 1 if "linear_attn.norm" in name else each for name, each in tensors.items()}


def with_norms_of_a_tower_of_one(tensors: Tensors) -> Tensors:
    """Set the tower's norms to one; they scale by their weight, the text's by one plus theirs."""
    scales = re.compile(r"visual\..*norm\d?\.weight")
    return {name: each + 1 if scales.search(name) else each for name, each in with_gated_norms_of_one(tensors).items()}


def drafts_what_it_will_say(tensors: Tensors) -> Tensors:
    """Scale embeddings as a norm would, because EAGLE's draft layer has no norm before it."""
    embedding = tensors["model.embed_tokens.weight"]
    size = embedding.pow(2).mean(-1, keepdim=True).sqrt()
    return {**tensors, "model.embed_tokens.weight": embedding / size}


def draft_of_the_target(tensors: Tensors) -> Tensors:
    """Build a draft of the target's own layer, with a projection that drops the hidden state."""
    import torch

    layer = {
        name.removeprefix("model."): each
        for name, each in MODELS["llama_eagle_target"].tensors(seed_of("llama_eagle_target")).items()
        if name.startswith("model.layers.0.") and not name.endswith("input_layernorm.weight")
    }
    keep = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    return {**layer, "fc.weight": keep, "fc.bias": torch.zeros(HIDDEN)}


def with_a_small_embedding(tensors: Tensors) -> Tensors:
    """Shrink the embedding; it is the head too, and a large one would repeat the last token."""
    return {**tensors, "model.embed_tokens.weight": tensors["model.embed_tokens.weight"] * 0.1}


ENDS = {**weights("model.", embed_tokens=(VOCABULARY, HIDDEN)), **weights(lm_head=(VOCABULARY, HIDDEN))}
USUAL_ENDS = {**ENDS, **norms("model.norm")}
BOTH_NORMS = norms("input_layernorm", "post_attention_layernorm")

LLAMA_LAYER = {**BOTH_NORMS, **attention(2), **mlp("mlp.")}
LLAMA = Model("LlamaForCausalLM", "llama", 2, (LLAMA_LAYER,) * 4, USUAL_ENDS)

EAGLE3_HEADS = {"q": HEADS, "k": 2, "v": 2}
EAGLE3_LAYER: Shapes = {
    **LLAMA_LAYER,
    **weights("self_attn.", **{f"{name}_proj": (heads * HEAD, 2 * HIDDEN) for name, heads in EAGLE3_HEADS.items()}),
    **norms("hidden_norm"),
}

QWEN_REST = {
    **BOTH_NORMS,
    **mixture("mlp.", "shared_expert"),
    **weights("mlp.", shared_expert_gate=(1, HIDDEN)),
}
QWEN_FULL = {**QWEN_REST, **attention(1, query_parts=2), **norms("self_attn.q_norm", "self_attn.k_norm", size=HEAD)}
QWEN_KEYS, QWEN_VALUES = 4, 8
QWEN_MIXED = (2 * QWEN_KEYS + QWEN_VALUES) * HEAD
QWEN_LINEAR: Shapes = {
    **QWEN_REST,
    "linear_attn.in_proj_qkvz.weight": (QWEN_MIXED + QWEN_VALUES * HEAD, HIDDEN),
    "linear_attn.in_proj_ba.weight": (2 * QWEN_VALUES, HIDDEN),
    "linear_attn.conv1d.weight": (QWEN_MIXED, 1, 4),
    "linear_attn.dt_bias": (QWEN_VALUES,),
    "linear_attn.A_log": (QWEN_VALUES,),
    "linear_attn.norm.weight": (HEAD,),
    "linear_attn.out_proj.weight": (HIDDEN, QWEN_VALUES * HEAD),
}
QWEN3_NEXT = Model(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    1,
    (QWEN_LINEAR, QWEN_LINEAR, QWEN_LINEAR, QWEN_FULL),
    USUAL_ENDS,
    options(
        f"""partial_rotary_factor=0.25 full_attention_interval=4 attention_bias=false
        linear_conv_kernel_dim=4 linear_key_head_dim={HEAD} linear_value_head_dim={HEAD}
        linear_num_key_heads={QWEN_KEYS} linear_num_value_heads={QWEN_VALUES}
        decoder_sparse_step=1 moe_intermediate_size={SMALL} shared_expert_intermediate_size={SMALL}
        num_experts={EXPERTS} num_experts_per_tok=2 norm_topk_prob=true mlp_only_layers=[]"""
    ),
    norm=0,
    finish=with_gated_norms_of_one,
)
QWEN_DRAFT: Shapes = {
    "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    **norms("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    **{f"mtp.layers.0.{name}": shape for name, shape in QWEN_FULL.items()},
}

# Qwen3.5: like Qwen3-Next, but dense, with separate linear attention projections
QWEN3_5_REST = {**BOTH_NORMS, **mlp("mlp.")}
QWEN3_5_LINEAR: Shapes = {
    **QWEN3_5_REST,
    **weights(
        "linear_attn.",
        in_proj_qkv=(QWEN_MIXED, HIDDEN),
        in_proj_z=(QWEN_VALUES * HEAD, HIDDEN),
        in_proj_b=(QWEN_VALUES, HIDDEN),
        in_proj_a=(QWEN_VALUES, HIDDEN),
        conv1d=(QWEN_MIXED, 1, 4),
        norm=(HEAD,),
        out_proj=(HIDDEN, QWEN_VALUES * HEAD),
    ),
    "linear_attn.dt_bias": (QWEN_VALUES,),
    "linear_attn.A_log": (QWEN_VALUES,),
}
QWEN3_5_FULL = {
    **QWEN3_5_REST,
    **attention(1, query_parts=2),
    **norms("self_attn.q_norm", "self_attn.k_norm", size=HEAD),
}
QWEN3_5_TEXT = Model(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    1,
    (QWEN3_5_LINEAR, QWEN3_5_LINEAR, QWEN3_5_LINEAR, QWEN3_5_FULL),
    USUAL_ENDS,
    options(
        f"""full_attention_interval=4 attention_bias=false attn_output_gate=true linear_conv_kernel_dim=4
        linear_key_head_dim={HEAD} linear_value_head_dim={HEAD} linear_num_key_heads={QWEN_KEYS}
        linear_num_value_heads={QWEN_VALUES} partial_rotary_factor=0.25
        rope_parameters={{"rope_type":"default","rope_theta":10000.0,"partial_rotary_factor":0.25}}"""
    ),
    norm=0,
    finish=with_gated_norms_of_one,
)

# its images: patches of 16 by 16 by 2 frames of 3 colours, four of them per token
TOWER, TOWER_INNER, PATCH, MERGED, POSITIONS = 128, 256, 16, 4, 64
# random prompts contain none of these
OF_IMAGES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
NUMBERED = {name: VOCABULARY + number for number, name in enumerate(OF_IMAGES)}
# some kernels want a vocabulary that divides by 64
WITH_IMAGES = VOCABULARY + 64


def with_biases(pairs: Shapes) -> Shapes:
    return {
        f"{name}.{kind}": shape if kind == "weight" else shape[:1]
        for name, shape in pairs.items()
        for kind in ("weight", "bias")
    }


def tower_block(hidden: int, inner: int) -> Shapes:
    return with_biases(
        {
            "norm1": (hidden,),
            "norm2": (hidden,),
            "attn.qkv": (3 * hidden, hidden),
            "attn.proj": (hidden, hidden),
            "mlp.linear_fc1": (inner, hidden),
            "mlp.linear_fc2": (hidden, inner),
        }
    )


def tower_ends(hidden: int, out: int, positions: int) -> Shapes:
    merged = MERGED * hidden
    return {
        **with_biases({"patch_embed.proj": (hidden, 3, 2, PATCH, PATCH)}),
        "pos_embed.weight": (positions, hidden),
        **with_biases(
            {"merger.norm": (hidden,), "merger.linear_fc1": (merged, merged), "merger.linear_fc2": (out, merged)}
        ),
    }


def beside_no_weights(text: dict[str, Any]) -> dict[str, Any]:
    """Make a vision model's configuration from that of its text; SGLang serves the text alone by default."""
    names = {name: text.pop(name) for name in ("architectures", "model_type")}
    return {**names, "torch_dtype": text["torch_dtype"], "text_config": {**text, "model_type": "llama4_text"}}


def beside_a_tower(text: dict[str, Any]) -> dict[str, Any]:
    """Make a vision model's configuration from that of its text."""
    start, end, image, video = NUMBERED.values()
    tokens = options(
        f"vision_start_token_id={start} vision_end_token_id={end} image_token_id={image} video_token_id={video}"
    )
    tower = options(
        f"""model_type="qwen3_5" depth=1 hidden_size={TOWER} intermediate_size={TOWER_INNER} num_heads=2 in_channels=3
        patch_size={PATCH} temporal_patch_size=2 spatial_merge_size=2 num_position_embeddings={POSITIONS}
        out_hidden_size={HIDDEN} hidden_act="gelu_pytorch_tanh" deepstack_visual_indexes=[]"""
    )
    shared = ("architectures", "model_type", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
    return {
        **{name: text[name] for name in shared},
        **tokens,
        "text_config": {**text, "architectures": None, "model_type": QWEN3_5_TEXT.model_type},
        "vision_config": tower,
    }


def tokenizer(added: Mapping[str, int]) -> dict[str, Any]:
    """Make a tokenizer's file: words are their numbers, and a few have a name."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": name, "special": True, **flags} for name, number in added.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {**{str(number): number for number in range(VOCABULARY)}, **added},
            "unk_token": "0",
        },
    }


TOKENIZER_CONFIG = options(
    'tokenizer_class="PreTrainedTokenizerFast" model_max_length=8192 unk_token="0" pad_token="0" eos_token="1"'
)
# these files start SGLang's image processor, which is idle for token prompts
PIXELS = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (16 * PATCH) ** 2}
FRAMES = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2, "size": PIXELS}
PROCESSORS: dict[str, dict[str, Any]] = {
    "tokenizer.json": tokenizer(NUMBERED),
    "tokenizer_config.json": {
        **TOKENIZER_CONFIG,
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
    "preprocessor_config.json": {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
        **FRAMES,
    },
    "video_preprocessor_config.json": {
        "processor_class": "Qwen3VLProcessor",
        "video_processor_type": "Qwen3VLVideoProcessor",
        **FRAMES,
    },
}
QWEN3_5_SEES = dataclasses.replace(
    QWEN3_5_TEXT,
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    ends={
        **weights("model.language_model.", embed_tokens=(WITH_IMAGES, HIDDEN)),
        **weights(lm_head=(WITH_IMAGES, HIDDEN)),
        **norms("model.language_model.norm"),
        **{f"model.visual.{name}": shape for name, shape in tower_ends(TOWER, HIDDEN, POSITIONS).items()},
        **{f"model.visual.blocks.0.{name}": shape for name, shape in tower_block(TOWER, TOWER_INNER).items()},
    },
    config={**QWEN3_5_TEXT.config, "vocab_size": WITH_IMAGES},
    finish=with_norms_of_a_tower_of_one,
    stack="model.language_model.layers.",
    wrap=beside_a_tower,
    beside=PROCESSORS,
)

# no row of the head is of these, so nothing ends the thinking or the answer
OF_THINKING = {"</think>": VOCABULARY, "</s>": VOCABULARY + 1}


def that_thinks(model: Model) -> Model:
    """Make a model with a tokenizer that has a word for the end of thinking."""
    return dataclasses.replace(
        model,
        config={**model.config, "eos_token_id": OF_THINKING["</s>"]},
        beside={
            "tokenizer.json": tokenizer(OF_THINKING),
            "tokenizer_config.json": {**TOKENIZER_CONFIG, "eos_token": "</s>"},
        },
    )


OSS_INNER = 256
OSS_LAYER: Shapes = {
    **BOTH_NORMS,
    **attention(2),
    "self_attn.q_proj.bias": (QUERIES,),
    "self_attn.k_proj.bias": (2 * HEAD,),
    "self_attn.v_proj.bias": (2 * HEAD,),
    "self_attn.o_proj.bias": (HIDDEN,),
    "self_attn.sinks": (HEADS,),
    "mlp.router.weight": (EXPERTS, HIDDEN),
    "mlp.router.bias": (EXPERTS,),
    "mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * OSS_INNER),
    "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * OSS_INNER),
    "mlp.experts.down_proj": (EXPERTS, OSS_INNER, HIDDEN),
    "mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
}

MIXER_HEADS, STATE = 16, 128
MIXED = INNER + 2 * STATE
FALCON_LAYER: Shapes = {
    **norms("input_layernorm", "pre_ff_layernorm"),
    **attention(2),
    **mlp("feed_forward."),
    "mamba.in_proj.weight": (INNER + MIXED + MIXER_HEADS, HIDDEN),
    "mamba.conv1d.weight": (MIXED, 1, 4),
    "mamba.conv1d.bias": (MIXED,),
    "mamba.A_log": (MIXER_HEADS,),
    "mamba.D": (MIXER_HEADS,),
    "mamba.dt_bias": (MIXER_HEADS,),
    "mamba.out_proj.weight": (HIDDEN, INNER),
}

GRANITE_REST = {
    **BOTH_NORMS,
    **weights("shared_mlp.", input_linear=(2 * INNER, HIDDEN), output_linear=(HIDDEN, INNER)),
}
GRANITE_MAMBA: Shapes = {
    **GRANITE_REST,
    **{name: shape for name, shape in FALCON_LAYER.items() if name.startswith("mamba.")},
    **norms("mamba.norm", size=INNER),
}
GRANITE_FULL = {**GRANITE_REST, **attention(2)}

LFM2_REST = {
    **norms("operator_norm", "ffn_norm"),
    **weights("feed_forward.", w1=(INNER, HIDDEN), w2=(HIDDEN, INNER), w3=(INNER, HIDDEN)),
}
LFM2_CONV: Shapes = {
    **LFM2_REST,
    **weights("conv.", in_proj=(3 * HIDDEN, HIDDEN), conv=(HIDDEN, 1, 3), out_proj=(HIDDEN, HIDDEN)),
}
LFM2_FULL = {
    **LFM2_REST,
    **{name.replace("o_proj", "out_proj"): shape for name, shape in attention(2).items()},
    **norms("self_attn.q_layernorm", "self_attn.k_layernorm", size=HEAD),
}

PHI_INNER = 4 * HIDDEN
PHI_SQUARES = {f"self_attn.{name}.weight": (HIDDEN, HIDDEN) for name in ("q_proj", "k_proj", "v_proj", "dense")}
PHI_WEIGHTS = {**PHI_SQUARES, **weights("mlp.", fc1=(PHI_INNER, HIDDEN), fc2=(HIDDEN, PHI_INNER))}
PHI_LAYER: Shapes = {
    **norms("input_layernorm"),
    "input_layernorm.bias": (HIDDEN,),
    **PHI_WEIGHTS,
    **{name.replace(".weight", ".bias"): shape[:1] for name, shape in PHI_WEIGHTS.items()},
}


def kimi_expert(prefix: str) -> Shapes:
    return weights(prefix, w1=(SMALL, HIDDEN), w2=(HIDDEN, SMALL), w3=(SMALL, HIDDEN))


# not a power of two: for few experts of such a count SGLang picks a kernel that needs another bias type
KIMI_EXPERTS = 12
KIMI_MIXTURE = {
    **mixture("block_sparse_moe.", "shared_experts", kimi_expert, KIMI_EXPERTS),
    "block_sparse_moe.gate.e_score_correction_bias": (KIMI_EXPERTS,),
}
KIMI_LINEAR: Shapes = {
    **BOTH_NORMS,
    **weights("self_attn.", **{f"{name}_proj": (QUERIES, HIDDEN) for name in "qkv"}),
    **weights("self_attn.", **{f"{name}_conv1d": (QUERIES, 1, 4) for name in "qkv"}),
    **weights("self_attn.", **{f"{name}_a_proj": (HEAD, HIDDEN) for name in "fg"}),
    **weights("self_attn.", **{f"{name}_b_proj": (QUERIES, HEAD) for name in "fg"}),
    **weights("self_attn.", b_proj=(HEADS, HIDDEN), o_norm=(HEAD,), o_proj=(HIDDEN, QUERIES)),
    "self_attn.dt_bias": (QUERIES,),
    "self_attn.A_log": (1, 1, HEADS, 1),
}
KIMI_FULL: Shapes = {**BOTH_NORMS, **latent_attention("self_attn."), **KIMI_MIXTURE}

DEEPSEEK_LAYERS = 4
LLAMA_4_LAYER: Shapes = {**BOTH_NORMS, **attention(2), **mlp("feed_forward.")}
# how much of a prompt its local layers see, in whole chunks
LOCAL_CHUNK = 256
LING_REST = {**BOTH_NORMS, **mlp("mlp.")}
LING_LINEAR: Shapes = {
    **LING_REST,
    **weights("attention.", query_key_value=(3 * QUERIES, HIDDEN), dense=(HIDDEN, QUERIES), g_proj=(QUERIES, HIDDEN)),
    **norms("attention.query_layernorm", "attention.key_layernorm", size=HEAD),
    **norms("attention.g_norm", size=QUERIES),
}
LING_FULL: Shapes = {**LING_REST, **latent_attention("attention.")}

MODELS = {
    "llama": LLAMA,
    "llama_thinks": that_thinks(LLAMA),
    "llama_eagle_target": dataclasses.replace(LLAMA, layers=(LLAMA_LAYER,), finish=drafts_what_it_will_say),
    "llama_eagle_draft": dataclasses.replace(
        LLAMA, architecture="LlamaForCausalLMEagle", layers=({},), ends={}, finish=draft_of_the_target
    ),
    # attends to the target's hidden states beside its own embedding
    "llama_eagle3_draft": dataclasses.replace(
        LLAMA,
        architecture="LlamaForCausalLMEagle3",
        layers=({},),
        ends={
            **{f"midlayer.{name}": shape for name, shape in EAGLE3_LAYER.items()},
            **weights(fc=(HIDDEN, 3 * HIDDEN), lm_head=(VOCABULARY, HIDDEN)),
            **norms("norm"),
        },
        config=options(
            f"""draft_vocab_size={VOCABULARY}
            eagle_config={{"use_aux_hidden_state":true,"eagle_aux_hidden_state_layer_ids":[0,1,2]}}"""
        ),
    ),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next_thinks": that_thinks(QWEN3_NEXT),
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_5": QWEN3_5_SEES,
    # `--speculative-algorithm NEXTN` without a draft path: the layer that drafts is in the same checkpoint
    "qwen3_next_mtp": dataclasses.replace(QWEN3_NEXT, ends={**USUAL_ENDS, **QWEN_DRAFT}),
    # windows in every other layer, with a cache pool of their own; experts in bfloat16
    "gpt_oss": Model(
        "GptOssForCausalLM",
        "gpt_oss",
        2,
        (OSS_LAYER,) * 4,
        USUAL_ENDS,
        options(
            f"""intermediate_size={OSS_INNER} num_local_experts={EXPERTS} num_experts_per_tok=2 swiglu_limit=7.0
            layer_types=["sliding_attention","full_attention","sliding_attention","full_attention"]
            sliding_window=128 attention_bias=true"""
        ),
    ),
    # attention and a Mamba2 mixer side by side in each layer
    "falcon_h1": Model(
        "FalconH1ForCausalLM",
        "falcon_h1",
        2,
        (FALCON_LAYER,) * 4,
        {**ENDS, **norms("model.final_layernorm")},
        options(
            f"""mamba_d_ssm={INNER} mamba_n_heads={MIXER_HEADS} mamba_d_head={INNER // MIXER_HEADS} mamba_n_groups=1
            mamba_d_state={STATE} mamba_d_conv=4 mamba_expand=2 mamba_chunk_size=256 mamba_conv_bias=true
            mamba_proj_bias=false mamba_norm_before_gate=false mamba_rms_norm=false projectors_bias=false"""
        ),
    ),
    # a Mamba2 mixer in three layers of four, which SGLang does not look for under its name
    "granite_hybrid": Model(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        2,
        (GRANITE_MAMBA, GRANITE_MAMBA, GRANITE_FULL, GRANITE_MAMBA),
        USUAL_ENDS,
        options(
            f"""layer_types=["mamba","mamba","attention","mamba"] num_local_experts=0 num_experts_per_tok=0
            shared_intermediate_size={INNER} mamba_n_heads={MIXER_HEADS} mamba_d_head={INNER // MIXER_HEADS}
            mamba_n_groups=1 mamba_d_state={STATE} mamba_d_conv=4 mamba_expand=2 mamba_chunk_size=256
            mamba_conv_bias=true mamba_proj_bias=false position_embedding_type="rope" attention_bias=false
            attention_multiplier={HEAD**-0.5} embedding_multiplier=1.0 residual_multiplier=1.0 logits_scaling=1.0"""
        ),
    ),
    # short convolutions, of which SGLang's capture knows nothing either
    "lfm2": Model(
        "Lfm2ForCausalLM",
        "lfm2",
        2,
        (LFM2_CONV, LFM2_CONV, LFM2_FULL, LFM2_CONV),
        {**ENDS, **norms("model.embedding_norm")},
        options(
            """layer_types=["conv","conv","full_attention","conv"] conv_L_cache=3 conv_bias=false norm_eps=1e-6
            block_auto_adjust_ff_dim=false tie_embedding=false"""
        ),
    ),
    # takes forward_batch before positions
    "phi": Model(
        "PhiForCausalLM",
        "phi",
        HEADS,
        (PHI_LAYER,) * 4,
        {
            **ENDS,
            "lm_head.bias": (VOCABULARY,),
            **norms("model.final_layernorm"),
            "model.final_layernorm.bias": (HIDDEN,),
        },
        options(f'intermediate_size={PHI_INNER} hidden_act="gelu_new" partial_rotary_factor=0.5 layer_norm_eps=1e-5'),
    ),
    # takes three arguments
    "cohere": Model(
        "CohereForCausalLM",
        "cohere",
        2,
        ({**norms("input_layernorm"), **attention(2), **mlp("mlp.")},) * 4,
        {**weights("model.", embed_tokens=(VOCABULARY, HIDDEN)), **norms("model.norm")},
        options(
            """logit_scale=1.5 layer_norm_eps=1e-5 use_qk_norm=false attention_dropout=0.0
            tie_word_embeddings=true"""
        ),
        finish=with_a_small_embedding,
    ),
    # delta attention in three layers of four, latent attention without positions in the fourth
    "kimi_linear": Model(
        "KimiLinearForCausalLM",
        "kimi_linear",
        HEADS,
        ({**KIMI_LINEAR, **mlp("mlp.")}, *({**KIMI_LINEAR, **KIMI_MIXTURE},) * 2, KIMI_FULL),
        USUAL_ENDS,
        {
            "linear_attn_config": options(
                f"kda_layers=[1,2,3] full_attn_layers=[4] num_heads={HEADS} head_dim={HEAD} short_conv_kernel_size=4"
            ),
            **options(
                f"""num_experts={KIMI_EXPERTS} num_experts_per_token=2 num_shared_experts=1
                moe_intermediate_size={SMALL} moe_renormalize=true first_k_dense_replace=1
                mla_use_nope=true {LATENT}"""
            ),
        },
    ),
    # latent attention in every layer, and no experts
    "deepseek_v2": Model(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        HEADS,
        ({**BOTH_NORMS, **latent_attention("self_attn."), **mlp("mlp.")},) * DEEPSEEK_LAYERS,
        USUAL_ENDS,
        options(
            f"""{LATENT} first_k_dense_replace={DEEPSEEK_LAYERS} moe_layer_freq=1 moe_intermediate_size={SMALL}
            n_routed_experts={EXPERTS} n_shared_experts=1 num_experts_per_tok=2 n_group=1 topk_group=1
            topk_method="greedy" scoring_func="softmax" norm_topk_prob=true routed_scaling_factor=1.0
            attention_bias=false"""
        ),
    ),
    # three layers of four see their chunk of the prompt alone
    "llama4": Model(
        "Llama4ForConditionalGeneration",
        "llama4",
        2,
        (LLAMA_4_LAYER,) * 4,
        USUAL_ENDS,
        options(
            f"""attention_chunk_size={LOCAL_CHUNK} intermediate_size_mlp={INNER} num_local_experts={EXPERTS}
            num_experts_per_tok=1 interleave_moe_layer_step=100 use_qk_norm=true attn_temperature_tuning=false"""
        ),
        wrap=beside_no_weights,
    ),
    # lightning attention, whose convolution has no state, in every other layer, latent attention between
    "ling": Model(
        "BailingMoeV2_5ForCausalLM",
        "bailing_hybrid",
        HEADS,
        (LING_LINEAR, LING_FULL) * 2,
        {
            **weights("model.", word_embeddings=(VOCABULARY, HIDDEN)),
            **weights(lm_head=(VOCABULARY, HIDDEN)),
            **norms("model.norm"),
        },
        options(
            f"""{LATENT} first_k_dense_replace=4 moe_intermediate_size={SMALL} num_experts={EXPERTS}
            num_shared_experts=1 num_experts_per_tok=2 n_group=1 topk_group=1 score_function="sigmoid"
            norm_topk_prob=true moe_router_enable_expert_bias=true use_qk_norm=true layer_group_size=2
            group_norm_size=1 linear_silu=false full_attention_type="mla" num_nextn_predict_layers=0
            partial_rotary_factor=0.5 rope_scaling=null rope_parameters=null"""
        ),
    ),
}


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


def make(name: str, folder: pathlib.Path, known: Mapping[str, Model] | None = None) -> None:
    model = (known or MODELS)[name]
    write({"config.json": model.config_json(), **model.beside}, model.tensors(seed_of(name)), folder)


def write(files: Mapping[str, dict[str, Any]], tensors: Tensors, folder: pathlib.Path) -> None:
    """Write the JSON files and model.safetensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    target, *wanted = sys.argv[1:]
    for each in wanted:
        make(each, pathlib.Path(target) / each)
