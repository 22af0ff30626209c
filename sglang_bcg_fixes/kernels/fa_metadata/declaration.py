# SPDX-License-Identifier: Apache-2.0
"""Less launch overhead in each step on FlashAttention, eager and with graphs

SGLang's FlashAttentionBackend recomputes lengths, sums and page tables in every step: 4 to 33 torch operations eagerly,
up to 28 before a replay. Here each step is one launch, or two with topk above 1. SGLang's own code still runs where
equality is not known: unified memory, sharded caches, context parallelism, prefill-aware window attention, ragged
verify, local attention of more than one query, an encoder with pages or drafts, and page sizes that are not a power of
two. Three values differ on purpose, because SGLang's are wrong: chunks of local attention with pages above 1 token
(eager to 0.5.19; in a graph with a pool for windows, to 0.5.21), an encoder's lengths in a graph of more than one
request (to 0.5.12.post1), and drafts of a tree whose last step is on a page too many (to 0.5.12.post1).
"""

from __future__ import annotations

import dataclasses

from sglang_bcg_fixes.anatomy.launches import FA3
from sglang_bcg_fixes.concern import slower
from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.fa_metadata import program, rules
from sglang_bcg_fixes.model import Accepted, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, affected

MODULE = "sglang.srt.layers.attention.flashattention_backend"
BACKEND = f"{MODULE}:FlashAttentionBackend"
EAGER = f"{BACKEND}.init_forward_metadata"
REPLAYS = (f"{BACKEND}._apply_cuda_graph_metadata", f"{BACKEND}.init_forward_metadata_replay_cuda_graph")
BUFFERS = (f"{BACKEND}._bind_metadata_buffers", f"{BACKEND}.init_forward_metadata_capture_cuda_graph")
TRANSLATE = "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.translate_loc_from_full_to_swa"
LOCAL = "sglang.srt.layers.attention.local_attention"
# definitions that only some releases have
SOMETIMES = (
    f"{BACKEND}._get_swa_write_locations",
    f"{BACKEND}._maybe_init_local_attn_metadata",
    f"{BACKEND}._maybe_update_local_attn_metadata_for_replay",
    f"{MODULE}:make_local_attention_virtual_batches",
    f"{LOCAL}:LocalAttentionMetadataBuilder",
    f"{LOCAL}:LocalAttentionMetadata",
    f"{LOCAL}:make_local_attention_virtual_batches",
)
BODIES = "sglang_bcg_fixes.kernels.fa_metadata.adapter"
FOLDER = "sglang_bcg_fixes.kernels.fa_metadata"


def probe(source: Source) -> Finding:
    eager, replay = source.need(EAGER), source.need(*REPLAYS)
    read = [
        eager,
        replay,
        source.need(*BUFFERS),
        source.need(f"{BACKEND}.init_cuda_graph_state"),
        source.need(f"{MODULE}:FlashAttentionMetadata"),
        source.need(f"{MODULE}:draft_decode_set_expand_metadata"),
        source.need(TRANSLATE),
        source.need(f"{BACKEND}._compute_scheduler_metadata").header,
        source.need(f"{BACKEND}._init_sliding_window_attn_spec_metadata").header,
        *(found for where in SOMETIMES if (found := source.find(where))),
    ]
    finding = affected("what each mode fills is known for this source", *read)
    return dataclasses.replace(finding, rules=(rules.of_eager(eager), rules.of_replay(replay)))


KERNEL = Kernel(
    op="fa_metadata",
    doc=__doc__,
    impls=(
        # the first one has the lower host time; device times are alike
        Impl("cuda", program.installed, f"{FOLDER}.cuda"),
        Impl("triton", has_triton, f"{FOLDER}.triton"),
        Impl(
            "reference",
            Accepted,
            f"{FOLDER}.reference",
            only_by_name="plain torch, slower than what it replaces; for tests",
        ),
    ),
    probe=probe,
    patches=(
        PatchPoint((EAGER,), How.AROUND, f"{BODIES}:eager"),
        PatchPoint(REPLAYS, How.AROUND, f"{BODIES}:replay"),
    ),
    bit_exact=True,
    concerns=slower(FA3),
)
