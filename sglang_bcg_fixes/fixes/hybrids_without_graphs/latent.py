# SPDX-License-Identifier: Apache-2.0
"""Ling: layers show their latent attention under the name that SGLang looks for."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator
from typing import Any

from sglang_bcg_fixes.anatomy import latent_attention
from sglang_bcg_fixes.anatomy.attention_break import join_heads
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.fixes.hybrids_without_graphs.refusals import asks_for_breaks, is_admitted, why_not

BAILING = "sglang.srt.models.bailing_moe_linear"
# whose linear layers SGLang finds, but not its latent attention, which all its layers have under this name
BAILING_NAME = "BailingMoeV2_5ForCausalLM"
BAILING_ATTENTION = "attention"
# the name under which every release looks for latent attention, and what that is called there
LATENT_NAME, LATENT_PART = "self_attn", "attn_mqa"


@contextlib.contextmanager
def latent_attention_shown(model_runner: Any) -> Iterator[None]:
    """Meanwhile Bailing's layers have their attention under the name that SGLang looks for latent attention at."""
    with contextlib.ExitStack() as stack:
        kind = type(model_runner.model)
        if (kind.__name__, kind.__module__) == (BAILING_NAME, BAILING) and asks_for_breaks(model_runner.server_args):
            # a layer of another pipeline stage has none
            layers = [layer for layer in model_runner.model.model.layers if hasattr(layer, BAILING_ATTENTION)]
            linear = [layer for layer in layers if not hasattr(layer.attention, LATENT_PART)]
            reasons = itertools.chain(why_not(model_runner, ()), latent_attention.why_not_captured(model_runner))
            # nothing but grouped queries: SGLang itself admits it
            if len(linear) < len(layers) and is_admitted(model_runner, reasons):
                for layer_kind in set(map(type, layers)):
                    shown = property(operator.attrgetter(BAILING_ATTENTION))
                    stack.enter_context(replaced(layer_kind, LATENT_NAME, shown))
                for layer in linear:
                    stack.callback(layer.attention.attn.register_forward_hook(join_heads).remove)
        yield
