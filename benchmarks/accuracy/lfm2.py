# SPDX-License-Identifier: Apache-2.0
"""LFM2's architecture in plain torch, written from the formulas: short convolutions and attention, an MLP behind each.

A convolution keeps two tokens, so what an answer hangs on beside attention is what stood just before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hybrid
import torch
import torch.nn.functional as F
from nemotron_h import EPS, Norm
from torch import Tensor, nn

CONVOLUTION, ATTENTION = "conv", "full_attention"


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 128
    hidden: int = 256
    kinds: tuple[str, ...] = (CONVOLUTION, CONVOLUTION, ATTENTION, CONVOLUTION, ATTENTION, CONVOLUTION)
    heads: int = 2
    key_heads: int = 1
    head_dim: int = 128
    rope_theta: float = 1e6
    conv_taps: int = 3
    inner: int = 192

    @property
    def layers(self) -> int:
        return len(self.kinds)


class ShortConvolution(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.in_proj = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.conv = nn.Conv1d(shape.hidden, shape.hidden, shape.conv_taps, groups=shape.hidden, bias=False)
        self.out_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        before, behind, values = self.in_proj(x).chunk(3, -1)
        gated = before * values
        # there is no recurrent state
        tail, none = past or (gated.new_zeros(len(x), self.conv.kernel_size[0] - 1, x.shape[-1]), gated.new_empty(0))
        window = torch.cat([tail.to(gated.dtype), gated], 1)
        convolved = hybrid.convolved(window, self.conv.weight, x.shape[1])
        return self.out_proj(behind * convolved), (window[:, x.shape[1] :], none)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.key_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.key_heads * shape.head_dim, bias=False)
        self.out_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_layernorm = Norm(shape.head_dim)
        self.k_layernorm = Norm(shape.head_dim)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        size, theta = self.shape.head_dim, self.shape.rope_theta
        q, k, v = (hybrid.of_heads(project(x), size) for project in (self.q_proj, self.k_proj, self.v_proj))
        start = 0 if past is None else past[0].shape[2]
        q = hybrid.rotated(self.q_layernorm(q), start, size, theta)
        k = hybrid.rotated(self.k_layernorm(k), start, size, theta)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return self.out_proj(hybrid.attended(q, k, v, start)), (k, v)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.w2 = nn.Linear(shape.inner, shape.hidden, bias=False)
        self.w3 = nn.Linear(shape.hidden, shape.inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


def layer(shape: Shape, kind: str) -> hybrid.Layer:
    return hybrid.Layer(
        operator_norm=Norm(shape.hidden),
        **({"conv": ShortConvolution(shape)} if kind == CONVOLUTION else {"self_attn": Attention(shape)}),
        ffn_norm=Norm(shape.hidden),
        feed_forward=Mlp(shape),
    )


NAMES_IN_CONFIG = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "kinds": "layer_types",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "conv_taps": "conv_L_cache",
    "inner": "intermediate_size",
}
NAMES_OF_TENSORS = {"model.norm.": "model.embedding_norm."}


class Lfm2(hybrid.Hybrid):
    family = "lfm2"
    full = Shape()
    small = Shape(hidden=64, head_dim=32, inner=96)
    names_in_config = NAMES_IN_CONFIG
    names_of_tensors = NAMES_OF_TENSORS

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, (layer(shape, kind) for kind in shape.kinds), Norm(shape.hidden))

    def is_linear(self, layer: int) -> bool:
        return bool(self.shape.kinds[layer] == CONVOLUTION)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": self.family,
            "num_hidden_layers": self.shape.layers,
            "conv_bias": False,
            "norm_eps": EPS,
            "block_auto_adjust_ff_dim": False,
            # by this name in Hugging Face's LFM2
            "tie_embedding": False,
        }
