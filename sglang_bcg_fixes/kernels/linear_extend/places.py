# SPDX-License-Identifier: Apache-2.0
"""The places where SGLang captures and replays linear layers, for the plan, which runs before torch is imported."""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.runners import MAY_REPLAY, OLD_PREFILL, PREFILL
from sglang_bcg_fixes.engine.graph_break import DECORATOR_MODULES
from sglang_bcg_fixes.model import How, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.source.tree import Source, affected, drifted

CAPTURE = (f"{PREFILL}.capture", f"{OLD_PREFILL}._capture_all")
REPLAY = tuple(f"{module}:BreakableCUDAGraph.replay" for module in DECORATOR_MODULES)
BACKENDS = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
MAMBA = f"{BACKENDS}:MambaAttnBackendBase"
# these define a step's fields and its checkpoints
STEP = (
    f"{MAMBA}._forward_metadata",
    f"{MAMBA}._init_track_conv_indices",
    f"{MAMBA}._init_track_ssm_indices",
    f"{MAMBA}._track_mamba_state_extend",
)
# each of them in one of its places
RUNNER = (CAPTURE, MAY_REPLAY, REPLAY)
# a backend's answer, from 0.5.22 on, to whether SGLang captures its layers itself
SEAM = "supports_prefill_graph_extend"


def known(source: Source, backend: str, *read: Definition) -> Finding:
    """Answer for a source of which this was read, unless this backend answers the seam's question by itself.

    The base class answers no. That a backend has an answer does not tell which one it gives.
    """
    base, own = source.find(f"{MAMBA}.{SEAM}"), source.find(f"{backend}.{SEAM}")
    read += tuple(filter(None, (base, own)))
    if own:
        return drifted("SGLang may capture these layers itself", *read)
    return affected("what an extend of such a layer does is known for this source", *read)


def patches(bodies: str, *prepared: str) -> tuple[PatchPoint, ...]:
    """Return the patch points that all such layers share; `prepared` are places of the method that prepares a step."""
    return (
        PatchPoint(prepared, How.AFTER, f"{bodies}:prepared"),
        PatchPoint(CAPTURE, How.AROUND, f"{bodies}:capture"),
        PatchPoint(MAY_REPLAY, How.AROUND, f"{bodies}:can_replay"),
        PatchPoint(REPLAY, How.BEFORE, f"{bodies}:before_replay"),
    )
