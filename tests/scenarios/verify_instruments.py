# SPDX-License-Identifier: Apache-2.0
"""Instruments on a release's modules, and what they note. Argument: their names, with commas."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from cpu_sglang import one_batch, stand_ins
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.engine.slots import core, locate
from sglang_bcg_fixes.engine.wrappers import MARK
from sglang_bcg_fixes.lab.verify import instruments
from sglang_bcg_fixes.process import watch
from tests.scenarios import telling

IMPORTED_BY_A_SERVER = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner",
)


class Runner:
    capture_num_tokens, capture_bs = (4, 8), (1, 2, 4)
    __module__ = "sglang"


def layers_of(phase: str) -> list[Any]:
    """The marks of what stands round the question of this phase, and of that itself."""
    found = [core(locate(instruments.methods(phase, instruments.QUESTIONS)).own())]
    while MARK in vars(found[-1]):
        found.append(found[-1].__wrapped__)
    # every process with the plugin counts what is asked
    return [mark for each in found if (mark := getattr(each, MARK, None)) != watch.ASKED]


def main(names: list[str]) -> None:
    stand_ins.install()
    one_batch.load_plugins()
    for module in IMPORTED_BY_A_SERVER:
        importlib.import_module(module)
    process = plugin.load()
    found: dict[str, Any] = {
        "states": {name: process.report.state(name) for name in names},
        "wrong": [name for name in process.ledger.applied() if process.ledger.read_back(name)],
        # the counter is outermost, the refusal next, SGLang's own innermost
        "layers": {phase: layers_of(phase) for phase in instruments.PHASES},
    }
    batch = types.SimpleNamespace(input_ids=[1, 2, 3], batch_size=2, input_embeds=None)
    for phase in instruments.PHASES:
        getattr(instruments, f"note_{phase}_refused")(False, Runner(), batch)
    instruments.note_replay_of_graph(None)
    instruments.note_prefill(lambda *_: instruments.note_replay_of_graph(None), Runner(), batch)
    instruments.note_prefill(lambda *_: None, Runner(), batch)
    instruments.note_decode(None, Runner(), batch)
    from sglang.srt.server_args import ServerArgs

    fields = getattr(ServerArgs, "__struct_fields__", None) or list(ServerArgs.__dataclass_fields__)
    telling.result({**found, "fields": list(fields)})


if __name__ == "__main__":
    main(sys.argv[1].split(","))
