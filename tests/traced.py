# SPDX-License-Identifier: Apache-2.0
"""Notes what a process reads of this repository, for tests/ledger.py: every file, folder, package and program.

A line in the environment's site-packages (`install`) has every Python of a row begin with this file, by its path: it
imports nothing of the repository. Each note is written at once, so that a process may be killed at any moment.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

# the folder of the notes, and the file that begins them
FOLDER, CODE = "TESTS_TRACE", "TESTS_TRACE_BY"
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
INSIDE = ROOT + os.sep
PACKAGES = os.sep + "site-packages" + os.sep
# whose opening of a .py file is no reading of its comments: imports, tracebacks, and Triton's look for a kernel's lines
OF_CODE = ("<frozen importlib._bootstrap_external>", "linecache.py", "tokenize.py", "assertion/rewrite.py")
# they look whether a file is there that they have been told of: that one counts, and its neighbours do not
FINDERS = ("<frozen importlib", f"{os.sep}_pytest{os.sep}", os.path.join("importlib", "metadata"))
REGISTRY = os.path.join("planning", "registry.py")
FIXES = os.path.join("sglang_bcg_fixes", "fixes") + os.sep
CONCERN = os.path.join("sglang_bcg_fixes", "concern.py")
PLUGIN = "sglang_bcg_fixes.plugin"
FIX_MODULES = "sglang_bcg_fixes.fixes."
HOOK = (
    f"import os; os.environ.get('{FOLDER}') and exec(compile(open(os.environ['{CODE}']).read(), "
    f"os.environ['{CODE}'], 'exec'), {{'__name__': 'bcg_traced', '__file__': os.environ['{CODE}']}})\n"
)

# kind and what, of this process and of those that it was forked from
notes: dict[tuple[str, str], None] = {}
told_plans: set[int] = set()
watched: set[str] = set()
into = -1


def install() -> None:
    """Have this Python, and each that is started with the same packages, ask the environment if it is traced."""
    file = os.path.join(next(path for path in sys.path if path.endswith("site-packages")), "bcg_tests_traced.pth")
    old = ""
    if os.path.isfile(file):
        with open(file) as there:
            old = there.read()
    if old != HOOK:
        draft = f"{file}.{os.getpid()}"
        with open(draft, "w") as written:
            written.write(HOOK)
        os.replace(draft, file)


def begin() -> None:
    """Write into this environment's folder from now on, and there first what has been noted before."""
    global into
    if into >= 0:
        os.close(into)
        into = -1
    folder = os.environ.get(FOLDER)
    if not folder or not os.path.isdir(folder):
        return
    into = os.open(os.path.join(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for kind, what in notes:
        write(kind, what)
    told_plans.clear()


def note(kind: str, what: str) -> None:
    if (kind, what) not in notes:
        notes[kind, what] = None
        if into >= 0:
            write(kind, what)


def write(kind: str, what: str) -> None:
    os.write(into, f"{os.getpid()}\t{kind}\t{what}\n".encode())


def tell_plan() -> None:
    """Note what the plugin of this process has decided, once it has."""
    plugin = sys.modules.get(PLUGIN)
    loaded = getattr(plugin, "_loaded", None)
    if not loaded or id(loaded[0]) in told_plans or into < 0:
        return
    told_plans.add(id(loaded[0]))
    plan, settings = loaded[0].plan, os.environ.get("SGLANG_BCG_FIXES", "")
    on = sorted(decision.id for decision in plan.fixes if decision.action.name in ("APPLY", "BLOCKED"))
    write("plan", f"{plan.version} {'only' if settings == 'off' else 'all'} {','.join(on)}")
    for name, module in list(sys.modules.items()):
        # a fix may be a folder, of which the package declares it
        fix = name.removeprefix(FIX_MODULES).partition(".")[0]
        if name.startswith(FIX_MODULES) and not fix.startswith("_") and fix not in on and name not in watched:
            watched.add(name)
            watch(module, sys.modules[f"{FIX_MODULES}{fix}"].FIX.probe)


def watch(module: types.ModuleType, probe: Any) -> None:
    """Note the file of a fix that is off when a function of it runs, but for its probe and what that calls.

    Its verdict stands for such a fix. A row that has run more of it rests on the file like one where it is on; one that
    has asked whom its defect concerns, on that part.
    """
    code = getattr(probe, "__code__", None)
    file = module.__name__.replace(".", os.sep) + (f"{os.sep}__init__.py" if hasattr(module, "__path__") else ".py")
    for function in functions_of(module):
        if function.__code__ is not code:
            note_call(function, file, code)


def functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Every function that a module defines outside of functions; methods and decorated functions too."""
    own = (value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__)
    for value in own:
        for each in vars(value).values() if isinstance(value, type) else (value,):
            for name in ("", "__wrapped__", "__func__", "fget", "func"):
                inside = getattr(each, name, None) if name else each
                if isinstance(inside, types.FunctionType) and inside.__code__.co_filename == module.__file__:
                    yield inside


def note_call(function: types.FunctionType, file: str, probe: types.CodeType | None) -> None:
    """Have what the function runs for noted, until that is the fix itself; then it is as it was."""
    code = function.__code__
    if code.co_freevars:
        # its code cannot be replaced
        note("used", file)
        return
    whole = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    whole.__kwdefaults__ = function.__kwdefaults__

    def run(*arguments: Any, **keywords: Any) -> Any:
        frame: types.FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not probe and not frame.f_code.co_filename.endswith(CONCERN):
            frame = frame.f_back
        if frame is None:
            function.__code__ = code
            note("used", file)
        elif frame.f_code is not probe:
            note("concerns", file)
        return whole(*arguments, **keywords)

    # for who asks for its parameters
    function.__wrapped__ = whole  # type: ignore[attr-defined]
    function.__code__ = FORWARD.replace(co_consts=tuple(run if each == "run" else each for each in FORWARD.co_consts))


def forward(*arguments: Any, **keywords: Any) -> Any:
    # a function's code has no place for a closure, but its constants may be anything
    run: Any = "run"
    return run(*arguments, **keywords)


FORWARD = forward.__code__


@functools.cache
def real(folder: str) -> str:
    return os.path.realpath(folder)


def place(path: Any) -> str | None:
    """The path without links, if it is one."""
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, str):
        # an open file, or no path at all
        return None
    folder, name = os.path.split(path if path.startswith("/") else os.path.join(os.getcwd(), path))
    found = os.path.join(real(folder), name)
    return os.path.realpath(found) if name in ("", ".", "..") or os.path.islink(found) else found


def is_outside(name: str) -> bool:
    """True for what git and caches keep: folders that begin with a dot, but the two that are part of the project."""
    first = name.partition(os.sep)[0]
    return (first.startswith(".") and first not in (".ci", ".github") and os.sep in name) or first.endswith(".egg-info")


def opened(path: Any, mode: Any, flags: Any) -> None:
    found = place(path)
    if found is None:
        return
    if PACKAGES in found:
        note("package", found.rpartition(PACKAGES)[2].partition(os.sep)[0])
    elif found.startswith(INSIDE):
        only_written = flags & os.O_ACCMODE == os.O_WRONLY if isinstance(flags, int) else False
        name = found[len(INSIDE) :]
        # beside an open folder, which is removed
        is_entry = mode is None and not os.path.isabs(path) and by_removal()
        if only_written or is_outside(name) or is_entry:
            return
        code = name.endswith((".pyc", ".py")) and by_import()
        folder, base = os.path.split(name)
        if os.path.basename(folder) == "__pycache__":
            code, name = True, os.path.join(os.path.dirname(folder), base.partition(".")[0] + ".py")
        kind = "code" if code else "data"
        if code and name.startswith(FIXES) and not by_registry():
            kind = "used"
        if name == "pyproject.toml" and by_pytest():
            kind = "options"
        note(kind, name)


def opener() -> types.FrameType | None:
    """The frame that opens or lists something; none while Python begins."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def by_import() -> bool:
    """True where nobody sees the text of what is opened, only what it says to Python."""
    frame = opener()
    if frame is None:
        # Python itself, which is about to run it
        return True
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(OF_CODE):
            return True
        frame = frame.f_back
    return False


def by_removal() -> bool:
    frame = opener()
    return frame is not None and frame.f_code.co_filename.endswith("shutil.py")


def by_pytest() -> bool:
    """True where pytest looks for its own section."""
    frame = opener()
    while frame is not None and frame.f_code.co_filename.endswith("pathlib.py"):
        frame = frame.f_back
    return frame is not None and f"{os.sep}_pytest{os.sep}" in frame.f_code.co_filename


def by_registry() -> bool:
    frame = opener()
    while frame is not None:
        if frame.f_code.co_filename.endswith(REGISTRY):
            return True
        # a fix that is a folder imports its modules
        by_fix = FIXES in frame.f_code.co_filename and frame.f_code.co_name == "<module>"
        importing = frame.f_code.co_filename.startswith(("<frozen importlib", "<frozen zipimport"))
        if (
            not by_fix
            and not importing
            and not (frame.f_code.co_filename.endswith(os.path.join("importlib", "__init__.py")))
        ):
            return False
        frame = frame.f_back
    return False


def listed(path: Any) -> None:
    found = place("." if path is None else path)
    if found is None or not f"{found}{os.sep}".startswith(INSIDE):
        return
    frame = opener()
    by_finder = frame is not None and any(part in frame.f_code.co_filename for part in FINDERS)
    name = found[len(INSIDE) :]
    if by_finder or is_outside(name + os.sep) or "__pycache__" in name:
        return
    kind = "folder"
    if frame is not None and frame.f_code.co_filename.endswith("pkgutil.py"):
        # it lists a folder for its modules, and each folder in there for an __init__.py
        kind = "modules"
        if os.path.realpath(frame.f_locals["importer"].path) != found:
            return
    note(kind, name)


def started(program: Any, arguments: Sequence[Any], environment: Any) -> None:
    """A Python that is not traced may read anything; any other program is judged by its name."""
    given = os.environ if environment is None else {os.fsdecode(name): value for name, value in environment.items()}
    name = os.path.basename(os.fsdecode(program if program is not None else arguments[0]))
    words = [os.fsdecode(word) for word in arguments]
    if words and not name.startswith("python") and os.path.basename(words[0]).startswith("python"):
        name = os.path.basename(words[0])
    if not name.startswith("python"):
        note("program", name)
    elif os.fsdecode(words[0] if words else name) != sys.executable or FOLDER not in given:
        note("program", "python without a trace")


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        opened(*arguments)
        tell_plan()
    elif event in ("os.listdir", "os.scandir"):
        listed(arguments[0])
    elif event == "ctypes.dlopen" and isinstance(arguments[0], str) and os.sep in arguments[0]:
        opened(arguments[0], "r", os.O_RDONLY)
    elif event == "subprocess.Popen":
        started(arguments[0], arguments[1], arguments[3])
    elif event in ("os.posix_spawn", "os.spawn"):
        started(arguments[-3], arguments[-2], arguments[-1])
    elif event == "os.exec":
        started(*arguments)
    elif event == "os.system":
        note("program", "a shell")


# a virtual environment's folder may be gone through twice
if __name__ == "bcg_traced" and "bcg_traced" not in sys.modules:
    module = types.ModuleType("bcg_traced")
    module.__dict__.update(globals())
    sys.modules["bcg_traced"] = module
    begin()
    sys.addaudithook(hook)
