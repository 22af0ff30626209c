# SPDX-License-Identifier: Apache-2.0
"""Launches of these models, as cases of `bcg-fixes verify` without prompts: the servers start and are not asked."""

from __future__ import annotations

import dataclasses

from benchmarks.bench import hybrid_models, mamba2_model, model
from sglang_bcg_fixes.anatomy.launches import has_breakable_graphs_by_default
from sglang_bcg_fixes.fixes.hybrids_without_graphs import feed_forward
from sglang_bcg_fixes.lab.verify import cases
from sglang_bcg_fixes.source.tree import Source

MODELS = "benchmarks.bench.model"
# to which SGLang refuses prefill graphs in every release
WITHOUT_GRAPHS = (hybrid_models.GRANITE, hybrid_models.LFM2)
CASE = cases.Case(
    "bench",
    "A start.",
    model.NAME,
    script=lambda buckets: [],
    extra=lambda source: {"--context-length": 16384, "--max-total-tokens": 65536},
)


def is_admitted_by_a_fix(case: cases.Case, source: Source) -> bool:
    """Tell whether SGLang refuses the model prefill graphs, which a fix gives it if its flag asks."""
    is_nemotron = case.model == mamba2_model.NEMOTRON
    return case.model in WITHOUT_GRAPHS or (is_nemotron and feed_forward.counts_layers(source))


# in most releases these do not start with the attention backend of the other cases
OF_HYBRIDS = dataclasses.replace(CASE, extra=lambda source: {**CASE.extra(source), "--attention-backend": False})
# by model name; Qwen3.5 is started as users start it
CASES = {
    model.NAME: CASE,
    model.DENSE: dataclasses.replace(
        CASE,
        model=model.DENSE,
        module="sglang.srt.models.qwen3_5_text",
        served=has_breakable_graphs_by_default,
        by_default=True,
    ),
    mamba2_model.NEMOTRON: dataclasses.replace(
        OF_HYBRIDS,
        model=mamba2_model.NEMOTRON,
        module="sglang.srt.models.nemotron_h",
    ),
    mamba2_model.FALCON: dataclasses.replace(
        OF_HYBRIDS, model=mamba2_model.FALCON, module="sglang.srt.models.falcon_h1"
    ),
    **{
        name: dataclasses.replace(OF_HYBRIDS, model=name, module=f"sglang.srt.models.{module}")
        for name, module in (
            (hybrid_models.GRANITE, "granitemoehybrid"),
            (hybrid_models.LFM2, "lfm2"),
            (hybrid_models.KIMI, "kimi_linear"),
        )
    },
}
