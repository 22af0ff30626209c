# SPDX-License-Identifier: Apache-2.0
"""The method before a replay: fills the buffers of a graph that was captured for `bs` rows."""

from __future__ import annotations

from typing import Any

import torch

from sglang_bcg_fixes.kernels.fa_metadata import jobs
from sglang_bcg_fixes.kernels.fa_metadata.adapter.step import DRAFT_EXTENDS, FallBack, Step

Tensor = torch.Tensor


class ReplayStep(Step):
    """One call of the method before a replay."""

    def __init__(self, backend: Any, given: dict[str, Any]) -> None:
        self.bs: int = given["bs"]
        super().__init__(backend, given["seq_lens"])
        self.rule = self.known.replay_rules
        self.mode = given["forward_mode"]
        self.spec_info = given["spec_info"]
        self.req_pool_indices = given["req_pool_indices"]
        self.seq_lens_cpu = given["seq_lens_cpu"]
        self.out_cache_loc = given.get("out_cache_loc")
        self.encoder_lens = self.fits_encoder(given.get("encoder_lens"), is_plain=self.spec_info is None)
        if getattr(getattr(backend, "kv_index_translator", None), "reads_are_translated", False):
            raise FallBack("unified memory")

    def fill(self) -> None:
        backend, mode = self.backend, self.mode
        expand = None
        if mode.is_decode_or_idle():
            if self.spec_info is not None and backend.topk > 1:
                metadata, expand = self.branches()
            elif self.spec_info is not None:
                metadata = self.draft_decode()
            else:
                metadata = self.decode()
        elif mode.is_target_verify():
            metadata, expand = self.verify_tree() if backend.topk > 1 else (self.verify(), None)
        elif mode.name in DRAFT_EXTENDS:
            metadata = self.draft_extend()
        else:
            raise FallBack(f"mode {mode.name}")
        backend.forward_metadata = metadata
        backend.forward_metadata_spec_decode_expand = expand

    def bound(self, delta: int = 0) -> int:
        """Return the longest request's length plus delta, if the host knows it."""
        if self.seq_lens_cpu is not None:
            return int(self.seq_lens_cpu[: self.bs].max()) + delta
        if self.rule.context_for_bound:
            return int(self.backend.max_context_len)
        raise FallBack("lengths that the host does not know")

    def decode(self) -> Any:
        backend = self.backend
        metadata = backend.decode_cuda_graph_metadata[self.bs]
        known = self.seq_lens_cpu is not None
        metadata.max_seq_len_k = self.bound() if known else backend.max_context_len
        self.tables("decode", metadata, row_start=self.encoder_lens)
        self.local(metadata)
        self.encoder(metadata)
        plan_buffer = backend._sched_meta_buf
        if plan_buffer is not None and metadata.scheduler_metadata is not None:
            plan = backend._compute_scheduler_metadata(
                self.bs, metadata.max_seq_len_k, metadata.cache_seqlens_int32, metadata.cu_seqlens_q
            )
            if plan is not None:
                plan_buffer[: len(plan)] = plan
                plan_buffer[len(plan) :] = 0
        return metadata

    def local(self, metadata: Any) -> None:
        backend = self.backend
        if not backend.has_local_attention:
            return
        buffers = backend.decode_cuda_graph_local_attn_metadata
        job = jobs.LocalAttention(
            self.seq_lens,
            self.req_pool_indices,
            backend.req_to_token,
            buffers["local_seqused_k"][: self.bs],
            buffers["local_block_table"],
            backend.attention_chunk_size,
            self.page_size,
            cu_seqlens_q=buffers["local_query_start_loc"],
            mapping=self.mapping,
        )
        self.launch("replay", job)
        if metadata.local_attn_metadata is not None:
            known = self.seq_lens_cpu is not None
            longest = self.longest_in_chunk(self.seq_lens_cpu[: self.bs]) if known else backend.attention_chunk_size
            metadata.local_attn_metadata.local_max_query_len = 1
            metadata.local_attn_metadata.local_max_seq_len = longest

    def encoder(self, metadata: Any) -> None:
        if self.encoder_lens is None:
            return
        # the captured kernels have their own bound, so the host need not sync for this one
        metadata.encoder_max_seq_len_k = self.backend.max_context_len
        job = jobs.FaMetadata(
            self.encoder_lens,
            self.req_pool_indices,
            self.backend.req_to_token,
            metadata.encoder_lens_int32,
            metadata.encoder_cu_seqlens_k,
            metadata.encoder_page_table,
            1,
        )
        self.launch("encoder", job)

    def draft_decode(self) -> Any:
        metadata, delta = self.backend.decode_cuda_graph_metadata[self.bs], self.backend.speculative_step_id + 1
        if self.rule.tells_bound:
            metadata.max_seq_len_k = self.bound(delta)
        self.tables("draft decode", metadata, delta=delta)
        return metadata

    def verify(self) -> Any:
        if getattr(self.spec_info, "ragged_verify_layout", None) is not None:
            raise FallBack("ragged verify")
        metadata, delta = self.backend.target_verify_metadata[self.bs], self.backend.speculative_num_draft_tokens
        if self.rule.tells_bound:
            metadata.max_seq_len_k = self.bound(delta)
        self.tables("verify", metadata, delta=delta)
        return metadata

    def draft_extend(self) -> Any:
        metadata = self.backend.draft_extend_metadata[self.bs]
        version_1 = self.mode.name == "DRAFT_EXTEND"
        if version_1 and not self.rule.accepted:
            raise FallBack(f"mode {self.mode.name}")
        new, most = self.accepted() if version_1 else self.new_tokens()
        metadata.max_seq_len_k = self.bound()
        more = {"q_stride": new} if isinstance(new, int) else {"extend_lens": new}
        self.tables("draft extend", metadata, cu_seqlens_q=metadata.cu_seqlens_q, **more)
        metadata.max_seq_len_q = most
        return metadata

    def accepted(self) -> tuple[Tensor, int]:
        """Version 1: the tokens accepted of each request."""
        on_host = getattr(self.spec_info, f"{self.rule.accepted}_cpu")
        new: Tensor = getattr(self.spec_info, self.rule.accepted)
        return self.for_every_row(new), max(on_host) if on_host else 1

    def new_tokens(self) -> tuple[Tensor | int, int]:
        """Version 2: the worker's counts, on the device or on the host; else the same number for each."""
        spec_info = self.spec_info
        each = getattr(spec_info, "num_tokens_per_req", self.backend.speculative_num_steps + 1)
        on_host = getattr(spec_info, "extend_seq_lens_cpu", None)
        new: Tensor | None = getattr(spec_info, "extend_seq_lens_tensor", None)
        if new is None and on_host is not None:
            new = torch.as_tensor(on_host, dtype=torch.int32, device=self.seq_lens.device)
        if new is None:
            return each, each
        return self.for_every_row(new), int(max(on_host)) if on_host else each

    def for_every_row(self, new: Tensor) -> Tensor:
        if len(new) < self.bs:
            raise FallBack("fewer lengths of new tokens than rows")
        return new

    def branches(self) -> tuple[Any, Any]:
        backend = self.backend
        topk, steps, length = backend.topk, backend.speculative_num_steps, backend.speculative_step_id + 1
        rows = self.bs * topk
        if self.out_cache_loc is None or len(self.out_cache_loc) < rows * steps:
            raise FallBack("drafts without a location for each")
        metadata = backend.draft_decode_metadata_topk_normal[self.bs]
        expand = backend.draft_decode_metadata_topk_expand[self.bs]
        metadata.max_seq_len_k = self.bound()
        # the sums of the prefix are never read here, and SGLang does not fill them
        self.tables("draft decode, prefix", metadata, drop_last=self.page_size > 1, sums=False, window=False)
        job = jobs.DraftExpand(
            self.seq_lens,
            self.out_cache_loc,
            expand.cache_seqlens_int32,
            expand.page_table,
            self.page_size,
            topk,
            steps,
            length,
        )
        self.launch("replay", job)
        return metadata, expand

    def verify_tree(self) -> tuple[Any, Any]:
        backend = self.backend
        metadata = backend.target_verify_metadata_topk_normal[self.bs]
        expand = backend.target_verify_metadata_topk_expand[self.bs]
        metadata.max_seq_len_k = backend.max_context_len if self.rule.verify_bound_is_context else self.bound()
        self.tables("verify, prefix", metadata, window=False)
        job = jobs.VerifyExpand(
            self.seq_lens,
            metadata.cu_seqlens_k,
            self.req_pool_indices,
            backend.req_to_token,
            self.spec_info.custom_mask,
            expand.cache_seqlens_int32,
            expand.cu_seqlens_k,
            expand.page_table,
            backend.speculative_num_draft_tokens,
            live_rows=self.spec_info.positions.numel(),
        )
        self.launch("replay", job)
        if backend.has_swa:
            backend._init_sliding_window_attn_spec_metadata(
                metadata, expand, backend.target_verify_metadata_topk_swa[self.bs]
            )
        return metadata, expand

    def tables(self, mode: str, metadata: Any, sums: bool = True, window: bool = True, **more: Any) -> None:
        """Fill the graph's buffers in one launch; entries after the live pages stay stale."""
        job = jobs.FaMetadata(
            self.seq_lens,
            self.req_pool_indices,
            self.backend.req_to_token,
            metadata.cache_seqlens_int32,
            metadata.cu_seqlens_k if sums else None,
            metadata.page_table,
            self.page_size,
            **more,
            **self.window(metadata if window else None),
        )
        self.launch(mode, job)

    def window(self, metadata: Any) -> dict[str, Any]:
        mapping, found = self.mapping, dict[str, Any]()
        if mapping is None:
            return {}
        if metadata is not None and metadata.swa_page_table is not None:
            found["swa_page_table"] = metadata.swa_page_table
        if self.rule.window_locations and self.out_cache_loc is not None:
            found["out_cache_loc"] = self.out_cache_loc
            found["swa_out_cache_loc"] = getattr(self.backend, self.rule.window_locations)
        return found | {"mapping": mapping} if found else {}
