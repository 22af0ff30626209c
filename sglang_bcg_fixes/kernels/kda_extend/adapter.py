# SPDX-License-Identifier: Apache-2.0
"""Hand Kimi delta attention layers to our kernels while their prefill graphs are captured."""

from __future__ import annotations

from typing import Any

import torch

from sglang_bcg_fixes.kernels.kda_extend import Shape, refusal
from sglang_bcg_fixes.kernels.kda_extend.declaration import BACKEND, KERNEL, MEASURED
from sglang_bcg_fixes.kernels.linear_extend import serving
from sglang_bcg_fixes.kernels.linear_extend.serving import FallBack, Original

Tensor = torch.Tensor
# dimensions of gates that a model has split by heads, and that it has not
SPLIT, FLAT = 4, 3


class Served(serving.Served):
    """The tables of one runner, and how a layer calls the kernels with them."""

    kernel, backend = KERNEL, BACKEND

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        if getattr(serving.backend_of(runner.model_runner), "accept_lens_pool", None) is not None:
            raise FallBack("accepted states that an extend stages")

    def refuse_model(self, model_runner: Any) -> None:
        self.refuse_unmeasured(model_runner, MEASURED)

    def takes(self, layer: Any, mixed_qkv: Any, a: Any, b: Any) -> bool:
        layer_id = layer.layer_id
        cache = self.cache(layer_id)
        return self.decide(
            layer_id, lambda: self.unmeasured(cache.temporal, "triton") or why_not(layer, mixed_qkv, a, b, cache)
        )

    def extend(self, layer: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        cache, shape = self.cache(layer.layer_id), shape_of(layer)
        rows = mixed_qkv.shape[0]
        tuning = self.implementation.tuning_for(rows)
        output = torch.empty(1, rows, shape.heads, shape.values, dtype=mixed_qkv.dtype, device=mixed_qkv.device)
        self.implementation.extend(
            mixed_qkv,
            a[0].flatten(1),
            b[0],
            shape=shape,
            conv_weights=layer.conv_weights,
            bias=layer.bias,
            A_log=layer.A_log.flatten(),
            dt_bias=layer.dt_bias,
            # as SGLang's eager backend tells its kernel
            is_squashed=a.ndim == SPLIT,
            conv=cache.conv[0].transpose(1, 2),
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
        layer.num_v_heads,
        layer.head_k_dim,
        layer.head_v_dim,
        width=layer.conv_weights.shape[1],
        lower_bound=layer.lower_bound,
    )


def why_not(layer: Any, mixed_qkv: Any, a: Any, b: Any, cache: Any) -> str | None:
    """Return the reason this layer keeps its break, or None if the kernels support it."""
    weights = (layer.conv_weights, layer.A_log, layer.dt_bias)
    if not all(isinstance(each, Tensor) for each in (mixed_qkv, a, b, *weights)):
        return "projections that are not tensors"
    heads, rows = layer.num_v_heads, len(mixed_qkv)
    sizes = {SPLIT: (1, rows, heads, layer.head_k_dim), FLAT: (1, rows, heads * layer.head_k_dim)}
    (conv,), state = cache.conv, cache.temporal
    unlike = layer.num_q_heads, layer.num_k_heads
    wrong = {
        f"{heads} value heads on {unlike[1]} key and {unlike[0]} query heads": unlike != (heads, heads),
        f"gates of {tuple(a.shape)}": a.shape != sizes.get(a.ndim),
        f"betas of {tuple(b.shape)}": b.shape != (1, rows, heads),
        "states that are kept as steps": any(
            getattr(cache, name, None) is not None for name in ("replayssm_d", "replayssm_rawv")
        ),
        "strided state pools": not (conv.is_contiguous() and state.is_contiguous()),
        "projections whose rows are not contiguous": {each.stride(-1) for each in (mixed_qkv, a, b)} != {1},
        "weights that are not contiguous": not all(each.is_contiguous() for each in weights),
    }
    found = next((what for what, applies in wrong.items() if applies), None)
    return found or refusal(
        shape_of(layer),
        kind=mixed_qkv.dtype,
        activation=layer.activation,
        conv=conv.transpose(1, 2),
        state=state,
    )
