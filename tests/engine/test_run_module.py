# SPDX-License-Identifier: Apache-2.0
"""`python -m sglang_bcg_fixes -- MODULE ...`: the plugin where SGLang loads none."""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest

from tests import processes, wheels
from tests.engine import test_plugin
from tests.engine.test_plugin import OTHERS_OFF, Extra

extra = test_plugin.extra


def module(tmp_path: pathlib.Path, text: str, name: str = "a_program") -> pathlib.Path:
    folder = tmp_path / "programs"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(processes.code(text))
    return folder


def run_module(
    site: pathlib.Path, programs: pathlib.Path, reports: pathlib.Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return processes.python(
        *("-m", "sglang_bcg_fixes", *arguments),
        paths=[processes.FAKE_SGLANG, site, programs],
        environment={"FAKE_FORM": "enable", "SGLANG_BCG_REPORT_DIR": str(reports), **OTHERS_OFF},
    )


def test_a_module_is_run_with_the_plugin(extra: Extra, tmp_path: pathlib.Path) -> None:
    text = """
        import json, multiprocessing, sys
        from sglang.srt import target
        def child():
            from sglang.srt import target
            print(json.dumps([__name__, target.function(1)]))
        if __name__ == "__main__":
            print(json.dumps([sys.argv, __spec__.name, target.function(1)]))
            process = multiprocessing.get_context("spawn").Process(target=child)
            process.start()
            process.join()
            sys.exit(3)
    """
    programs = module(tmp_path, text)
    done = run_module(extra().site, programs, tmp_path / "r", "--", "a_program", "--flag", "-v", "--", "x")
    assert done.returncode == 3, done.stderr
    mine, childs = map(json.loads, done.stdout.splitlines())
    assert mine[0] == [str(programs / "a_program.py"), "--flag", "-v", "--", "x"] and mine[1] == "a_program"
    assert mine[2][0] == "around"
    assert childs == ["__mp_main__", ["function", 1, 1]], "as docs/selfcheck.md says"
    assert "processes that a_program starts have the plugin only where" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "name a module"), (["--model-path"], "name a module"), (["no_such.module"], "no_such")],
)
def test_a_module_that_is_none_is_an_error(
    extra: Extra, tmp_path: pathlib.Path, arguments: list[str], words: str
) -> None:
    done = run_module(extra().site, tmp_path, tmp_path / "r", "--", *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == ""


def test_sglang_s_own_benchmark_of_one_batch_is_run_with_the_plugin(tmp_path: pathlib.Path) -> None:
    # it loads no plugins itself
    text = """
        import runpy, sys
        from cpu_sglang import stand_ins
        stand_ins.install()
        try:
            runpy.run_module("sglang.bench_one_batch", run_name="__main__", alter_sys=True)
        finally:
            from sglang_bcg_fixes import plugin
            print("RESULT", plugin.load().report.ids("applied"))
    """
    done = processes.python(
        *("-m", "sglang_bcg_fixes", "--", "a_program", "--help"),
        paths=[wheels.unpacked("0.5.12.post1"), module(tmp_path, text)],
        environment={"TRITON_INTERPRET": "1", "SGLANG_BCG_REPORT_DIR": str(tmp_path / "reports")},
        timeout=120,
    )
    assert done.returncode == 0 and "--model-path" in done.stdout, done.stderr[-2000:]
    applied = done.stdout.rpartition("RESULT ")[2]
    assert "break_input_lifetime" in applied and "attention_tail_uninitialised" in applied, applied
