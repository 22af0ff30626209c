# SPDX-License-Identifier: Apache-2.0
"""Refusals: servers, layers and batches whose attention keeps its break, each with the reason."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from sglang_bcg_fixes.kernels.fa_metadata.adapter.step import why_unsupported
from sglang_bcg_fixes.kernels.fa_metadata.declaration import MODULE
from sglang_bcg_fixes.kernels.linear_extend.serving import (
    MODES,
    UNKNOWN_PARTS,
    FallBack,
    is_interpreted,
    refuse_server,
)

# of FlashAttentionMetadata: what a captured layer reads, and what is of the host alone
KNOWN = {
    *("cache_seqlens_int32", "cu_seqlens_q", "page_table", "swa_page_table", "swa_out_cache_loc"),
    *("max_seq_len_q", "max_seq_len_k", "cu_seqlens_k"),
}
# what a layer may be given
GIVEN = {"sinks", "save_kv_cache", "key_value_num_tokens"}
# servers with smaller heads were not measured faster, and the trial knows no cap of logits
MEASURED_HEAD = 128
# bytes of tables: a longer context than any that was measured
MOST_TABLE = 64 << 20


def flash_attention_of(model_runner: Any) -> Any:
    """Return the FlashAttention backend of full attention, or raise FallBack."""
    backend = model_runner.attn_backend
    backend = getattr(backend, "full_attn_backend", backend)
    module = importlib.import_module(MODULE)
    if type(backend) is not module.FlashAttentionBackend:
        raise FallBack(f"the backend is a {type(backend).__name__}")
    reason = why_unsupported(backend, module)
    if reason:
        raise FallBack(reason)
    return backend


def why_not_server(model_runner: Any, backend: Any, device: torch.device) -> None:
    """Raise FallBack for a server all of whose layers keep their break."""
    reasons = {
        f"tensors on {device.type}": device.type != "cuda" and not is_interpreted(),
        f"FlashAttention-{backend.fa_impl_ver}": backend.fa_impl_ver != 3,
        "latent attention": backend.use_mla,
        "an encoder": backend.is_encoder_decoder,
        "a draft model": model_runner.is_draft_worker,
        "a model that generates nothing": not model_runner.is_generation,
        f"a cache in {backend.kv_cache_dtype}": backend.kv_cache_dtype.itemsize != 2,
        "attention without a cache": getattr(backend, "fa_skip_kv_cache", False),
        f"a context of {backend.max_context_len} tokens": 16 * backend.max_context_len > MOST_TABLE,
    }
    for reason, holds in reasons.items():
        if holds:
            raise FallBack(reason)
    refuse_server(model_runner)


def why_not_layer(layer: Any, given: dict[str, Any], is_named: bool) -> str | None:
    """Return the reason a layer keeps its break, or None; `is_named` takes what no GPU has measured, too."""
    others = sorted(name for name, value in given.items() if value is not None and name not in GIVEN)
    reasons = {
        f"a layer that is given {', '.join(others)}": bool(others),
        "cross attention": layer.is_cross_attention,
        f"{getattr(layer.attn_type, 'value', layer.attn_type)} attention": str(
            getattr(layer.attn_type, "value", layer.attn_type)
        )
        != "decoder",
        "chunked local attention": layer.use_irope,
        f"heads of {layer.qk_head_dim}, unless the flag names an implementation": layer.qk_head_dim < MEASURED_HEAD
        and not is_named,
        "a cap of logits, unless the flag names an implementation": bool(layer.logit_cap) and not is_named,
        f"keys of {layer.qk_head_dim} and values of {layer.v_head_dim}": layer.qk_head_dim != layer.v_head_dim,
        f"{layer.tp_q_head_num} heads for {layer.tp_k_head_num} of keys": bool(
            layer.tp_q_head_num % layer.tp_k_head_num
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def unknown_part_of(batch: Any) -> str | None:
    """Return the reason a batch is replayed with its breaks: a part that no captured layer reads."""
    for name in (*UNKNOWN_PARTS, "encoder_lens"):
        if getattr(batch, name, None) is not None:
            return f"a batch with {name}"
    if batch.forward_mode.name not in MODES:
        return f"a batch of mode {batch.forward_mode.name}"
    if getattr(batch, "mha_return_lse", False):
        return "a batch whose attention returns sums"
    if batch.extend_seq_lens_cpu is None or batch.extend_prefix_lens_cpu is None:
        return "lengths that the host does not know"
    return None


def loads_layer_by_layer(pool: Any) -> str | None:
    """Return the reason where a cache has asked to be told of each layer: a break tells it, a captured layer cannot."""
    parts = (pool, getattr(pool, "full_kv_pool", None), getattr(pool, "swa_kv_pool", None))
    waits = any(getattr(part, "layer_transfer_counter", None) is not None for part in parts)
    return "keys that are loaded layer by layer" if waits else None


def unknown_part_of_metadata(metadata: Any) -> str | None:
    for field in dataclasses.fields(metadata):
        value = getattr(metadata, field.name)
        if field.name not in KNOWN and (isinstance(value, torch.Tensor) or value != field.default):
            return f"metadata with {field.name}"
    return None


def is_of(metadata: Any, requests: tuple[tuple[int, int], ...]) -> bool:
    """Tell whether metadata is of these requests, as far as the host knows it."""
    new, keys = (max(each) for each in zip(*requests, strict=True))
    return (metadata.cache_seqlens_int32.shape[0], metadata.max_seq_len_q, metadata.max_seq_len_k) == (
        *(len(requests), new, keys),
    )
