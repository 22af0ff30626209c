# SPDX-License-Identifier: Apache-2.0
"""The plugin changes nothing where nothing is wrong: eager greedy tokens of every release, on a CPU."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable

import pytest

from tests import processes
from tests.wheels import RELEASES

MODELS = ("llama", "qwen3next", "bailing_full")
# its Bailing imports the CUDA-only package cutlass unguarded, which 0.5.15.post1 mended
MODELS_OF_0_5_15 = ("llama", "qwen3next")
ARMS = {
    "no plugin": ["SGLANG_PLUGINS=__none__"],
    "every fix off": ["SGLANG_PLUGINS=bcg_fixes", "SGLANG_BCG_FIXES=off"],
    "what the release needs": ["SGLANG_PLUGINS=bcg_fixes", "SGLANG_BCG_FIXES=strict"],
}


# of what is patched, these models call this outside of graphs
@pytest.mark.forms_of("linear_attention_captured", "layers_routed_by_id", "hybrid_layer_misrouted")
@pytest.mark.parametrize("release", RELEASES)
def test_the_plugin_does_not_change_eager_tokens(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, release: str
) -> None:
    models = MODELS_OF_0_5_15 if release == "0.5.15" else MODELS
    report = tmp_path / "report.json"
    arms = [word for name, environment in ARMS.items() for word in ("--arm", name, *environment)]
    process = processes.on_cpu(
        release_root(release),
        *("-m", "tests.scenarios.tokens_of_arms", "--model", *models, "--json", str(report), *arms),
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found = json.loads(report.read_text())["tokens"]
    without = found["no plugin"]
    assert without.keys() == set(models)
    assert all(len(set(map(tuple, without[model]))) > 1 for model in models), "the prompts make no difference"
    assert found == dict.fromkeys(ARMS, without)
    # of two arms, each of the models says what it does, some twice; the third has no plugin to say anything
    said_by = set(re.findall(r"bcg-fixes 0\.1\.0 on sglang .*\(pid (\d+)\)", process.stderr))
    assert len(said_by) == 2 * len(models), process.stderr[-4000:]
