# SPDX-License-Identifier: Apache-2.0
"""Commands on a machine that lacks something: packages, a folder that can be written, memory."""

from __future__ import annotations

import contextlib
import errno
import importlib.abc
import importlib.util
import io
import os
import pathlib
import re
import sys
import tempfile
from importlib.machinery import ModuleSpec
from typing import Any
from unittest import mock

from tests.scenarios import named

FORBIDDEN = ("torch", "triton", "sglang", "flashinfer", "numpy")


class Forbidden(importlib.abc.MetaPathFinder):
    """Refuses to import what a bare machine does not have."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in FORBIDDEN:
            raise AssertionError(f"{name} must not be imported here")
        return None


def command(*arguments: str) -> None:
    from sglang_bcg_fixes.cli.main import main

    raise SystemExit(main(list(arguments)))


def without_packages(*arguments: str) -> None:
    sys.meta_path.insert(0, Forbidden())
    command(*arguments)


def explain_each(*names: str) -> dict[str, tuple[int, str]]:
    sys.meta_path.insert(0, Forbidden())
    from sglang_bcg_fixes.cli.main import main

    found = {}
    for name in names:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                status = main(["explain", name])
            except SystemExit as left:
                status = left.code if isinstance(left.code, int) else 1
        found[name] = status, printed.getvalue()
    return found


def declarations_without_packages() -> int:
    sys.meta_path.insert(0, Forbidden())
    from sglang_bcg_fixes.planning import registry

    return len(registry.discover().fixes)


def without_sglang(*arguments: str) -> None:
    find = importlib.util.find_spec

    def find_others(name: str, *rest: Any) -> ModuleSpec | None:
        return None if name == "sglang" else find(name, *rest)

    with mock.patch.object(importlib.util, "find_spec", find_others):
        command(*arguments)


def without_sglang_and_torch(*arguments: str) -> None:
    """Refuse torch, whoever imports it; its version can still be looked up."""
    with mock.patch.dict(sys.modules, {"torch": None, "triton": None}):
        without_sglang(*arguments)


def with_little_memory(*arguments: str) -> None:
    from sglang_bcg_fixes.cli.main import main

    code = main(list(arguments))
    # getrusage would count what the parent had before it started this
    peak = re.search(r"VmHWM:\s*(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert peak and int(peak[1]) < 300 << 10, "KiB"
    raise SystemExit(code)


def with_a_read_only_cache(*arguments: str) -> None:
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with mock.patch.object(tempfile, "mkdtemp", side_effect=read_only):
        command(*arguments)


if __name__ == "__main__":
    named.run(globals())
