# SPDX-License-Identifier: Apache-2.0
"""SGLANG_BCG=off in a server's process: SGLang is as without the plugin, whatever else is set."""

from __future__ import annotations

import pathlib

import pytest

from tests import processes

OURS = "[name for name in sys.modules if name.startswith('sglang_bcg_fixes.fixes.')]"
PLAIN = f"assert target.function(1) == ['function', 1, 1] and not {OURS}"
PROGRAM = f"import sys\nfrom sglang.srt import target\nfrom sglang_bcg_fixes import plugin\nplugin.load()\n{PLAIN}\n"


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"SGLANG_BCG_FIXES": "strict", "SGLANG_BCG_FIX_SSM_MIXER_CAPTURED": "on"},
        {"SGLANG_BCG_KERNEL_GDN_EXTEND": "cuda"},
        {"SGLANG_BCG_TYPO": "on", "SGLANG_BCG_CANARY": "often"},
        {"SGLANG_BCG_REPORT_DIR": "/dev/null/nowhere"},
    ],
)
def test_a_server_starts_as_without_the_plugin(setting: dict[str, str], tmp_path: pathlib.Path) -> None:
    reports = {"SGLANG_BCG_REPORT_DIR": str(tmp_path), **setting}
    environment = {"FAKE_FORM": "enable", "SGLANG_BCG": "off", **reports}
    done = processes.python("-c", PROGRAM, paths=[processes.FAKE_SGLANG], environment=environment)
    assert done.returncode == 0, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("bcg-fixes ") and line.endswith(": off by SGLANG_BCG=off, SGLang is as without it")
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_names_the_switch(tmp_path: pathlib.Path) -> None:
    environment = {"FAKE_FORM": "enable", "SGLANG_BCG_TYPO": "on", "SGLANG_BCG_REPORT_DIR": str(tmp_path)}
    done = processes.python("-c", PROGRAM, paths=[processes.FAKE_SGLANG], environment=environment)
    assert done.returncode == 1 and done.stderr.startswith("bcg-fixes refuses to start: SGLANG_BCG_TYPO is not a flag")
    assert done.stderr.rstrip().endswith("SGLANG_BCG=off starts the server without any fix")
