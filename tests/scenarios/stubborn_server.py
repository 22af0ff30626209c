# SPDX-License-Identifier: Apache-2.0
"""A server whose child ignores a polite end, as a process that is stuck in a kernel does."""

from __future__ import annotations

import subprocess
import sys
import time

DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"

if __name__ == "__main__":
    subprocess.Popen([sys.executable, "-c", f"import signal, time; {DEAF}; time.sleep(99)"])
    print("loading the weights", flush=True)
    time.sleep(99)
