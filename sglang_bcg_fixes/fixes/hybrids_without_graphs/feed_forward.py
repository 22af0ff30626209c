# SPDX-License-Identifier: Apache-2.0
"""NemotronH: layers that are feed-forward only count as layers that can be captured."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from sglang_bcg_fixes.anatomy.launches import named
from sglang_bcg_fixes.anatomy.runners import SETUP_MODULE
from sglang_bcg_fixes.concern import Launch
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.fixes.hybrids_without_graphs.refusals import asks_for_breaks, is_admitted, why_not
from sglang_bcg_fixes.writing import Source

NEMOTRON = "sglang.srt.models.nemotron_h"
# whose mixers SGLang finds, and breaks the graph at
NEMOTRON_NAMES = ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM")
# where its configuration has the kinds of its layers
PATTERN = "hybrid_override_pattern"
# the class of its layers without a mixer and without attention
FEED_FORWARD = "NemotronHMLPLikeDecoderLayer"
# they number and count what was collected, where a release has them
COUNT = "has_standard_gqa_for_all_local_layers"


def counts_layers(source: Source) -> bool:
    """Tell whether a feed-forward layer of NemotronH is one layer too few for this release."""
    return source.find(f"{SETUP_MODULE}:{COUNT}") is not None


def is_nemotron_with_uncounted_layers(launch: Launch) -> bool | None:
    kinds = {kind for pattern in launch.values(PATTERN) for kind in str(pattern)}
    if not counts_layers(launch.source) or (kinds and not kinds & {"-", "E"}):
        return False
    return named(*NEMOTRON_NAMES).holds(launch)


@contextlib.contextmanager
def feed_forward_counted(model_runner: Any) -> Iterator[None]:
    """Meanwhile layers of NemotronH that are feed-forward only count as layers that can be captured."""
    kind, setup = type(model_runner.model), sys.modules[SETUP_MODULE]
    is_nemotron = kind.__module__ == NEMOTRON and kind.__name__ in NEMOTRON_NAMES
    if not is_nemotron or not hasattr(setup, COUNT) or not asks_for_breaks(model_runner.server_args):
        yield
        return
    count = getattr(setup, COUNT)

    def count_all(*, attention_layer_count: int, **rest: Any) -> bool:
        feed_forward = getattr(sys.modules[NEMOTRON], FEED_FORWARD)
        more = sum(isinstance(layer, feed_forward) for layer in model_runner.model.model.layers)
        # what SGLang itself admits or would refuse anyway is left to it
        return count(attention_layer_count=attention_layer_count, **rest) or (
            count(attention_layer_count=attention_layer_count + more, **rest)
            and is_admitted(model_runner, why_not(model_runner, ()))
        )

    with replaced(setup, COUNT, count_all):
        yield
