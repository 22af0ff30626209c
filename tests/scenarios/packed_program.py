# SPDX-License-Identifier: Apache-2.0
"""The CUDA source in the package of this folder, and the origin of its machine code for Hopper."""

from __future__ import annotations

import json

from sglang_bcg_fixes.kernels.cuda import program
from sglang_bcg_fixes.kernels.fa_metadata.program import PROGRAM

if __name__ == "__main__":
    built = program.precompiled(PROGRAM, (9, 0))
    print(json.dumps([str(PROGRAM.file), PROGRAM.file.is_file(), built.origin if built else None]))
