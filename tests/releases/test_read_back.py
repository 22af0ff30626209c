# SPDX-License-Identifier: Apache-2.0
"""The hooks that look again, in real releases, and what a real runner of prefill graphs tells of its fixes."""

from __future__ import annotations

import types
from typing import cast

import pytest

from sglang_bcg_fixes.anatomy import runners
from sglang_bcg_fixes.process import watch
from sglang_bcg_fixes.process.process import Process
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import processes, wheels
from tests.wheels import NEWEST, RELEASES


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_has_the_places_that_are_watched(release: str) -> None:
    source = Source(Folder(wheels.unpacked(release)))
    # the source is all that they are made from
    process = cast(Process, types.SimpleNamespace(source=source))
    places = [place for hook in watch.hooks(process) for point in hook.patches for place in point.where]
    assert len(places) == len(runners.BY_PHASE) + 2
    assert [place for place in places if source.find(place) is None] == []


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_counts_replays_itself_and_gives_no_reason(release: str) -> None:
    srt = wheels.unpacked(release) / "sglang" / "srt"
    collector = (srt / "observability" / "metrics_collector.py").read_text()
    # so there is no counter of ours for it, as docs/selfcheck.md says
    assert 'name="sglang:cuda_graph_passes_total"' in collector
    assert 'mode = "prefill_cuda_graph" if value else "prefill_none"' in collector
    batch = (srt / "model_executor" / "forward_batch_info.py").read_text()
    asked = ("input_embeds", "replace_embeds", "capture_hidden_mode", "return_logprob", "global_num_tokens_cpu")
    assert [name for name in asked if f"    {name}: " not in batch] == []


@pytest.mark.parametrize("release", ["0.5.12.post1", NEWEST])
def test_a_real_runner_is_read_back_and_its_fixes_are_reached(release: str) -> None:
    arguments = ("-m", "tests.scenarios.runner_read_back", "one_prefill")
    found, log = processes.beside(wheels.unpacked(release), *arguments, SGLANG_BCG_FIXES="auto")
    assert found["built"] == f"{found['runner']} was built" and found["found"]["occasion"] == "the first batch came"
    assert found["found"]["lost"] == {} == found["found"]["wrapped"]
    assert found["found"]["live"] == found["applied"] and found["batches"] == 1, found
    reached = "linear_attention_captured" if release == "0.5.12.post1" else "break_input_lifetime"
    assert found["calls"][reached] > 0 and found["words"][reached] == f" ({found['calls'][reached]} calls)"
    # another model's: to be applied and not reached is no fault
    assert found["words"]["ssm_mixer_captured"] == " (never reached in 1 batches)", found
    assert log.count("): verified when") == 1
