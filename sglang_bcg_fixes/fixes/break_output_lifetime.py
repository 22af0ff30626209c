"""A graph break writes its output into memory that may belong to somebody else

Symptom: Wrong greedy output, NaN or "illegal memory access" in prefill with breakable CUDA graphs on; nothing in the
log.
Cause: eager_on_graph keeps the output of a break as a weak view. The tensor was made by eager code, so no graph holds
its memory: it is freed after capture, and every replay copies the new output into what has taken its place, while the
next segment reads from there.
Change: A fix would keep the output itself, one line. This version only watches for it.
Remove when: No release before 0.5.16 has to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.graph_break import DECORATOR_MODULES
from sglang_bcg_fixes.mitigations import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, absent, affected, fixed

WEAK = "_weak_ref_if_tensor"


def probe(source: Source) -> Finding:
    if not any(source.has_module(module) for module in DECORATOR_MODULES):
        return absent("this release has no breakable CUDA graphs")
    decorator = source.need(*(f"{module}:eager_on_graph" for module in DECORATOR_MODULES))
    if WEAK in decorator.need_assignment_to("captured_output").calls:
        weak = source.need(*(f"{module}:{WEAK}" for module in DECORATOR_MODULES))
        return affected("a break keeps its output as a weak view only", decorator, weak)
    return fixed("a break keeps its output alive", decorator)


FIX = Fix(
    id="break_output_lifetime",
    doc=__doc__,
    upstream=("https://github.com/sgl-project/sglang/pull/30584",),
    probe=probe,
    known={
        "e9083b5cca12": "eager_on_graph, 0.5.11 to 0.5.15.post1",
        "fb1ee0132095": "_weak_ref_if_tensor, 0.5.11 to 0.5.15.post1",
        "b438beb12fe8": "eager_on_graph, 0.5.16",
        "fc1c741485b3": "eager_on_graph, 0.5.17",
        "b824eab8cff7": "eager_on_graph, 0.5.18 to 0.5.21",
        "e6b8d4716731": "eager_on_graph, 0.5.22",
        "0732ee81313e": "eager_on_graph, 0.5.23",
    },
    mitigations=PREFILL_GRAPHS_OFF,
)
