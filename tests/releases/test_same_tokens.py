"""Where nothing is wrong the plugin changes nothing: eager greedy tokens of every release, on a CPU."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest

from tests import processes
from tests.wheels import RELEASES

MODELS = ("llama", "qwen3next", "bailing_full")
ARMS = {
    "no plugin": {"SGLANG_PLUGINS": "__none__"},
    "every fix off": {"SGLANG_PLUGINS": "bcg_fixes", "SGLANG_BCG_FIXES": "off"},
    "what the release needs": {"SGLANG_PLUGINS": "bcg_fixes"},
}


def tokens(root: pathlib.Path, report: pathlib.Path, environment: dict[str, str]) -> dict[str, list[list[int]]]:
    process = processes.python(
        *("-m", "sglang_on_cpu.one_batch", "--model", *MODELS, "--json", str(report)),
        paths=[root, processes.REPOSITORY / "tools"],
        environment={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **environment},
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(report.read_text())["tokens"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_plugin_does_not_change_eager_tokens(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, release: str
) -> None:
    found = {arm: tokens(release_root(release), tmp_path / "report.json", ARMS[arm]) for arm in ARMS}
    without = found["no plugin"]
    assert without.keys() == set(MODELS)
    assert all(len(set(map(tuple, without[model]))) > 1 for model in MODELS), "the prompts make no difference"
    assert found == dict.fromkeys(ARMS, without)
