"""Code run in a process of its own, so that nothing it imports or patches stays behind."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping

REPOSITORY = pathlib.Path(__file__).parent.parent
FAKE_SGLANG = REPOSITORY / "tests" / "engine" / "fake_sglang"


def python(
    *arguments: str, paths: Iterable[pathlib.Path] = (), environment: Mapping[str, str] | None = None, timeout: int = 60
) -> subprocess.CompletedProcess[str]:
    """Python with these folders before the repository on its path, and none of our settings but those given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG", "XDG"))}
    inherited["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, REPOSITORY]))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def code(text: str) -> str:
    return textwrap.dedent(text)
