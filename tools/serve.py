# SPDX-License-Identifier: Apache-2.0
"""Serve a tiny model with a released, unmodified SGLang and this checkout's plugin; needs only Python.

    make serve                    # or: python tools/serve.py; Ctrl-C ends it
    make serve RELEASE=0.5.23     # another release of SGLang
    make serve ONESHOT=1          # stop after the first completion; exit status 0 if all went well

Without a GPU (no nvidia-smi), SGLang's own CPU engine serves, and packages that exist only for CUDA are replaced by
cpu_sglang. There are no CUDA graphs on a CPU, so this shows that the plugin loads and what it patches, not
that graphs are right.
"""

from __future__ import annotations

import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

import serve_install
import tiny_model
from serve_server import ServeError, Server

# the pinned packages have no wheels for an older python
OLDEST_PYTHON = (3, 11)
DEFAULT_RELEASE = "0.5.12.post1"
PLUGIN_LINE = re.compile(r"\bbcg-fixes\b.*\bapplied\b")
PROMPT = (3, 4, 5, 6, 7)
NEW_TOKENS = 8

# smallest possible server; the model has no tokenizer
ARGUMENTS = (
    "--skip-tokenizer-init",
    "--random-seed=0",
    "--context-length=256",
    "--max-total-tokens=1024",
    "--max-running-requests=4",
    "--chunked-prefill-size=128",
)
ARGUMENTS_ON_CPU = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--dtype=float16",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
    # the default takes gigabytes of the machine's memory for linear attention states
    "--max-mamba-cache-size=8",
    "--mem-fraction-static=0.5",
)
ARGUMENTS_ON_GPU = ("--dtype=bfloat16", "--mem-fraction-static=0.5")


def main() -> int:
    # lets `kill` or a time limit on this program end the server too
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        return serve(os.environ)
    except ServeError as error:
        print(f"make serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmake serve: interrupted", file=sys.stderr)
        return 130


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def serve(environ: Mapping[str, str]) -> int:
    release = environ.get("RELEASE") or DEFAULT_RELEASE
    check(release)
    on_gpu = shutil.which("nvidia-smi") is not None
    python = serve_install.prepare(environment_folder(environ), release, on_gpu)
    folder = cache_folder(environ)
    model = folder / "tiny-qwen3-next"
    tiny_model.write(model)
    port = int(environ.get("PORT") or free_port())
    address = f"http://127.0.0.1:{port}"
    environment = environment_of_server(environ, on_gpu)
    server = Server(command(python, release, on_gpu, model, port), environment, folder, address)
    try:
        return show(server, python, environment, environ)
    finally:
        print("stopping the server", flush=True)
        server.stop()


def check(release: str) -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise ServeError(f"this is python {sys.version.split()[0]}. Next: run it with python 3.11 or 3.12.")
    if release not in serve_install.RELEASES:
        known = ", ".join(serve_install.RELEASES)
        raise ServeError(f"RELEASE={release} has not been tried with this. Next: choose one of {known}.")


def environment_folder(environ: Mapping[str, str]) -> pathlib.Path:
    return pathlib.Path(environ.get("BCG_FIXES_VENV") or serve_install.REPOSITORY / ".venv").absolute()


def cache_folder(environ: Mapping[str, str]) -> pathlib.Path:
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = pathlib.Path(base).expanduser() / "sglang-bcg-fixes" / "serve"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def free_port() -> int:
    # sglang takes more ports at fixed distances above this one, up to 10000, and refuses to start past 65535
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise ServeError("no free port was found between 20000 and 30000. Next: name one, PORT=... make serve.")


def environment_of_server(environ: Mapping[str, str], on_gpu: bool) -> dict[str, str]:
    environment = {"SGLANG_PLUGINS": "bcg_fixes", **environ, "PYTHONUNBUFFERED": "1"}
    if not on_gpu:
        environment["PYTHONPATH"] = str(serve_install.REPOSITORY)
        # runs the linear attention layers' Triton kernels without a GPU
        environment["TRITON_INTERPRET"] = "1"
    return environment


def command(python: pathlib.Path, release: str, on_gpu: bool, model: pathlib.Path, port: int) -> list[str]:
    module = "sglang.launch_server" if on_gpu else "cpu_sglang.launch"
    device = (*ARGUMENTS_ON_GPU, *graph_arguments(release)) if on_gpu else ARGUMENTS_ON_CPU
    return [str(python), "-m", module, f"--model-path={model}", f"--port={port}", *ARGUMENTS, *device]


def graph_arguments(release: str) -> tuple[str, ...]:
    """Flags that turn on breakable prefill graphs for a hybrid model; from 0.5.15 they are the default."""
    minor = int(release.split(".")[2])
    if minor <= 13:
        return ("--enable-breakable-cuda-graph", "--enforce-piecewise-cuda-graph")
    return ("--cuda-graph-backend-prefill=breakable",) if minor == 14 else ()


def show(server: Server, python: pathlib.Path, environment: Mapping[str, str], environ: Mapping[str, str]) -> int:
    """Print the server's answers and report; return the exit status."""
    print(f"server log: {server.log}", flush=True)
    waited = server.wait_until_healthy(float(environ.get("START_LIMIT_S") or 600))
    print(f"{server.address} is healthy after {waited:.0f} s", flush=True)
    output_ids = server.generate(PROMPT, NEW_TOKENS, limit_s=float(environ.get("ANSWER_LIMIT_S") or 300))
    print(f"prompt ids {list(PROMPT)} -> completion ids {output_ids}", flush=True)
    plugin_lines = [line for line in server.lines() if PLUGIN_LINE.search(line)]
    if not plugin_lines:
        raise server.failure(
            "the server answers, but the plugin said nothing in its log, so it serves without the fixes "
            f"(SGLANG_PLUGINS={environment['SGLANG_PLUGINS']})"
        )
    print("the plugin said:", *plugin_lines, sep="\n  ", flush=True)
    print_status(python, environment)
    if environ.get("ONESHOT"):
        return 0
    print(f"serving on {server.address} until Ctrl-C", flush=True)
    try:
        while True:
            server.check_alive()
            time.sleep(1)
    except KeyboardInterrupt:
        print(flush=True)
        return 0


def print_status(python: pathlib.Path, environment: Mapping[str, str]) -> None:
    status = [str(python.parent / "bcg-fixes"), "status"]
    print("bcg-fixes status:", flush=True)
    ended = subprocess.run(status, env=dict(environment), check=False).returncode
    if ended != 0:
        raise ServeError(f"{' '.join(status)} ended with exit status {ended}. Next: run it while make serve is up.")


if __name__ == "__main__":
    sys.exit(main())
