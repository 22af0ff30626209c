# SPDX-License-Identifier: Apache-2.0
"""init_forward_metadata: every tensor is new, and as wide as the batch's longest request."""

from __future__ import annotations

from typing import Any

import torch

from sglang_bcg_fixes.kernels.fa_metadata import jobs
from sglang_bcg_fixes.kernels.fa_metadata.adapter.step import DRAFT_EXTENDS, FallBack, Step

Tensor = torch.Tensor


class EagerStep(Step):
    """One call of init_forward_metadata."""

    def __init__(self, backend: Any, batch: Any) -> None:
        super().__init__(backend, batch.seq_lens)
        self.batch = batch
        self.mode = batch.forward_mode
        self.bs = len(self.seq_lens)
        if self.bs == 0 or self.bs != batch.batch_size:
            raise FallBack("a batch of no requests" if self.bs == 0 else "rows that are not requests")
        if batch.seq_lens_cpu is None:
            raise FallBack("lengths that the host does not know")
        self.encoder_lens = self.fits_encoder(batch.encoder_lens, is_plain=batch.spec_info is None)
        self.longest = int(batch.seq_lens_cpu.max())

    def fill(self) -> None:
        backend, mode, batch = self.backend, self.mode, self.batch
        drafts = batch.spec_info is not None
        if mode.is_decode_or_idle():
            if drafts and backend.topk > 1:
                metadata = self.branches()
            elif drafts:
                metadata = self.tables("draft decode", delta=backend.speculative_step_id + 1, q_stride=1)
                self.local(metadata, backend.speculative_step_id + 1)
            else:
                metadata = self.decode()
        elif mode.is_target_verify():
            metadata = self.verify() if backend.topk <= 1 else self.verify_tree()
        elif mode.is_extend_or_draft_extend_or_mixed(include_draft_extend_v2=True):
            metadata = self.extend()
        else:
            raise FallBack(f"mode {mode.name}")
        backend.forward_metadata = metadata

    def decode(self) -> Any:
        metadata = self.tables("decode", q_stride=1)
        metadata.scheduler_metadata = self.backend._compute_scheduler_metadata(
            self.bs, metadata.max_seq_len_k, metadata.cache_seqlens_int32, metadata.cu_seqlens_q
        )
        self.local(metadata)
        self.encoder(metadata)
        return metadata

    def local(self, metadata: Any, delta: int = 0) -> None:
        """Fill the metadata of the chunk that each request's only query is in."""
        backend = self.backend
        if not backend.has_local_attention:
            return
        chunk, bs = backend.attention_chunk_size, self.bs
        found = self.known.local_class(
            local_query_start_loc=self.integers(bs + 1),
            local_seqused_k=self.integers(bs),
            local_block_table=self.integers(bs, chunk // self.page_size),
            local_max_query_len=1,
            local_max_seq_len=self.longest_in_chunk(self.batch.seq_lens_cpu + delta),
        )
        job = jobs.LocalAttention(
            metadata.cache_seqlens_int32,
            self.batch.req_pool_indices,
            self.table,
            found.local_seqused_k,
            found.local_block_table,
            chunk,
            self.page_size,
            cu_seqlens_q=found.local_query_start_loc,
            mapping=self.mapping,
            zero_tail=True,
        )
        self.launch("eager", job)
        metadata.local_attn_metadata = found

    def encoder(self, metadata: Any) -> None:
        """Fill the encoder's metadata for cross attention; the text's own table begins after it."""
        lengths, on_host = self.encoder_lens, self.batch.encoder_lens_cpu
        if lengths is None:
            return
        longest = max(on_host) if on_host else int(lengths.max())
        metadata.encoder_max_seq_len_k = longest
        metadata.encoder_lens_int32, metadata.encoder_cu_seqlens_k = self.integers(self.bs), self.integers(self.bs + 1)
        metadata.encoder_page_table = self.integers(self.bs, min(longest, self.table.shape[1]))
        job = jobs.FaMetadata(
            lengths,
            self.batch.req_pool_indices,
            self.table,
            metadata.encoder_lens_int32,
            metadata.encoder_cu_seqlens_k,
            metadata.encoder_page_table,
            1,
            zero_tail=True,
        )
        self.launch("encoder", job)

    def verify(self) -> Any:
        self.refuse_many_queries()
        if getattr(self.batch.spec_info, "ragged_verify_layout", None) is not None:
            raise FallBack("ragged verify")
        new = self.backend.speculative_num_draft_tokens
        metadata = self.tables("verify", delta=new, q_stride=new)
        metadata.max_seq_len_q = new
        return metadata

    def extend(self) -> Any:
        batch, new = self.batch, self.batch.extend_seq_lens
        if self.mode.name == "EXTEND":
            self.refuse_many_queries()
        on_host = batch.extend_seq_lens_cpu
        if self.mode.name not in DRAFT_EXTENDS and not any(batch.extend_prefix_lens_cpu):
            metadata = self.tables("extend without prefix")
            metadata.cu_seqlens_q = metadata.cu_seqlens_k
        else:
            metadata = self.tables("extend", extend_lens=new)
        metadata.max_seq_len_q = self.backend.speculative_num_draft_tokens if on_host is None else max(on_host)
        self.encoder(metadata)
        return metadata

    def refuse_many_queries(self) -> None:
        if self.backend.has_local_attention:
            raise FallBack("local attention of more than one query")

    def branches(self) -> Any:
        """Draft decode with topk > 1: the prefix's whole pages, and for each branch the rest."""
        backend, batch = self.backend, self.batch
        topk, steps, length = backend.topk, backend.speculative_num_steps, backend.speculative_step_id + 1
        if steps == 0:
            raise FallBack("a draft without steps")
        rows = self.bs * topk
        metadata = self.tables("draft decode, prefix", q_stride=topk, drop_last=self.page_size > 1)
        metadata.max_seq_len_q = topk
        expand = self.known.metadata_class()
        expand.max_seq_len_q = 1
        expand.cache_seqlens_int32 = self.integers(rows)
        expand.cu_seqlens_q, expand.cu_seqlens_k = self.integers(rows + 1), self.integers(rows + 1)
        expand.page_table = self.integers(rows, length if self.page_size == 1 else steps)
        job = jobs.DraftExpand(
            self.seq_lens,
            batch.out_cache_loc,
            expand.cache_seqlens_int32,
            expand.page_table,
            self.page_size,
            topk,
            steps,
            length,
            cu_seqlens_q=expand.cu_seqlens_q,
            cu_seqlens_k=expand.cu_seqlens_k,
            zero_tail=True,
        )
        self.launch("eager", job)
        backend.forward_metadata_spec_decode_expand = expand
        return metadata

    def verify_tree(self) -> Any:
        """Target verify with topk > 1: the prefix, and for each draft token its ancestors."""
        backend, batch = self.backend, self.batch
        new = backend.speculative_num_draft_tokens
        rows = self.bs * new
        metadata = self.tables("verify, prefix", q_stride=new)
        metadata.max_seq_len_q = new
        expand = self.known.metadata_class()
        expand.max_seq_len_q = 1
        expand.cache_seqlens_int32 = self.integers(rows)
        expand.cu_seqlens_q, expand.cu_seqlens_k = self.integers(rows + 1), self.integers(rows + 1)
        expand.page_table = self.integers(rows, new)
        job = jobs.VerifyExpand(
            self.seq_lens,
            metadata.cu_seqlens_k,
            batch.req_pool_indices,
            self.table,
            batch.spec_info.custom_mask,
            expand.cache_seqlens_int32,
            expand.cu_seqlens_k,
            expand.page_table,
            new,
            cu_seqlens_q=expand.cu_seqlens_q,
        )
        self.launch("eager", job)
        backend.forward_metadata_spec_decode_expand = expand
        if backend.has_swa:
            backend._init_sliding_window_attn_spec_metadata(metadata, expand)
        return metadata

    @property
    def table(self) -> Tensor:
        pool = getattr(self.backend, "req_to_token_pool", None) or self.batch.req_to_token_pool
        table: Tensor = pool.req_to_token
        return table

    def tables(
        self, mode: str, delta: int = 0, extend_lens: Tensor | None = None, q_stride: int = 0, drop_last: bool = False
    ) -> Any:
        """Fill new tensors in one launch; table entries past a request's length become 0."""
        metadata, table, bs = self.known.metadata_class(), self.table, self.bs
        metadata.max_seq_len_k = self.longest + delta
        width = -(-min(metadata.max_seq_len_k, table.shape[1]) // self.page_size)
        metadata.cache_seqlens_int32, metadata.cu_seqlens_k = self.integers(bs), self.integers(bs + 1)
        metadata.page_table = self.integers(bs, width)
        if q_stride or extend_lens is not None:
            metadata.cu_seqlens_q = self.integers(bs + 1)
        job = jobs.FaMetadata(
            self.seq_lens,
            self.batch.req_pool_indices,
            table,
            metadata.cache_seqlens_int32,
            metadata.cu_seqlens_k,
            metadata.page_table,
            self.page_size,
            delta=delta,
            drop_last=drop_last,
            row_start=self.encoder_lens,
            cu_seqlens_q=metadata.cu_seqlens_q,
            extend_lens=extend_lens,
            q_stride=q_stride,
            zero_tail=True,
            **self.window(metadata),
        )
        self.launch(mode, job)
        return metadata

    def window(self, metadata: Any) -> dict[str, Any]:
        mapping = self.mapping
        if mapping is None:
            return {}
        metadata.swa_page_table = torch.empty_like(metadata.page_table)
        found: dict[str, Any] = {"swa_page_table": metadata.swa_page_table, "mapping": mapping}
        how, locations = self.known.eager_rules.window_locations, self.batch.out_cache_loc
        if how.startswith("step's"):
            locations = self.backend._get_swa_write_locations(self.batch)
        if how == "step's, translated" and locations is not None:
            # a view of one step's locations, out of those of all steps
            locations = locations.contiguous()
        if how == "step's":
            metadata.swa_out_cache_loc = locations
        elif how != "pool" and locations is not None:
            metadata.swa_out_cache_loc = torch.empty(len(locations), dtype=torch.int64, device=locations.device)
            found |= {"out_cache_loc": locations, "swa_out_cache_loc": metadata.swa_out_cache_loc}
        return found
