# SPDX-License-Identifier: Apache-2.0
"""Models with full-size layers and a small vocabulary, so that several servers fit on one GPU.

Qwen3-Next-80B-A3B has its 48 layers, but 16 experts instead of 512: 8 GB. Qwen3.5-4B has 8 of its 32 layers, text only.
Four layers of each are drawn and repeated. Nemotron-H-8B has the first 12 of its 52 layers, 3 GB, and Falcon-H1-7B 6 of
its 44, 2 GB; of those one layer of each kind is drawn, as of the models of hybrid_models.

    python -m benchmarks.bench.model FOLDER NAME...
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

from benchmarks.bench import hybrid_models, mamba2_model
from benchmarks.bench.gdn_layer import SHAPES, Shape
from sglang_bcg_fixes.lab.verify import models
from sglang_bcg_fixes.lab.verify.models import VOCABULARY, Shapes, norms, options, weights

NAME, DENSE = "qwen3_next", "qwen3_5_4b"
HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 512, 16, 10
HEADS, KEY_HEADS, HEAD = 16, 2, 256
PERIOD, LAYERS = 4, 48
GDN = SHAPES[NAME]
VALUES = GDN.value_heads * GDN.head


def mlp(prefix: str) -> Shapes:
    return models.mlp(prefix, INNER, HIDDEN)


def gated_attention(hidden: int, heads: int, key_heads: int) -> Shapes:
    queries, keys = (heads * HEAD, hidden), (key_heads * HEAD, hidden)
    return weights(
        "self_attn.",
        q_proj=(2 * queries[0], hidden),
        k_proj=keys,
        v_proj=keys,
        o_proj=(hidden, queries[0]),
        q_norm=(HEAD,),
        k_norm=(HEAD,),
    )


def linear_attention(hidden: int, gdn: Shape) -> Shapes:
    """Qwen3.5's, which projects to each of its inputs apart."""
    values = gdn.value_heads * gdn.head
    return {
        **weights(
            "linear_attn.",
            in_proj_qkv=(gdn.channels, hidden),
            in_proj_z=(values, hidden),
            in_proj_b=(gdn.value_heads, hidden),
            in_proj_a=(gdn.value_heads, hidden),
            conv1d=(gdn.channels, 1, gdn.width),
            norm=(gdn.head,),
            out_proj=(hidden, values),
        ),
        "linear_attn.dt_bias": (gdn.value_heads,),
        "linear_attn.A_log": (gdn.value_heads,),
    }


REST: Shapes = {
    **norms("input_layernorm", "post_attention_layernorm", size=HIDDEN),
    **weights("mlp.", gate=(EXPERTS, HIDDEN), shared_expert_gate=(1, HIDDEN)),
    **mlp("mlp.shared_expert."),
    **{name: shape for index in range(EXPERTS) for name, shape in mlp(f"mlp.experts.{index}.").items()},
}
LINEAR: Shapes = {
    **REST,
    **weights(
        "linear_attn.",
        in_proj_qkvz=(GDN.channels + VALUES, HIDDEN),
        in_proj_ba=(2 * GDN.value_heads, HIDDEN),
        conv1d=(GDN.channels, 1, GDN.width),
        norm=(GDN.head,),
        out_proj=(HIDDEN, VALUES),
    ),
    "linear_attn.dt_bias": (GDN.value_heads,),
    "linear_attn.A_log": (GDN.value_heads,),
}
FULL: Shapes = {**REST, **gated_attention(HIDDEN, HEADS, KEY_HEADS)}
FOUR_LAYERS = models.Model(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    KEY_HEADS,
    (LINEAR, LINEAR, LINEAR, FULL),
    {
        **weights("model.", embed_tokens=(VOCABULARY, HIDDEN)),
        **norms("model.norm", size=HIDDEN),
        **weights(lm_head=(VOCABULARY, HIDDEN)),
    },
    options(
        f"""hidden_size={HIDDEN} intermediate_size=5120 num_attention_heads={HEADS}
        head_dim={HEAD} max_position_embeddings=32768 partial_rotary_factor=0.25 full_attention_interval={PERIOD}
        attention_bias=false linear_conv_kernel_dim={GDN.width} linear_key_head_dim={GDN.head}
        linear_value_head_dim={GDN.head} linear_num_key_heads={GDN.key_heads}
        linear_num_value_heads={GDN.value_heads} decoder_sparse_step=1 moe_intermediate_size={INNER}
        shared_expert_intermediate_size={INNER} num_experts={EXPERTS} num_experts_per_tok={CHOSEN}
        norm_topk_prob=true mlp_only_layers=[]"""
    ),
    norm=0,
    finish=models.with_gated_norms_of_one,
    order=tuple(range(PERIOD)) * (LAYERS // PERIOD),
)


DENSE_HIDDEN, DENSE_INNER, DENSE_KEY_HEADS, DENSE_LAYERS = 2560, 9216, 4, 8
DENSE_GDN = SHAPES[DENSE]
DENSE_REST: Shapes = {
    **norms("input_layernorm", "post_attention_layernorm", size=DENSE_HIDDEN),
    **models.mlp("mlp.", DENSE_INNER, DENSE_HIDDEN),
}
DENSE_LINEAR: Shapes = {**DENSE_REST, **linear_attention(DENSE_HIDDEN, DENSE_GDN)}
DENSE_FULL: Shapes = {**DENSE_REST, **gated_attention(DENSE_HIDDEN, HEADS, DENSE_KEY_HEADS)}
DENSE_FOUR_LAYERS = dataclasses.replace(
    models.QWEN3_5_TEXT,
    key_heads=DENSE_KEY_HEADS,
    layers=(DENSE_LINEAR, DENSE_LINEAR, DENSE_LINEAR, DENSE_FULL),
    ends={
        **weights("model.", embed_tokens=(VOCABULARY, DENSE_HIDDEN)),
        **norms("model.norm", size=DENSE_HIDDEN),
        **weights(lm_head=(VOCABULARY, DENSE_HIDDEN)),
    },
    config={
        **models.QWEN3_5_TEXT.config,
        **options(
            f"""hidden_size={DENSE_HIDDEN} intermediate_size={DENSE_INNER}
            num_attention_heads={HEADS} head_dim={HEAD} max_position_embeddings=32768
            linear_key_head_dim={DENSE_GDN.head} linear_value_head_dim={DENSE_GDN.head}
            linear_num_key_heads={DENSE_GDN.key_heads} linear_num_value_heads={DENSE_GDN.value_heads}"""
        ),
    },
    order=tuple(range(PERIOD)) * (DENSE_LAYERS // PERIOD),
)
MODELS = {NAME: FOUR_LAYERS, DENSE: DENSE_FOUR_LAYERS, **mamba2_model.MODELS, **hybrid_models.MODELS}


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        models.make(wanted, pathlib.Path(sys.argv[1]) / wanted, MODELS)
