# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next's architecture in plain torch, written from the formulas.

Three layers of gated delta net to one of full attention, a mixture of experts in each. Every expert is chosen for every
token, so that a rounding error cannot send a token elsewhere: what changes an answer is the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import hybrid
import torch
import torch.nn.functional as F
from hybrid import CHUNK, normalized
from torch import Tensor, nn

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 128
    hidden: int = 256
    layers: int = 4
    # every so many layers one with full attention
    interval: int = 4
    heads: int = 2
    key_heads: int = 1
    head_dim: int = 128
    rotated: float = 0.25
    rope_theta: float = 10000.0
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_dim: int = 128
    conv_taps: int = 4
    experts: int = 4
    expert_inner: int = 64
    shared_inner: int = 128

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, token by token: what the chunked form is checked against.

    q, k: (batch, heads, time, key dim), v: (..., value dim), g (logarithm of the decay) and beta: (batch, heads, time),
    state: (batch, heads, key dim, value dim).
    """
    outputs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        missing = v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], missing * beta[:, :, t, None])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(outputs, 2), state


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The same with matrix products: inside a chunk all tokens at once, from chunk to chunk the state.

    What token i adds to the state is k_i u_i, where u_i depends on the earlier u_j of its chunk. These are a unit lower
    triangular system, solved for the values and for the part that has to be taken off for what the state already holds.
    """
    length = q.shape[2]
    # a token with beta 0 and g 0 changes nothing
    missing = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, missing)).unflatten(2, (-1, chunk)) for x in (g, beta))

    decay = g.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # masked before exp: above the diagonal it would overflow
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~later, -math.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.mT * between).tril(-1)
    added, known = torch.linalg.solve_triangular(
        system,
        torch.cat([v * beta.unsqueeze(-1), k_beta * decay.exp().unsqueeze(-1)], -1),
        upper=False,
        unitriangular=True,
    ).split([v.shape[-1], k.shape[-1]], -1)
    inside = q @ k.mT * between
    q_decayed = q * decay.exp().unsqueeze(-1)
    total = decay[..., -1:]
    k_left = k * (total - decay).exp().unsqueeze(-1)
    total = total.exp().unsqueeze(-1)
    outputs, state = hybrid.walked(added, known, q_decayed, inside, total, k_left, state)
    return outputs[:, :, :length], state


class Norm(nn.Module):
    """RMS norm; the weight is stored as its distance from one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return (normalized(x.float(), EPS) * (1 + self.weight.float())).to(x.dtype)


class GatedNorm(nn.Module):
    """RMS norm of each head, times SiLU of a gate; the weight is stored as it is."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return normalized(x.float(), EPS) * self.weight.float() * F.silu(gate.float())


class GatedDeltaNet(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        keys, values = (heads * shape.linear_dim for heads in (shape.linear_key_heads, shape.linear_value_heads))
        self.in_proj_qkvz = nn.Linear(shape.hidden, 2 * keys + 2 * values, bias=False)
        self.in_proj_ba = nn.Linear(shape.hidden, 2 * shape.linear_value_heads, bias=False)
        self.conv1d = nn.Conv1d(
            2 * keys + values, 2 * keys + values, shape.conv_taps, bias=False, groups=2 * keys + values
        )
        self.dt_bias = nn.Parameter(torch.empty(shape.linear_value_heads))
        self.A_log = nn.Parameter(torch.zeros(shape.linear_value_heads))
        self.norm = GatedNorm(shape.linear_dim)
        self.out_proj = nn.Linear(values, shape.hidden, bias=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mixed (q, k, v of all heads, as the convolution takes them), z, b and a.

        The projections are packed by key head: its q and k, and the v and z of the value heads that share it.
        """
        s = self.shape
        group = s.linear_value_heads // s.linear_key_heads
        q, k, v, z = (
            self.in_proj_qkvz(x)
            .unflatten(-1, (s.linear_key_heads, -1))
            .split([s.linear_dim, s.linear_dim, group * s.linear_dim, group * s.linear_dim], -1)
        )
        b, a = self.in_proj_ba(x).unflatten(-1, (s.linear_key_heads, -1)).split(group, -1)
        mixed = torch.cat([part.flatten(-2) for part in (q, k, v)], -1)
        return mixed, z.flatten(-2).unflatten(-1, (-1, s.linear_dim)), b.flatten(-2), a.flatten(-2)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        s = self.shape
        mixed, z, b, a = self.split(x)
        if past is None:
            tail = mixed.new_zeros(len(x), s.conv_taps - 1, mixed.shape[-1])
            state = torch.zeros(
                len(x), s.linear_value_heads, s.linear_dim, s.linear_dim, device=x.device, dtype=self.A_log.dtype
            )
        else:
            tail, state = past
        window = torch.cat([tail.to(mixed.dtype), mixed], 1)
        heads = (
            F.silu(hybrid.convolved(window, self.conv1d.weight, x.shape[1]))
            .to(state.dtype)
            .unflatten(-1, (-1, s.linear_dim))
            .transpose(1, 2)
            .split([s.linear_key_heads, s.linear_key_heads, s.linear_value_heads], 1)
        )
        group = s.linear_value_heads // s.linear_key_heads
        q, k = (
            (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + EPS)).repeat_interleave(group, 1)
            for part in heads[:2]
        )
        g = -self.A_log.exp() * F.softplus(a.to(state.dtype) + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            out, state = chunked_delta_rule(
                q * s.linear_dim**-0.5,
                k,
                heads[2],
                g.transpose(1, 2),
                b.to(state.dtype).sigmoid().transpose(1, 2),
                state,
            )
        out = self.norm(out.transpose(1, 2), z).to(x.dtype).flatten(-2)
        return self.out_proj(out), (window[:, x.shape[1] :], state)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, 2 * shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.key_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.key_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim)
        self.k_norm = Norm(shape.head_dim)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        s = self.shape
        q, gate = self.q_proj(x).unflatten(-1, (s.heads, 2 * s.head_dim)).chunk(2, -1)
        k, v = (proj(x).unflatten(-1, (s.key_heads, s.head_dim)).transpose(1, 2) for proj in (self.k_proj, self.v_proj))
        start = 0 if past is None else past[0].shape[2]
        size = int(s.head_dim * s.rotated)
        q = hybrid.rotated(self.q_norm(q.transpose(1, 2)), start, size, s.rope_theta)
        k = hybrid.rotated(self.k_norm(k), start, size, s.rope_theta)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        out = hybrid.attended(q, k, v, start)
        return self.o_proj(out * gate.sigmoid().flatten(-2)), (k, v)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """Every expert, weighted by the router, and a shared one behind a gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = nn.ModuleList(Mlp(shape.hidden, shape.expert_inner) for _ in range(shape.experts))
        self.shared_expert = Mlp(shape.hidden, shape.shared_inner)
        self.shared_expert_gate = nn.Linear(shape.hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).float().softmax(-1).to(x.dtype)
        chosen = sum(expert(x) * weights[..., n, None] for n, expert in enumerate(self.experts))
        return chosen + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)


def layer(shape: Shape, number: int) -> hybrid.Layer:
    return hybrid.Layer(
        input_layernorm=Norm(shape.hidden),
        **({"self_attn": Attention(shape)} if shape.is_full(number) else {"linear_attn": GatedDeltaNet(shape)}),
        post_attention_layernorm=Norm(shape.hidden),
        mlp=Mixture(shape),
    )


NAMES_IN_CONFIG = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "interval": "full_attention_interval",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rotated": "partial_rotary_factor",
    "rope_theta": "rope_theta",
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_dim": "linear_key_head_dim",
    "conv_taps": "linear_conv_kernel_dim",
    "experts": "num_experts",
    "expert_inner": "moe_intermediate_size",
    "shared_inner": "shared_expert_intermediate_size",
}


class Qwen3Next(hybrid.Hybrid):
    family = "qwen3_next"
    full = Shape()
    small = Shape(
        hidden=64,
        head_dim=32,
        linear_dim=32,
        linear_key_heads=2,
        linear_value_heads=2,
        expert_inner=16,
        shared_inner=64,
    )
    names_in_config = NAMES_IN_CONFIG

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, (layer(shape, number) for number in range(shape.layers)), Norm(shape.hidden))

    def initialize(self) -> None:
        super().initialize()
        for layer in self.model.layers:
            if isinstance(layer.mixer, GatedDeltaNet):
                bias = layer.mixer.dt_bias
                bias.data.copy_(hybrid.inverse_softplus(hybrid.forgetting(len(bias))))

    def is_linear(self, layer: int) -> bool:
        return not self.shape.is_full(layer)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": self.family,
            "linear_value_head_dim": self.shape.linear_dim,
            "num_experts_per_tok": self.shape.experts,
            "intermediate_size": self.shape.shared_inner,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        }
