# SPDX-License-Identifier: Apache-2.0
"""Granite hybrid's architecture in plain torch: NemotronH's mixers and attention, and an MLP behind each.

Attention comes first and knows no positions, as in nemotron_h.py and for its reason. Before 0.5.22 SGLang adds what
comes into the last MLP once more before the last norm. Here that MLP is nothing, and a norm does not see that its input
is doubled, so that all releases compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hybrid
import torch.nn.functional as F
from nemotron_h import EPS, Attention, Mamba2, Norm, Sizes
from torch import Tensor, nn

MIXER, ATTENTION = "mamba", "attention"


@dataclass(frozen=True)
class Shape(Sizes):
    kinds: tuple[str, ...] = (ATTENTION, MIXER, MIXER, MIXER, MIXER)
    groups: int = 1
    inner: int = 128

    @property
    def layers(self) -> int:
        return len(self.kinds)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        # gate and value in one
        self.input_linear = nn.Linear(shape.hidden, 2 * shape.inner, bias=False)
        self.output_linear = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.input_linear(x).chunk(2, -1)
        out: Tensor = self.output_linear(F.silu(gate) * value)
        return out


def layer(shape: Shape, kind: str) -> hybrid.Layer:
    return hybrid.Layer(
        input_layernorm=Norm(shape.hidden),
        **({"mamba": Mamba2(shape)} if kind == MIXER else {"self_attn": Attention(shape)}),
        post_attention_layernorm=Norm(shape.hidden),
        shared_mlp=Mlp(shape),
    )


NAMES_IN_CONFIG = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "kinds": "layer_types",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mixer_heads": "mamba_n_heads",
    "mixer_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "states": "mamba_d_state",
    "conv_taps": "mamba_d_conv",
    "inner": "shared_intermediate_size",
}


class Granite(hybrid.Hybrid):
    family = "granitemoehybrid"
    full = Shape()
    small = Shape(hidden=64, head_dim=32, mixer_heads=4, mixer_dim=32, states=64)
    names_in_config = NAMES_IN_CONFIG

    def __init__(self, shape: Shape) -> None:
        if shape.head_dim * shape.heads != shape.hidden:
            raise ValueError(
                f"{shape.heads} heads of {shape.head_dim}: in Granite they are as wide as its hidden states"
            )
        super().__init__(shape, (layer(shape, kind) for kind in shape.kinds), Norm(shape.hidden))

    def initialize(self) -> None:
        super().initialize()
        layers: list[Any] = list(self.model.layers)
        for layer in layers:
            if isinstance(layer.mixer, Mamba2):
                layer.mixer.initialize()
        nothing = layers[-1].shared_mlp.output_linear.weight
        nothing.data.zero_()
        nothing.requires_grad_(False)

    def is_linear(self, layer: int) -> bool:
        return bool(self.shape.kinds[layer] == MIXER)

    def config(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": self.family,
            "num_hidden_layers": shape.layers,
            "intermediate_size": shape.inner,
            "mamba_expand": shape.mixer_inner // shape.hidden,
            "mamba_chunk_size": 256,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "position_embedding_type": "nope",
            "attention_multiplier": shape.head_dim**-0.5,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        }
