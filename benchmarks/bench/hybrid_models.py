# SPDX-License-Identifier: Apache-2.0
"""Models with other linear layers beside attention: their layers in published sizes, but few of them and few experts.

LFM2-1.2B is whole but for its vocabulary.
"""

from __future__ import annotations

import dataclasses

from benchmarks.bench.mamba2_layer import Shape
from benchmarks.bench.mamba2_model import Sizes, attention, common, mixer
from sglang_bcg_fixes.lab.verify import models
from sglang_bcg_fixes.lab.verify.models import NOPE, RANK, ROPE, VALUE, VOCABULARY, Shapes, norms, options, weights

GRANITE, LFM2, KIMI = "granite_4_h_micro", "lfm2_1_2b", "kimi_linear_48b"
# one period of Granite's forty layers, all of LFM2-1.2B's
GRANITE_PATTERN = "mmmmm*mmmm"
LFM2_PATTERN = "cc*cc*cc*c*c*c*c"
# three layers of delta attention and one of latent attention, the first with a dense feed-forward part
KIMI_ORDER = (0, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 2)


@dataclasses.dataclass(frozen=True)
class Experts:
    """Experts of a layer: their number, how many a token takes, and the size of each and of the shared one."""

    count: int
    chosen: int
    inner: int


def ends(hidden: int, norm: str) -> Shapes:
    return {
        **weights("model.", **{"embed_tokens": (VOCABULARY, hidden), norm: (hidden,)}),
        **weights(lm_head=(VOCABULARY, hidden)),
    }


def granite_hybrid(shape: Shape, sizes: Sizes, pattern: str) -> models.Model:
    """Build a model whose layers have a Mamba2 mixer or attention, and a dense feed-forward part."""
    hidden, inner = sizes.hidden, sizes.inner
    rest = {
        **norms("input_layernorm", "post_attention_layernorm", size=hidden),
        **weights("shared_mlp.", input_linear=(2 * inner, hidden), output_linear=(hidden, inner)),
    }
    of_kind = {
        "m": {**rest, **mixer("mamba.", shape, hidden), **norms("mamba.norm", size=shape.of_kernel.inner)},
        "*": {**rest, **attention("self_attn.", sizes)},
    }
    kinds = ",".join('"attention"' if kind == "*" else '"mamba"' for kind in pattern)
    return models.Model(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        sizes.key_heads,
        tuple(of_kind.values()),
        ends(hidden, "norm"),
        options(
            f"""{common(sizes)} layer_types=[{kinds}] num_local_experts=0 num_experts_per_tok=0
            shared_intermediate_size={inner} mamba_n_heads={shape.heads} mamba_d_head={shape.head}
            mamba_n_groups={shape.groups} mamba_d_state={shape.states} mamba_d_conv={shape.width} mamba_expand=2
            mamba_chunk_size={shape.chunk} mamba_conv_bias=true mamba_proj_bias=false position_embedding_type="nope"
            attention_bias=false attention_multiplier={1 / sizes.head} embedding_multiplier=1.0
            residual_multiplier=1.0 logits_scaling=1.0"""
        ),
        order=tuple(map("m*".index, pattern)),
    )


def lfm2(sizes: Sizes, pattern: str, width: int = 3) -> models.Model:
    """Build a model whose layers have a short convolution or attention."""
    hidden, inner = sizes.hidden, sizes.inner
    rest = {
        **norms("operator_norm", "ffn_norm", size=hidden),
        **weights("feed_forward.", w1=(inner, hidden), w2=(hidden, inner), w3=(inner, hidden)),
    }
    of_kind = {
        "c": {
            **rest,
            **weights("conv.", in_proj=(3 * hidden, hidden), conv=(hidden, 1, width), out_proj=(hidden, hidden)),
        },
        "*": {
            **rest,
            **{name.replace("o_proj", "out_proj"): shape for name, shape in attention("self_attn.", sizes).items()},
            **norms("self_attn.q_layernorm", "self_attn.k_layernorm", size=sizes.head),
        },
    }
    kinds = ",".join('"full_attention"' if kind == "*" else '"conv"' for kind in pattern)
    return models.Model(
        "Lfm2ForCausalLM",
        "lfm2",
        sizes.key_heads,
        tuple(of_kind.values()),
        ends(hidden, "embedding_norm"),
        options(
            f"""{common(sizes)} layer_types=[{kinds}] conv_L_cache={width} conv_bias=false norm_eps=1e-6
            block_auto_adjust_ff_dim=false tie_embedding=false"""
        ),
        order=tuple(map("c*".index, pattern)),
    )


def latent_attention(sizes: Sizes) -> Shapes:
    hidden, heads = sizes.hidden, sizes.heads
    return weights(
        "self_attn.",
        q_proj=(heads * (NOPE + ROPE), hidden),
        kv_a_proj_with_mqa=(RANK + ROPE, hidden),
        kv_a_layernorm=(RANK,),
        kv_b_proj=(heads * (NOPE + VALUE), RANK),
        o_proj=(hidden, heads * VALUE),
    )


def kimi_linear(sizes: Sizes, experts: Experts, order: tuple[int, ...]) -> models.Model:
    """Build a model whose layers have Kimi delta attention, or latent attention without positions."""
    hidden, heads, head = sizes.hidden, sizes.heads, sizes.head
    of_heads = heads * head

    def expert(prefix: str) -> Shapes:
        return weights(prefix, w1=(experts.inner, hidden), w2=(hidden, experts.inner), w3=(experts.inner, hidden))

    both = norms("input_layernorm", "post_attention_layernorm", size=hidden)
    mixture = {
        **models.mixture("block_sparse_moe.", "shared_experts", expert, experts.count, experts.inner, hidden),
        "block_sparse_moe.gate.e_score_correction_bias": (experts.count,),
    }
    delta = {
        **weights("self_attn.", **{f"{name}_proj": (of_heads, hidden) for name in "qkv"}),
        **weights("self_attn.", **{f"{name}_conv1d": (of_heads, 1, 4) for name in "qkv"}),
        **weights("self_attn.", **{f"{name}_a_proj": (head, hidden) for name in "fg"}),
        **weights("self_attn.", **{f"{name}_b_proj": (of_heads, head) for name in "fg"}),
        **weights("self_attn.", b_proj=(heads, hidden), o_norm=(head,), o_proj=(hidden, of_heads)),
        "self_attn.dt_bias": (of_heads,),
        "self_attn.A_log": (1, 1, heads, 1),
    }
    # counted from one
    full = [number for number, kind in enumerate(order, 1) if kind == 2]
    others = [number for number in range(1, len(order) + 1) if number not in full]
    return models.Model(
        "KimiLinearForCausalLM",
        "kimi_linear",
        heads,
        (
            {**both, **delta, **models.mlp("mlp.", sizes.inner, hidden)},
            {**both, **delta, **mixture},
            {**both, **latent_attention(sizes), **mixture},
        ),
        ends(hidden, "norm"),
        {
            **options(common(sizes)),
            "linear_attn_config": {
                **options(f"num_heads={heads} head_dim={head} short_conv_kernel_size=4"),
                "kda_layers": others,
                "full_attn_layers": full,
            },
            **options(
                f"""q_lora_rank=null kv_lora_rank={RANK} qk_rope_head_dim={ROPE} qk_nope_head_dim={NOPE}
                v_head_dim={VALUE} mla_use_nope=true num_experts={experts.count}
                num_experts_per_token={experts.chosen} num_shared_experts=1 moe_intermediate_size={experts.inner}
                moe_renormalize=true first_k_dense_replace=1"""
            ),
        },
        order=order,
    )


MODELS = {
    GRANITE: granite_hybrid(Shape(36, 64, 1, chunk=256), Sizes(2048, 8192, 32, 8, 64), GRANITE_PATTERN),
    LFM2: lfm2(Sizes(2048, 8192, 32, 8, 64), LFM2_PATTERN),
    # of as many experts as a power of two SGLang's kernel wants the bias in another type
    KIMI: kimi_linear(Sizes(2304, 9216, 32, 32), Experts(24, 8, 1024), KIMI_ORDER),
}
