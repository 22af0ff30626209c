"""A fix of another package, as far as the plugin is concerned: prefill graphs are captured and never replayed.

Kernel choices depend on whether prefill graphs are on, so this is the exact reference for a server that replays.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.hookspecs import hookimpl
from sglang_bcg_fixes.model import Finding, Fix, How, PatchPoint, Verdict
from sglang_bcg_fixes.probe import Source

ME = "sglang.srt.model_executor"
CAN_RUN = (
    f"{ME}.breakable_cuda_graph_runner:BreakableCudaGraphRunner.can_run",
    f"{ME}.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.can_replay_locally",
    f"{ME}.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.can_run_graph",
)


def probe(source: Source) -> Finding:
    return Finding(Verdict.AFFECTED, "a reference is wanted")


def refuse(*args: Any, **kwargs: Any) -> bool:
    return False


@hookimpl
def bcg_fixes() -> list[Fix]:
    return [
        Fix(
            id="refuse_replay",
            doc="Prefill graphs are replayed.",
            upstream=(),
            probe=probe,
            known={},
            patches=(PatchPoint(CAN_RUN, How.REPLACE, f"{__name__}:refuse"),),
        )
    ]
