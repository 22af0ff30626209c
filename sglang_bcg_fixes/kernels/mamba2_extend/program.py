# SPDX-License-Identifier: Apache-2.0
"""The source of the CUDA implementation. Imports no torch: the plan asks before a server has imported it."""

from __future__ import annotations

from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.cuda import program
from sglang_bcg_fixes.model import Accepted, Rejected

KINDS = ("bf16", "f16")
PROGRAM = program.Program(
    "mamba2_extend/mamba2_extend.cuh",
    (
        *(f"bcg_mamba2_prepare_{kind}" for kind in KINDS),
        *(
            f"bcg_mamba2_{kernel}_{states}_{kind}"
            for kernel in ("carry", "advance")
            for states in (128, 256)
            for kind in KINDS
        ),
    ),
    only="sm_90a",
)


def installed() -> Accepted | Rejected:
    """Answer as far as possible without a context; `cuda.ready` answers the rest."""
    triton = has_triton()
    return triton if isinstance(triton, Rejected) else program.installed(PROGRAM)
