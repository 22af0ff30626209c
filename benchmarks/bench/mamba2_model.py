# SPDX-License-Identifier: Apache-2.0
"""Models with Mamba2 mixers: their layers in published sizes, but few of them. The mixers are those of mamba2_layer."""

from __future__ import annotations

import dataclasses

from benchmarks.bench.mamba2_layer import SHAPES, Shape
from sglang_bcg_fixes.lab.verify import models
from sglang_bcg_fixes.lab.verify.models import VOCABULARY, Shapes, norms, options, weights

NEMOTRON, FALCON = "nemotron_h_8b", "falcon_h1_7b"
# all layers of Nemotron-H-8B: mixers, feed-forward layers, attention
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
KINDS = "M-*"
NEMOTRON_LAYERS, FALCON_LAYERS = 12, 6


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of everything but the mixers; `inner` is that of a feed-forward layer."""

    hidden: int
    inner: int
    heads: int
    key_heads: int
    head: int = 128


def mixer(prefix: str, shape: Shape, hidden: int) -> Shapes:
    sizes = shape.of_kernel
    return {
        **weights(
            prefix,
            in_proj=(sizes.inner + sizes.channels + shape.heads, hidden),
            conv1d=(sizes.channels, 1, shape.width),
            out_proj=(hidden, sizes.inner),
        ),
        f"{prefix}conv1d.bias": (sizes.channels,),
        **{f"{prefix}{name}": (shape.heads,) for name in ("A_log", "D", "dt_bias")},
    }


def attention(prefix: str, sizes: Sizes) -> Shapes:
    queries, keys = sizes.heads * sizes.head, (sizes.key_heads * sizes.head, sizes.hidden)
    return weights(prefix, q_proj=(queries, sizes.hidden), k_proj=keys, v_proj=keys, o_proj=(sizes.hidden, queries))


def common(sizes: Sizes) -> str:
    return f"""hidden_size={sizes.hidden} intermediate_size={sizes.inner} num_attention_heads={sizes.heads}
        head_dim={sizes.head} max_position_embeddings=32768"""


def nemotron_h(shape: Shape, sizes: Sizes, pattern: str) -> models.Model:
    """Build a model whose every layer is a mixer, a feed-forward layer or attention."""
    hidden = sizes.hidden
    of_kind = {
        "M": {**mixer("mixer.", shape, hidden), **norms("mixer.norm", size=shape.of_kernel.inner)},
        "-": weights("mixer.", up_proj=(sizes.inner, hidden), down_proj=(hidden, sizes.inner)),
        "*": attention("mixer.", sizes),
    }
    return models.Model(
        "NemotronHForCausalLM",
        "nemotron_h",
        sizes.key_heads,
        tuple({**norms("norm", size=hidden), **of_kind[kind]} for kind in KINDS),
        {
            **weights("backbone.", embeddings=(VOCABULARY, hidden), norm_f=(hidden,)),
            **weights(lm_head=(VOCABULARY, hidden)),
        },
        # SGLang's class takes groups, width and chunk under two names each, and asks for either
        options(
            f"""{common(sizes)} attention_head_dim={sizes.head} hybrid_override_pattern="{pattern}"
            mlp_hidden_act="relu2" mamba_hidden_act="silu" layer_norm_epsilon=1e-5 mamba_num_heads={shape.heads}
            mamba_head_dim={shape.head} n_groups={shape.groups} mamba_n_groups={shape.groups}
            ssm_state_size={shape.states} mamba_ssm_dtype="{shape.kept}" conv_kernel={shape.width}
            mamba_d_conv={shape.width} chunk_size={shape.chunk} mamba_chunk_size={shape.chunk} use_conv_bias=true
            use_bias=false"""
        ),
        stack="backbone.layers.",
        order=tuple(map(KINDS.index, pattern)),
    )


def falcon_h1(shape: Shape, sizes: Sizes, layers: int) -> models.Model:
    """Build a model with attention and a mixer side by side in each layer; its multipliers are one."""
    hidden, inner = sizes.hidden, shape.of_kernel.inner
    layer = {
        **norms("input_layernorm", "pre_ff_layernorm", size=hidden),
        **attention("self_attn.", sizes),
        **models.mlp("feed_forward.", sizes.inner, hidden),
        **mixer("mamba.", shape, hidden),
    }
    return models.Model(
        "FalconH1ForCausalLM",
        "falcon_h1",
        sizes.key_heads,
        (layer,),
        {
            **weights("model.", embed_tokens=(VOCABULARY, hidden), final_layernorm=(hidden,)),
            **weights(lm_head=(VOCABULARY, hidden)),
        },
        options(
            f"""{common(sizes)} mamba_d_ssm={inner} mamba_n_heads={shape.heads} mamba_d_head={shape.head}
            mamba_n_groups={shape.groups} mamba_d_state={shape.states} mamba_ssm_dtype="{shape.kept}"
            mamba_d_conv={shape.width} mamba_expand=2 mamba_chunk_size={shape.chunk} mamba_conv_bias=true
            mamba_proj_bias=false mamba_norm_before_gate=false mamba_rms_norm=false projectors_bias=false"""
        ),
        order=(0,) * layers,
    )


MODELS = {
    NEMOTRON: nemotron_h(SHAPES[NEMOTRON], Sizes(4096, 21504, 32, 8), PATTERN[:NEMOTRON_LAYERS]),
    FALCON: falcon_h1(SHAPES[FALCON], Sizes(3072, 12288, 12, 2), FALCON_LAYERS),
}
