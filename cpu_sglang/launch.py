# SPDX-License-Identifier: Apache-2.0
"""Start SGLang's own server on a machine without a GPU: python -m cpu_sglang.launch ARGUMENTS...

SGLang spawns its processes, and a spawned python process imports the main module of its parent. So this module, being
that main module, puts the stand-ins into every process, before sglang is imported there.
"""

import runpy
import sys

from cpu_sglang import stand_ins

SERVER_MODULE = "sglang.launch_server"

stand_ins.install()

if __name__ == "__main__":
    sys.argv[0] = SERVER_MODULE
    # alter_sys would make sglang.launch_server the main module, and the spawned processes would lack the stand-ins
    runpy.run_module(SERVER_MODULE, run_name="__main__", alter_sys=False)
