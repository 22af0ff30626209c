# SPDX-License-Identifier: Apache-2.0
"""Metrics of a process beside the fake SGLang, in the mode with many processes that SGLang uses."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import Any

import setproctitle

from tests.scenarios import named
from tests.scenarios.fake_server import batch, begin, build, change, status

# SGLang's HTTP server reads what its schedulers have written
SCRAPE = (
    "from prometheus_client import CollectorRegistry, generate_latest, multiprocess as m; "
    "registry = CollectorRegistry(); m.MultiProcessCollector(registry); "
    "print(generate_latest(registry).decode())"
)


def scraped() -> str:
    return subprocess.run([sys.executable, "-c", SCRAPE], stdout=subprocess.PIPE, text=True, check=True).stdout


def shown() -> list[str]:
    return sorted(line for line in scraped().splitlines() if line.startswith("sglang_bcg") and "extra_" in line)


def serve(enable_metrics: bool = True) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    runner = ModelRunner()
    runner.server_args = types.SimpleNamespace(enable_metrics=enable_metrics)
    runner.forward(1)


def row(state: str, value: str) -> str:
    return f'sglang_bcg_fix_state{{fix="extra_fix",process="scheduler_TP1",state="{state}"}} {value}'


def state_of_a_fix() -> None:
    begin()
    setproctitle.setproctitle("sglang::scheduler_TP1")
    assert shown() == []
    serve()
    assert shown() == [row("applied", "1.0")], shown()
    change("replaced function")
    build()
    assert shown() == [row("applied", "0.0"), row("lost", "1.0")], shown()


def state_of_a_kernel() -> None:
    begin()
    serve()
    assert 'sglang_bcg_fix_state{fix="extra_op",process="MainProcess",state="applied"} 1.0' in shown(), shown()


def switched_off() -> None:
    begin()
    serve(enable_metrics=False)
    build()
    assert "prometheus_client" not in sys.modules


def without_the_client() -> None:
    begin()
    absent: Any = None
    sys.modules["prometheus_client"] = absent
    serve()
    serve()
    assert status("-v").count(" applied ") == 1


def forked_child() -> None:
    begin()
    from sglang.srt import target

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


def everything(changed: str) -> str:
    begin()
    serve()
    if changed == "replaced function":
        change(changed)
        build()
    return scraped()


if __name__ == "__main__":
    named.run(globals())
