# SPDX-License-Identifier: Apache-2.0
"""An EAGLE3 draft's answers to a prompt with an image, eager and where a graph may be replayed."""

from __future__ import annotations

import json
import pathlib
import types

import pytest

from sglang_bcg_fixes.fixes import draft_images_dropped
from tests import processes, wheels
from tests.fixes import alone

MODELS = processes.REPOSITORY / "cpu_sglang" / "models"


@pytest.fixture
def eagle3(tmp_path: pathlib.Path) -> pathlib.Path:
    config = json.loads((MODELS / "llama" / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    config |= {"draft_vocab_size": config["vocab_size"], "target_hidden_size": config["hidden_size"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("release", ["0.5.16", "0.5.21"])
def test_a_draft_sees_the_images_of_its_target(eagle3: pathlib.Path, release: str) -> None:
    found = alone.found("draft_images_dropped", release, "tests.scenarios.draft_images", str(eagle3))
    assert found["applied"] == ["draft_images_dropped"]
    # texts are replayed still
    assert found["with"] == [[True, 2], [True, 0], [True, 0], [True, 2]]
    assert found["without"] == [[True, 2], [False, 2], [False, 2], [True, 2]]


def test_the_next_release_does_so_by_itself(eagle3: pathlib.Path) -> None:
    found = processes.beside(
        wheels.unpacked("0.5.22"), "-m", "tests.scenarios.draft_images", str(eagle3), SGLANG_BCG_FIXES="off"
    )[0]
    assert found["without"] == [[True, 2]] * 4


@pytest.mark.parametrize("has_buffer", [False, True])
@pytest.mark.parametrize("counts", [None, [6, 0]])
@pytest.mark.parametrize("has_image", [False, True])
@pytest.mark.parametrize("states", [None, object()])
def test_only_a_drafts_images_that_no_buffer_takes_are_refused(
    states: object, has_image: bool, counts: list[int] | None, has_buffer: bool
) -> None:
    registry = types.SimpleNamespace(has_slot=lambda name: has_buffer)
    runner = types.SimpleNamespace(static_draft_hidden_states=states, buffer_registry=registry)
    batch = types.SimpleNamespace(global_num_tokens_cpu=counts, contains_mm_inputs=lambda: has_image)
    can_run = draft_images_dropped.refuse_images(lambda *_: True, runner, batch)
    assert can_run is not (states is not None and has_image and counts is None and not has_buffer)


def test_the_first_runner_has_no_states_where_it_is_a_targets() -> None:
    batch = types.SimpleNamespace(global_num_tokens_cpu=None, contains_mm_inputs=lambda: True)
    assert draft_images_dropped.refuse_images(lambda *_: True, types.SimpleNamespace(), batch)
