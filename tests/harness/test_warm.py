# SPDX-License-Identifier: Apache-2.0
"""A process that starts with torch imported is one as any other to the code that it runs."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
from typing import Any

import pytest

from tests import processes, programs, warm, wheels
from tests.wheels import NEWEST, RELEASES

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
    path: dict[str, Any] = {"PYTHONPATH": str(tmp_path)}
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
        ("import sys; sys.exit('what is missing')", 1, "what is missing\n"),
        ("import sys; sys.exit(None)", 0, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'the last word'); 1 / 0", 1, "the last word"),
    ],
)
def test_how_it_ended_is_told(code: str, status: int, said: str) -> None:
    done = run("-c", code)
    assert done.returncode == status and said in done.stderr


def test_its_threads_are_waited_for() -> None:
    code = "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('done'))).start()"
    done = run("-c", code)
    assert (done.stdout, done.returncode) == ("done\n", 0)


def test_what_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run("-c", "import time; print('begun', flush=True); time.sleep(60)", timeout=0.5)
    assert run("-c", "print(1)").stdout == "1\n"


def test_each_environment_that_packages_read_when_they_are_imported_has_its_own() -> None:
    same = warm.starter({**WHOLE, "PYTHONPATH": "elsewhere", "SGLANG_PLUGINS": "others"})
    assert same is warm.starter(WHOLE)
    assert warm.starter({**WHOLE, "TORCHDYNAMO_DISABLE": "1"}) is not same


# what a program may see of the process that it runs in, before SGLang and after
SEEN = """
import json, os, sys
was_imported = "sglang" in sys.modules
from cpu_sglang import one_batch
sglang = one_batch.import_sglang(with_graphs=True)
import torch
one_batch._import_benchmark()
print("RESULT", json.dumps({
    "was imported": was_imported, "argv": sys.argv[1:], "path": sys.path, "environment": dict(os.environ),
    "folder": os.getcwd(), "name": __name__, "modules": sorted(sys.modules), "stdin": sys.stdin.read(),
    "sglang": [sglang.__file__, sglang.__version__], "graph": torch.cuda.CUDAGraph.__module__,
    "finders": [type(finder).__name__ for finder in sys.meta_path], "parent": os.getppid(),
}))
"""


@pytest.fixture(params=[RELEASES[0], NEWEST])
def root(request: pytest.FixtureRequest) -> pathlib.Path:
    return wheels.unpacked(request.param)


def test_with_sglang_imported_it_is_given_what_a_cold_one_is(root: pathlib.Path) -> None:
    # of its own, so that no test before this one has had it imported
    told = {"SGLANG_TOLD": "by this test"}
    cold, warmed = (processes.on_cpu(root, "-c", SEEN, "one", cold=cold, environment=told) for cold in (True, False))
    ours, new = processes.result(warmed), processes.result(cold)
    assert ours.pop("parent") != new.pop("parent")
    assert (ours.pop("was imported"), new.pop("was imported")) == (True, False)
    assert ours == new
    assert not [name for name in ours["modules"] if name.startswith("sglang_bcg_fixes")]
    # what the import had to say is said once, and by the first
    assert warmed.stderr == cold.stderr


def test_a_module_is_run_as_well(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    report = tmp_path / "report.json"
    command = ("-m", "cpu_sglang.prefill", "--model", "llama", "--requests", "1", "--graph", "none")
    done = processes.on_cpu(root, *command, "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(report.read_text())["batches"]) == 3


def parent(root: pathlib.Path, code: str = "", **environment: str) -> int:
    """The process that it was forked from, having imported the release, as long as that is the same one."""
    start = "from cpu_sglang import one_batch; sglang = one_batch.import_sglang(); import json, os"
    program = f'{start}\n{code}\nprint("RESULT", json.dumps(os.getppid()))'
    found: int = processes.result(processes.on_cpu(root, "-c", program, environment=environment))
    return found


def test_the_releases_used_last_are_kept_and_nothing_is_left_behind() -> None:
    root = wheels.unpacked(RELEASES[0])
    first = parent(root, "sglang.left = 1")
    assert parent(root, "assert not hasattr(sglang, 'left')", SGLANG_BCG_FIXES="off") == first
    assert parent(root, SGLANG_PLUGINS="__none__", SGLANG_MAMBA_CONV_DTYPE="float16") == first
    others = [parent(root, SGLANG_TOLD=told) for told in "abc"[: warm.RELEASES_AT_ONCE]]
    assert len({first, *others}) == 1 + warm.RELEASES_AT_ONCE
    alive = [pathlib.Path("/proc", str(process)).exists() for process in (first, *others)]
    assert alive == [False, *[True] * warm.RELEASES_AT_ONCE]
    assert parent(root, SGLANG_TOLD="a") == others[0]


UNLIKE = {
    "a variable is set": "import os; os.environ['SGLANG_TOLD'] = 'so'\none_batch.import_sglang()",
    "it is not called": "if False: one_batch.import_sglang()",
    "it is called otherwise": (
        "if False: one_batch.import_sglang()\ncall = one_batch.import_sglang\ncall(with_graphs=True)"
    ),
}


@pytest.mark.parametrize("code", UNLIKE.values(), ids=UNLIKE)
def test_what_must_not_have_sglang_imported_is_refused(code: str) -> None:
    program = f"from cpu_sglang import one_batch\n{code}"
    done = processes.on_cpu(wheels.unpacked(RELEASES[0]), "-c", program)
    assert done.returncode == 1 and "run this program with cold=True" in done.stderr
    assert processes.on_cpu(wheels.unpacked(RELEASES[0]), "-c", program, cold=True).returncode == 0


def test_a_release_that_cannot_be_imported_says_why(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sglang.py").write_text("raise ImportError('no such luck')")
    for _ in range(2):
        done = processes.on_cpu(tmp_path, "-c", "from cpu_sglang import one_batch; one_batch.import_sglang()")
        assert done.returncode == 1 and "no such luck" in done.stderr


def test_an_import_that_takes_too_long_is_ended(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sglang.py").write_text("import time; time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        processes.on_cpu(tmp_path, "-c", "from cpu_sglang import one_batch; one_batch.import_sglang()", timeout=1)


WITH, WITHOUT = "one_batch.import_sglang(with_graphs=True)", "one_batch.import_sglang()"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("-c", WITH), True),
        (("-c", WITHOUT), False),
        (("-c", f"{WITH}\n{WITHOUT}"), None),
        (("-c", f"said = {WITH!r}"), None),
        # decided when it runs
        (("-c", "one_batch.import_sglang(with_graphs=asked)"), None),
        (("-m", "tests.scenarios.harmless_conditions"), None),
        (("-c", "import sglang"), None),
        (("-m", "cpu_sglang.prefill"), True),
        (("-m", "tests.bench.cpu_layer"), False),
        (("-m", "sglang_bcg_fixes"), None),
        (("-c", "from tests.scenarios import released"), True),
        (("-c", "from tests.scenarios.released import load"), True),
        (("-c", "import tests.scenarios.released"), True),
        # what it says itself goes before what a module does that it may not call
        (("-c", f"from tests.scenarios import released\n{WITHOUT}"), False),
        (("-c", "from tests.scenarios import released; from tests.bench import cpu_layer"), None),
    ],
)
def test_how_a_program_imports_sglang_is_read_from_its_source(arguments: tuple[str, ...], found: Any) -> None:
    assert programs.with_graphs(arguments) is found


PARSED = """
import ast, pathlib
from cpu_sglang import one_batch
root = pathlib.Path(one_batch.import_sglang().__path__[0]).parent
module = "sglang/srt/server_args.py"
text = (root / module).read_text()
plain = ast.dump(compile(text, module, "exec", ast.PyCF_ONLY_AST))
first, again = ast.parse(text, module), ast.parse(text, module)
other = ast.parse(text.replace("class ServerArgs", "class Others"), module)
print(first is again, ast.dump(first) == plain, ast.dump(other) == plain, ast.parse(text) is first)
"""


def test_what_the_plugin_reads_is_parsed_and_nothing_is_taken_for_it() -> None:
    assert processes.on_cpu(wheels.unpacked(NEWEST), "-c", PARSED).stdout == "True True False False\n"
