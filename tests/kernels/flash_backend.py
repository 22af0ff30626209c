# SPDX-License-Identifier: Apache-2.0
"""The metadata methods of the installed SGLang's FlashAttentionBackend, without a model, a runner or its kernels.

The class and all of its methods are the real ones; only the attributes that its constructor takes from a runner are set
here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from sglang_bcg_fixes.engine.wrappers import INNER

Tensor = torch.Tensor

BACKEND = "sglang.srt.layers.attention.flashattention_backend"
POOL = "sglang.srt.mem_cache.swa_memory_pool"
MODES = "sglang.srt.model_executor.forward_batch_info"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Server options that the metadata depends on."""

    context: int
    page_size: int = 1
    topk: int = 0
    steps: int = 0
    draft_tokens: int | None = None
    step: int = 0
    chunk: int | None = None
    # layers with a window that are not in a pool of their own
    window: int | None = None
    encoder: bool = False


@dataclasses.dataclass
class Batch:
    """Input of the backend for one step."""

    mode: str
    seq_lens: Tensor
    req_pool_indices: Tensor
    out_cache_loc: Tensor | None = None
    spec_info: Any = None
    prefix_lens: list[int] | None = None
    extend_lens: Tensor | None = None
    encoder_lens: Tensor | None = None
    on_host: bool = True

    def forward_batch(self, table: Tensor, pool: Any) -> Any:
        lengths = self.seq_lens.cpu()
        new = None if self.extend_lens is None else self.extend_lens.tolist()
        return types.SimpleNamespace(
            forward_mode=getattr(importlib.import_module(MODES).ForwardMode, self.mode),
            batch_size=len(self.seq_lens),
            seq_lens=self.seq_lens,
            seq_lens_cpu=lengths if self.on_host else None,
            seq_lens_sum=int(lengths.sum()),
            req_pool_indices=self.req_pool_indices,
            out_cache_loc=self.out_cache_loc,
            spec_info=self.spec_info,
            positions=torch.zeros(sum(new) if new else self.tokens(), dtype=torch.int64),
            extend_prefix_lens_cpu=self.prefix_lens,
            extend_seq_lens=self.extend_lens,
            extend_seq_lens_cpu=new,
            extend_num_tokens=sum(new) if new else None,
            global_num_tokens_cpu=None,
            encoder_lens=self.encoder_lens,
            encoder_lens_cpu=None if self.encoder_lens is None else self.encoder_lens.tolist(),
            req_to_token_pool=types.SimpleNamespace(req_to_token=table),
            token_to_kv_pool=pool,
            kv_loc_plan=None,
        )

    def tokens(self) -> int:
        return len(self.seq_lens) if self.out_cache_loc is None else len(self.out_cache_loc)


class Backend:
    """One backend on this table of requests; with a mapping it has a pool for sliding-window layers."""

    def __init__(self, setting: Setting, req_to_token: Tensor, mapping: Tensor | None = None) -> None:
        module = importlib.import_module(BACKEND)
        self.setting = setting
        self.table = req_to_token
        self.pool = pool_of(mapping)
        self.real = module.FlashAttentionBackend.__new__(module.FlashAttentionBackend)
        vars(self.real).update(self.attributes(module))

    def attributes(self, module: Any) -> dict[str, Any]:
        setting = self.setting
        builder = getattr(module, "LocalAttentionMetadataBuilder", None)
        translate = getattr(self.pool, "translate_loc_from_full_to_swa", None)
        values = {
            "is_encoder_decoder": setting.encoder,
            "forward_metadata": None,
            "forward_metadata_spec_decode_expand": None,
            "max_context_len": setting.context,
            "max_num_pages": -(-setting.context // setting.page_size),
            "device": self.table.device,
            "decode_cuda_graph_metadata": {},
            "target_verify_metadata": {},
            "req_to_token": self.table,
            "req_to_token_pool": types.SimpleNamespace(req_to_token=self.table),
            "token_to_kv_pool": self.pool,
            "page_size": setting.page_size,
            "use_mla": False,
            "skip_prefill": False,
            "attn_cp_size": 1,
            "needs_cpu_seq_lens": True,
            "use_sliding_window_kv_pool": self.pool is not None,
            "topk": setting.topk,
            "speculative_num_steps": setting.steps,
            "speculative_num_draft_tokens": setting.draft_tokens,
            "speculative_step_id": setting.step,
            "has_local_attention": setting.chunk is not None,
            "attention_chunk_size": setting.chunk,
            "sliding_window_size": setting.window,
            "has_swa": setting.window is not None,
            "is_prefill_aware_swa": False,
            "fa_impl_ver": 3,
            "fa_skip_kv_cache": False,
            "kv_cache_is_mxfp8": False,
            # the kernel library's own plan of its work
            "_get_scheduler_metadata": None,
            "_disable_scheduler_metadata_precompute": True,
            "_decode_uses_static_max_seqlen_k": False,
            "_verify_mask": None,
            "is_draft_runner": True,
            "kv_index_translator": Translator(self.pool, self.table),
            "kv_read_tables": None,
            "_unified_dense": False,
            "_unified_hooks": types.SimpleNamespace(v2p_page_table=None, kernel_page_multiplier=1),
            "full_cg_prefill_metadata": None,
            "local_attn_builder": None,
        }
        if setting.chunk is not None and builder is not None:
            values["local_attn_builder"] = builder(
                attention_chunk_size=setting.chunk,
                page_size=setting.page_size,
                max_context_len=setting.context,
                device=self.table.device,
                swa_translate=translate,
            )
        return values

    def eager(self, batch: Batch) -> None:
        self.real.init_forward_metadata(batch.forward_batch(self.table, self.pool))

    def capture(self, batch: Batch) -> None:
        rows = len(batch.seq_lens)
        made = batch.forward_batch(self.table, self.pool)
        tokens = len(made.positions)
        self.real.init_cuda_graph_state(rows, tokens)
        if hasattr(self.real, "init_forward_metadata_out_graph"):
            self.real.init_forward_metadata_out_graph(made, in_capture=True)
            return
        self.real.init_forward_metadata_capture_cuda_graph(
            bs=rows,
            num_tokens=tokens,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            encoder_lens=batch.encoder_lens,
            forward_mode=made.forward_mode,
            spec_info=batch.spec_info,
        )

    def replay(self, batch: Batch) -> None:
        self.replay_of(batch)()

    def replay_of(self, batch: Batch) -> Any:
        """Return the call that a graph runner makes before each replay, with the batch already made."""
        made = batch.forward_batch(self.table, self.pool)
        if hasattr(self.real, "init_forward_metadata_out_graph"):
            return lambda: self.real.init_forward_metadata_out_graph(made)
        return lambda: self.real.init_forward_metadata_replay_cuda_graph(
            bs=made.batch_size,
            req_pool_indices=made.req_pool_indices,
            seq_lens=made.seq_lens,
            seq_lens_sum=made.seq_lens_sum,
            encoder_lens=made.encoder_lens,
            forward_mode=made.forward_mode,
            spec_info=made.spec_info,
            seq_lens_cpu=made.seq_lens_cpu,
            out_cache_loc=made.out_cache_loc,
        )

    def eager_of(self, batch: Batch) -> Any:
        made = batch.forward_batch(self.table, self.pool)
        return lambda: self.real.init_forward_metadata(made)

    def without_patches(self) -> Backend:
        """Restore SGLang's own methods on this object, whatever wraps those of its class."""
        for name, method in vars(type(self.real)).items():
            while hasattr(method, INNER):
                method = getattr(method, INNER)
                setattr(self.real, name, types.MethodType(method, self.real))
        return self

    @property
    def found(self) -> Any:
        return self.real.forward_metadata

    @property
    def expanded(self) -> Any:
        return self.real.forward_metadata_spec_decode_expand


class Translator:
    """The index translator of late releases; it only translates slots into the window's pool."""

    is_translating = False
    reads_are_translated = False

    def __init__(self, pool: Any, req_to_token: Tensor) -> None:
        self.pool = pool
        self.req_to_token = req_to_token

    def build_index_table(self, *, req_pool_indices: Tensor, **_: Any) -> Any:
        nothing = {"is_translated": False, "sliding_window_ids": None}
        return types.SimpleNamespace(ids=self.req_to_token, row_ids=req_pool_indices, **nothing)

    def sliding_window_write_loc_for(self, out_cache_loc: Tensor | None) -> Tensor | None:
        if self.pool is None or out_cache_loc is None:
            return None
        found: Tensor = self.pool.translate_loc_from_full_to_swa(out_cache_loc)
        return found

    def write_ids(self, forward_batch: Any, kind: Any) -> Tensor | None:
        return self.sliding_window_write_loc_for(forward_batch.out_cache_loc)


def pool_of(mapping: Tensor | None) -> Any:
    """Make SGLang's own pool with its mapping, without its memory."""
    if mapping is None:
        return None
    kind = importlib.import_module(POOL).SWAKVPool
    pool = kind.__new__(kind)
    pool.full_to_swa_index_mapping = mapping
    pool.swa_layer_nums = 1
    return pool


@contextlib.contextmanager
def in_use(backend: Any) -> Iterator[None]:
    """Enter the context through which later releases find the backend."""
    try:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    except ImportError:
        yield
        return
    with forward_context(ForwardContext(attn_backend=backend)):
        yield
