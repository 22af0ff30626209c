"""What a running process says of its fixes later on: still live, and reached."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from tests import processes
from tests.engine import test_plugin
from tests.engine.test_plugin import EXTRA, OTHERS_OFF, load

extra = test_plugin.extra
REPLACED = """
import functools
def theirs(original):
    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return ["theirs"]
    return replacement
"""
WRAPPED = REPLACED.replace('["theirs"]', '["theirs", *original(*args, **kwargs)]')
STATUS = """
import json, os, subprocess, sys
def status(*arguments):
    command = [sys.executable, "-m", "sglang_bcg_fixes", "status", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
def calls():
    fixes = {process["pid"]: process["fixes"] for process in json.loads(status("--json"))}
    return {pid: next(fix["calls"] for fix in rows if fix["id"] == "extra_fix") for pid, rows in fixes.items()}
def line():
    return next(line for line in status().splitlines() if line.split()[1] in ("extra_fix", "extra_fix:"))
def build():
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
    assert EAGLEDraftCudaGraphRunner("worker").eagle_worker == "worker"
def batch():
    from sglang.srt.model_executor.model_runner import ModelRunner
    return ModelRunner().forward(1)
FUNCTION = "sglang.srt.target:function"
"""
BY_PLUGIN = "target.function = theirs(target.function)"
BY_PLUGIN_METHOD = "target.Thing.method = theirs(target.Thing.method)"
OWN_CLASS = """
class Thing(target.Thing):
    def method(self, x):
        return ["own"]
target.Thing = Thing
"""


def told(code: str) -> str:
    """The code, with what it may ask and do."""
    return STATUS + processes.code(code)


def test_what_is_live_when_a_runner_has_been_built_is_said_once(extra, tmp_path: pathlib.Path) -> None:
    code = """
        assert result.report.read_back is None and "not read back yet" in status()
        build()
        found = result.report.read_back
        assert found.live == ["extra_fix"] and found.lost == {} and found.wrapped == {}, found
        assert "read back when EAGLEDraftCudaGraphRunner was built: 1 live; 0 batches since" in status(), status()
        build()
        batch()
        assert result.report.read_back.occasion == "the first batch came"
    """
    done = load(extra(), tmp_path / "reports", told(code))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("read back when") == 1 and len(done.stderr.splitlines()) == 2, done.stderr


@pytest.mark.parametrize(
    ("change", "slot", "holder"),
    [
        (REPLACED + BY_PLUGIN, "function", "function from <string>:"),
        (REPLACED + BY_PLUGIN_METHOD, "Thing.method", "Thing.method from <string>:"),
        (OWN_CLASS, "Thing.method", "Thing.method from <string>:"),
        (
            "import importlib; importlib.reload(target)",
            "function",
            f"function from {processes.FAKE_SGLANG / 'sglang/srt/target.py'}:",
        ),
        ("del target.function", "function", "nothing"),
    ],
    ids=["function", "method", "class", "reload", "deleted"],
)
def test_what_another_plugin_has_replaced_is_lost(
    extra, tmp_path: pathlib.Path, change: str, slot: str, holder: str
) -> None:
    done = load(extra(), tmp_path / "reports", told(f"{change}\nbuild()\nbuild()\nprint(line())"))
    assert done.returncode == 0, done.stderr
    words = f"sglang.srt.target:{slot} holds {holder}"
    [warning] = [line for line in done.stderr.splitlines() if "was applied and is LOST" in line]
    assert warning.startswith("bcg-fixes: extra_fix ") and words in warning, warning
    assert "Switch off the plugin" in warning and "SGLANG_BCG_FIX_EXTRA_FIX=off" in warning, warning
    assert done.stdout.split()[:2] == ["lost", "extra_fix:"] and words in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("occasion", "environ"),
    [("build()", {"SGLANG_BCG_FIXES": "strict"}), ("batch()", {"SGLANG_BCG_FIX_EXTRA_FIX": "on"})],
)
def test_a_lost_fix_that_is_required_ends_the_process(
    extra, tmp_path: pathlib.Path, environ: dict[str, str], occasion: str
) -> None:
    # SGLang may swallow an Exception
    code = told(f"{REPLACED}\n{BY_PLUGIN}\ntry:\n    {occasion}\nexcept Exception:\n    print('swallowed')")
    done = load(extra(), tmp_path / "reports", code, **environ)
    assert done.returncode == 1 and "swallowed" not in done.stdout, done.stderr
    assert "refuses to serve without SGLANG_BCG_FIX_EXTRA_FIX (lost): sglang.srt.target:function holds" in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        WRAPPED + BY_PLUGIN,
        WRAPPED + BY_PLUGIN_METHOD,
        f"{WRAPPED}{BY_PLUGIN}\n{BY_PLUGIN}",
        "import functools; target.function = functools.partial(target.function)",
        "import functools; target.function = functools.lru_cache(target.function)",
        "target.function = lambda x, original=target.function: original(x)",
    ],
    ids=["function", "method", "twice", "partial", "lru_cache", "default"],
)
def test_what_another_plugin_has_wrapped_is_live_and_named(extra, tmp_path: pathlib.Path, change: str) -> None:
    code = told(f"{change}\nbuild()\nprint(status())")
    done = load(extra(), tmp_path / "reports", code, SGLANG_BCG_FIXES="strict")
    assert done.returncode == 0 and " applied     extra_fix (" in done.stdout, done.stdout + done.stderr
    for text in (done.stdout, done.stderr):
        assert "1 live; extra_fix: sglang.srt.target:" in text and " is inside " in text, text


def test_a_subclass_that_takes_a_class_s_place_and_inherits_keeps_the_fix(extra, tmp_path: pathlib.Path) -> None:
    code = "target.Thing = type('Thing', (target.Thing,), {})\nbuild()\nassert result.report.read_back.lost == {}"
    done = load(extra(), tmp_path / "reports", told(code))
    assert done.returncode == 0, done.stderr


def test_a_fix_that_comes_back_is_applied_again(extra, tmp_path: pathlib.Path) -> None:
    code = "ours = target.function\ndel target.function\nbuild()\ntarget.function = ours\nbuild()\nprint(line())"
    done = load(extra(), tmp_path / "reports", told(code))
    assert done.returncode == 0 and done.stdout.split()[0] == "applied", done.stderr


@pytest.mark.parametrize(
    ("environ", "status"),
    # SGLang's own code is right: what nobody named is not worth a server
    [
        ({"SGLANG_BCG_FIXES": "strict"}, 0),
        ({"SGLANG_BCG_KERNEL_EXTRA_OP": "triton"}, 1),
        ({"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_KERNEL_EXTRA_OP": "triton"}, 1),
    ],
)
def test_a_kernel_that_another_plugin_has_replaced_is_lost(
    extra, tmp_path: pathlib.Path, environ: dict[str, str], status: int
) -> None:
    text = test_plugin.with_kernel(point="Thing.static").replace("bodies:through_kernel", "bodies:around")
    code = f"""
        target.Thing.static(1)
        build()
        batch()
        assert "extra_op" in result.report.read_back.live, result.report.read_back
        assert "applied     extra_op, triton (1 calls): it is extra" in status(), status()
        {REPLACED.replace(chr(10), chr(10) + " " * 8)}
        target.Thing.static = staticmethod(theirs(target.Thing.static))
        build()
        build()
        print(status())
    """
    done = load(extra(text=text), tmp_path / "reports", told(code), **environ)
    assert done.returncode == status, done.stderr
    words = "sglang.srt.target:Thing.static holds Thing.static from <string>:"
    if status:
        assert f"refuses to serve without SGLANG_BCG_KERNEL_EXTRA_OP (lost): {words}" in done.stderr, done.stderr
        return
    [warning] = [line for line in done.stderr.splitlines() if "was applied and is LOST" in line]
    assert warning.startswith("bcg-fixes: extra_op ") and words in warning, warning
    assert "kernels extra_op triton (lost)" in done.stderr and f"lost        extra_op, triton: {words}" in done.stdout


def test_nothing_is_hooked_where_nothing_is_applied(extra, tmp_path: pathlib.Path) -> None:
    code = """
        from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
        from sglang.srt.model_executor.model_runner import ModelRunner
        for function in (EAGLEDraftCudaGraphRunner.__init__, ModelRunner.forward):
            assert function.__code__.co_filename.startswith(os.path.dirname(target.__file__)), function
    """
    done = load(extra(), tmp_path / "reports", told(code), SGLANG_BCG_FIXES="off")
    assert done.returncode == 0, done.stderr


def test_a_place_that_cannot_be_watched_is_a_warning(extra, tmp_path: pathlib.Path) -> None:
    code = """
        from sglang.srt import target
        from sglang.srt.model_executor import model_runner
        del model_runner.ModelRunner.forward
        from sglang_bcg_fixes import plugin
        assert plugin.load().report.state("extra_fix") == "applied"
    """
    done = alone(extra(), tmp_path / "reports", code)
    assert done.returncode == 0, done.stderr
    assert "batches are not watched, so fixes may get lost unseen: no sglang.srt.model_executor" in done.stderr


def alone(site: pathlib.Path, reports: pathlib.Path, code: str) -> subprocess.CompletedProcess[str]:
    return processes.python(
        "-c",
        processes.code(code),
        paths=[processes.FAKE_SGLANG, site],
        environment={"FAKE_FORM": "enable", "SGLANG_BCG_REPORT_DIR": str(reports), **OTHERS_OFF},
    )


@pytest.mark.parametrize(("environ", "status"), [({}, 0), ({"SGLANG_BCG_FIXES": "strict"}, 1)])
def test_what_cannot_be_read_back_is_not_called_live(
    extra, tmp_path: pathlib.Path, environ: dict[str, str], status: int
) -> None:
    code = "result.ledger.read_back = lambda name: 1 / 0\nbuild()\nassert result.report.read_back is None"
    done = load(extra(), tmp_path / "reports", told(code), **environ)
    assert done.returncode == status and "Traceback" in done.stderr and "cannot" in done.stderr, done.stderr
    assert ("refuses to serve" in done.stderr) is bool(environ), done.stderr


def test_status_counts_the_calls_of_a_running_process(extra, tmp_path: pathlib.Path) -> None:
    code = """
        assert "extra_fix (not reached yet): it is extra" in line(), line()
        build()
        assert "extra_fix (not reached yet)" in line()
        from sglang.srt import copies
        for _ in range(3):
            copies.use(1)
        batch()
        batch()
        # shown at the beginning of a batch: seven of eight
        assert "extra_fix (7 calls): it is extra" in line(), line()
        assert calls() == {os.getpid(): {FUNCTION: 7, "sglang.srt.target:Thing.method": 0}}, calls()
    """
    done = load(extra(), tmp_path / "reports", told(code))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("how", "body"), [("BEFORE", "seen_before"), ("AFTER", "after"), ("REPLACE", "replace")])
def test_every_way_of_patching_counts(extra, tmp_path: pathlib.Path, how: str, body: str) -> None:
    text = EXTRA.replace("How.AROUND", f"How.{how}").replace("bodies:around", f"bodies:{body}")
    code = "for x in range(5):\n    target.function(x)\nbatch()\nassert calls()[os.getpid()][FUNCTION] == 5, calls()"
    done = load(extra(text=text), tmp_path / "reports", told(code))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", ["enable", "stub", "object"])
def test_a_break_counts_what_its_replay_runs(extra, tmp_path: pathlib.Path, form: str) -> None:
    text = EXTRA.replace("How.AROUND", "How.GRAPH_BREAK").replace("bodies:around", "bodies:break_body")
    text = text.replace("target:function", "breaks:broken_operation").replace("target:SECOND", "breaks:forgotten")
    code = """
        from sglang.srt import breaks
        breaks.graphs.capturing = True
        breaks.broken_operation(1, [])
        [replay] = breaks.graphs.breaks
        replay()
        replay()
        batch()
        captured = 0 if breaks.graphs.FORM != "enable" else 1
        found = calls()[os.getpid()]
        assert found == {"sglang.srt.breaks:broken_operation": captured + 2, "sglang.srt.breaks:forgotten": 0}, found
    """
    done = load(extra(text=text), tmp_path / "reports", told(code), FAKE_FORM=form)
    assert done.returncode == 0, done.stderr


def test_an_applied_fix_that_no_batch_reaches_is_shown_as_such(extra, tmp_path: pathlib.Path) -> None:
    text = EXTRA.replace("target:function", "copies:use")
    code = "from sglang.srt import copies\nbuild()\nfor _ in range(3):\n    batch()\nprint(status())"
    done = load(extra(text=text), tmp_path / "reports", told(code))
    assert done.returncode == 0, done.stderr
    # the first one was there when the fixes were read back
    assert "extra_fix (never reached in 2 batches)" in done.stdout and "; 2 batches since" in done.stdout, done.stdout


def test_a_forked_child_counts_and_reports_for_itself(extra, tmp_path: pathlib.Path) -> None:
    code = """
        build()
        target.function(1)
        batch()
        batch()
        child = os.fork()
        if not child:
            for _ in range(100):
                target.function(1)
            batch()
            found = calls()
            print(found[os.getpid()][FUNCTION], found[os.getppid()][FUNCTION], flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        batch()
        [found] = calls().values()
        print(found[FUNCTION])
    """
    done = load(extra(), tmp_path / "reports", told(code))
    assert done.returncode == 0, done.stderr
    # each batch calls it once, and shows what was counted before it
    assert done.stdout.splitlines() == ["100 2", "3"], done.stdout


def test_two_servers_on_one_machine_are_told_apart(extra, tmp_path: pathlib.Path) -> None:
    second = """
        from sglang.srt import target
        from sglang_bcg_fixes import plugin
        plugin.load()
        build()
        for _ in range(40):
            target.function(1)
        batch()
        print("ready", flush=True)
        input()
    """
    first = """
        build()
        batch()
        other = subprocess.Popen([sys.executable, "-c", SECOND], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert other.stdout.readline() == b"ready\\n"
        found = calls()
        print(found[os.getpid()][FUNCTION], found[other.pid][FUNCTION])
        other.communicate(b"\\n")
        assert other.returncode == 0 and [*calls()] == [os.getpid()]
    """
    done = load(extra(), tmp_path / "reports", told(first.replace("SECOND", repr(told(second)))))
    assert done.returncode == 0 and done.stdout == "0 40\n", done.stdout + done.stderr


def test_a_report_folder_that_cannot_be_written_hides_no_loss(extra, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    done = load(extra(), tmp_path / "file" / "reports", told(f"{REPLACED}{BY_PLUGIN}\nbuild()\nbuild()"))
    assert done.returncode == 0 and "extra_fix was applied and is LOST" in done.stderr, done.stderr
    assert done.stderr.count("`bcg-fixes status` will not see this process") == 1, done.stderr


def test_counts_that_cannot_be_had_are_unknown(extra, tmp_path: pathlib.Path) -> None:
    code = """
        build()
        descriptor = result.report.as_dict()["reached"]["descriptor"]
        os.close(descriptor)
        # somebody else's by now
        assert os.open("/dev/zero", os.O_RDONLY) == descriptor
        print(line())
    """
    done = load(extra(), tmp_path / "reports", told(code))
    assert done.returncode == 0 and "extra_fix (calls unknown)" in done.stdout, done.stdout + done.stderr


def test_torch_s_compiler_traces_what_is_patched_and_counts_nothing(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    code = """
        import torch
        from sglang_bcg_fixes.engine import call_counts
        from sglang_bcg_fixes.model import How
        from sglang_bcg_fixes.engine.wrappers import wrap
        bodies = {
            How.BEFORE: lambda x: None,
            How.AFTER: lambda result, x: result,
            How.AROUND: lambda original, x: original(x),
            How.REPLACE: lambda x: x + 1,
        }
        for number, (how, body) in enumerate(bodies.items()):
            place = call_counts.TALLY.number("a_fix", str(how))
            patched = wrap(lambda x: x + 1, how, body, place)
            compiled = torch.compile(lambda x: 2 * patched(x), backend="eager", fullgraph=True)
            assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
            assert call_counts.TALLY.counts[place] == 0, how
            patched(torch.ones(2))
            # a counter that is compiled into it would have it compiled again now, and fail
            with torch.compiler.set_stance("fail_on_recompile"):
                assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
            assert call_counts.TALLY.counts[place] == 1, how
    """
    done = processes.python("-c", processes.code(code), timeout=180)
    assert done.returncode == 0, done.stderr
