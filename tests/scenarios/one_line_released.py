# SPDX-License-Identifier: Apache-2.0
"""One batch of a real release's model, and the line that its process logs; for several ranks, that of each."""

from __future__ import annotations

import logging
import types
from typing import Any

from cpu_sglang import one_batch, ranks
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.cli import server_command
from sglang_bcg_fixes.concern import Launch
from sglang_bcg_fixes.process import this_server
from sglang_bcg_fixes.source.finding import Verdict
from tests.scenarios import named, released

# by the name that a release knows
GRAPHS = {"enable_breakable_cuda_graph": True, "cuda_graph_backend_prefill": "breakable"}


class Said(logging.Handler):
    """Lines of ours, with their levels."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append([record.levelname, record.getMessage()])


def listen() -> Said:
    said, logger = Said(), logging.getLogger("sglang_bcg_fixes")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return said


def one_prefill(model: str) -> dict[str, Any]:
    said = listen()
    loaded = released.load(model, **GRAPHS)
    arguments = loaded.model_runner.server_args
    if getattr(arguments, "cuda_graph_config", None) is not None:
        # SGLang has decided otherwise, because there is no GPU
        arguments.cuda_graph_config.prefill.backend = "breakable"
    one_batch.generate(loaded, [[3, 4, 5, 6, 7]], 1)
    found = plugin.load().report.served
    assert found is not None
    return {"said": said.lines, "model": found.model, "concerned": sorted(found.concerned)}


def launch(model: str, *words: str) -> dict[str, Any]:
    """The fixes that concern a launch, by the server's arguments as SGLang resolves them and by the words alone."""
    one_batch.import_sglang()
    one_batch.load_plugins()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import prepare_server_args

    folder = str(one_batch.MODELS / model)
    typed = ["--model-path", folder, *words]
    arguments = prepare_server_args(typed)
    process = plugin.load()
    fixes = [each for each in process.plan.fixes if each.finding.verdict is Verdict.AFFECTED]
    config = types.SimpleNamespace(hf_config=ModelConfig(folder).hf_config)
    runner = types.SimpleNamespace(server_args=arguments, model_config=config, device="cpu")
    as_typed = Launch(process.source, config.hf_config.to_dict(), server_command.options_in(process.source, typed))
    return {
        "served": sorted(this_server.seen(runner, process.source, fixes).concerned),
        "doctor": sorted(each.id for each in fixes if this_server.touches(each, as_typed)),
        "options": this_server.options_of(arguments),
    }


def of_ranks(model: str) -> list[Any]:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()

    def act(rank: ranks.Rank) -> Any:
        said = listen()
        loaded = rank.load(model)
        one_batch.generate(loaded, [[3, 4, 5, 6, 7]], 1)
        return said.lines

    return ranks.each(2, act)


if __name__ == "__main__":
    named.run(globals())
