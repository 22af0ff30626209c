# SPDX-License-Identifier: Apache-2.0
"""The reasons to leave a server as SGLang serves it, and the line of the log that says one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from sglang_bcg_fixes.anatomy import ranks
from sglang_bcg_fixes.engine import wrappers
from sglang_bcg_fixes.model import flag_of

ID = "hybrids_without_graphs"
logger = logging.getLogger("sglang_bcg_fixes")


def asks_for_breaks(arguments: Any) -> bool:
    """Tell whether the graphs that are about to be captured have breaks, by the server's own settings."""
    if hasattr(arguments, "enable_breakable_cuda_graph"):
        return bool(arguments.enable_breakable_cuda_graph)
    from sglang.srt.model_executor import cuda_graph_config as settings

    return bool(settings.check_cuda_graph_backend(settings.Phase.PREFILL, settings.Backend.BREAKABLE))


def is_admitted(model_runner: Any, reasons: Iterator[str], level: int = logging.WARNING) -> bool:
    """Tell whether the model may be captured, and log where one of these is why not."""
    reason = next(reasons, None)
    if reason is None:
        return True
    kind = type(model_runner.model)
    logger.log(
        level,
        "bcg-fixes %s: no prefill graphs for %s.%s, prefill runs eagerly, as in SGLang: %s. %s=off ends this message",
        ID,
        kind.__module__,
        kind.__qualname__,
        reason,
        flag_of(ID),
    )
    return False


def why_not(model_runner: Any, calls: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """List the reasons to leave this server as it is; `calls` have to be broken, each by its fix."""
    from sglang_bcg_fixes.kernels.linear_extend import serving

    if not all(fix in wrappers.fixes_in(call) for fix, call in calls):
        yield "a mixer would not break the graph"
    if model_runner.is_draft_worker or not model_runner.spec_algorithm.is_none():
        yield "speculation"
    arguments = model_runner.server_args
    if getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None):
        yield "LoRA"
    yield from serving.refused_options(arguments, model_runner, *ranks.resolved_sizes())
    if serving.is_deterministic():
        yield "deterministic inference"
