# SPDX-License-Identifier: Apache-2.0
"""Kimi-Linear's architecture in plain torch, written from the formulas.

Three layers of Kimi delta attention to one of latent attention, which knows no positions, and a dense MLP in each. Kimi
delta attention is a gated delta net in which every key of a head forgets at its own rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import hybrid
import torch
import torch.nn.functional as F
from hybrid import CHUNK, normalized
from nemotron_h import EPS, Norm
from qwen3_next import Mlp
from torch import Tensor, nn

# of queries and keys, as SGLang has it
LENGTH_EPS = 1e-6
# tokens whose pairs are weighted one by one
FEW = 8


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 128
    hidden: int = 256
    # counted from one, as in a Hugging Face folder
    delta_layers: tuple[int, ...] = (1, 2, 3)
    full_layers: tuple[int, ...] = (4,)
    delta_heads: int = 2
    delta_dim: int = 128
    conv_taps: int = 4
    heads: int = 2
    # what a token leaves for latent attention: `rank` numbers of all heads, and `shared` that are part of every key
    rank: int = 512
    shared: int = 64
    keys: int = 128
    values: int = 128
    inner: int = 256

    @property
    def layers(self) -> int:
        return len(self.delta_layers) + len(self.full_layers)


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, token by token: what the chunked form is checked against.

    q, k, g (logarithm of each key's decay): (batch, heads, time, key dim), v: (..., value dim), beta: (batch, heads,
    time), state: (batch, heads, key dim, value dim).
    """
    outputs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp().unsqueeze(-1)
        missing = v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], missing * beta[:, :, t, None])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(outputs, 2), state


def products(rows: Tensor, keys: Tensor, decay: Tensor) -> Tensor:
    """Products of each row (..., time, key dim) with the keys up to its own place, weighted by what is left of these.

    `decay` has the sums of the logarithms up to each place. What is left is exp(the row's - the key's), whose factors
    exp(the row's) and exp(- the key's) may be too small and too large for a float. So the tokens are halved. What the
    later half's rows see of the earlier half's keys has a factor before the middle and one behind it, at most 1 each.
    """
    length = decay.shape[-2]
    if length <= FEW:
        seen = torch.ones(length, length, dtype=torch.bool, device=decay.device).tril().unsqueeze(-1)
        # masked before exp: above the diagonal it would overflow
        left = (decay.unsqueeze(-2) - decay.unsqueeze(-3)).masked_fill(~seen, -math.inf).exp()
        return (rows.unsqueeze(-2) * (keys.unsqueeze(-3) * left)).sum(-1)
    earlier, later = products(*(torch.unflatten(part, -2, (2, -1)) for part in (rows, keys, decay))).unbind(-3)
    half = length // 2
    middle = decay[..., half - 1 : half, :]
    to_middle = keys[..., :half, :] * (middle - decay[..., :half, :]).exp()
    from_middle = rows[..., half:, :] * (decay[..., half:, :] - middle).exp()
    first = torch.cat([earlier, torch.zeros_like(earlier)], -1)
    return torch.cat([first, torch.cat([from_middle @ to_middle.mT, later], -1)], -2)


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The same with matrix products, as qwen3_next.py has it; `chunk` is a power of two."""
    length = q.shape[2]
    # a token with beta 0 and g 0 changes nothing
    missing = -length % chunk
    q, k, v, g = (torch.unflatten(F.pad(x, (0, 0, 0, missing)), 2, (-1, chunk)) for x in (q, k, v, g))
    beta = torch.unflatten(F.pad(beta, (0, missing)), 2, (-1, chunk)).unsqueeze(-1)

    decay = g.cumsum(-2)
    inside, among_keys = products(torch.stack([q, k]), k, decay)
    added, known = torch.linalg.solve_triangular(
        (among_keys * beta).tril(-1),
        torch.cat([v * beta, k * beta * decay.exp()], -1),
        upper=False,
        unitriangular=True,
    ).split([v.shape[-1], k.shape[-1]], -1)
    q_decayed = q * decay.exp()
    total = decay[..., -1:, :]
    k_left = k * (total - decay).exp()
    total = total.exp().mT
    outputs, state = hybrid.walked(added, known, q_decayed, inside, total, k_left, state)
    return outputs[:, :, :length], state


class GatedNorm(nn.Module):
    """RMS norm of each head, times the sigmoid of a gate."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return normalized(x.float(), EPS) * self.weight.float() * gate.float().sigmoid()


class DeltaAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size = shape.delta_heads * shape.delta_dim
        for name in "qkv":
            self.add_module(f"{name}_proj", nn.Linear(shape.hidden, size, bias=False))
            self.add_module(f"{name}_conv1d", nn.Conv1d(size, size, shape.conv_taps, bias=False, groups=size))
        # what is forgotten, and the gate of the output
        self.f_a_proj, self.g_a_proj = (nn.Linear(shape.hidden, shape.delta_dim, bias=False) for _ in "fg")
        self.f_b_proj, self.g_b_proj = (nn.Linear(shape.delta_dim, size, bias=False) for _ in "fg")
        self.b_proj = nn.Linear(shape.hidden, shape.delta_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(1, 1, shape.delta_heads, 1))
        self.dt_bias = nn.Parameter(torch.empty(size))
        self.o_norm = GatedNorm(shape.delta_dim)
        self.o_proj = nn.Linear(size, shape.hidden, bias=False)

    def initialize(self) -> None:
        self.A_log.data.zero_()
        self.dt_bias.data.copy_(hybrid.inverse_softplus(hybrid.forgetting(len(self.dt_bias))))

    @property
    def taps(self) -> Tensor:
        return torch.cat([self.get_parameter(f"{name}_conv1d.weight") for name in "qkv"])

    def mixed(self, x: Tensor) -> Tensor:
        """Return queries, keys and values of all heads, as the convolutions take them."""
        return torch.cat([self.get_submodule(f"{name}_proj")(x) for name in "qkv"], -1)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        s = self.shape
        of_heads = (s.delta_heads, s.delta_dim)
        mixed = self.mixed(x)
        if past is None:
            tail = mixed.new_zeros(len(x), s.conv_taps - 1, mixed.shape[-1])
            state = torch.zeros(
                len(x), s.delta_heads, s.delta_dim, s.delta_dim, device=x.device, dtype=self.A_log.dtype
            )
        else:
            tail, state = past
        window = torch.cat([tail.to(mixed.dtype), mixed], 1)
        convolved = F.silu(hybrid.convolved(window, self.taps, x.shape[1])).to(state.dtype)
        q, k, v = (hybrid.of_heads(part, s.delta_dim) for part in convolved.chunk(3, -1))
        q, k = (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + LENGTH_EPS) for part in (q, k))
        forget = self.f_b_proj(self.f_a_proj(x)).to(state.dtype) + self.dt_bias
        g = -self.A_log.exp() * torch.unflatten(F.softplus(forget), -1, of_heads)
        with torch.autocast(x.device.type, enabled=False):
            out, state = chunked_delta_rule(
                q * s.delta_dim**-0.5,
                k,
                v,
                g.transpose(1, 2),
                self.b_proj(x).to(state.dtype).sigmoid().transpose(1, 2),
                state,
            )
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, of_heads)
        out = self.o_norm(out.transpose(1, 2), gate).to(x.dtype).flatten(-2)
        return self.o_proj(out), (window[:, x.shape[1] :], state)


class LatentAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * (shape.keys + shape.shared), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden, shape.rank + shape.shared, bias=False)
        self.kv_a_layernorm = Norm(shape.rank)
        self.kv_b_proj = nn.Linear(shape.rank, shape.heads * (shape.keys + shape.values), bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.values, shape.hidden, bias=False)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        s = self.shape
        q = hybrid.of_heads(self.q_proj(x), s.keys + s.shared)
        latent, shared = self.kv_a_proj_with_mqa(x).split([s.rank, s.shared], -1)
        of_both = hybrid.of_heads(self.kv_b_proj(self.kv_a_layernorm(latent)), s.keys + s.values)
        k, v = torch.split(of_both, [s.keys, s.values], -1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, s.heads, -1, -1)], -1)
        start = 0 if past is None else past[0].shape[2]
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return self.o_proj(hybrid.attended(q, k, v, start)), (k, v)


def layer(shape: Shape, number: int) -> hybrid.Layer:
    return hybrid.Layer(
        input_layernorm=Norm(shape.hidden),
        self_attn=DeltaAttention(shape) if number in shape.delta_layers else LatentAttention(shape),
        post_attention_layernorm=Norm(shape.hidden),
        mlp=Mlp(shape.hidden, shape.inner),
    )


NAMES_IN_CONFIG = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "delta_layers": "linear_attn_config.kda_layers",
    "full_layers": "linear_attn_config.full_attn_layers",
    "delta_heads": "linear_attn_config.num_heads",
    "delta_dim": "linear_attn_config.head_dim",
    "conv_taps": "linear_attn_config.short_conv_kernel_size",
    "heads": "num_attention_heads",
    "rank": "kv_lora_rank",
    "shared": "qk_rope_head_dim",
    "keys": "qk_nope_head_dim",
    "values": "v_head_dim",
    "inner": "intermediate_size",
}


class KimiLinear(hybrid.Hybrid):
    family = "kimi_linear"
    full = Shape()
    small = Shape(hidden=64, delta_dim=32, rank=64, shared=16, keys=32, values=32, inner=96)
    names_in_config = NAMES_IN_CONFIG

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, (layer(shape, 1 + number) for number in range(shape.layers)), Norm(shape.hidden))

    def initialize(self) -> None:
        super().initialize()
        for layer in self.model.layers:
            if isinstance(layer.mixer, DeltaAttention):
                layer.mixer.initialize()

    def is_linear(self, layer: int) -> bool:
        return 1 + layer in self.shape.delta_layers

    def config(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": self.family,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": shape.heads,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "q_lora_rank": None,
            "mla_use_nope": True,
            "num_experts": None,
        }
