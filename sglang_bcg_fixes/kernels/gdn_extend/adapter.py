# SPDX-License-Identifier: Apache-2.0
"""Hand gated delta net layers to our kernels while their prefill graphs are captured."""

from __future__ import annotations

from typing import Any

import torch

from sglang_bcg_fixes.kernels.gdn_extend import Shape, refusal
from sglang_bcg_fixes.kernels.gdn_extend.declaration import BACKEND, KERNEL
from sglang_bcg_fixes.kernels.linear_extend import serving
from sglang_bcg_fixes.kernels.linear_extend.serving import Original

Tensor = torch.Tensor


class Served(serving.Served):
    """The tables of one runner, and how a layer calls the kernels with them."""

    kernel, backend = KERNEL, BACKEND

    def takes(self, layer: Any, mixed_qkv: Any, a: Any, b: Any) -> bool:
        return self.decide(layer.layer_id, lambda: self.refusal_of(layer, mixed_qkv, a, b))

    def refusal_of(self, layer: Any, mixed_qkv: Any, a: Any, b: Any) -> str | None:
        """Return the reason this layer keeps its break, or None if it is captured."""
        cache = self.cache(layer.layer_id)
        return self.unmeasured(cache.temporal, "cuda") or why_not(layer, mixed_qkv, a, b, cache)

    def extend(self, layer: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        cache, shape = self.cache(layer.layer_id), shape_of(layer)
        rows = mixed_qkv.shape[0]
        tuning = self.implementation.tuning_for(rows)
        output = torch.empty(1, rows, shape.value_heads, shape.values, dtype=mixed_qkv.dtype, device=mixed_qkv.device)
        self.implementation.extend(
            mixed_qkv,
            a,
            b,
            shape=shape,
            conv_weights=layer.conv_weights,
            bias=layer.bias,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            conv=cache.conv[0],
            state=cache.temporal,
            tables=self.tables,
            # allocated from the graph's own pool, which reuses it after this layer
            scratch=self.implementation.Scratch.for_rows(rows, self.tables, shape, mixed_qkv.dtype, tuning),
            output=output[0],
            tracking=self.tracking,
            tuning=tuning,
        )
        return output


OPERATION = serving.Operation(Served)


# the bodies of the patch points


def capture(original: Original, self: Any) -> None:
    OPERATION.capture(original, self)


def forward(original: Original, self: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any) -> Any:
    served = OPERATION.captured(forward_batch)
    if served is not None and served.takes(self, mixed_qkv, a, b):
        return served.extend(self, mixed_qkv, a, b)
    return original(self, forward_batch, mixed_qkv, a, b)


def prepared(result: None, self: Any, forward_batch: Any) -> None:
    OPERATION.prepared(self, forward_batch)


def can_replay(original: Original, self: Any, forward_batch: Any) -> bool:
    return OPERATION.can_replay(original, self, forward_batch)


def before_replay(self: Any) -> None:
    OPERATION.before_replay(self)


# decisions


def shape_of(layer: Any) -> Shape:
    return Shape(
        layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim, width=layer.conv_weights.shape[1]
    )


def why_not(layer: Any, mixed_qkv: Any, a: Any, b: Any, cache: Any) -> str | None:
    """Return the reason this layer keeps its break, or None if the kernels support it."""
    if not all(isinstance(each, Tensor) and each.ndim == 2 for each in (mixed_qkv, a, b, layer.conv_weights)):
        return "projections that are not two-dimensional tensors"
    (conv,), state = cache.conv, cache.temporal
    wrong = {
        f"{layer.num_q_heads} query heads on {layer.num_k_heads} key heads": layer.num_q_heads != layer.num_k_heads,
        "states that are kept as steps": getattr(cache, "replayssm_d", None) is not None,
        "strided state pools": not (conv.is_contiguous() and state.is_contiguous()),
        "projections whose rows are not contiguous": {mixed_qkv.stride(1), a.stride(1), b.stride(1)} != {1},
        "weights that are not contiguous": not (
            all(each.is_contiguous() for each in (layer.conv_weights, layer.A_log, layer.dt_bias))
        ),
    }
    found = next((what for what, applies in wrong.items() if applies), None)
    return found or refusal(shape_of(layer), kind=mixed_qkv.dtype, activation=layer.activation, conv=conv, state=state)
