# SPDX-License-Identifier: Apache-2.0
"""Serve a tiny model with a released, unmodified SGLang and this checkout's plugin; needs only Python.

    make serve                    # or: python tools/serve.py; Ctrl-C ends it
    make serve RELEASE=0.5.20     # another release of SGLang
    make serve ONESHOT=1          # stop after the first completion; exit status 0 if all went well

Without a GPU (no nvidia-smi), SGLang's own CPU engine serves, and packages that exist only for CUDA are replaced by
cpu_sglang. There are no CUDA graphs on a CPU, so this shows that the plugin loads and what it patches, not
that graphs are right.
"""

from __future__ import annotations

import pathlib
import random
import re
import shutil
import socket
import sys
import textwrap
import time
from collections.abc import Mapping

import serve_install
import tiny_model
from serve_server import ServeError, Server, run

PLUGIN_LINE = re.compile(r"\bbcg-fixes \S+: sglang ")
LONGEST = 200
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


def serve(environ: Mapping[str, str]) -> int:
    release = environ.get("RELEASE") or serve_install.RELEASES[-1]
    check(release)
    on_gpu = shutil.which("nvidia-smi") is not None
    python = serve_install.prepare(serve_install.environment_folder(environ), release, on_gpu)
    folder = serve_install.cache_folder(environ, "serve")
    model = folder / "tiny-qwen3-next"
    tiny_model.write(model)
    port = int(environ.get("PORT") or free_port())
    address = f"http://127.0.0.1:{port}"
    environment = environment_of_server(environ, on_gpu)
    server = Server(command(python, release, on_gpu, model, port), environment, folder, address)
    try:
        return show(server, release, environment, environ)
    finally:
        server.stop()


def check(release: str) -> None:
    serve_install.check_python()
    if release not in serve_install.RELEASES:
        known = ", ".join(serve_install.RELEASES)
        raise ServeError(f"RELEASE={release} has not been tried with this. Next: choose one of {known}.")


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


def show(server: Server, release: str, environment: Mapping[str, str], environ: Mapping[str, str]) -> int:
    """Print three lines of result, and wait; return the exit status."""
    waited = server.wait_until_healthy(float(environ.get("START_LIMIT_S") or 600))
    output_ids = server.generate(PROMPT, NEW_TOKENS, limit_s=float(environ.get("ANSWER_LIMIT_S") or 300))
    plugin_lines = [line for line in server.lines() if PLUGIN_LINE.search(line)]
    if not plugin_lines:
        raise server.failure(
            "the server answers, but the plugin said nothing in its log, so it serves without the fixes "
            f"(SGLANG_PLUGINS={environment['SGLANG_PLUGINS']})"
        )
    print(f"SGLang {release} is healthy after {waited:.0f} s on {server.address}; its log is {server.log}")
    print(f"prompt ids {list(PROMPT)} -> completion ids {output_ids}")
    # the scheduler's comes last: it is the process that runs the model
    print(textwrap.shorten(plugin_lines[-1], LONGEST, placeholder=" ..."), flush=True)
    if environ.get("ONESHOT"):
        return 0
    print("Ctrl-C ends it", flush=True)
    try:
        while True:
            server.check_alive()
            time.sleep(1)
    except KeyboardInterrupt:
        print(flush=True)
        return 0


if __name__ == "__main__":
    sys.exit(run("make serve", serve))
