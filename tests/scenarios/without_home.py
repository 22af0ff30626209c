# SPDX-License-Identifier: Apache-2.0
"""Processes of a user that the system does not know and that has no home."""

from __future__ import annotations

import os
import pwd
import tempfile
from typing import Any
from unittest import mock

from tests.scenarios import named


def nobody(number: int) -> Any:
    raise KeyError(f"getpwuid(): uid not found: {number}")


def begin() -> None:
    vars(pwd)["getpwuid"] = nobody
    os.environ.pop("HOME", None)


def server() -> None:
    begin()
    serve()


def server_without_a_folder() -> None:
    begin()
    nowhere = FileNotFoundError(2, "No usable temporary directory found")
    with mock.patch.object(tempfile, "gettempdir", side_effect=nowhere):
        serve()


def serve() -> None:
    from tests.scenarios import fake_server, plugin_process

    fake_server.begin()
    plugin_process.patched()


def command(*arguments: str) -> None:
    begin()
    from sglang_bcg_fixes.cli.main import main

    raise SystemExit(main(list(arguments)))


if __name__ == "__main__":
    named.run(globals())
