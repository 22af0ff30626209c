# SPDX-License-Identifier: Apache-2.0
"""A real server with two tensor parallel ranks on the CPU, and another plugin that takes a fix from one of them."""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import urllib.request
from collections.abc import Callable, Iterator

import pytest
import serve
import serve_server

from tests import processes

RELEASE = "0.5.12.post1"
MODEL = processes.REPOSITORY / "cpu_sglang" / "models" / "llama"
ARGUMENTS = (
    "--load-format=dummy",
    "--tp-size=2",
    "--enable-metrics",
    # not for a model that needs no Triton here
    "--disable-piecewise-cuda-graph",
)


# through SGLang's own hooks, in the second rank alone: python numbers the processes that the server starts
OTHER_PLUGIN = """
import multiprocessing

def never_called(self, *args, **kwargs):
    raise AssertionError

def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    if multiprocessing.current_process().name == "Process-2":
        HookRegistry.register("sglang.srt.mem_cache.swa_memory_pool.SWAKVPool.set_kv_buffer", never_called,
                              HookType.REPLACE)
"""
LOST = "swa_slots_of_whole_batch"


@pytest.fixture
def environment(release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> dict[str, str]:
    site = tmp_path / "site"
    info = site / "other_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "other_plugin.py").write_text(OTHER_PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nother = other_plugin:load\n")
    cores = sorted(os.sched_getaffinity(0))
    given = {
        **processes.ON_CPU,
        **processes.WITHOUT_KERNELS,
        "SGLANG_PLUGINS": "bcg_fixes,other",
        # SGLang wants a NUMA node for each rank, or to be told
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "SGLANG_BCG_REPORT_DIR": str(tmp_path / "reports"),
    }
    return processes.environment_of([release_root(RELEASE), site], given)


@pytest.fixture
def server(environment: dict[str, str], tmp_path: pathlib.Path) -> Iterator[serve_server.Server]:
    port = serve.free_port()
    command = [*serve.command(pathlib.Path(sys.executable), RELEASE, False, MODEL, port), *ARGUMENTS]
    server = serve_server.Server(command, environment, tmp_path, f"http://127.0.0.1:{port}")
    try:
        server.wait_until_healthy(400)
        yield server
    finally:
        server.stop()


def test_both_ranks_report_and_what_one_has_lost_is_said(
    server: serve_server.Server, environment: dict[str, str]
) -> None:
    server.generate(serve.PROMPT, 2, limit_s=120)
    text, machine = (
        processes.python("-m", "sglang_bcg_fixes", "status", *way, environment=environment) for way in ([], ["--json"])
    )
    rows = json.loads(machine.stdout)["processes"]
    assert {row["server"] for row in rows} == {server.process.pid}
    ranks = {row["title"]: row for row in rows if (row["title"] or "").startswith("scheduler")}
    assert list(ranks) == ["scheduler_TP0", "scheduler_TP1"]
    applied = {title: {fix["id"] for fix in row["fixes"] if fix["state"] == "applied"} for title, row in ranks.items()}
    assert applied["scheduler_TP0"] == {*applied["scheduler_TP1"], LOST} and len(applied["scheduler_TP1"]) > 9, applied
    assert all({*row["verified"]["live"]} == applied[title] and row["batches"] for title, row in ranks.items()), ranks

    assert text.returncode == machine.returncode == 1, text.stderr
    first, second = (f"{title} (pid {row['pid']})" for title, row in ranks.items())
    told = [line for line in text.stdout.splitlines() if line.startswith("RANKS DIFFER")]
    assert told == [f"RANKS DIFFER: {second} has {LOST} lost, and {first} has it applied"]
    log = server.log.read_text()
    assert f"bcg-fixes: {LOST} was applied and is LOST" in log
    lines = sorted(line for line in re.findall(r"bcg-fixes .*", log) if "bcg-fixes: " not in line)
    assert [line.partition("; ")[0] for line in lines] == [
        f"bcg-fixes 0.1.0: sglang {RELEASE} LlamaForCausalLM TP{rank}: {found}"
        for rank, found in enumerate(("none of its fixes needed, 0 unread, 0 lost", "0 fixes live, 0 unread, 1 lost"))
    ]
    assert text.stdout.startswith("WRONG  LlamaForCausalLM :"), text.stdout

    with urllib.request.urlopen(f"{server.address}/metrics", timeout=60) as answer:
        shown = answer.read().decode()
    gauges = re.findall(r'^sglang_bcg_fix_state{fix="(\w+)",process="(\w+)",state="applied"} 1.0$', shown, re.MULTILINE)
    assert {title: {fix for fix, process in gauges if process == title} for title in ranks} == applied
    assert f'sglang_bcg_fix_state{{fix="{LOST}",process="scheduler_TP1",state="lost"}} 1.0' in shown
    assert 'mode="prefill_none"' in shown, "what SGLang counts itself"

    server.stop()
    left = processes.python("-m", "sglang_bcg_fixes", "status", "--json", environment=environment)
    assert json.loads(left.stdout)["processes"] == [], left.stdout
