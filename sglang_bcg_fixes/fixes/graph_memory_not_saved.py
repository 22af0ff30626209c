# SPDX-License-Identifier: Apache-2.0
"""Wrong answers or a crash after sleep and resume with SGLANG_MEMORY_SAVER_CUDA_GRAPH=1

Symptom: With --enable-memory-saver and SGLANG_MEMORY_SAVER_CUDA_GRAPH=1, as reinforcement learning sets them, replayed
decode steps answer from garbage after /release_memory_occupation and /resume_memory_occupation, or end in "misaligned
address" some steps later.
Cause: The memory saver gives a graph's memory back without a copy of it. What was written there while capturing, and
is only read by replays, is lost. Without that variable SGLang keeps the memory of graphs, and is right.
Change: The memory saver keeps a copy on the host while the graphs' memory is released, as from 0.5.21 on. It takes as
much host memory as the graphs take on the GPU. A capture that says itself what it wants is left as it is.
Remove when: 0.5.20 need not be served.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DECODE_GRAPHS, MEMORY_SAVER, MEMORY_SAVER_FOR_GRAPHS
from sglang_bcg_fixes.anatomy.runners import EXECUTOR, OLD_DECODE
from sglang_bcg_fixes.anatomy.workarounds import DECODE_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, wrong

CAPTURES = (
    f"{EXECUTOR}.runner_backend.full_cuda_graph_backend:FullCudaGraphBackend.capture_one",
    f"{OLD_DECODE}._capture_graph",
)
SAVER = "sglang.srt.utils.torch_memory_saver_adapter:_TorchMemorySaverAdapterReal.cuda_graph"
COPY = "enable_cpu_backup"


def probe(source: Source) -> Finding:
    capture, saver = source.need(*CAPTURES), source.need(SAVER)
    if not (capture.mentions("memory_saver_adapter.cuda_graph") and saver.mentions("_memory_saver.cuda_graph(**")):
        return drifted("graphs are captured for the memory saver", capture, saver)
    if capture.mentions(f"{COPY}=True") or saver.mentions(COPY):
        return fixed("the memory of graphs is copied to the host before it is released", capture, saver)
    return affected("the memory of graphs is released without a copy", capture, saver)


def keep_a_copy(
    original: Callable[..., AbstractContextManager[None]], self: Any, **options: Any
) -> AbstractContextManager[None]:
    return original(self, **{COPY: True, **options})


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/32718",),
    probe=probe,
    patches=(PatchPoint((SAVER,), How.AROUND, keep_a_copy),),
    workarounds=DECODE_GRAPHS_OFF,
    verify=("llama_sleep",),
    concerns=wrong(MEMORY_SAVER, MEMORY_SAVER_FOR_GRAPHS, DECODE_GRAPHS),
)
