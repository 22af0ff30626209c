"""A process that starts with torch imported is one as any other to the code that it runs."""

from __future__ import annotations

import pathlib
import signal
import subprocess

import pytest

from tests import processes, warm

ABOUT = """
import atexit, json, os, sys
atexit.register(lambda: print("ended", file=sys.stderr))
import settings
print(json.dumps([
    sys.argv[1:], sys.path[1:3], os.environ["SGLANG_TOLD"], os.getcwd(), __name__, settings.VALUE,
    sys.modules["__main__"].__dict__ is globals(), sys.stdin.read(),
]))
sys.exit(3)
"""


WHOLE = processes.environment_of([], {**processes.ON_CPU, "SGLANG_TOLD": "so"})


def run(*arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm.starter(WHOLE).run(arguments, {**WHOLE, **environment}, timeout)


@pytest.mark.parametrize("way", [("-c", ABOUT), ("-m", "about")])
def test_it_is_given_what_a_new_one_is(tmp_path: pathlib.Path, way: tuple[str, str]) -> None:
    (tmp_path / "settings.py").write_text("VALUE = 7")
    (tmp_path / "about.py").write_text(ABOUT)
    path = {"PYTHONPATH": str(tmp_path)}
    ours = run(*way, "one", "two", **path)
    new = subprocess.run(ours.args, env={**WHOLE, **path}, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (ours.stdout, ours.stderr, ours.returncode) == (new.stdout, "ended\n", 3)
    assert (new.stderr, new.returncode) == ("ended\n", 3)


def test_nothing_is_left_behind_for_the_next() -> None:
    first = "import os, sys, torch; torch.left = 1; sys.path.append('x'); os.environ['SGLANG_LEFT'] = '1'"
    second = "import os, sys, torch; print(hasattr(torch, 'left'), 'x' in sys.path, 'SGLANG_LEFT' in os.environ)"
    assert run("-c", first).returncode == 0
    assert run("-c", second).stdout == "False False False\n"


def test_torch_is_imported_and_nothing_that_is_tested() -> None:
    found = "import sys; print('torch' in sys.modules, [n for n in sys.modules if n.startswith(('sglang', 'tests'))])"
    assert run("-c", found).stdout == "True []\n"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os; os._exit(5)", 5, ""),
    ],
)
def test_how_it_ended_is_told(code: str, status: int, said: str) -> None:
    done = run("-c", code)
    assert done.returncode == status and said in done.stderr


def test_what_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run("-c", "import time; print('begun', flush=True); time.sleep(60)", timeout=0.5)
    assert run("-c", "print(1)").stdout == "1\n"


def test_each_environment_that_packages_read_when_they_are_imported_has_its_own() -> None:
    same = warm.starter({**WHOLE, "PYTHONPATH": "elsewhere", "SGLANG_PLUGINS": "others"})
    assert same is warm.starter(WHOLE)
    assert warm.starter({**WHOLE, "TORCHDYNAMO_DISABLE": "1"}) is not same
