# SPDX-License-Identifier: Apache-2.0
"""The metrics of a process, through the real Prometheus client in the multiprocess mode that SGLang uses."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from tests import processes, wheels
from tests.engine import test_plugin
from tests.engine.test_plugin import Done, Extra
from tests.wheels import NEWEST

extra = test_plugin.extra


def with_metrics(extra: Extra, folder: pathlib.Path, *arguments: str, **environ: Any) -> Done:
    (folder / "metrics").mkdir(exist_ok=True)
    multiprocess: dict[str, Any] = {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")}
    return extra.scenario("metrics_shown", *arguments, **multiprocess, **environ)


def test_the_state_of_each_fix_is_a_gauge(extra: Extra, tmp_path: pathlib.Path) -> None:
    with_metrics(extra(), tmp_path, "state_of_a_fix")


def test_a_kernel_has_one_too(extra: Extra, tmp_path: pathlib.Path) -> None:
    with_metrics(extra(text=test_plugin.with_kernel()), tmp_path, "state_of_a_kernel")


def test_where_metrics_are_off_the_client_is_not_imported(extra: Extra, tmp_path: pathlib.Path) -> None:
    with_metrics(extra(), tmp_path, "switched_off")
    assert os.listdir(tmp_path / "metrics") == []


def test_metrics_that_cannot_be_made_stop_nobody(extra: Extra, tmp_path: pathlib.Path) -> None:
    done = with_metrics(extra(), tmp_path, "without_the_client", SGLANG_BCG_FIXES="strict")
    assert done.stderr.count("/metrics shows the fixes of this process no longer") == 1, done.stderr


def test_processes_of_one_server_are_told_apart(extra: Extra, tmp_path: pathlib.Path) -> None:
    with_metrics(extra(), tmp_path, "forked_child")


RELEASES = ["0.5.11", "0.5.14", NEWEST]
FALLBACKS = ("-m", "tests.scenarios.prefill_fallbacks", "reasons")


@pytest.mark.parametrize("release", RELEASES)
def test_a_real_runner_says_why_it_does_not_replay(release: str) -> None:
    reasons, same_states, replayed = processes.beside(wheels.unpacked(release), *FALLBACKS, "none", cold=True)[0]
    assert reasons == {"longer than the largest bucket": 1.0}
    assert same_states and replayed


def test_a_fix_that_refuses_a_replay_is_named() -> None:
    found, _ = processes.beside(wheels.unpacked("0.5.14"), *FALLBACKS, "lora", cold=True)
    assert found == [{"fix lora_batch_stale": 3.0, "longer than the largest bucket": 1.0}, True, False]
