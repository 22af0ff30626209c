# SPDX-License-Identifier: Apache-2.0
"""Hand lightning attention layers to a kernel while their prefill graphs are captured."""

from __future__ import annotations

from typing import Any

import torch

from sglang_bcg_fixes.kernels.lightning_extend import Shape, refusal
from sglang_bcg_fixes.kernels.lightning_extend.declaration import BACKEND, KERNEL
from sglang_bcg_fixes.kernels.linear_extend import serving
from sglang_bcg_fixes.kernels.linear_extend.serving import FallBack, Original

Tensor = torch.Tensor


class Served(serving.Served):
    """The tables of one runner, and how a layer calls the kernels with them."""

    kernel, backend = KERNEL, BACKEND

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.hybrid = runner.model_runner.attn_backend
        if self.tracking and not self.form.can_keep_checkpoints():
            raise FallBack("checkpoints for the prefix cache, which the kernels of this release do not write")

    def takes(self, layer: Any, q: Any, k: Any, v: Any, others: dict[str, Any]) -> bool:
        if is_full_attention(self.hybrid, layer):
            return False
        linear = self.hybrid.linear_attn_backend
        return self.decide(layer.layer_id, lambda: why_not(layer, linear, self.cache(layer.layer_id), q, k, v, others))

    def extend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run a layer on all rows of a graph; the answer has the shape of SGLang's eager one."""
        shape = shape_of(layer)
        q, k, v = (each.view(-1, shape.heads, shape.head) for each in (q, k, v))
        found: Tensor = self.form.extend(
            *(q, k, v),
            decay=self.hybrid.linear_attn_backend.tp_slope[layer.layer_id],
            scale=layer.scaling,
            state=self.cache(layer.layer_id).temporal,
            tables=self.tables,
            tracking=self.tracking,
        )
        return found


OPERATION = serving.Operation(Served)


# the bodies of the patch points


def capture(original: Original, self: Any) -> None:
    OPERATION.capture(original, self)


def forward(original: Original, self: Any, q: Any, k: Any, v: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
    served = OPERATION.captured(forward_batch)
    if served is not None and served.takes(self, q, k, v, named):
        return served.extend(self, q, k, v)
    return original(self, q, k, v, forward_batch, *rest, **named)


def prepared(result: None, self: Any, forward_batch: Any) -> None:
    OPERATION.prepared(self, forward_batch)


def can_replay(original: Original, self: Any, forward_batch: Any) -> bool:
    return OPERATION.can_replay(original, self, forward_batch)


def before_replay(self: Any) -> None:
    OPERATION.before_replay(self)


# decisions


def is_full_attention(hybrid: Any, layer: Any) -> bool:
    """Ask as SGLang routes: such a layer is of the same class as one of full attention."""
    ask = getattr(hybrid, "_is_full_attn", None)
    return bool(ask(layer)) if ask else layer.layer_id in hybrid.full_attn_layers


def shape_of(layer: Any) -> Shape:
    return Shape(layer.tp_q_head_num, layer.head_dim)


def why_not(layer: Any, linear: Any, cache: Any, q: Any, k: Any, v: Any, others: dict[str, Any]) -> str | None:
    """Return the reason this layer keeps its break, or None if the kernels support it."""
    given = sorted(name for name, value in others.items() if value is not None and name != "save_kv_cache")
    wrong = {
        f"linear_backend {linear.linear_backend}": linear.linear_backend != "seg_la",
        f"a layer that is given {', '.join(given)}": bool(given),
        "queries in the dtype of a cache with scales": (
            linear.kv_cache_dtype_str != "auto" and layer.k_scale is not None
        ),
        "projections that are not tensors": not all(isinstance(each, Tensor) for each in (q, k, v)),
        f"keys of {layer.qk_head_dim} and values of {layer.v_head_dim}": layer.qk_head_dim != layer.v_head_dim,
    }
    found = next((what for what, applies in wrong.items() if applies), None)
    if found:
        return found
    shape = shape_of(layer)
    q, k, v = (each.view(len(each), -1, shape.head) for each in (q, k, v))
    return refusal(shape, q, k, v, cache.temporal)
