# SPDX-License-Identifier: Apache-2.0
"""The source of the CUDA implementation. Imports no torch: the plan asks before a server has imported it."""

from __future__ import annotations

from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.cuda import program
from sglang_bcg_fixes.model import Accepted, Rejected

PROGRAM = program.Program(
    "gdn_extend/gdn_extend.cuh",
    tuple(
        f"bcg_gdn_{kernel}_{kind}"
        for kernel in ("prepare", "advance", "carry", "advance_segments")
        for kind in ("bf16", "f16")
    ),
    only="sm_90a",
)


def installed() -> Accepted | Rejected:
    """Answer as far as possible without a context; `cuda.ready` answers the rest."""
    triton = has_triton()
    return triton if isinstance(triton, Rejected) else program.installed(PROGRAM)
