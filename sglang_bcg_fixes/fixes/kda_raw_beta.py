# SPDX-License-Identifier: Apache-2.0
"""Kimi-Linear and Kimi K3 answer every replayed prefill wrongly (explicit breakable graphs)

Symptom: Kimi-Linear and Kimi K3 answer wrong with HTTP 200 to every prompt that a prefill graph replays. A tiny
Kimi-Linear gave another first token to 96 of 99 prompts on an H200. Nothing in the log. Only with
--cuda-graph-backend-prefill breakable, as in recipes for K3: by default these models have no prefill graphs.
Cause: The models hand over betas without their sigmoid, and the eager backend tells its kernel so. The captured form
tells it so only if the gate is flat. These two models split the gate by heads, so the kernel multiplies the state with
numbers of any size and sign.
Change: The captured form gets the gate flat, as GLM-5 Next hands it over. It is the same memory, and it is split again
at once. Pull request 39495 would give these models prefill graphs by default: then every such server has this defect.
Remove when: No release from 0.5.22 on that decides by the shape of the gate has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import DELTA_ATTENTION, PREFILL_GRAPHS, named
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.concern import Condition, Launch
from sglang_bcg_fixes.writing import (
    Finding,
    Fix,
    How,
    PatchPoint,
    Source,
    absent,
    affected,
    drifted,
    fixed,
    unknown,
    wrong,
)

LINEAR = "sglang.srt.layers.attention.linear"
MODULE = f"{LINEAR}.kda_prefill_graph"
CAPTURED = f"{MODULE}:kda_extend_in_graph"
EAGER = f"{LINEAR}.kda_backend:KDAAttnBackend.forward_extend"
# with the dimension of the batch: tokens, heads and channels
SPLIT = 4


def probe(source: Source) -> Finding:
    if not source.has_module(MODULE):
        return absent("Kimi delta attention runs in a break of the graph")
    captured, eager = source.need(CAPTURED), source.need(EAGER)
    if captured.mentions("beta_is_raw=True"):
        return fixed("the captured form takes every beta for a raw one", captured)
    if not (captured.mentions("gate_was_flat = a.ndim == 3") and captured.mentions("beta_is_raw=gate_was_flat")):
        return drifted("the captured form decides about the beta", captured)
    if not eager.mentions("beta_is_raw=True"):
        return unknown("the eager form does not take every beta for a raw one", captured, eager)
    return affected("only a flat gate makes the captured form take a beta for a raw one", captured, eager)


def has_a_split_gate(launch: Launch) -> bool | None:
    """GLM-5 Next, whose graphs are made by default, has a flat one."""
    return False if named("Glm5Next*").holds(launch) else DELTA_ATTENTION.holds(launch)


def with_a_flat_gate(original: Any, *, a: Any, **rest: Any) -> Any:
    return original(a=a.flatten(-2) if a.ndim == SPLIT else a, **rest)


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/39495",),
    probe=probe,
    patches=(PatchPoint((CAPTURED,), How.AROUND, with_a_flat_gate),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("kimi_linear_prefill_graph",),
    concerns=wrong(Condition(DELTA_ATTENTION.says, has_a_split_gate), PREFILL_GRAPHS),
)
