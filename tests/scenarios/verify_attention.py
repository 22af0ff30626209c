# SPDX-License-Identifier: Apache-2.0
"""The attention that TensorRT-LLM's MLA backend takes for each kind of batch after a prefill in a compiled graph."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from cpu_sglang import one_batch
from tests.scenarios import telling

MODES = ("EXTEND", "TARGET_VERIFY", "DRAFT_EXTEND_V2")


class Own(Exception):
    """Raised where the backend's own attention begins: it writes the cache."""


class Pool:
    def set_mla_kv_buffer(self, *_: Any, **__: Any) -> None:
        raise Own


def taken() -> dict[str, str]:
    from sglang.srt.layers.attention.trtllm_mla_backend import TRTLLMMLABackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    found = {}
    for name in MODES:
        backend: Any = object.__new__(TRTLLMMLABackend)
        # as the capture of a compiled prefill leaves it
        backend.forward_prefill_metadata = SimpleNamespace(fallback_to_flashinfer_impl=True)
        backend.data_type, backend.token_to_kv_pool = torch.bfloat16, Pool()
        tensor = torch.zeros(1)
        batch = SimpleNamespace(forward_mode=ForwardMode[name], out_cache_loc=tensor, token_to_kv_pool=Pool())
        try:
            found[name] = backend.forward_extend(tensor, tensor, tensor, None, batch, True, tensor, tensor)
        except Own:
            found[name] = "TensorRT-LLM"
    return found


def main() -> None:
    one_batch.import_sglang()
    one_batch.load_plugins()
    backend: Any = importlib.import_module("sglang.srt.layers.attention.trtllm_mla_backend")
    backend.TRTLLMMLABackend.__mro__[1].forward_extend = lambda *_, **__: "FlashInfer"
    # later releases look for the pool where a forward pass has put it
    if hasattr(backend, "get_token_to_kv_pool"):
        backend.get_token_to_kv_pool = Pool
    telling.with_and_without(taken)


if __name__ == "__main__":
    main()
