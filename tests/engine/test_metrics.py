"""What a process shows to Prometheus: the real client, in the mode with many processes that SGLang uses."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from tests import processes
from tests.engine import test_plugin
from tests.engine.test_plugin import load
from tests.engine.test_read_back import BY_PLUGIN, REPLACED, told
from tests.wheels import NEWEST

extra = test_plugin.extra
# SGLang's HTTP server reads what its schedulers have written
SCRAPE = """
import types
def shown():
    code = ("from prometheus_client import CollectorRegistry, generate_latest, multiprocess as m; "
            "registry = CollectorRegistry(); m.MultiProcessCollector(registry); "
            "print(generate_latest(registry).decode())")
    text = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    return sorted(line for line in text.splitlines() if line.startswith("sglang_bcg") and "extra_" in line)
def serve(enable_metrics=True):
    from sglang.srt.model_executor.model_runner import ModelRunner
    runner = ModelRunner()
    runner.server_args = types.SimpleNamespace(enable_metrics=enable_metrics)
    runner.forward(1)
"""


def with_metrics(
    site: pathlib.Path, folder: pathlib.Path, code: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    (folder / "metrics").mkdir(exist_ok=True)
    multiprocess = {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")}
    return load(site, folder / "reports", SCRAPE + told(code), **multiprocess, **environ)


def test_the_state_of_each_fix_is_a_gauge(extra, tmp_path: pathlib.Path) -> None:
    code = f"""
        import setproctitle
        setproctitle.setproctitle("sglang::scheduler_TP1")
        def row(state, value):
            return f'sglang_bcg_fix_state{{{{fix="extra_fix",process="scheduler_TP1",state="{{state}}"}}}} {{value}}'
        assert shown() == []
        serve()
        assert shown() == [row("applied", "1.0")], shown()
        {(REPLACED + BY_PLUGIN).replace(chr(10), chr(10) + " " * 8)}
        build()
        assert shown() == [row("applied", "0.0"), row("lost", "1.0")], shown()
    """
    done = with_metrics(extra(), tmp_path, code)
    assert done.returncode == 0, done.stderr


def test_a_kernel_has_one_too(extra, tmp_path: pathlib.Path) -> None:
    code = """
        serve()
        assert 'sglang_bcg_fix_state{fix="extra_op",process="MainProcess",state="applied"} 1.0' in shown(), shown()
    """
    done = with_metrics(extra(text=test_plugin.with_kernel()), tmp_path, code)
    assert done.returncode == 0, done.stderr


def test_where_metrics_are_off_the_client_is_not_imported(extra, tmp_path: pathlib.Path) -> None:
    code = "serve(enable_metrics=False)\nbuild()\nassert 'prometheus_client' not in sys.modules"
    done = with_metrics(extra(), tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path / "metrics") == []


def test_metrics_that_cannot_be_made_stop_nobody(extra, tmp_path: pathlib.Path) -> None:
    code = "sys.modules['prometheus_client'] = None\nserve()\nserve()\nassert status().count(' applied ') == 1"
    done = with_metrics(extra(), tmp_path, code, SGLANG_BCG_FIXES="strict")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("/metrics shows the fixes of this process no longer") == 1, done.stderr


def test_processes_of_one_server_are_told_apart(extra, tmp_path: pathlib.Path) -> None:
    code = """
        import setproctitle
        setproctitle.setproctitle("sglang::scheduler_TP0")
        serve()
        child = os.fork()
        if not child:
            # the child goes on under the name that it was forked with, and in files of its own
            target.function(1)
            batch()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(shown()) == 1, shown()
    """
    done = with_metrics(extra(), tmp_path, code)
    assert done.returncode == 0, done.stderr


RELEASES = ["0.5.11", "0.5.14", NEWEST]
# a real runner of prefill graphs, asked for batches of every length
REAL = """
import json, os, tempfile, types
os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()
from cpu_sglang import graphs, one_batch, prefill
from tests.scenarios import small_llama
loaded = small_llama.load(enable_metrics=True)
runner = loaded.model_runner
prefill.capture_prefill(runner)
if os.environ.get("LORA"):
    runner.server_args.enable_lora = True
    does_nothing = lambda *_: None
    runner.lora_manager = types.SimpleNamespace(fetch_new_loras=does_nothing, prepare_lora_batch=does_nothing)
before = graphs.counters.replays
for lengths in ([6], [11], [40], [3, 4]):
    one_batch.generate(loaded, prefill._prompts(lengths), 1)
from prometheus_client import CollectorRegistry, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
samples = [sample for family in registry.collect() for sample in family.samples]
reasons = {s.labels["reason"]: s.value for s in samples if s.name == "sglang_bcg_prefill_fallbacks_total"}
states = {s.labels["fix"]: s.labels["state"] for s in samples if s.name == "sglang_bcg_fix_state" and s.value}
from sglang_bcg_fixes import plugin
report = plugin.load().report
print("RESULT", json.dumps([reasons, states == report.states(), graphs.counters.replays > before]))
"""


@pytest.mark.parametrize("release", RELEASES)
def test_a_real_runner_says_why_it_does_not_replay(release_root, release: str) -> None:
    reasons, same_states, replayed = processes.beside(release_root(release), "-c", REAL, cold=True)[0]
    assert reasons == {"longer than the largest bucket": 1.0}
    assert same_states and replayed


def test_a_fix_that_refuses_a_replay_is_named(release_root) -> None:
    found, _ = processes.beside(release_root("0.5.14"), "-c", REAL, cold=True, LORA="1")
    assert found == [{"fix lora_batch_stale": 3.0, "longer than the largest bucket": 1.0}, True, False]
