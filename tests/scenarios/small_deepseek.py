# SPDX-License-Identifier: Apache-2.0
"""A small model with latent attention on a release's real runner, and what backends plan for it."""

from __future__ import annotations

import contextlib
import importlib
import types
from typing import Any

import torch

from cpu_sglang import one_batch

ATTENTION = "sglang.srt.layers.attention"
PLANNERS = {"flashinfer_mla_backend": "FlashInferMLAAttnBackend", "trtllm_mla_backend": "TRTLLMMLABackend"}
PROMPTS = [[5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]]


def load() -> one_batch.LoadedModel:
    """The model with random weights on FlashAttention 3, after SGLang has loaded the plugin."""
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    # before the runner is imported: what is patched in both can be undone alone then, nothing else is above it
    for module in PLANNERS:
        importlib.import_module(f"{ATTENTION}.{module}")
    loaded = one_batch.load("deepseek_v2", attention_backend="fa3")
    model = loaded.model_runner.model
    one_batch.randomize(model)
    # the absorbed weights are made from the others
    model.post_load_weights()
    return loaded


def batch() -> Any:
    """One request without a prefix, as far as dispatch and planning ask."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return types.SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[3],
        seq_lens_cpu=[3],
        seq_lens=torch.tensor([3]),
        extend_prefix_lens=torch.tensor([0]),
        req_pool_indices=None,
        seq_lens_sum=3,
        attn_dcp_metadata=None,
        attn_cp_metadata=None,
        get_max_chunk_capacity=lambda: 1024,
    )


def planned_by_flashinfer() -> list[Any]:
    """The kernels that it plans for: ragged for the expanded form, paged for the absorbed one."""
    return _plan("flashinfer_mla_backend")[1]


def planned_by_tensorrt() -> list[Any]:
    """Plans that it asks of FlashInfer, and whether FlashInfer's absorbed form replaces its own kernel."""
    backend, plans = _plan("trtllm_mla_backend")
    return [*plans, backend.forward_prefill_metadata.fallback_to_flashinfer_impl]


def planned_by_tensorrt_after_a_prefill() -> bool:
    """Tell if a verification of drafts would be captured with FlashInfer's kernel, which is planned for the prefill."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend, _ = _plan("trtllm_mla_backend")
    mode, unplanned = ForwardMode.TARGET_VERIFY, contextlib.suppress(AttributeError)
    # which needs a GPU and the sizes of a model after what is looked at
    with unplanned:
        if hasattr(backend, "init_forward_metadata_out_graph"):
            backend.init_forward_metadata_out_graph(types.SimpleNamespace(forward_mode=mode, batch_size=1))
        else:
            backend.init_forward_metadata_capture_cuda_graph(1, 4, None, torch.tensor([3]), None, mode, None)
    plan = backend.forward_prefill_metadata
    return plan is not None and bool(plan.fallback_to_flashinfer_impl)


def _plan(module: str) -> tuple[Any, list[Any]]:
    family = getattr(importlib.import_module(f"{ATTENTION}.{module}"), PLANNERS[module])
    backend, plans = object.__new__(family), list[Any]()
    backend.prefill_wrapper_paged, backend.disable_chunked_prefix_cache = None, False

    def update(*_: Any, use_ragged: bool, **__: Any) -> None:
        plans.append("ragged" if use_ragged else "paged")

    backend.indices_updater_prefill = types.SimpleNamespace(update=update)
    backend.init_forward_metadata(batch())
    return backend, plans
