# SPDX-License-Identifier: Apache-2.0
"""Hand Mamba2 mixers to our kernels while their prefill graphs are captured."""

from __future__ import annotations

from typing import Any

import torch

from sglang_bcg_fixes.anatomy.forward_batch import prefill_batch, prefill_context
from sglang_bcg_fixes.kernels.linear_extend import serving
from sglang_bcg_fixes.kernels.linear_extend.serving import Original
from sglang_bcg_fixes.kernels.mamba2_extend import Shape, refusal
from sglang_bcg_fixes.kernels.mamba2_extend.declaration import BACKEND, KERNEL, measured_with

Tensor = torch.Tensor


class Served(serving.Served):
    """The tables of one runner, and how a mixer calls the kernels with them."""

    kernel, backend = KERNEL, BACKEND

    def refuse_model(self, model_runner: Any) -> None:
        self.refuse_unmeasured(model_runner, measured_with(self.selected.forms.values()))

    def takes(self, mixer: Any, hidden_states: Any, layer_id: int) -> bool:
        return self.decide(layer_id, lambda: self.refusal_of_mixer(mixer, hidden_states, layer_id))

    def refusal_of_mixer(self, mixer: Any, hidden_states: Any, layer_id: int) -> str | None:
        cache = self.cache(layer_id)
        return self.unmeasured(cache.temporal, "triton") or why_not(mixer, hidden_states, cache)

    def mix(
        self, mixer: Any, hidden_states: Tensor, layer_id: int, mup_vector: Any = None, is_reduced_later: bool = False
    ) -> Any:
        """Run a mixer, from its input projection to its output projection, on all rows of a graph.

        Leave the sum over ranks to the next layer's norm where SGLang does: in graphs of few rows.
        """
        projected, _ = mixer.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        shape, rows = shape_of(mixer), len(projected)
        if projected.dtype != hidden_states.dtype or projected.stride(1) != 1:
            raise RuntimeError(
                f"bcg-fixes {KERNEL.op}: layer {layer_id} projects {hidden_states.dtype} to {projected.dtype} with the "
                f"strides {projected.stride()}. {self.off}"
            )
        gate, inputs, dt = torch.split(projected, [shape.inner, shape.channels, shape.heads], 1)
        output = torch.empty(rows, shape.heads, shape.head, dtype=projected.dtype, device=projected.device)
        cache, tuning = self.cache(layer_id), self.implementation.tuning_for(shape)
        self.implementation.extend(
            inputs,
            dt,
            shape=shape,
            conv_weights=mixer.conv1d.weight.flatten(1),
            bias=mixer.conv1d.bias,
            A=mixer.A,
            D=mixer.D,
            dt_bias=mixer.dt_bias,
            conv=cache.conv[0],
            state=cache.temporal,
            tables=self.tables,
            # allocated from the graph's own pool, which reuses it after this layer
            scratch=self.implementation.Scratch.for_rows(rows, self.tables, shape, projected.dtype, tuning),
            output=output,
            tracking=self.tracking,
            tuning=tuning,
        )
        found, _ = mixer.out_proj(mixer.norm(output.flatten(1), gate), skip_all_reduce=is_reduced_later)
        return found


OPERATION = serving.Operation(Served)


def is_taken(mixer: Any, hidden_states: Any, layer_id: int) -> bool:
    """Tell whether this call of a mixer, while a prefill graph is captured, needs no break."""
    if OPERATION.capturing is None:
        return False
    served = OPERATION.captured(prefill_batch())
    return served is not None and served.takes(mixer, hidden_states, layer_id)


# the bodies of the patch points


def capture(original: Original, self: Any) -> None:
    OPERATION.capture(original, self)


def forward(
    original: Original, self: Any, mixer: Any, hidden_states: Any, output: Any, layer_id: int, **rest: Any
) -> Any:
    if not is_taken(mixer, hidden_states, layer_id):
        return original(self, mixer, hidden_states, output, layer_id, **rest)
    given = rest.get("mup_vector"), bool(rest.get("should_allreduce_fusion"))
    found = OPERATION.capturing.mix(mixer, hidden_states, layer_id, *given)  # type: ignore[union-attr]
    return found if output is None else output.copy_(found)


def nemotron_break(
    original: Original, hidden_states: Any, output: Any, layer_id: int, *rest: Any, **named: Any
) -> None:
    mixer = prefill_context()().attention_layers[layer_id].mixer if OPERATION.capturing else None
    if mixer is None or not is_taken(mixer, hidden_states, layer_id):
        original(hidden_states, output, layer_id, *rest, **named)
        return
    # the only other argument, of the releases that have one
    is_reduced_later = any(rest) or any(named.values())
    found = OPERATION.capturing.mix(  # type: ignore[union-attr]
        mixer, hidden_states, layer_id, is_reduced_later=is_reduced_later
    )
    output.view(found.shape).copy_(found)


def prepared(result: None, self: Any, forward_batch: Any) -> None:
    OPERATION.prepared(self, forward_batch)


def can_replay(original: Original, self: Any, forward_batch: Any) -> bool:
    return OPERATION.can_replay(original, self, forward_batch)


def before_replay(self: Any) -> None:
    OPERATION.before_replay(self)


# decisions


def shape_of(mixer: Any) -> Shape:
    ranks = mixer.tp_size
    return Shape(
        mixer.num_heads // ranks,
        mixer.n_groups // ranks,
        mixer.head_dim,
        mixer.ssm_state_size,
        width=mixer.conv1d.weight.shape[-1],
    )


def why_not(mixer: Any, hidden_states: Any, cache: Any) -> str | None:
    """Return the reason this layer keeps its break, or None if the kernels support it."""
    if not isinstance(hidden_states, Tensor) or hidden_states.ndim != 2:
        return "hidden states that are not a two-dimensional tensor"
    (conv,), state = cache.conv, cache.temporal
    weights = (mixer.conv1d.weight, mixer.A, mixer.D, mixer.dt_bias)
    wrong = {
        "strided state pools": not (conv.is_contiguous() and state.is_contiguous()),
        "weights that are not contiguous": not all(each.is_contiguous() for each in weights),
    }
    found = next((what for what, applies in wrong.items() if applies), None)
    return found or refusal(
        shape_of(mixer), kind=hidden_states.dtype, activation=mixer.activation, conv=conv, state=state
    )
