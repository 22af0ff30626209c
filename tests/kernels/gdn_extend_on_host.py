# SPDX-License-Identifier: Apache-2.0
"""csrc/gdn_extend on the host."""

from __future__ import annotations

from sglang_bcg_fixes.kernels.gdn_extend import cuda
from sglang_bcg_fixes.kernels.gdn_extend.program import PROGRAM
from tests.kernels.program_on_host import FEW_BLOCKS, HOST, OnHost

__all__ = ["FEW_BLOCKS", "HOST", "SIGNATURES", "build", "device", "launched", "library"]

ON_HOST = OnHost(cuda, PROGRAM)
SIGNATURES = ON_HOST.signatures
device, library, launched, build = ON_HOST.device, ON_HOST.library, ON_HOST.launched, ON_HOST.build
