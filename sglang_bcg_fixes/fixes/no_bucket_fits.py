# SPDX-License-Identifier: Apache-2.0
"""The server does not start: every size in --cuda-graph-bs-prefill is too large

Symptom: The server stops at start-up with "'EagerRunner' object has no attribute 'runner'", right after warning that no
configured capture size fits: every size given with --cuda-graph-bs-prefill is larger than the number of requests times
the context length.
Cause: capture_prefill_graph returns a record of the runner and its cost on every path but this one, where it returns
the bare runner.
Change: The bare runner is wrapped in such a record, as on the other paths: prefill runs eagerly.
Remove when: Every release that has to be served returns the record.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import PREFILL_GRAPHS, PREFILL_SIZES
from sglang_bcg_fixes.anatomy.runners import CAPTURE_PREFILL, SETUP_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, ends, fixed


def probe(source: Source) -> Finding:
    record = source.find(f"{SETUP_MODULE}:GraphCapture")
    if record is None:
        return absent("the capture of prefill graphs returns no record")
    capture = source.need(CAPTURE_PREFILL)
    answers = [node.value for node in ast.walk(capture.node) if isinstance(node, ast.Return)]
    if any(isinstance(answer, ast.Name) for answer in answers):
        return affected("where no size fits, the capture returns a bare runner", capture, record)
    return fixed("every path out of the capture returns a record", capture, record)


def as_record(original: Callable[..., Any], *, model_runner: Any, **rest: Any) -> Any:
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    answer = original(model_runner=model_runner, **rest)
    if isinstance(answer, GraphCapture):
        return answer
    phase = "draft_prefill" if model_runner.is_draft_worker else "prefill"
    return GraphCapture(runner=answer, memory_phase=phase, memory_usage_gb=0, capture_time=0)


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((CAPTURE_PREFILL,), How.AROUND, as_record),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(PREFILL_SIZES, PREFILL_GRAPHS),
)
