# SPDX-License-Identifier: Apache-2.0
"""Hand short convolutions to our kernels while their prefill graphs are captured."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from sglang_bcg_fixes.kernels.linear_extend import serving
from sglang_bcg_fixes.kernels.linear_extend.serving import FallBack, Original
from sglang_bcg_fixes.kernels.short_conv_extend import Shape, refusal
from sglang_bcg_fixes.kernels.short_conv_extend.declaration import BACKEND, BACKEND_MODULE, KERNEL, OLD_BACKEND

Tensor = torch.Tensor


class Served(serving.Served):
    """The tables of one runner, and how a layer calls the kernels with them."""

    kernel = KERNEL

    def __init__(self, runner: Any) -> None:
        self.backend = BACKEND if importlib.util.find_spec(BACKEND_MODULE) else OLD_BACKEND
        super().__init__(runner)
        if self.tracking:
            raise FallBack("checkpoints for the prefix cache, which such layers do not write")

    def takes(self, layer: Any, hidden_states: Any) -> bool:
        number = layer.layer_idx
        return self.decide(number, lambda: self.refusal_of_mixer(layer, hidden_states, number))

    def refusal_of_mixer(self, mixer: Any, hidden_states: Any, layer_id: int) -> str | None:
        return why_not(mixer, hidden_states, self.cache(layer_id))

    def mix(self, layer: Any, hidden_states: Tensor) -> Tensor:
        """Run a layer, from its input projection to its output projection, on all rows of a graph."""
        projected, _ = layer.in_proj(hidden_states)
        before, after, x = projected.chunk(3, dim=-1)
        inputs = before * x
        if inputs.dtype != hidden_states.dtype:
            raise RuntimeError(
                f"bcg-fixes {KERNEL.op}: layer {layer.layer_idx} projects {hidden_states.dtype} to {inputs.dtype}. "
                f"{self.off}"
            )
        shape, rows = shape_of(layer), len(inputs)
        output, tuning = torch.empty_like(inputs), self.implementation.tuning_for(shape)
        self.implementation.extend(
            inputs,
            shape=shape,
            conv_weights=layer.conv_weight,
            bias=layer.conv_bias,
            conv=self.cache(layer.layer_idx).conv[0],
            tables=self.tables,
            # allocated from the graph's own pool, which reuses it after this layer
            scratch=self.implementation.Scratch.for_rows(rows, self.tables, shape, inputs.dtype, tuning),
            output=output,
            tuning=tuning,
        )
        found: Tensor
        found, _ = layer.out_proj(after * output)
        return found


OPERATION = serving.Operation(Served)


def is_taken(layer: Any, hidden_states: Any, forward_batch: Any) -> bool:
    """Tell whether this call of a layer, while a prefill graph is captured, needs no break."""
    served = OPERATION.captured(forward_batch)
    return served is not None and served.takes(layer, hidden_states)


# the bodies of the patch points


def capture(original: Original, self: Any) -> None:
    OPERATION.capture(original, self)


def forward(original: Original, self: Any, hidden_states: Any, forward_batch: Any) -> Any:
    if not is_taken(self, hidden_states, forward_batch):
        return original(self, hidden_states, forward_batch)
    return OPERATION.capturing.mix(self, hidden_states)  # type: ignore[union-attr]


def prepared(result: None, self: Any, forward_batch: Any) -> None:
    OPERATION.prepared(self, forward_batch)


def can_replay(original: Original, self: Any, forward_batch: Any) -> bool:
    return OPERATION.can_replay(original, self, forward_batch)


def before_replay(self: Any) -> None:
    OPERATION.before_replay(self)


# decisions


def shape_of(layer: Any) -> Shape:
    return Shape(*layer.conv_weight.shape)


def why_not(layer: Any, hidden_states: Any, cache: Any) -> str | None:
    """Return the reason this layer keeps its break, or None if the kernels support it."""
    if not isinstance(hidden_states, Tensor) or hidden_states.ndim != 2:
        return "hidden states that are not a two-dimensional tensor"
    if not layer.conv_weight.is_contiguous():
        return "weights that are not contiguous"
    return refusal(shape_of(layer), kind=hidden_states.dtype, conv=cache.conv[0])
