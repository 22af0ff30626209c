"""A graph break replays with inputs whose memory may belong to somebody else

Symptom: Wrong greedy output, NaN or "illegal memory access" in prefill with breakable CUDA graphs on, often only after
many requests or after smaller buckets were captured; nothing in the log.
Cause: eager_on_graph keeps the arguments of a break as weak views, in the belief that the graphs' shared memory pool
keeps them. The pool stays alive, but its blocks are handed out again, and a tensor that eager code made, a break or
what ran before the capture, belongs to no pool at all: it is freed, and replays read what has taken its place.
Change: What lies outside of the graphs' pool is kept with the graph. What a segment of the same graph writes is left
weak, as SGLang has it: each replay writes it anew before a break reads it, so sharing its memory is right, and keeping
it, as upstream's open change does, would cost 66 GiB for 36 layers of Qwen3-8B's attention instead of 0.3
(benchmarks/break_lifetimes.py has both as cases). The attention breaks of released models are given nothing else.
Remove when: Every release that has to be served keeps the inputs of a break alive.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.graph_pool import WEAK, WEAK_PLACES, keep_and_view
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine.graph_break import DECORATOR_MODULES
from sglang_bcg_fixes.model import Fix, How, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, absent, affected, fixed


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
    id="break_input_lifetime",
    doc=__doc__,
    upstream=(
        "https://github.com/sgl-project/sglang/issues/37448",
        "https://github.com/sgl-project/sglang/pull/37606",
    ),
    probe=probe,
    patches=(PatchPoint(WEAK_PLACES, How.AROUND, keep_and_view),),
    mitigations=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
)
