# SPDX-License-Identifier: Apache-2.0
"""Servers that `verify` starts, forked from a process that has imported their release: see tests/warm.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import types
from collections.abc import Mapping
from typing import Any, BinaryIO

from tests import programs, warm


class Popen:
    """A stand-in for `subprocess.Popen`: what it starts has ended, and its log is written.

    So nothing that hangs is killed here, and nobody is interrupted: tests/verify/test_command.py has these.
    """

    # nobody has it, so there is nobody left to kill
    pid = 2**31 - 1

    def __init__(self, command: list[str], env: Mapping[str, str], stdout: BinaryIO, **_: Any) -> None:
        assert command[0] == sys.executable
        arguments = tuple(command[1:])
        with_graphs = programs.with_graphs(arguments)
        try:
            done = warm.starter(env).run(arguments, env, timeout=300, with_graphs=with_graphs)
        except subprocess.TimeoutExpired as late:
            # as if it had been killed
            done = subprocess.CompletedProcess(command, -signal.SIGKILL, "", str(late))
        stdout.write((done.stdout + done.stderr).encode())
        self.returncode = done.returncode

    def poll(self) -> int:
        return self.returncode

    wait = poll


# in place of the whole module, as it is known to who starts them: the first process is started as ever
SUBPROCESS = types.SimpleNamespace(Popen=Popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
