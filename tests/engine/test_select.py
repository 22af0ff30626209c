# SPDX-License-Identifier: Apache-2.0
"""The choice of the implementation that runs, where only the first use can make it."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.model import Accepted, Impl, Rejected
from sglang_bcg_fixes.planning import plan
from tests.engine.bodies import KNOWN, kernel

Implementations = dict[str, Any]


@pytest.fixture
def implementations() -> Iterator[Implementations]:
    """Modules that stand for implementations, as if they could be imported."""
    made = {name: types.ModuleType(f"forms_of_tests.{name}") for name in ("cuda", "triton")}
    sys.modules.update({module.__name__: module for module in made.values()})
    yield made
    for module in made.values():
        del sys.modules[module.__name__]


def selected(state: str = "auto") -> active.Selected:
    impls = [Impl(name, Accepted, f"forms_of_tests.{name}") for name in ("cuda", "triton")]
    return active.Selected(plan.choose(kernel("metadata", *impls), state, KNOWN))


def test_the_first_that_is_ready_runs_and_is_asked_once_for_each_device(implementations: Implementations) -> None:
    asked: list[int] = []

    def ready(device: int) -> Accepted:
        asked.append(device)
        return Accepted()

    implementations["cuda"].ready = ready
    used = selected()
    assert [used.module(0), used.module(0), used.module(1)] == [implementations["cuda"]] * 3
    assert asked == [0, 1]


def test_machine_code_says_where_it_came_from(
    implementations: Implementations, caplog: pytest.LogCaptureFixture
) -> None:
    implementations["cuda"].origin = lambda device: f"sm_90a, compiled for device {device}"
    used = selected()
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            used.module(3)
    assert [record.message for record in caplog.records] == [
        "bcg-fixes: metadata: cuda runs as sm_90a, compiled for device 3"
    ]


def test_another_takes_the_place_of_one_that_is_not_ready_and_that_is_said(
    implementations: Implementations, caplog: pytest.LogCaptureFixture
) -> None:
    implementations["cuda"].ready = lambda device: Rejected("the driver is too old")
    used = selected()
    with caplog.at_level(logging.WARNING):
        assert used.module(0) is implementations["triton"]
    assert used.impl.name == "triton"
    assert "the driver is too old; triton takes its place" in caplog.text


def test_no_implementation_is_said_to_take_a_place_where_none_runs(
    implementations: Implementations, caplog: pytest.LogCaptureFixture
) -> None:
    implementations["cuda"].ready = lambda device: Rejected("it is written for sm_90a")
    implementations["triton"].ready = lambda device: Rejected("the driver is too old")
    used = selected()
    with caplog.at_level(logging.WARNING), pytest.raises(active.CannotRun) as raised:
        used.module(0)
    assert not caplog.records
    assert all(reason in raised.value.reason for reason in ("the driver is too old", "it is written for sm_90a"))


def test_one_that_was_named_has_no_other(implementations: Implementations) -> None:
    implementations["cuda"].ready = lambda device: Rejected("the driver is too old")
    with pytest.raises(RuntimeError, match=r"the driver is too old.*SGLANG_BCG_KERNEL_METADATA=off"):
        selected("cuda").module(0)


def test_what_is_left_to_other_code_is_counted_noted_once_and_logged_for_debugging_alone(
    implementations: Implementations, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[dict[str, Any]] = []
    monkeypatch.setattr(active, "_selected", {"metadata": selected()})
    monkeypatch.setattr(active, "_after_note", [])
    monkeypatch.setattr(active, "_to_triton", {})
    active.call_after_note(lambda: noted.append(active.so_far("metadata")))
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            active.selected("metadata").fall_back("an encoder")
        for part in ("prepare", "advance", "prepare"):
            active.leave_to_triton("metadata", part)
    assert active.selected("metadata").fallbacks == {"an encoder": 3}
    assert [record.message.removeprefix("bcg-fixes: metadata is left to ") for record in caplog.records] == [
        "SGLang's own code here: an encoder",
        "Triton here: prepare",
        "Triton here: advance",
    ]
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    triton: list[list[str]] = [[], ["prepare"], ["prepare", "advance"]]
    assert noted == [{"impl": "cuda", "left": ["an encoder"], "to_triton": parts} for parts in triton]


@pytest.mark.parametrize("state", ["auto", "triton"])
def test_auto_takes_an_implementation_where_it_was_measured_and_its_flag_takes_it_everywhere(
    implementations: Implementations, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    capabilities = {0: (9, 0), 1: (10, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    only = Impl("triton", Accepted, "forms_of_tests.triton", measured_on=("sm_90",))
    used = active.Selected(plan.choose(kernel("metadata", only), state, KNOWN))
    assert used.module(0) is implementations["triton"]
    # tensors of a CPU
    assert used.module(None) is implementations["triton"]
    if state == "triton":
        assert used.module(1) is implementations["triton"]
    else:
        with pytest.raises(active.CannotRun) as raised:
            used.module(1)
        assert raised.value.reason == (
            "triton does not run on this device: it was measured on sm_90, and this is an sm_100; "
            "SGLANG_BCG_KERNEL_METADATA=triton takes it here too"
        )
