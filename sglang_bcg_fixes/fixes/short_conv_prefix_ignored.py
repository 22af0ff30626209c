# SPDX-License-Identifier: Apache-2.0
"""LFM2 answers wrongly on prefix-cache hits and after chunked prefill

Symptom: LFM2 and LFM2-MoE answer wrongly where a prefix is found in the prefix cache, which is on by default, and where
a prompt is prefilled in chunks: after the seam each of their short convolutions has lost the tokens before it. The
fewer tokens follow, the more of the answer is wrong. Nothing in the log.
Cause: The layers tell the convolution of a prefill that no request has a window of earlier inputs. Decode reads it, and
so does prefill from 0.5.12 on.
Change: The convolution of a prefill learns which requests have a prefix, as from 0.5.12 on; it then begins with the
window in their slots. A call that says so itself is left as it is, and so is decode.
Remove when: 0.5.11 need not be served.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.launches import named
from sglang_bcg_fixes.anatomy.short_convolutions import LAYER, LFM2, LFM2_MOE, MOE_LAYER
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.model import Workaround
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

if TYPE_CHECKING:
    from torch import Tensor

CONVOLVE, PREFIXES = "causal_conv1d_fn", "has_initial_state"


def probe(source: Source) -> Finding:
    if not all(map(source.has_module, (LFM2, LFM2_MOE))):
        return absent("this release has no LFM2, or none with experts")
    layers = [source.need(layer) for layer in (LAYER, MOE_LAYER)]
    if not all(layer.mentions(f"{CONVOLVE}(") and layer.mentions(f"{PREFIXES}=") for layer in layers):
        return drifted("the layers convolve", *layers)
    if any(map(ignores_prefixes, layers)):
        return affected("the convolution of a prefill is told that no request has a prefix", *layers)
    return fixed("the convolution of a prefill is told which requests have a prefix", *layers)


def ignores_prefixes(layer: Definition) -> bool:
    return layer.mentions(f"{PREFIXES}=None")


def is_wrong(layer: str, source: Source) -> bool:
    return ignores_prefixes(source.need(layer))


def begin_with_the_window(
    original: Callable[..., Tensor], self: Any, hidden_states: Tensor, forward_batch: Any
) -> Tensor:
    return with_prefixes_told(LFM2, original, self, hidden_states, forward_batch)


def begin_with_the_window_moe(
    original: Callable[..., Tensor], self: Any, hidden_states: Tensor, forward_batch: Any
) -> Tensor:
    return with_prefixes_told(LFM2_MOE, original, self, hidden_states, forward_batch)


def with_prefixes_told(
    module: str, original: Callable[..., Tensor], self: Any, hidden_states: Tensor, forward_batch: Any
) -> Tensor:
    mode = forward_batch.forward_mode
    if mode.is_decode() or mode.is_idle():
        return original(self, hidden_states, forward_batch)
    of_layers = sys.modules[module]
    convolve = getattr(of_layers, CONVOLVE)

    def convolve_behind_prefixes(*args: Any, cache_indices: Tensor, **named: Any) -> Tensor:
        if named.get(PREFIXES) is None:
            named[PREFIXES] = forward_batch.extend_prefix_lens[: len(cache_indices)] > 0
        found: Tensor = convolve(*args, cache_indices=cache_indices, **named)
        return found

    with replaced(of_layers, CONVOLVE, convolve_behind_prefixes):
        return original(self, hidden_states, forward_batch)


FIX = Fix(
    probe=probe,
    patches=(
        PatchPoint((LAYER,), How.AROUND, begin_with_the_window, needed=functools.partial(is_wrong, LAYER)),
        PatchPoint((MOE_LAYER,), How.AROUND, begin_with_the_window_moe, needed=functools.partial(is_wrong, MOE_LAYER)),
    ),
    workarounds=(
        Workaround(
            flags="--disable-radix-cache --chunked-prefill-size -1",
            option="--disable-radix-cache",
            effect="no prompt goes on behind a prefix: correct, without a prefix cache, and long prompts in one piece",
        ),
    ),
    verify=("lfm2_prefill_graph",),
    concerns=wrong(named("Lfm2*")),
)
