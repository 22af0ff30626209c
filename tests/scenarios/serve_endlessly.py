# SPDX-License-Identifier: Apache-2.0
"""`make serve` with a server that never answers and with nothing to install."""

from __future__ import annotations

import pathlib
import sys

import serve
import serve_install
import serve_server

SERVER = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"

if __name__ == "__main__":
    serve_install.prepare = lambda *_: pathlib.Path(sys.executable)
    serve.command = lambda *_: [sys.executable, "-c", SERVER]
    sys.exit(serve_server.run("make serve", serve.serve))
