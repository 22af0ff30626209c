# SPDX-License-Identifier: Apache-2.0
"""sglang_bcg_fixes.lab.verify.server where there is no GPU.

SGLang spawns its processes, and a spawned python process imports the main module of its parent: so the stand-ins are in
every process before sglang is imported there.
"""

from __future__ import annotations

import sys

from cpu_sglang import stand_ins
from sglang_bcg_fixes.lab.verify import server

stand_ins.install()

if __name__ == "__main__":
    server.main(sys.argv[1:])
