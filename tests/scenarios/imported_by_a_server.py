# SPDX-License-Identifier: Apache-2.0
"""The states of all fixes after a process has imported a module of SGLang first, as a server's processes do."""

from __future__ import annotations

import importlib
import sys

from cpu_sglang import one_batch
from sglang_bcg_fixes import plugin
from tests.scenarios import telling


def main(module: str) -> None:
    one_batch.import_sglang()
    one_batch.load_plugins()
    importlib.import_module(module)
    outcomes = plugin.load().report.outcomes.values()
    telling.result({each.decision.id: [each.state, each.detail] for each in outcomes})


main(*sys.argv[1:])
