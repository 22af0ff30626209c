# SPDX-License-Identifier: Apache-2.0
"""The source of the CUDA implementation. Imports no torch: the plan asks before a server has imported it."""

from __future__ import annotations

from sglang_bcg_fixes.kernels.cuda import program
from sglang_bcg_fixes.model import Accepted, Rejected

PROGRAM = program.Program(
    "fa_metadata/fa_metadata.cuh", ("bcg_fa_metadata", "bcg_draft_expand", "bcg_verify_expand", "bcg_local_attention")
)


def installed() -> Accepted | Rejected:
    """Answer as far as possible without a context; `cuda.ready` answers the rest."""
    return program.installed(PROGRAM)
