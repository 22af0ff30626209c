# SPDX-License-Identifier: Apache-2.0
"""A tiny diffusion LLM whose batches replay prefill graphs, with and without the fix."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import full_logits_dropped as fix
from sglang_bcg_fixes.planning.registry import declared_in
from tests import processes
from tests.fixes import settings
from tests.wheels import NEWEST

FIX = declared_in(fix)
Root = Callable[[str], pathlib.Path]
# one of each way to make the answer, and of each schedule
WAYS = {("0.5.12", "together"), ("0.5.13", "together"), ("0.5.14", "together"), ("0.5.16", "together")} | {
    (NEWEST, "together"),
    (NEWEST, "apart"),
}


def replayed(root: pathlib.Path, schedule: str, fixes: dict[str, Any]) -> dict[str, Any]:
    told: tuple[dict[str, Any], str] = processes.beside(
        root, "-m", "tests.scenarios.diffusion_replay", schedule, **fixes
    )
    return told[0]


@pytest.mark.parametrize("release,schedule", sorted(WAYS))
def test_replays_give_the_eager_tokens_and_the_first_one_ends_the_server_without(
    release_root: Root, release: str, schedule: str
) -> None:
    found = replayed(release_root(release), schedule, settings.only(FIX.id))
    assert found == {"applied": True, "same": True, "answered": True, "replays": found["replays"]} and found["replays"]
    stock = replayed(release_root(release), schedule, settings.only(FIX.id, "off"))
    assert "'NoneType' object" in stock["error"] and stock["answered"] and not stock["applied"], stock


def test_both_fixes_of_the_answer_stand_each_other(release_root: Root) -> None:
    found = replayed(
        release_root("0.5.14"), "together", settings.only(FIX.id) | {"SGLANG_BCG_FIX_CUSTOMIZED_INFO_DROPPED": "on"}
    )
    assert found["same"] and found["replays"], found
