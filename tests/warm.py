"""Python processes that begin with torch and its like imported: most of what a release's tests took was those imports.

A `Starter` keeps one process that has imported them and nothing of SGLang or of ours, and has it fork for each run. To
the code that runs, all is as in a process of its own: its path, its environment, its `__main__`, its end.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping
from typing import Any

# what every release imports, the largest first
IMPORTED = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._dynamo.repro.after_dynamo",
    "transformers",
    "openai.types.responses",
    "aiohttp.web",
    "fastapi",
    "IPython.display",
    "requests",
    "triton.language",
)
# a package may read these when it is imported; torch sets one of them itself
READ_WHEN_IMPORTED = ("CUDA", "HF_", "LD_", "MKL", "NUMBA", "OMP", "PYTHON", "TORCH", "TRANSFORMERS", "TRITON")


class Starter:
    """The process that forks, with the environment that its packages were imported in."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        # one at a time: it waits for what it has forked
        self._turn = threading.Lock()

    def run(
        self, arguments: tuple[str, ...], environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` of Python with these arguments, `-c` or `-m` first."""
        command = [sys.executable, *arguments]
        with self._turn, tempfile.TemporaryDirectory() as folder:
            out, err = (pathlib.Path(folder, name) for name in ("out", "err"))
            asked = {
                "arguments": arguments,
                "environment": dict(environment),
                "folder": str(pathlib.Path.cwd()),
                "files": [str(out), str(err)],
                "timeout": timeout,
            }
            returncode = self._ask(asked)
            printed = [file.read_text() for file in (out, err)]
        if returncode is None:
            raise subprocess.TimeoutExpired(command, timeout, *printed)
        return subprocess.CompletedProcess(command, returncode, *printed)

    @functools.cached_property
    def _process(self) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, __file__], subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=pipe, text=True)

    def _ask(self, asked: dict[str, Any]) -> int | None:
        process = self._process
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"the process that forks has ended: {process.wait()}"
        returncode: int | None = json.loads(answer)
        return returncode


_starters: dict[frozenset[tuple[str, str]], Starter] = {}


def starter(environment: Mapping[str, str]) -> Starter:
    """The one whose packages were imported in this environment, as far as they read it."""
    imported_in = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    read = frozenset(pair for pair in imported_in.items() if pair[0].startswith(READ_WHEN_IMPORTED))
    return _starters.setdefault(read, Starter(imported_in))


def forked() -> dict[str, Any]:
    """Answer until nobody asks; returns in each forked process, with what that one is to run."""
    for name in IMPORTED:
        importlib.import_module(name)
    assert not any(name.partition(".")[0].startswith(("sglang", "tests")) for name in sys.modules)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread does not come along into a forked process"
    # what is imported stays for good, and a collection would copy its pages in each process
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            return asked
        print(json.dumps(wait(child, asked["timeout"])), flush=True)
    sys.exit()


def wait(child: int, timeout: float) -> int | None:
    """The child's exit status, or None where it had to be killed."""
    deadline, is_late = time.monotonic() + timeout, False
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return None if is_late else os.waitstatus_to_exitcode(status)
        if not is_late and time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            is_late = True
        time.sleep(0.005)


def run(asked: dict[str, Any]) -> None:
    """Give this process what a new Python would have: files, folder, environment, path, arguments and `__main__`."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [os.open(name, os.O_WRONLY | os.O_CREAT) for name in asked["files"]]
    for number, file in enumerate([nothing, *files]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    kind, what, *arguments = asked["arguments"]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # the first one is this file's folder
    sys.path[:] = ["" if kind == "-c" else asked["folder"], *given, *sys.path[1:]]
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    run(forked())
