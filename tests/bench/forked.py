# SPDX-License-Identifier: Apache-2.0
"""Processes that the bench starts, forked from one that has imported their release: see tests/warm.py."""

from __future__ import annotations

import io
import subprocess
import sys
import types
from collections.abc import Mapping
from typing import Any

from tests import programs, warm


class Popen:
    """A stand-in for `subprocess.Popen`, for a program whose output is read to its end."""

    def __init__(self, command: list[str], stdout: int, text: bool, env: Mapping[str, str]) -> None:
        assert command[0] == sys.executable and text
        arguments = tuple(command[1:])
        done = warm.starter(env).run(arguments, env, timeout=300, with_graphs=programs.with_graphs(arguments))
        sys.stderr.write(done.stderr)
        self.stdout, self.returncode = io.StringIO(done.stdout), done.returncode

    def __enter__(self) -> Popen:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def kill(self) -> None:
        """Do nothing: it has ended."""


# in place of the whole module, as it is known to who starts them: the first process is started as ever
SUBPROCESS = types.SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE)
