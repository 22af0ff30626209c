# SPDX-License-Identifier: Apache-2.0
"""benchmarks/fa_steps.py, with servers that misbehave; tests/verify/fake_engine.py says how."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable

import pytest

from benchmarks import fa_steps
from benchmarks.bench.rows import Row
from sglang_bcg_fixes.lab.verify.servers import Runner
from sglang_bcg_fixes.source import releases
from tests import processes
from tests.wheels import NEWEST

ARMS, BATCHES = (fa_steps.SGLANG, "triton", "cuda"), (1, 4)
_, TRITON, CUDA = NAMES = tuple(map(fa_steps.name_of, ARMS))
Measure = Callable[..., tuple[list[Row], list[str]]]


@pytest.fixture
def measure(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Measure:
    monkeypatch.setattr(fa_steps, "ANSWER_LIMIT", 3.0)
    monkeypatch.setenv("PYTHONPATH", str(processes.REPOSITORY))
    source = releases.in_folder(release_root(NEWEST))

    def measure(kind: str, **misbehaviour: str) -> tuple[list[Row], list[str]]:
        said: list[str] = []
        engine = [sys.executable, "-m", "tests.verify.fake_engine"]
        with contextlib.ExitStack() as stack:
            runner = stack.enter_context(Runner(engine, len(ARMS), fa_steps.LIMITS))
            alive = []
            for run in fa_steps.runs_of(kind, ARMS, source, tmp_path):
                wrong = {"MISBEHAVIOUR": f"patched={misbehaviour.get(run.arm, 'nothing')}"}
                server = dataclasses.replace(run.server, environment={**run.server.environment, **wrong})
                alive.append(fa_steps.start(dataclasses.replace(run, server=server), runner, stack))
            fa_steps.wait_until_started(alive, said.append)
            return [row for some in fa_steps.measure(kind, alive, BATCHES, 5, said.append) for row in some], said

    return measure


@pytest.mark.parametrize("kind", fa_steps.KINDS)
def test_right_servers_are_timed_in_turn(measure: Measure, kind: str) -> None:
    found, said = measure(kind)
    assert [(row.sequences, row.arm) for row in found] == [(batch, arm) for batch in BATCHES for arm in NAMES]
    assert all(row.verdict == "green" and row.median is not None and row.rounds == 5 for row in found), said
    assert said[: len(ARMS)] == [f"{arm}: started" for arm in ARMS]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("too short", "other tokens than SGLang's own, 1 together"),
        ("crashes", "ended by signal 9 while it served"),
        ("dies at start", "ended with exit status 1 before it served"),
        ("hangs", "no answer within 3 s"),
    ],
)
def test_a_red_server_has_no_time_and_the_others_have(measure: Measure, wrong: str, why: str) -> None:
    found, said = measure("decode", triton=wrong)
    ours = [row for row in found if row.arm == TRITON]
    assert len(ours) == len(BATCHES) and all((row.verdict, row.why, row.median) == ("red", why, None) for row in ours)
    assert all(row.verdict == "green" and row.median is not None for row in found if row.arm != TRITON), said


def test_without_the_tokens_of_sglang_nothing_is_timed(measure: Measure) -> None:
    found, _ = measure("decode", off="dies at start")
    assert all(row.median is None for row in found)
    assert {row.why for row in found if row.arm == CUDA} == {"SGLang's own server has not answered"}
