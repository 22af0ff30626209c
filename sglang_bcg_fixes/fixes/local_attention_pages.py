# SPDX-License-Identifier: Apache-2.0
"""Llama 4 answers wrongly on FlashAttention with --page-size above 1

Symptom: Llama 4 on FlashAttention with --page-size above 1 answers wrongly with HTTP 200: its local layers see a few
tokens of the prompt or other requests' keys. Prompts shorter than the chunk (8192) are affected too, with graphs and
without.
Cause: Up to 0.5.19 the chunk is shortened to the longest sequence and rounded down to whole pages, so a chunk begins in
the middle of the prompt, and eager passes treat token slots as page numbers. Up to 0.5.21 the replay of a decode graph
looks page numbers up in a table of token slots where local layers have a pool of their own, which is the default.
Change: With larger pages the chunks, their lengths and their pages are recomputed: chunks keep their size, slots become
pages, and a page is translated through the pool's table as the slot that it begins with. Pages of one token are left as
they were.
Remove when: No release before 0.5.22 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_bcg_fixes.anatomy.launches import FLASH_ATTENTION, LOCAL, PAGES
from sglang_bcg_fixes.anatomy.workarounds import PAGES_OF_ONE_TOKEN
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, wrong

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "sglang.srt.layers.attention.flashattention_backend"
BACKEND = f"{MODULE}:FlashAttentionBackend"
EAGER = f"{BACKEND}._maybe_init_local_attn_metadata"
REPLAY = f"{BACKEND}._maybe_update_local_attn_metadata_for_replay"
CHUNKS = f"{MODULE}:make_local_attention_virtual_batches"
BUILDER = "sglang.srt.layers.attention.local_attention:LocalAttentionMetadataBuilder"


def probe(source: Source) -> Finding:
    if source.find(BUILDER):
        built = tuple(source.need(f"{BUILDER}.{name}") for name in ("build", "_graph_page_table", "update_for_replay"))
        if built[0].mentions("page_table[:, ::self.page_size] // self.page_size") and "swa_page_table" in built[1].text:
            return fixed("slots become pages, and graphs take the pool's own table of pages", *built)
        return drifted("the local attention builder takes its pages", *built)
    read = (source.need(EAGER), source.need(REPLAY), source.need(CHUNKS))
    wrong = []
    if eager_is_wrong(source):
        wrong.append("chunks are shortened to whole pages, and eager passes take slots for pages")
    if read[1].mentions("translate_loc_from_full_to_swa(metadata.page_table[:bs, :max_seq_len])"):
        wrong.append("replays look pages up as slots")
    if wrong:
        return affected("; ".join(wrong), *read)
    return drifted("local attention takes its pages", *read)


def eager_is_wrong(source: Source) -> bool:
    eager = source.find(EAGER)
    return eager is not None and not eager.mentions("// self.page_size")


class Chunks(NamedTuple):
    """Requests as the kernel sees them: one for each chunk in which a request has new tokens."""

    queries: Any
    keys: Any
    pages: Tensor


def chunks_of(chunk: int, page: int, query_starts: Any, lengths: Any, table: Tensor) -> Chunks:
    import numpy
    import torch

    first_new = lengths - numpy.diff(query_starts)
    first = first_new // chunk
    count = (lengths - 1) // chunk - first + 1
    request = numpy.repeat(numpy.arange(len(lengths)), count)
    begin = (numpy.arange(len(request)) - (numpy.cumsum(count) - count - first)[request]) * chunk
    end = numpy.minimum(begin + chunk, lengths[request])
    columns = begin[:, None] // page + numpy.arange(chunk // page)
    # nothing after the last token is read
    columns = columns.clip(max=table.shape[1] - 1)
    pages = table[torch.from_numpy(request)[:, None], torch.from_numpy(columns)]
    queries = end - numpy.maximum(begin, first_new[request])
    return Chunks(queries.astype(numpy.int32), (end - begin).astype(numpy.int32), pages)


def is_for_us(backend: Any) -> bool:
    return bool(
        backend.has_local_attention
        and backend.page_size > 1
        # another chunk begins within a page, which a page table cannot express
        and backend.attention_chunk_size % backend.page_size == 0
    )


def plan_eager(original: Callable[..., None], self: Any, forwardbatch: Any, metadata: Any, device: Any) -> None:
    original(self, forwardbatch, metadata, device)
    local = metadata.local_attn_metadata
    if local is None or not is_for_us(self):
        return
    table = metadata.page_table
    if self.use_sliding_window_kv_pool:
        table = self.token_to_kv_pool.translate_loc_from_full_to_swa(table)
    table = (table[:, :: self.page_size] // self.page_size).int()
    found = chunks_of(
        self.attention_chunk_size,
        self.page_size,
        metadata.cu_seqlens_q.cpu().numpy(),
        metadata.cache_seqlens_int32.cpu().numpy(),
        table,
    )
    local.local_query_start_loc, local.local_seqused_k = (item.to(device) for item in starts_and_lengths(found))
    local.local_block_table = found.pages.to(device)
    tell_largest(local, found)


def plan_replay(original: Callable[..., None], self: Any, metadata: Any, bs: int) -> None:
    if not is_for_us(self):
        original(self, metadata, bs)
        return
    import numpy

    lengths = metadata.cache_seqlens_int32[:bs].cpu().numpy()
    table = metadata.page_table[:bs, : -(-int(lengths.max()) // self.page_size)]
    if self.use_sliding_window_kv_pool:
        slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(table.long() * self.page_size)
        table = slots // self.page_size
    # one new token per request
    found = chunks_of(self.attention_chunk_size, self.page_size, numpy.arange(bs + 1), lengths, table.int())
    starts, keys = starts_and_lengths(found)
    buffers = self.decode_cuda_graph_local_attn_metadata
    for name, value in (("local_query_start_loc", starts), ("local_seqused_k", keys)):
        buffers[name].zero_()[: len(value)].copy_(value)
    rows, columns = found.pages.shape
    buffers["local_block_table"].zero_()[:rows, :columns].copy_(found.pages)
    if metadata.local_attn_metadata is not None:
        tell_largest(metadata.local_attn_metadata, found)


def starts_and_lengths(found: Chunks) -> tuple[Tensor, Tensor]:
    import numpy
    import torch

    starts = numpy.concatenate([[0], numpy.cumsum(found.queries)]).astype(numpy.int32)
    return torch.from_numpy(starts), torch.from_numpy(found.keys)


def tell_largest(local: Any, found: Chunks) -> None:
    local.local_max_query_len = int(found.queries.max())
    local.local_max_seq_len = int(found.keys.max())


FIX = Fix(
    probe=probe,
    patches=(
        PatchPoint((EAGER,), How.AROUND, plan_eager, needed=eager_is_wrong),
        PatchPoint((REPLAY,), How.AROUND, plan_replay),
    ),
    workarounds=PAGES_OF_ONE_TOKEN,
    verify=("llama_prefix_cache",),
    concerns=wrong(LOCAL, FLASH_ATTENTION, PAGES),
)
