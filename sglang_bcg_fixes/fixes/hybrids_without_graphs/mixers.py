# SPDX-License-Identifier: Apache-2.0
"""Granite and LFM2: layers show their mixer while graphs are set up, and a convolution breaks the graph."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.forward_batch import is_captured_into_a_prefill_graph, prefill_batch
from sglang_bcg_fixes.anatomy.short_convolutions import LFM2, LFM2_MOE
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.fixes.hybrids_without_graphs.measured import (
    MEASURED,
    prefill_settings,
    sizes_to_capture,
    why_no_room,
    why_not_inside,
    why_unmeasured,
)
from sglang_bcg_fixes.fixes.hybrids_without_graphs.refusals import ID, asks_for_breaks, is_admitted, why_not
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.short_conv_extend import declaration as short_conv_extend

if TYPE_CHECKING:
    from torch import Tensor

GRANITE = "sglang.srt.models.granitemoehybrid"
# a model's own class, where it is defined, and the name under which its layers have their mixer
MIXERS = {
    ("GraniteMoeHybridForCausalLM", GRANITE): "mamba",
    ("Lfm2ForCausalLM", LFM2): "conv",
    ("Lfm2MoeForCausalLM", LFM2_MOE): "conv",
}
# the name of a layer's linear attention, under which every release looks for it
KNOWN_NAME = "linear_attn"
SSM_BREAK = "ssm_mixer_captured"


@contextlib.contextmanager
def mixers_shown(model_runner: Any, if_measured: bool = False) -> Iterator[None]:
    """Meanwhile layers of the models that are admitted have their mixer under the name that SGLang looks for.

    With `if_measured` these are the models that were measured, up to a size, and only with all mixers inside the graph.
    """
    with contextlib.ExitStack() as stack:
        name = mixer_of(model_runner.model)
        if if_measured and type(model_runner.model).__name__ not in MEASURED:
            name = None
        if name is not None and asks_for_breaks(model_runner.server_args):
            kinds = admitted_layers(model_runner, name, if_measured)
            if kinds and if_measured:
                settings = prefill_settings()
                stack.enter_context(replaced(settings, "bs", sizes_to_capture(model_runner.model, settings)))
            for kind in kinds:
                # of the class: a part that each layer had twice would have its weights twice
                stack.enter_context(replaced(kind, KNOWN_NAME, property(operator.attrgetter(name))))
        yield


def mixer_of(model: Any) -> str | None:
    """Return the name of the mixers in a model that may be admitted."""
    kind = type(model)
    return MIXERS.get((kind.__name__, kind.__module__))


def admitted_layers(model_runner: Any, name: str, if_measured: bool) -> set[type]:
    """Return the classes of the layers with a mixer; none, with the reason in the log, where the model is refused."""
    layers = {number: layer for number, layer in enumerate(model_runner.model.model.layers) if hasattr(layer, name)}
    # nothing but attention: SGLang itself admits it
    if not layers:
        return set()
    mixers = {number: getattr(layer, name) for number, layer in layers.items()}
    calls = broken_calls(model_runner, name, mixers.values())
    reasons = why_not(model_runner, calls)
    if if_measured:
        reasons = itertools.chain(
            reasons, why_unmeasured(model_runner), why_no_room(model_runner), why_not_inside(model_runner, mixers)
        )
    # a default that leaves a model as SGLang serves it is nothing to warn of
    is_wanted = is_admitted(model_runner, reasons, logging.INFO if if_measured else logging.WARNING)
    return set(map(type, layers.values())) if is_wanted else set()


def broken_calls(model_runner: Any, name: str, mixers: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The fix that has to be round what runs each mixer: its backend, or a convolution itself."""
    if name == "mamba":
        backend = getattr(model_runner.attn_backend, "linear_attn_backend", None)
        yield SSM_BREAK, getattr(type(backend), "forward", None)
    else:
        for mixer in mixers:
            yield ID, type(mixer).forward


def break_round_the_convolution(
    original: Callable[..., Tensor], self: Any, hidden_states: Tensor, forward_batch: Any
) -> Tensor:
    if not is_captured_into_a_prefill_graph() or has_a_kernel(self, hidden_states, forward_batch):
        return original(self, hidden_states, forward_batch)
    output = hidden_states.new_empty(hidden_states.shape)
    as_break(original)(self, hidden_states, output)
    return output


def has_a_kernel(mixer: Any, hidden_states: Tensor, forward_batch: Any) -> bool:
    """Tell whether a kernel of this package, which is around the original or this, captures the convolution."""
    if not active.is_used(short_conv_extend.KERNEL.op):
        return False
    from sglang_bcg_fixes.kernels.short_conv_extend import adapter

    return adapter.is_taken(mixer, hidden_states, forward_batch)


@functools.cache
def as_break(original: Callable[..., Tensor]) -> Callable[..., None]:
    def run_on_real_tokens(mixer: Any, hidden_states: Tensor, output: Tensor) -> None:
        batch = prefill_batch()
        real = batch.extend_num_tokens
        output[:real].copy_(original(mixer, hidden_states[:real], batch))
        output[real:].zero_()

    broken: Callable[..., None] = graph_break.decorate(run_on_real_tokens, None)
    return broken
