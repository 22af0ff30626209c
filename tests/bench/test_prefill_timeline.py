# SPDX-License-Identifier: Apache-2.0
"""The last prefill among a profiler's events, kept and drawn by benchmarks/prefill_timeline.py."""

from __future__ import annotations

import json
import pathlib
from typing import Any
from xml.etree import ElementTree

from benchmarks import prefill_timeline


def event(name: str, begin: float, microseconds: float, thread: int = 1, kind: str = "user_annotation") -> Any:
    return {"ph": "X", "name": name, "ts": begin, "dur": microseconds, "tid": thread, "cat": kind}


TRACE = [
    {"ph": "M", "name": "process_name"},
    # an earlier prefill
    event("scheduler.recv_requests", 0, 5),
    event("step[EXTEND bs=1 toks=61]", 10, 80),
    event("scheduler.process_batch_result", 95, 5),
    # loops without a request
    event("scheduler.recv_requests", 200, 5),
    event("scheduler.recv_requests", 1000, 10),
    event("scheduler.run_batch", 1100, 500),
    event("step[EXTEND bs=1 toks=61]", 1150, 400),
    event("step[EXTEND bs=1 toks=61]", 1400, 300, thread=9, kind="gpu_user_annotation"),
    event("aten::cumsum", 1160, 20, kind="cpu_op"),
    event("cudaGraphLaunch", 1300, 100, kind="cuda_runtime"),
    event("cudaGraphLaunch", 1300, 100, thread=2, kind="cuda_runtime"),
    event("copy", 1200, 1, thread=9, kind="gpu_memcpy"),
    *(event("attention", 1420 + 20 * number, 15, thread=9, kind="kernel") for number in range(12)),
    event("scheduler.process_batch_result", 1700, 100),
    event("scheduler.process_batch_result", 1900, 100),
]


def test_the_last_prefill_is_kept_and_drawn(tmp_path: pathlib.Path) -> None:
    found = prefill_timeline.spans(TRACE)
    assert [(each["name"], each["begin"], each["in"]) for each in found["scheduler"]] == [
        ("scheduler.recv_requests", 0, 0),
        ("scheduler.run_batch", 100, 0),
        ("step[EXTEND bs=1 toks=61]", 150, 1),
        ("cudaGraphLaunch", 300, 2),
        ("scheduler.process_batch_result", 700, 0),
    ]
    # kernels without a gap between them are one span
    assert [(each["begin"], each["us"], each["kernels"]) for each in found["gpu"]] == [(200, 1, 1), (420, 235, 12)]
    file = tmp_path / "found.json"
    file.write_text(json.dumps(found))
    assert prefill_timeline.main(["--draw", str(file)]) == 0
    drawn = ElementTree.parse(file.with_suffix(".svg"))
    bars = drawn.findall(".//{*}rect/{*}title")
    assert [bar.text for bar in bars] == [
        *("scheduler.recv_requests, 10 µs", "scheduler.run_batch, 500 µs", "step[EXTEND bs=1 toks=61], 400 µs"),
        *("cudaGraphLaunch, 100 µs", "scheduler.process_batch_result, 100 µs", "busy, 1 µs", "busy, 235 µs"),
    ]
