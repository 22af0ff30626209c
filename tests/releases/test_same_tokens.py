# SPDX-License-Identifier: Apache-2.0
"""The plugin changes nothing where nothing is wrong: eager greedy tokens of every release, on a CPU."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from collections.abc import Callable

import pytest

from tests import processes
from tests.wheels import NEWEST, RELEASES

MODELS = ("llama", "qwen3next", "bailing_full")
# its Bailing imports the CUDA-only package cutlass unguarded, which 0.5.15.post1 mended
MODELS_OF_0_5_15 = ("llama", "qwen3next")
ARMS = {
    "no plugin": {"SGLANG_PLUGINS": "__none__"},
    "every fix off": {"SGLANG_PLUGINS": "bcg_fixes", "SGLANG_BCG_FIXES": "off"},
    "what the release needs": {"SGLANG_PLUGINS": "bcg_fixes", "SGLANG_BCG_FIXES": "strict"},
}


# of what is patched, these models call this outside of graphs
@pytest.mark.parametrize("release", RELEASES)
def test_the_plugin_does_not_change_eager_tokens(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    models = MODELS_OF_0_5_15 if release == "0.5.15" else MODELS
    command = ("-m", "tests.scenarios.tokens_of_arms", json.dumps(ARMS), *models)
    process = processes.on_cpu(release_root(release), *command, timeout=600)
    found = processes.result(process)
    without = found["no plugin"]
    assert without.keys() == set(models)
    assert all(len(set(map(tuple, without[model]))) > 1 for model in models), "the prompts make no difference"
    assert found == dict.fromkeys(ARMS, without)
    # of two arms, each of the models says what it does, some twice; the third has no plugin to say anything
    said_by = set(re.findall(r"bcg-fixes 0\.1\.0 on sglang .*\(pid (\d+)\)", process.stderr))
    assert len(said_by) == 2 * len(models), process.stderr[-4000:]


def test_the_command_writes_what_is_compared(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    report = tmp_path / "report.json"
    arms = [("--arm", name, *map("=".join, environment.items())) for name, environment in list(ARMS.items())[:2]]
    command = ("--model", "llama", "--json", str(report), "--steps", "3", *itertools.chain(*arms))
    process = processes.on_cpu(release_root(NEWEST), "-m", "cpu_sglang.one_batch", *command)
    assert process.returncode == 0, process.stderr[-4000:]
    found = json.loads(report.read_text())
    assert found["release"] == NEWEST and len(found["tokens"]) == 2
    assert [len(tokens) for answer in found["tokens"].values() for tokens in answer["llama"]] == [3] * 4
