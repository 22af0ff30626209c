# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek under breakable graphs, and the real dispatch and plans of backends for GPUs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import types
from collections.abc import Iterator
from typing import Any

import torch

from cpu_sglang import one_batch, prefill
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL_MODULE
from sglang_bcg_fixes.engine import graph_break
from tests.scenarios import small_deepseek, telling
from tests.scenarios.small_deepseek import PROMPTS

ID = "mla_dispatch_unaware"
BACKENDS = ("triton", "fa3", "flashinfer", "flashmla", "cutlass_mla", "trtllm_mla")
ATTENTION = types.SimpleNamespace(
    flashinfer_mla_disable_ragged=False, disable_chunked_prefix_cache=False, chunked_prefix_cache_threshold=0
)


def chosen() -> dict[str, str]:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    batch = small_deepseek.batch()
    return {name: AttentionBackendRegistry.get_handler(name)(ATTENTION, batch).name for name in BACKENDS}


def planned() -> list[Any]:
    return [*small_deepseek.planned_by_flashinfer(), *small_deepseek.planned_by_tensorrt()]


def dispatch(scope: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"outside": [chosen(), planned()]}
    with scope():
        found["inside"] = [chosen(), planned()]
        found["verified as a prefill"] = small_deepseek.planned_by_tensorrt_after_a_prefill()
    return found


@contextlib.contextmanager
def counted_forwards() -> Iterator[list[bool]]:
    """Note of each forward pass of the old runner if a graph is captured from it."""
    noted: list[bool] = []
    if not importlib.util.find_spec(OLD_PREFILL_MODULE):
        yield noted
        return
    runner = importlib.import_module(OLD_PREFILL_MODULE).BreakableCudaGraphRunner
    run = runner._run_forward

    def noting(*arguments: Any, **options: Any) -> Any:
        noted.append(torch.cuda.is_current_stream_capturing())
        return run(*arguments, **options)

    runner._run_forward = noting
    yield noted
    runner._run_forward = run


def main() -> None:
    loaded = small_deepseek.load()
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    ledger = plugin.load().ledger
    scope = graph_break.load("context").enable_breakable_cuda_graph

    def replay() -> Any:
        prefill.capture_prefill(loaded.model_runner, (8, 16))
        return one_batch.generate(loaded, PROMPTS, 3)

    eager = one_batch.generate(loaded, PROMPTS, 3)
    found = {"applied": ID in ledger.applied(), "mended": dispatch(scope)}
    with counted_forwards() as forwards:
        replayed = replay()
    found["forwards"] = forwards
    found["difference"] = (replayed[1] - eager[1]).abs().max().item()
    found["same tokens"] = replayed[0] == eager[0]
    handlers = AttentionBackendRegistry._handlers
    mended, handlers["fa3"] = handlers["fa3"], lambda *_: AttnForwardMethod.MLA
    absorbed = one_batch.generate(loaded, PROMPTS, 3)
    handlers["fa3"] = mended
    found["bitwise equal to eager absorbed"] = bool((replayed[1] == absorbed[1]).all())

    ledger.undo(ID)
    found["stock"] = dispatch(scope)
    try:
        replay()
    except Exception as error:
        found["error"] = str(error)
    telling.result(found)


if __name__ == "__main__":
    main()
