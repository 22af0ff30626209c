# SPDX-License-Identifier: Apache-2.0
"""The server does not start: --enable-memory-saver and SGLANG_MEMORY_SAVER_CUDA_GRAPH=1

Symptom: With --enable-memory-saver and SGLANG_MEMORY_SAVER_CUDA_GRAPH=1, as reinforcement learning sets them to release
the memory of graphs, the server does not start: "Breakable CUDA graph is not compatible with memory saver mode". From
0.5.15 on with default flags, on 0.5.14 with an explicit breakable backend.
Cause: These graphs are captured into memory that the memory saver cannot release, so their backend raises an error
where that is wanted. Decode graphs have a backend that can; no rule leaves out prefill graphs for it.
Change: None: which graphs to give up is the user's choice. This version only watches for it.
Remove when: Every release that has to be served captures these graphs into memory that can be released, or leaves them
out by itself.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.launches import MEMORY_SAVER, MEMORY_SAVER_FOR_GRAPHS, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL, OLD_PREFILL_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, Source, absent, affected, ends, fixed

MAKE = "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend:BreakableCudaGraphBackend.__init__"


def probe(source: Source) -> Finding:
    if source.has_module(OLD_PREFILL_MODULE):
        return absent(
            "prefill graphs are captured without regard to the memory saver", source.need(f"{OLD_PREFILL}.__init__")
        )
    make = source.need(MAKE)
    if make.mentions("raise NotImplementedError"):
        return affected("a server with the memory saver for graphs does not start", make)
    return fixed("the memory saver is not refused", make)


FIX = Fix(
    probe=probe,
    workarounds=PREFILL_GRAPHS_OFF,
    concerns=ends(MEMORY_SAVER, MEMORY_SAVER_FOR_GRAPHS, PREFILL_GRAPHS),
)
