# SPDX-License-Identifier: Apache-2.0
"""A server's process beside the fake SGLang that logs as SGLang does, and what it says of its fixes."""

from __future__ import annotations

import importlib
import logging
import types
from typing import Any

from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.process.selfcheck import at_start
from tests.scenarios import named
from tests.scenarios.fake_server import change, status


def begin(level: str = "INFO") -> None:
    logging.basicConfig(level=level, format="%(levelname)s %(message)s")
    importlib.import_module("sglang.srt.target")
    plugin.load()


def serve(architecture: str, **settings: Any) -> None:
    """Two batches of a model; the settings are those of its server."""
    runner = built(architecture, **settings)
    runner.forward(1)
    runner.forward(1)


def built(architecture: str, **settings: Any) -> Any:
    from sglang.srt.model_executor.model_runner import ModelRunner

    runner: Any = ModelRunner()
    config = types.SimpleNamespace(to_dict=lambda: {"architectures": [architecture]})
    runner.model_config = types.SimpleNamespace(hf_config=config)
    runner.server_args = types.SimpleNamespace(port=30000, **settings)
    return runner


def no_model() -> None:
    """A process that only imports what is patched, as the tokenizer's does."""
    begin()


def a_model(architecture: str = "LlamaForCausalLM", level: str = "INFO") -> str:
    begin(level)
    serve(architecture)
    return status()


def left_alone(architecture: str, *reasons: str) -> str:
    begin()
    active.selected("extra_op").fallbacks.update(reasons)
    serve(architecture)
    return status()


def unchecked(architecture: str, reason: str) -> str:
    begin()
    plugin.load().report.selfcheck = at_start.Outcome(at_start.NOT_CHECKED, reason).as_dict()
    serve(architecture)
    return status()


def a_draft() -> None:
    begin()
    from sglang.srt.model_executor.model_runner import ModelRunner

    draft = ModelRunner()
    draft.is_draft_worker = True
    draft.forward(1)
    assert plugin.load().report.served is None


def a_model_with_drafts(architecture: str, of_drafts: str) -> str:
    begin()
    served, draft = built(architecture), built(of_drafts)
    draft.is_draft_worker = True
    plugin.load().meet(served)
    plugin.load().meet(draft)
    served.forward(1)
    return status()


def lost(architecture: str) -> str:
    begin()
    change("replaced function")
    serve(architecture)
    return status()


if __name__ == "__main__":
    named.run(globals())
