# SPDX-License-Identifier: Apache-2.0
"""Everything that can be seen of a release's modules in a process, in words that another process can compare.

python -m tests.releases.attributes MODULES, a JSON list of what is imported behind SGLang's plugins.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import json
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

OURS = "sglang_bcg_fixes"
# how far into containers, closures and wrappers: our wrappers hold what they wrap one level down
DEEP = 3
# an address: by itself, in a repr, or in the name that pydantic gives a schema
ADDRESS = re.compile(r"0x[0-9a-f]+|\d{9,}")


def code_of(function: Any) -> str:
    code = function.__code__
    return f"{function.__module__}.{function.__qualname__} {code.co_filename}:{code.co_firstlineno}"


def described(value: Any, depth: int = DEEP) -> Any:
    """Describe a value and its contents without running any code of its own."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if depth == 0:
        return name

    def inner(held: Any) -> Any:
        return described(held, depth - 1)

    if kind is types.FunctionType:
        cells = [inner(cell.cell_contents) for cell in value.__closure__ or () if cell != types.CellType()]
        added = {key: inner(held) for key, held in sorted(vars(value).items())}
        return [code_of(value), cells, added, inner(value.__defaults__), inner(value.__kwdefaults__)]
    if kind in (staticmethod, classmethod):
        return [name, inner(value.__func__)]
    if kind is property:
        return [name, *(inner(part) for part in (value.fget, value.fset, value.fdel))]
    if kind is functools.partial:
        return [name, inner(value.func), inner(value.args), inner(value.keywords)]
    if kind is types.MethodType:
        return [name, inner(value.__func__)]
    if kind in (list, tuple):
        return [name, *(inner(item) for item in value)]
    if kind is dict:
        return {str(key): inner(item) for key, item in value.items() if isinstance(key, str | int)}
    if isinstance(value, type):
        return [name, value.__module__, value.__qualname__]
    return [name, ADDRESS.sub("N", str(value))] if isinstance(value, str | int | None) else name


def attributes() -> dict[str, Any]:
    """Describe all of every SGLang module and of the classes in it."""
    found: dict[str, Any] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] != "sglang":
            continue
        for key, value in list(vars(module).items()):
            if key != "__builtins__":
                found[f"{module_name}:{key}"] = described(value)
            if isinstance(value, type) and vars(value).get("__module__") == module_name:
                members = list(vars(value).items())
                found |= {f"{module_name}:{key}.{inner}": described(member) for inner, member in members}
    return found


def noting(function: Callable[..., Any], asked_by: list[str]) -> Callable[..., Any]:
    """Note from which module it is called."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked_by.append(inspect.stack()[1].frame.f_globals.get("__name__", "?"))
        return function(*args, **kwargs)

    return noted


def of_the_process() -> dict[str, Any]:
    """Places of this process through which others could run code in it."""
    handlers = [(number.name, described(signal.getsignal(number))) for number in signal.valid_signals() if number < 32]
    return {
        "finders": [described(finder, 1) for finder in sys.meta_path],
        "path hooks": [described(hook, 1) for hook in sys.path_hooks],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signals": sorted(map(str, handlers)),
        "hooks": [described(hook) for hook in (sys.excepthook, sys.displayhook, sys.gettrace(), sys.getprofile())],
        "descriptors": sorted(filter(None, map(target_of, os.listdir("/proc/self/fd")))),
    }


def target_of(descriptor: str) -> str | None:
    """The target of a lasting descriptor; sockets and pipes have numbers that differ."""
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return None
    return target if target.startswith("/memfd") else None


def imported(modules: list[str]) -> Iterator[str]:
    """Import these; give those that cannot be imported here, with or without a plugin."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            yield f"{name}: {error}"


def main() -> None:
    asked: dict[str, list[str]] = {"at exit": [], "at fork": []}
    atexit.register = noting(atexit.register, asked["at exit"])
    os.register_at_fork = noting(os.register_at_fork, asked["at fork"])
    from cpu_sglang import stand_ins

    stand_ins.install()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    missing = list(imported(json.loads(sys.argv[1])))
    found = {**of_the_process(), "missing": missing, "attributes": attributes()}
    handlers = {when: [name for name in names if name.startswith(OURS)] for when, names in asked.items()}
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == OURS)
    print("RESULT", json.dumps({**found, "our handlers": handlers, "our modules": len(loaded)}))


if __name__ == "__main__":
    main()
