# SPDX-License-Identifier: Apache-2.0
"""NemotronH's architecture in plain torch, written from the formulas.

A layer is a Mamba2 mixer, attention without positions, or an MLP of squared ReLU, each behind a norm. Attention comes
first, where no token knows of its neighbours yet: what a prompt says has to be kept by the mixers.
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

EPS = 1e-5
# by which a head's input is weighted when training begins, whatever it forgets
FIRST_STEP = 0.1
MIXER, ATTENTION, MLP = "M*-"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model with these mixers and this attention, whatever its layers are."""

    vocabulary: int = 128
    hidden: int = 256
    heads: int = 2
    key_heads: int = 1
    head_dim: int = 128
    mixer_heads: int = 8
    mixer_dim: int = 64
    groups: int = 2
    states: int = 128
    conv_taps: int = 4
    inner: int = 512

    @property
    def mixer_inner(self) -> int:
        return self.mixer_heads * self.mixer_dim

    @property
    def channels(self) -> int:
        """Return the number of the convolution's channels: x, B and C."""
        return self.mixer_inner + 2 * self.groups * self.states


@dataclass(frozen=True)
class Shape(Sizes):
    # a letter for each layer
    pattern: str = "*-M-M-M-"

    @property
    def layers(self) -> int:
        return len(self.pattern)


def recurrent_scan(
    x: Tensor, step: Tensor, a: Tensor, to_state: Tensor, from_state: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, token by token: what the chunked form is checked against.

    x: (batch, heads, time, head dim), step: (batch, heads, time), a: (heads,), both B (to_state) and C (from_state):
    (batch, groups, time, states), state: (batch, heads, head dim, states).
    """
    of_a_group = x.shape[1] // to_state.shape[1]
    to_state, from_state = (part.repeat_interleave(of_a_group, 1) for part in (to_state, from_state))
    outputs = []
    for t in range(x.shape[2]):
        state = state * (step[:, :, t] * a).exp()[..., None, None]
        state = state + torch.einsum("bhp,bhn,bh->bhpn", x[:, :, t], to_state[:, :, t], step[:, :, t])
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, from_state[:, :, t]))
    return torch.stack(outputs, 2), state


def decays(logarithms: Tensor) -> Tensor:
    """Return the share that is left at each place (row) of an earlier one (column): products of the decays between."""
    total = logarithms.cumsum(-1)
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).tril()
    # masked before exp: above the diagonal it would overflow
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~later, -math.inf).exp()


def chunked_scan(
    x: Tensor, step: Tensor, a: Tensor, to_state: Tensor, from_state: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The same with matrix products, all chunks at once: within each, and from the ends of all to those behind them."""
    length = x.shape[2]
    of_a_group = x.shape[1] // to_state.shape[1]
    # a token with a step of 0 changes nothing
    missing = -length % chunk
    # (batch, heads, chunks, tokens, ...), and with the heads of a group apart where these share B and C
    x, to_state, from_state = (
        F.pad(part, (0, 0, 0, missing)).unflatten(2, (-1, chunk)) for part in (x, to_state, from_state)
    )
    step = F.pad(step, (0, missing)).unflatten(2, (-1, chunk))
    logarithms = step * a[:, None, None]
    total = logarithms.cumsum(-1)
    weighted = x * step.unsqueeze(-1)
    shared = from_state @ to_state.mT
    inside = (decays(logarithms).unflatten(1, (-1, of_a_group)) * shared.unsqueeze(2)).flatten(1, 2)
    output = inside @ weighted

    # what each chunk adds to the state at its end, and before them what there was: (batch, heads, chunks, dim x states)
    left = weighted * (total[..., -1:] - total).exp().unsqueeze(-1)
    added = left.unflatten(1, (-1, of_a_group)).mT @ to_state.unsqueeze(2)
    states = torch.cat([state.unsqueeze(2).flatten(3), added.flatten(1, 2).flatten(3)], 2)
    states = decays(F.pad(total[..., -1], (1, 0))) @ states
    states = states.unflatten(-1, state.shape[2:])
    before = states[:, :, :-1].unflatten(1, (-1, of_a_group))
    read = (from_state.unsqueeze(2) @ before.mT).flatten(1, 2)
    output = output + read * total.exp().unsqueeze(-1)
    return output.flatten(2, 3)[:, :, :length], states[:, :, -1]


class Norm(nn.Module):
    """RMS norm, of each of several groups of channels by itself."""

    def __init__(self, size: int, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        of_groups = x.float().unflatten(-1, (self.groups, -1))
        return (normalized(of_groups, EPS).flatten(-2) * self.weight.float()).to(x.dtype)


class Mamba2(nn.Module):
    def __init__(self, shape: Sizes) -> None:
        super().__init__()
        self.shape = shape
        self.in_proj = nn.Linear(shape.hidden, shape.mixer_inner + shape.channels + shape.mixer_heads, bias=False)
        self.conv1d = nn.Conv1d(shape.channels, shape.channels, shape.conv_taps, groups=shape.channels)
        self.dt_bias = nn.Parameter(torch.empty(shape.mixer_heads))
        self.A_log = nn.Parameter(torch.empty(shape.mixer_heads))
        self.D = nn.Parameter(torch.ones(shape.mixer_heads))
        self.norm = Norm(shape.mixer_inner, shape.groups)
        self.out_proj = nn.Linear(shape.mixer_inner, shape.hidden, bias=False)

    def initialize(self) -> None:
        self.conv1d.bias.data.zero_()
        self.dt_bias.data.copy_(hybrid.inverse_softplus(torch.tensor(FIRST_STEP)))
        self.A_log.data.copy_((hybrid.forgetting(self.shape.mixer_heads) / FIRST_STEP).log())

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        s = self.shape
        gate, mixed, dt = self.in_proj(x).split([s.mixer_inner, s.channels, s.mixer_heads], -1)
        kind = self.A_log.dtype
        if past is None:
            tail = mixed.new_zeros(len(x), s.conv_taps - 1, s.channels)
            state = torch.zeros(len(x), s.mixer_heads, s.mixer_dim, s.states, device=x.device, dtype=kind)
        else:
            tail, state = past
        window = torch.cat([tail.to(mixed.dtype), mixed], 1)
        convolved = hybrid.convolved(window, self.conv1d.weight, x.shape[1]) + self.conv1d.bias.to(mixed.dtype)
        of_groups = s.groups * s.states
        inputs, to_state, from_state = F.silu(convolved).to(kind).split([s.mixer_inner, of_groups, of_groups], -1)
        inputs = hybrid.of_heads(inputs, s.mixer_dim)
        with torch.autocast(x.device.type, enabled=False):
            out, state = chunked_scan(
                inputs,
                F.softplus(dt.to(kind) + self.dt_bias).transpose(1, 2),
                -self.A_log.exp(),
                hybrid.of_heads(to_state, s.states),
                hybrid.of_heads(from_state, s.states),
                state,
            )
        out = out + inputs * self.D[:, None, None]
        out = self.norm(out.transpose(1, 2).flatten(-2) * F.silu(gate.to(kind)))
        return self.out_proj(out.to(x.dtype)), (window[:, x.shape[1] :], state)


class Attention(nn.Module):
    def __init__(self, shape: Sizes) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.key_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.key_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (
            hybrid.of_heads(project(x), self.shape.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        start = 0
        if past is not None:
            start = past[0].shape[2]
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return self.o_proj(hybrid.attended(q, k, v, start)), (k, v)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor, past: None) -> tuple[Tensor, None]:
        return self.down_proj(F.relu(self.up_proj(x)).square()), None


MIXERS = {MIXER: Mamba2, ATTENTION: Attention, MLP: Mlp}


class Layer(nn.Module):
    def __init__(self, shape: Shape, letter: str) -> None:
        super().__init__()
        self.norm = Norm(shape.hidden)
        self.mixer = MIXERS[letter](shape)

    def forward(self, x: Tensor, past: Any) -> tuple[Tensor, Any]:
        mixed, past = self.mixer(self.norm(x), past)
        return x + mixed, past


NAMES_IN_CONFIG = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "pattern": "hybrid_override_pattern",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mixer_heads": "mamba_num_heads",
    "mixer_dim": "mamba_head_dim",
    "groups": "n_groups",
    "states": "ssm_state_size",
    "conv_taps": "conv_kernel",
    "inner": "intermediate_size",
}
NAMES_OF_TENSORS = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.": "backbone.",
}


class NemotronH(hybrid.Hybrid):
    family = "nemotron_h"
    full = Shape()
    small = Shape(hidden=64, head_dim=32, mixer_heads=4, mixer_dim=32, groups=1, states=64, inner=128)
    names_in_config = NAMES_IN_CONFIG
    names_of_tensors = NAMES_OF_TENSORS

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, (Layer(shape, letter) for letter in shape.pattern), Norm(shape.hidden))

    def initialize(self) -> None:
        super().initialize()
        for layer in self.model.layers:
            if isinstance(layer.mixer, Mamba2):
                layer.mixer.initialize()

    def is_linear(self, layer: int) -> bool:
        return self.shape.pattern[layer] == MIXER

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": self.family,
            "num_hidden_layers": self.shape.layers,
            "attention_head_dim": self.shape.head_dim,
            # SGLang asks for it by either name
            "mamba_n_groups": self.shape.groups,
            "mamba_hidden_act": "silu",
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": EPS,
            # of SGLang's own kernels
            "chunk_size": 128,
            "use_conv_bias": True,
            "use_bias": False,
            "mlp_bias": False,
        }
