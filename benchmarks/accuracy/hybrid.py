# SPDX-License-Identifier: Apache-2.0
"""Hybrid models in plain torch, small enough to be trained in minutes: what the families have in common.

A family is an architecture with a file of its own, which says what its layers are; families.py has the list. Here are
the model around the layers, parts that several have, and the folder that SGLang loads.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# tokens that a linear layer takes at once
CHUNK = 64
# half of what the heads of a linear layer hold is gone after 3 ... 3000 tokens when training begins
FASTEST, SLOWEST = 0.2, 0.0002


def normalized(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def convolved(window: Tensor, weight: Tensor, length: int) -> Tensor:
    """Causal depthwise convolution: of `window` (batch, time, channels) with nn.Conv1d's weight, the last tokens."""
    taps = weight.squeeze(1).to(window.dtype)
    # a sum of shifts: torch's depthwise convolution is slow in the backward pass
    return sum(window[:, tap : tap + length] * taps[:, tap] for tap in range(taps.shape[1]))


def attended(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal attention of (batch, heads, time, head dim), the first query being token `start`; heads side by side."""
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(start) if start else None
    out = F.scaled_dot_product_attention(
        q,
        *(part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v)),
        attn_mask=seen,
        is_causal=seen is None,
    )
    return out.transpose(1, 2).flatten(-2)


def of_heads(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def walked(
    added: Tensor, known: Tensor, q: Tensor, inside: Tensor, kept: Tensor, k: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Walk over the chunks of a delta rule, the third dimension; `known` is taken off for what the state holds."""
    outputs = []
    for n in range(q.shape[2]):
        u = added[:, :, n] - known[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + inside[:, :, n] @ u)
        state = state * kept[:, :, n] + k[:, :, n].mT @ u
    return torch.cat(outputs, 2), state


def rotated(x: Tensor, start: int, size: int, theta: float) -> Tensor:
    """Have positions from `start` on turn the first `size` coordinates of each head; their halves go together."""
    speed = theta ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angle = torch.arange(start, start + x.shape[2], device=x.device).unsqueeze(1) * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def forgetting(heads: int) -> Tensor:
    """Rates at which heads forget, for a start that has all of them."""
    return torch.logspace(math.log10(FASTEST), math.log10(SLOWEST), heads)


def inverse_softplus(x: Tensor) -> Tensor:
    return x.expm1().log()


class Layer(nn.Module):
    """A norm, a mixer, a norm and an MLP, in this order and under their names in checkpoints."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.names = tuple(parts)
        for name, part in parts.items():
            self.add_module(name, part)

    @property
    def mixer(self) -> Any:
        return getattr(self, self.names[1])

    def forward(self, x: Tensor, past: Any) -> tuple[Tensor, Any]:
        before_mixer, mixer, before_mlp, mlp = (getattr(self, name) for name in self.names)
        mixed, past = mixer(before_mixer(x), past)
        x = x + mixed
        return x + mlp(before_mlp(x)), past


class Stack(nn.Module):
    def __init__(self, shape: Any, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class Hybrid(nn.Module):
    """Embedding, layers, a norm, and a head; a layer takes its input and its past, and returns output and state."""

    family: ClassVar[str]
    # the shape to train, and one for a CPU
    full: ClassVar[Any]
    small: ClassVar[Any]
    # what fields of a shape are called in a Hugging Face folder; a dot leads into an object there
    names_in_config: ClassVar[dict[str, str]]
    # beginnings of our tensors' names, and what they are in that folder
    names_of_tensors: ClassVar[dict[str, str]] = {}

    def __init__(self, shape: Any, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.model = Stack(shape, layers, norm)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.initialize()

    def initialize(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            spread = parameter.shape[-1] ** -0.5
            if name.endswith(
                ("o_proj.weight", "out_proj.weight", "down_proj.weight", "output_linear.weight", "w2.weight")
            ):
                spread /= math.sqrt(2 * self.shape.layers)
            if "embed_tokens" in name:
                spread = 1.0
            nn.init.normal_(parameter, std=spread)

    def is_linear(self, layer: int) -> bool:
        """Tell whether it keeps a state of one size, however long a sequence is."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Return what a folder says of this family, beside the fields of the shape."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, past: list[Any] | None = None) -> tuple[Tensor, list[Any]]:
        """Logits, and what the next part of the same sequences needs: for each layer a pair, or None."""
        x = self.model.embed_tokens(tokens)
        states = []
        for number, layer in enumerate(self.model.layers):
            x, state = layer(x, past[number] if past else None)
            states.append(state)
        return self.lm_head(self.model.norm(x)), states


def renamed(tensors: dict[str, Tensor], beginnings: dict[str, str]) -> dict[str, Tensor]:
    """By the first beginning that a name has."""

    def new(name: str) -> str:
        found = next((old for old in beginnings if name.startswith(old)), "")
        return beginnings.get(found, "") + name.removeprefix(found)

    return {new(name): tensor for name, tensor in tensors.items()}


def weights(model: Hybrid) -> dict[str, Tensor]:
    """As in a checkpoint: bfloat16, but for the decay's logarithm, which SGLang keeps in float32."""
    found = {
        name: value.detach().cpu().to(torch.float32 if name.endswith("A_log") else torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    return renamed(found, model.names_of_tensors)


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """With an object for each beginning of names before a dot."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        beginning, dot, rest = name.partition(".")
        (found.setdefault(beginning, {}) if dot else found)[rest or name] = value
    return found


def save(model: Hybrid, folder: pathlib.Path, end: int, start: int) -> int:
    """Write what SGLang loads; return the size of the weights' file."""
    config = {
        **nested({name: getattr(model.shape, field) for field, name in model.names_in_config.items()}),
        **model.config(),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": start,
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(weights(model), folder / "model.safetensors", {"format": "pt"})
    return (folder / "model.safetensors").stat().st_size


def load(family: type[Any], folder: pathlib.Path) -> Hybrid:
    config = json.loads((folder / "config.json").read_text())
    values = {
        field: functools.reduce(dict.__getitem__, name.split("."), config)
        for field, name in family.names_in_config.items()
    }
    shape = type(family.full)(**values)
    model: Hybrid = family(shape)
    found = renamed(load_file(folder / "model.safetensors"), {new: old for old, new in model.names_of_tensors.items()})
    model.load_state_dict({name: value.float() for name, value in found.items()})
    return model
