# SPDX-License-Identifier: Apache-2.0
"""Inputs of a model's layers in a captured prefill, and the function that replaces them at replay."""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL, PREFILL
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.source.tree import Source

REPLAY = "replay_layer_forward"


def captured_forward(source: Source) -> Definition:
    return source.need(f"{OLD_PREFILL}._run_forward", f"{PREFILL}._run_forward")


def replayed_forward(source: Source) -> Definition | None:
    """The function that replaces the layers at replay; None where the whole model is captured."""
    if "self.layer_model.forward" not in captured_forward(source).calls:
        return None
    return source.need(
        f"{PREFILL}._execute_body_capture.{REPLAY}",
        f"{PREFILL}.execute.{REPLAY}",
        f"{OLD_PREFILL}.replay.{REPLAY}",
    )


def given_embeddings(source: Source) -> list[Definition]:
    load = source.find(f"{PREFILL}.load_batch")
    return [load.need_assignment_to("input_embeds")] if load else []


def takes_no_embeddings(source: Source) -> bool:
    captured = captured_forward(source)
    passed_on = captured.mentions("input_embeds") or "_build_layer_model_forward_kwargs" in captured.calls
    kept_from_it = any(given.mentions("Backend.BREAKABLE") for given in given_embeddings(source))
    return replayed_forward(source) is None or not passed_on or kept_from_it
