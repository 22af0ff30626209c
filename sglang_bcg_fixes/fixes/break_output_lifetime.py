# SPDX-License-Identifier: Apache-2.0
"""A model of your own may answer wrongly or crash: prefill graphs write to reused memory

Symptom: Wrong greedy output, NaN or "illegal memory access" in prefill with breakable CUDA graphs on; nothing in the
log.
Cause: eager_on_graph keeps the output of a break as a weak view. Eager code made the tensor, so no graph owns its
memory: it is freed after capture, and every replay copies the new output into whatever now occupies that memory, where
the next segment reads it.
Change: The output is kept alive with the graph, unless it lies in the graphs' pool, which keeps it. SGLang makes the
weak views of inputs and outputs with one function, so on these releases this fix and break_input_lifetime each cover
both.
Remove when: No release before 0.5.16 has to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.graph_pool import WEAK, WEAK_PLACES, keep_and_view
from sglang_bcg_fixes.anatomy.launches import CODE_OF_YOUR_OWN, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine.graph_break import DECORATOR_MODULES
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, fixed, possible


def probe(source: Source) -> Finding:
    if not any(source.has_module(module) for module in DECORATOR_MODULES):
        return absent("this release has no breakable CUDA graphs")
    decorator = source.need(*(f"{module}:eager_on_graph" for module in DECORATOR_MODULES))
    if WEAK in decorator.need_assignment_to("captured_output").calls:
        weak = source.need(*WEAK_PLACES)
        return affected("a break keeps its output as a weak view only", decorator, weak)
    return fixed("a break keeps its output alive", decorator)


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/30584",),
    probe=probe,
    patches=(PatchPoint(WEAK_PLACES, How.AROUND, keep_and_view),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=possible(PREFILL_GRAPHS, CODE_OF_YOUR_OWN),
)
