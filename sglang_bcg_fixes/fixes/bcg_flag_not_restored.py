# SPDX-License-Identifier: Apache-2.0
"""No harm in SGLang itself; code of yours that nests graph scopes may answer wrongly

Symptom: None seen in a released SGLang, which does not nest these scopes. Code that nests them would take the ordinary
code paths in the rest of the outer scope: capture without graph breaks.
Cause: On exit enable_breakable_cuda_graph sets its flag to False instead of restoring the previous value.
Change: The flag is restored to its previous value. Latent, because no released SGLang nests these scopes: applied only
with SGLANG_BCG_FIX_BCG_FLAG_NOT_RESTORED=on, for code of yours that does.
Remove when: Every release that has to be served restores the flag.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from sglang_bcg_fixes.anatomy.launches import CODE_OF_YOUR_OWN, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.engine.graph_break import CONTEXT_MODULES
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, drifted, fixed, latent, possible

SCOPES = tuple(f"{module}:enable_breakable_cuda_graph" for module in CONTEXT_MODULES)


def probe(source: Source) -> Finding:
    if not any(source.has_module(module) for module in CONTEXT_MODULES):
        return absent("this release has no breakable CUDA graphs")
    scope, flag = (
        source.need(*SCOPES),
        source.need(*(f"{module}:is_in_breakable_cuda_graph" for module in CONTEXT_MODULES)),
    )
    endings = [step for node in ast.walk(scope.node) if isinstance(node, ast.Try) for step in node.finalbody]
    if not endings:
        return drifted("the scope ends", scope)
    if any(isinstance(step, ast.Assign) and ast.unparse(step.value) == "False" for step in endings):
        return latent("the scope ends with the flag set to False, whatever it was before", scope, flag)
    return fixed("the scope restores the flag", scope)


@contextlib.contextmanager
def restore_the_flag(original: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    context = graph_break.load("context")
    before = context.is_in_breakable_cuda_graph()
    try:
        with original():
            yield
    finally:
        context._in_breakable_cuda_graph = before  # type: ignore[attr-defined]


FIX = Fix(
    probe=probe,
    patches=(PatchPoint(SCOPES, How.AROUND, restore_the_flag),),
    default="off",
    workarounds=PREFILL_GRAPHS_OFF,
    concerns=possible(PREFILL_GRAPHS, CODE_OF_YOUR_OWN),
)
