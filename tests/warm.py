# SPDX-License-Identifier: Apache-2.0
"""Python processes that begin with torch and its like imported: most of what a release's tests took was those imports.

A `Starter` keeps one process that has imported them and nothing of SGLang or of ours, and has it fork for each run. To
the code that runs, all is as in a process of its own: its path, its environment, its `__main__`, its end.

A program that calls `one_batch.import_sglang()` can be forked from another process instead, which the first has forked
and which has called it for the same release, has imported the benchmark that `one_batch.load()` starts with, and has
parsed what our plugin reads of a release. The call then returns at once. It must come before anything that the import
could notice, so it raises where the program has changed its environment, and a program that ends without it fails.
"""

from __future__ import annotations

import ast
import atexit
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NoReturn

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
# SGLang may read any variable when it is imported, but not the plugin's and pytest's; the third it reads for a model,
# and the last to choose from plugins of PLATFORMS, of which there are none
NOT_READ_BY_SGLANG = ("PYTEST_CURRENT_TEST", "SGLANG_BCG_", "SGLANG_MAMBA_CONV_DTYPE", "SGLANG_PLUGINS", "TESTS_")
# a folder of starters that outlive this process, and an open file that ends with the one that may use them
STARTERS, LIFELINE = "TESTS_STARTERS", "TESTS_LIFELINE"
# names all that the plugin reads of a release
FORMS = pathlib.Path(__file__).parent.parent / "sglang_bcg_fixes" / "source" / "forms.json"
PLATFORMS = "sglang.srt.platforms"
# those used last: each takes two hundred megabytes, in every worker of pytest
RELEASES_AT_ONCE = 3


class Starter:
    """The process that forks, with the environment that its packages were imported in."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        # one at a time: it waits for what it has forked
        self._turn = threading.Lock()

    def run(
        self,
        arguments: tuple[str, ...],
        environment: Mapping[str, str],
        timeout: float,
        with_graphs: bool | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments as `subprocess.run` does, `-c` or `-m` first.

        `with_graphs` is what the program tells `import_sglang()` if that is to be done already, or else None.
        """
        command = [sys.executable, *arguments]
        with self._turn, tempfile.TemporaryDirectory() as folder:
            out, err = (pathlib.Path(folder, name) for name in ("out", "err"))
            asked = {
                "arguments": arguments,
                "environment": dict(environment),
                "folder": str(pathlib.Path.cwd()),
                "files": [str(out), str(err)],
                "timeout": timeout,
                "with_graphs": with_graphs,
            }
            self._process.send(asked)
            returncode: int | None = self._process.recv()
            printed = [file.read_text() for file in (out, err)]
        if returncode is None:
            raise subprocess.TimeoutExpired(command, timeout, *printed)
        return subprocess.CompletedProcess(command, returncode, *printed)

    @functools.cached_property
    def _process(self) -> Connection:
        folder, lifeline = starters_folder()
        read = json.dumps(sorted(read_when_imported(self.environment)))
        address = os.path.join(folder, hashlib.sha256(read.encode()).hexdigest()[:16])
        if not os.path.exists(address):
            command = [sys.executable, __file__, address, str(lifeline)]
            started = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, pass_fds=[lifeline])
            while not os.path.exists(address):
                if started.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)} has ended with {started.returncode}")
                time.sleep(0.01)
        return Client(address)


@functools.cache
def starters_folder() -> tuple[str, int]:
    """Give the folder of their addresses, and the file whose other end this process or its parent holds."""
    if STARTERS in os.environ:
        return os.environ[STARTERS], int(os.environ[LIFELINE])
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name, os.pipe()[0]


_starters: dict[frozenset[tuple[str, str]], Starter] = {}


def starter(environment: Mapping[str, str]) -> Starter:
    """The one whose packages were imported in this environment, as far as they read it."""
    imported_in = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    return _starters.setdefault(read_when_imported(imported_in), Starter(imported_in))


def read_when_imported(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(pair for pair in environment.items() if pair[0].startswith(READ_WHEN_IMPORTED))


class Release:
    """A process that has imported a release and forks too, as the first process sees it."""

    def __init__(self, process: int, connection: Connection) -> None:
        self.process, self.connection = process, connection
        self.has_ended = False

    def run(self, asked: dict[str, Any]) -> int | None:
        self.connection.send(asked)
        try:
            status: int | None = self.connection.recv()
        except EOFError:
            # it could not import the release, and has said why where the program would have
            status = self.ended()
            return None if status == -signal.SIGALRM else status
        return status

    def end(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        self.ended()

    def ended(self) -> int:
        self.has_ended = True
        self.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def forked(address: str, lifeline: int) -> dict[str, Any]:
    """Answer whoever calls, until nobody may; returns in each process forked for a run, with what that is to run."""
    for name in IMPORTED:
        importlib.import_module(name)
    assert not any(name.partition(".")[0].startswith(("sglang", "tests")) for name in sys.modules)
    prepare_to_fork()
    releases: dict[Any, Release] = {}
    # whoever waits for the address may call at once
    draft = f"{address}.draft"
    listener = Listener(draft)
    os.rename(draft, address)
    caller = called(listener, lifeline)
    while True:
        try:
            asked: dict[str, Any] = caller.recv()
        except EOFError:
            caller.close()
            caller = called(listener, lifeline)
            continue
        if asked["with_graphs"] is None:
            child = os.fork()
            if child == 0:
                close(listener, caller, *(release.connection for release in releases.values()))
                enter(asked)
                return asked
            caller.send(wait(child, asked["timeout"]))
            continue
        read = {pair for pair in asked["environment"].items() if not pair[0].startswith(NOT_READ_BY_SGLANG)}
        key = (asked["with_graphs"], asked["folder"], frozenset(read))
        release = releases.pop(key, None)
        if release is None:
            if len(releases) == RELEASES_AT_ONCE:
                releases.pop(next(iter(releases))).end()
            ours, theirs = multiprocessing.Pipe()
            child = os.fork()
            if child == 0:
                close(listener, caller, ours, *(release.connection for release in releases.values()))
                return forked_with_release(theirs)
            theirs.close()
            release = Release(child, ours)
        caller.send(release.run(asked))
        if not release.has_ended:
            # the last one is the one used last
            releases[key] = release


def forked_with_release(caller: Connection) -> dict[str, Any]:
    """Do as `forked` for one release, imported by the first run in its own files, folder and environment."""
    asked = received(caller)
    # ends this process if the import takes as long as the program may
    signal.setitimer(signal.ITIMER_REAL, asked["timeout"])
    enter(asked)
    from cpu_sglang import one_batch

    sglang = one_batch.import_sglang(with_graphs=asked["with_graphs"])
    one_batch._import_benchmark()
    parse_only_once(pathlib.Path(sglang.__path__[0]).parent)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert not any(name.startswith(("sglang_bcg_fixes", "tests")) for name in sys.modules)
    assert not importlib.metadata.entry_points(group=PLATFORMS), "an import would depend on SGLANG_PLUGINS"
    changed = dict(os.environ.items() - asked["environment"].items())
    assert not asked["environment"].keys() - os.environ.keys(), "SGLang's import removes a variable"
    prepare_to_fork()
    while True:
        child = os.fork()
        if child == 0:
            caller.close()
            asked["environment"].update(changed)
            use(asked)
            one_batch.import_sglang = asked["imported"] = Imported(sglang, asked)
            return asked
        caller.send(wait(child, asked["timeout"]))
        asked = received(caller)


class Imported:
    """Takes the place of `one_batch.import_sglang` in a process forked from one that has called it."""

    def __init__(self, sglang: types.ModuleType, asked: dict[str, Any]) -> None:
        self.sglang, self.asked = sglang, asked
        self.was_called = False

    def __call__(self, with_graphs: bool = False) -> types.ModuleType:
        if with_graphs != self.asked["with_graphs"] or dict(os.environ) != self.asked["environment"]:
            raise RuntimeError("SGLang was imported in another way or environment: run this program with cold=True")
        self.was_called = True
        return self.sglang

    def check(self) -> None:
        if not self.was_called:
            raise RuntimeError(
                "SGLang was imported, and nobody called import_sglang(): run this program with cold=True"
            )


def parse_only_once(root: pathlib.Path) -> None:
    """Keep the syntax trees of what the plugin reads, which takes half a second in each process that has it."""
    parse, trees = ast.parse, {}
    for module in {where.partition(":")[0] for where in json.loads(FORMS.read_text())}:
        path = f"{module.replace('.', '/')}.py"
        if (root / path).is_file():
            text = (root / path).read_text()
            trees[text, path] = parse(text, path)

    # nobody changes a tree that has a name of a file
    def parse_others(source: Any, filename: Any = "<unknown>", *arguments: Any, **keywords: Any) -> Any:
        known = None if arguments or keywords or not isinstance(source, str) else trees.get((source, filename))
        return known or parse(source, filename, *arguments, **keywords)

    ast.parse = parse_others


def close(*ends: Listener | Connection) -> None:
    for end in ends:
        end.close()


def called(listener: Listener, lifeline: int) -> Connection:
    """Wait for the next one that has runs to ask for."""
    ready, _, _ = select.select([listener._listener._socket, lifeline], [], [])  # type: ignore[attr-defined]
    if lifeline in ready:
        os._exit(0)
    return listener.accept()


def received(caller: Connection) -> dict[str, Any]:
    try:
        asked: dict[str, Any] = caller.recv()
    except EOFError:
        # without the handlers of what was imported, which each forked process runs for itself
        os._exit(0)
    return asked


def prepare_to_fork() -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "a thread does not come along into a forked process"
    # what is imported stays for good, and a collection would copy its pages in each process
    gc.collect()
    gc.freeze()


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


def enter(asked: dict[str, Any]) -> None:
    """Give this process what a new Python would have: files, folder, environment, arguments and path."""
    use(asked)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [entry for entry in given if entry]


def use(asked: dict[str, Any]) -> None:
    """All of it but the path's folders, which this process has."""
    # with a model and the interpreter's objects a collection takes long, and a program that waits for one asks for it
    gc.set_threshold(100_000, 50, 100)
    nothing = os.open(os.devnull, os.O_RDONLY)
    # behind what the import of a release has written there
    files = [os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in asked["files"]]
    for number, file in enumerate([nothing, *files]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    traced = sys.modules.get("bcg_traced")
    if traced:
        # also what this process has read before it was this run's
        traced.begin()
    kind, _, *arguments = asked["arguments"]
    sys.argv = [kind, *arguments]
    # it was this file's folder
    sys.path[0] = "" if kind == "-c" else asked["folder"]


def run(asked: dict[str, Any]) -> None:
    kind, what, *_ = asked["arguments"]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))
    if "imported" in asked:
        asked["imported"].check()


def status_of(asked: dict[str, Any]) -> int:
    """Run it, and say with which status Python would exit."""
    try:
        run(asked)
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def leave(status: int) -> NoReturn:
    """Exit as Python does, but without taking every module apart: that would copy their pages, for seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(status_of(forked(sys.argv[1], int(sys.argv[2]))))
