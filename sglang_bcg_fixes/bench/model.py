"""A model with Qwen3-Next-80B-A3B's 48 layers at their real sizes, but for 16 experts instead of 512 and few words.

Four layers are drawn and come twelve times over: 8 GB, so that several servers have it on one GPU.

    python -m sglang_bcg_fixes.bench.model FOLDER qwen3_next
"""

from __future__ import annotations

import pathlib
import sys

from sglang_bcg_fixes.bench.gdn_layer import SHAPES
from sglang_bcg_fixes.verify import models
from sglang_bcg_fixes.verify.models import VOCABULARY, Shapes, Tensors, norms, options, weights

NAME = "qwen3_next"
HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 512, 16, 10
HEADS, KEY_HEADS, HEAD = 16, 2, 256
PERIOD, LAYERS = 4, 48
GDN = SHAPES[NAME]
VALUES = GDN.value_heads * GDN.head


def mlp(prefix: str) -> Shapes:
    return weights(prefix, gate_proj=(INNER, HIDDEN), up_proj=(INNER, HIDDEN), down_proj=(HIDDEN, INNER))


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
FULL: Shapes = {
    **REST,
    **weights(
        "self_attn.",
        q_proj=(2 * HEADS * HEAD, HIDDEN),
        k_proj=(KEY_HEADS * HEAD, HIDDEN),
        v_proj=(KEY_HEADS * HEAD, HIDDEN),
        o_proj=(HIDDEN, HEADS * HEAD),
        q_norm=(HEAD,),
        k_norm=(HEAD,),
    ),
}
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
        f"""num_hidden_layers={LAYERS} hidden_size={HIDDEN} intermediate_size=5120 num_attention_heads={HEADS}
        head_dim={HEAD} max_position_embeddings=32768 partial_rotary_factor=0.25 full_attention_interval={PERIOD}
        attention_bias=false linear_conv_kernel_dim={GDN.width} linear_key_head_dim={GDN.head}
        linear_value_head_dim={GDN.head} linear_num_key_heads={GDN.key_heads}
        linear_num_value_heads={GDN.value_heads} decoder_sparse_step=1 moe_intermediate_size={INNER}
        shared_expert_intermediate_size={INNER} num_experts={EXPERTS} num_experts_per_tok={CHOSEN}
        norm_topk_prob=true mlp_only_layers=[]"""
    ),
    norm=0,
    finish=models.with_gated_norms_of_one,
)


def tensors() -> Tensors:
    drawn = FOUR_LAYERS.tensors(models.seed_of(NAME))
    found = dict(drawn)
    for layer in range(PERIOD, LAYERS):
        start = f"model.layers.{layer % PERIOD}."
        for name, each in drawn.items():
            if name.startswith(start):
                # a checkpoint's tensors share no memory
                found[f"model.layers.{layer}.{name.removeprefix(start)}"] = each.clone()
    return found


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        assert wanted == NAME, f"there is only {NAME}"
        models.write({"config.json": FOUR_LAYERS.config_json()}, tensors(), pathlib.Path(sys.argv[1]) / NAME)
