# SPDX-License-Identifier: Apache-2.0
"""A plugin that puts a class of its own in the place of the graph runner, by SGLang's hooks."""

from __future__ import annotations

from typing import Any

from tests.other_plugins import calls
from tests.other_plugins.runner import RUNNER


def load() -> None:
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
    from sglang.srt.plugins.hook_registry import HookType, plugin_hook

    @plugin_hook(RUNNER, type=HookType.REPLACE)
    class CountingRunner(PrefillCudaGraphRunner):  # type: ignore[misc]
        def capture(self, *args: Any, **kwargs: Any) -> Any:
            calls["graph"] += 1
            return super().capture(*args, **kwargs)

        def execute(self, *args: Any, **kwargs: Any) -> Any:
            calls["graph"] += 1
            return super().execute(*args, **kwargs)
