# SPDX-License-Identifier: Apache-2.0
"""A model of your own may answer wrongly or crash: prefill graphs read reused memory

Symptom: Wrong greedy output, NaN or "illegal memory access" in prefill with breakable CUDA graphs on, often only after
many requests or after smaller buckets were captured; nothing in the log.
Cause: eager_on_graph keeps the arguments of a break as weak views, on the assumption that the graphs' shared memory
pool keeps them. The pool stays alive, but its blocks are handed out again. A tensor made by eager code (a break, or
code that ran before the capture) belongs to no pool at all: it is freed, and replays read whatever now occupies its
memory.
Change: Tensors outside the graphs' pool are kept alive with the graph. Those that a segment of the same graph writes
stay weak, as in SGLang: each replay rewrites them before a break reads them, so sharing their memory is right. Keeping
them too, as upstream's open change does, would cost 66 GiB for 36 layers of Qwen3-8B's attention instead of 0.3
(benchmarks/break_lifetimes.py has both as cases). The attention breaks of released models receive nothing but tensors
that a segment writes.
Remove when: Every release that has to be served keeps the inputs of a break alive.
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
    inputs = (decorator.need_assignment_to("captured_args"), decorator.need_assignment_to("captured_kwargs"))
    if any(WEAK in item.calls for item in inputs):
        weak = source.need(*WEAK_PLACES)
        return affected("a break keeps its arguments as weak views only", decorator, weak)
    return fixed("a break keeps its arguments alive", decorator)


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/issues/37606",
        "https://github.com/sgl-project/sglang/pull/37448",
    ),
    probe=probe,
    patches=(PatchPoint(WEAK_PLACES, How.AROUND, keep_and_view),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=possible(PREFILL_GRAPHS, CODE_OF_YOUR_OWN),
)
