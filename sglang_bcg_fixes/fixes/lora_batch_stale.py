# SPDX-License-Identifier: Apache-2.0
"""LoRA: another request's adapter answers, or a crash (forced prefill graphs)

Symptom: With --enable-lora, prompts are answered with another request's adapter or with none, or a prefill ends with
"illegal memory access". Only when forced: --enforce-piecewise-cuda-graph together with --enable-breakable-cuda-graph
before 0.5.14, an explicit prefill backend later; by default LoRA turns prefill graphs off.
Cause: For each batch SGLang builds new lists that map tokens to adapters, and the layers read them from the LoRA
backend. A breakable capture has no adapters and prepares no lists, so the graph reads those of the last batch before
it, the warm-up's or a decode graph's, whoever owns their memory by then.
Change: With LoRA no batch is replayed by a graph that has captured the layers; one warning says so. Batches without an
adapter are refused too: their graph reads the same memory. Compiled (tc_piecewise) graphs are left as they are.
Remove when: No release before 0.5.17 has to be served.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, LORA
from sglang_bcg_fixes.anatomy.runners import MAY_REPLAY, OLD_PREFILL, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import flag_of
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, wrong

logger = logging.getLogger("sglang_bcg_fixes")

ID = "lora_batch_stale"


def probe(source: Source) -> Finding:
    gate = source.need(*MAY_REPLAY)
    if "self.model_runner.lora_manager.can_use_prefill_cuda_graph" in gate.calls:
        return fixed("a batch with adapters is checked against the graph's lists", gate)
    made = source.need(f"{OLD_PREFILL}._build_capture_forward_batch", f"{PREFILL}.capture_prepare")
    if "lora_ids=None" in made.text and "lora" not in gate.text:
        return affected("the capture prepares no adapters, and every batch is replayed", gate, made)
    return drifted("adapters are captured", gate, made)


def refuse_adapters(original: Callable[..., bool], self: Any, forward_batch: Any) -> bool:
    can_run = original(self, forward_batch)
    # compiled graphs have no separate layers; the first breakable runner captures the whole model
    captures_layers = getattr(self, "layer_model", self) is not None
    if can_run and captures_layers and self.model_runner.server_args.enable_lora:
        warn_once()
        return False
    return can_run


@functools.cache
def warn_once() -> None:
    ways = " or ".join(way.flags for way in PREFILL_GRAPHS_OFF)
    logger.warning(
        "bcg-fixes %s: with LoRA every prefill runs without its graph, which would apply the adapters of an earlier "
        "batch. %s starts without prefill graphs and saves their memory, %s=off replays them",
        ID,
        ways,
        flag_of(ID),
    )


FIX = Fix(
    probe=probe,
    patches=(PatchPoint(MAY_REPLAY, How.AROUND, refuse_adapters),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(LORA, ASKED_FOR),
)
