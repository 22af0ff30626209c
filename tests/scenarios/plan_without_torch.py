# SPDX-License-Identifier: Apache-2.0
"""The plan's question about a CUDA program, which must import nothing large. Argument: a driver."""

from __future__ import annotations

import sys

from sglang_bcg_fixes.kernels.cuda import driver
from sglang_bcg_fixes.kernels.fa_metadata import program

if __name__ == "__main__":
    driver.LIBRARY = sys.argv[1]
    print(program.installed())
    assert not {"torch", "numpy", "triton"} & set(sys.modules)
