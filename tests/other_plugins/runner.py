# SPDX-License-Identifier: Apache-2.0
"""A plugin that stands around methods of ModelRunner and of the graph runner, by SGLang's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.other_plugins import calls

EXECUTOR = "sglang.srt.model_executor"
RUNNER = f"{EXECUTOR}.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
FORWARD = f"{EXECUTOR}.model_runner.ModelRunner.forward"
LOAD_BATCH = f"{RUNNER}.load_batch"
TARGETS = (FORWARD, LOAD_BATCH, f"{RUNNER}.can_run_graph")


def counted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    calls["runner"] += 1
    return original(*args, **kwargs)


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookType, plugin_hook

    for target in TARGETS:
        plugin_hook(target, type=HookType.AROUND)(counted)
