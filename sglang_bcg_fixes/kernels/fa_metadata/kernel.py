"""FlashAttention's metadata in one launch, eager and before each replay of a graph

SGLang's FlashAttentionBackend makes its lengths, sums and tables of pages anew in every step: eagerly by 4 to 33
operations of torch, and before a replay by up to 28. These are a launch each here, or two with topk above 1. Whatever
is not known to be equal stays SGLang's own: unified memory, sharded caches, context parallelism, prefill-aware window
attention, ragged verify, local attention of more than one query, an encoder beside pages or drafts, and pages that are
no power of two. Three values differ on purpose, where SGLang's are wrong: chunks of local attention with pages above 1
token (eager to 0.5.19; in a graph with a pool for windows, to 0.5.21), an encoder's lengths in a graph of more than one
request (to 0.5.12.post1), and drafts of a tree whose last step is on a page too many (to 0.5.12.post1).
"""

from __future__ import annotations

from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.fa_metadata import program
from sglang_bcg_fixes.model import Accepted, Finding, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.probe import Source, affected

MODULE = "sglang.srt.layers.attention.flashattention_backend"
BACKEND = f"{MODULE}:FlashAttentionBackend"
EAGER = f"{BACKEND}.init_forward_metadata"
REPLAYS = (f"{BACKEND}._apply_cuda_graph_metadata", f"{BACKEND}.init_forward_metadata_replay_cuda_graph")
BUFFERS = (f"{BACKEND}._bind_metadata_buffers", f"{BACKEND}.init_forward_metadata_capture_cuda_graph")
TRANSLATE = "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.translate_loc_from_full_to_swa"
LOCAL = "sglang.srt.layers.attention.local_attention"
# in some releases only
SOMETIMES = (
    f"{BACKEND}._get_swa_write_locations",
    f"{BACKEND}._maybe_init_local_attn_metadata",
    f"{BACKEND}._maybe_update_local_attn_metadata_for_replay",
    f"{MODULE}:make_local_attention_virtual_batches",
    f"{LOCAL}:LocalAttentionMetadataBuilder",
    f"{LOCAL}:LocalAttentionMetadata",
    f"{LOCAL}:make_local_attention_virtual_batches",
)
BODIES = "sglang_bcg_fixes.kernels.fa_metadata.installed"
FOLDER = "sglang_bcg_fixes.kernels.fa_metadata"


def probe(source: Source) -> Finding:
    read = [
        source.need(EAGER),
        source.need(*REPLAYS),
        source.need(*BUFFERS),
        source.need(f"{BACKEND}.init_cuda_graph_state"),
        source.need(f"{MODULE}:FlashAttentionMetadata"),
        source.need(f"{MODULE}:draft_decode_set_expand_metadata"),
        source.need(TRANSLATE),
        source.need(f"{BACKEND}._compute_scheduler_metadata").header,
        source.need(f"{BACKEND}._init_sliding_window_attn_spec_metadata").header,
        *(found for where in SOMETIMES if (found := source.find(where))),
    ]
    return affected("what each mode fills is known for this source", *read)


KERNEL = Kernel(
    op="fa_metadata",
    doc=__doc__,
    impls=(
        # in this order: the host is quicker with the first one, and the device alike
        Impl("cuda", program.installed, f"{FOLDER}.cuda", graph_safe=True),
        Impl("triton", has_triton, f"{FOLDER}.triton", graph_safe=True),
        Impl(
            "reference",
            Accepted,
            f"{FOLDER}.reference",
            graph_safe=True,
            only_by_name="plain torch, slower than what it takes the place of; for tests",
        ),
    ),
    probe=probe,
    known={
        "5a19856dae3d": "FlashAttentionBackend.init_forward_metadata, 0.5.11 to 0.5.12.post1",
        "5d549a8d9ac9": "FlashAttentionBackend.init_forward_metadata_replay_cuda_graph, 0.5.11",
        "53b137fa94a1": "FlashAttentionBackend.init_forward_metadata_capture_cuda_graph, 0.5.11 to 0.5.12.post1",
        "229c3bb3ca62": "FlashAttentionBackend.init_cuda_graph_state, 0.5.11 to 0.5.12.post1",
        "c77e59c8f29b": "FlashAttentionMetadata, 0.5.11 to 0.5.12.post1",
        "bc8f5568c18b": "draft_decode_set_expand_metadata, 0.5.11 to 0.5.23",
        "b1909f13b2a3": "SWAKVPool.translate_loc_from_full_to_swa, 0.5.11 to 0.5.12.post1",
        "4ff6661a0fbe": "FlashAttentionBackend._compute_scheduler_metadata's header, 0.5.11 to 0.5.23",
        "a5596cd1a66c": "FlashAttentionBackend._init_sliding_window_attn_spec_metadata's header, 0.5.11 to 0.5.23",
        "b553f5bfe1f6": "FlashAttentionBackend._maybe_init_local_attn_metadata, 0.5.11 to 0.5.12.post1",
        "4e0f27a8b31e": "FlashAttentionBackend._maybe_update_local_attn_metadata_for_replay, 0.5.11 to 0.5.12.post1",
        "10e8d51fee8a": "make_local_attention_virtual_batches, 0.5.11 to 0.5.19",
        "ea1beb34fbf6": "FlashAttentionBackend.init_forward_metadata_replay_cuda_graph, 0.5.12 to 0.5.12.post1",
        "79a922a5fb86": "FlashAttentionBackend.init_forward_metadata, 0.5.13 to 0.5.13.post1",
        "ae8827d92958": "FlashAttentionBackend._apply_cuda_graph_metadata, 0.5.13 to 0.5.13.post1",
        "58a8602e2505": "FlashAttentionBackend._bind_metadata_buffers, 0.5.13 to 0.5.13.post1",
        "4b80fb42f1b5": "FlashAttentionBackend.init_cuda_graph_state, 0.5.13 to 0.5.15.post1",
        "d54c0982c466": "FlashAttentionMetadata, 0.5.13 to 0.5.13.post1",
        "55c85d432e78": "SWAKVPool.translate_loc_from_full_to_swa, 0.5.13 to 0.5.23",
        "611dc9fda75d": "FlashAttentionBackend._maybe_init_local_attn_metadata, 0.5.13 to 0.5.19",
        "282a50e8d968": "FlashAttentionBackend._maybe_update_local_attn_metadata_for_replay, 0.5.13 to 0.5.19",
        "099edda70396": "FlashAttentionBackend.init_forward_metadata, 0.5.14",
        "80d23d660c6f": "FlashAttentionBackend._apply_cuda_graph_metadata, 0.5.14",
        "9046d7236aa0": "FlashAttentionBackend._bind_metadata_buffers, 0.5.14",
        "089a2989f172": "FlashAttentionMetadata, 0.5.14",
        "cf54eaeb69cd": "FlashAttentionBackend.init_forward_metadata, 0.5.15 to 0.5.15.post1",
        "2df20bdc65e8": "FlashAttentionBackend._apply_cuda_graph_metadata, 0.5.15 to 0.5.15.post1",
        "ee29d1afbacf": "FlashAttentionBackend._bind_metadata_buffers, 0.5.15 to 0.5.15.post1",
        "e7edfb0a95bc": "FlashAttentionMetadata, 0.5.15 to 0.5.15.post1",
        "c3cac1f7d2fd": "FlashAttentionBackend.init_forward_metadata, 0.5.16",
        "dd2219cbb79d": "FlashAttentionBackend._apply_cuda_graph_metadata, 0.5.16",
        "ac3332aa5e9a": "FlashAttentionBackend._bind_metadata_buffers, 0.5.16 to 0.5.17",
        "754265d55189": "FlashAttentionBackend.init_cuda_graph_state, 0.5.16",
        "5114e3a9c3ed": "FlashAttentionMetadata, 0.5.16 to 0.5.21",
        "239bbd08b241": "FlashAttentionBackend.init_forward_metadata, 0.5.17 to 0.5.18",
        "cc9fb3a43d70": "FlashAttentionBackend._apply_cuda_graph_metadata, 0.5.17",
        "723fcf36c3c5": "FlashAttentionBackend.init_cuda_graph_state, 0.5.17",
        "f97575dee6f4": "FlashAttentionBackend._apply_cuda_graph_metadata, 0.5.18",
        "c2ca7ed6f94b": "FlashAttentionBackend._bind_metadata_buffers, 0.5.18 to 0.5.23",
        "f3a4b061abf9": "FlashAttentionBackend.init_cuda_graph_state, 0.5.18 to 0.5.21",
        "b3983820819f": "FlashAttentionBackend.init_forward_metadata, 0.5.19",
        "c4331e951e58": "FlashAttentionBackend._apply_cuda_graph_metadata, 0.5.19",
        "c6df15e7e209": "FlashAttentionBackend.init_cuda_graph_state, 0.5.19",
        "49993970c966": "FlashAttentionBackend.init_forward_metadata, 0.5.20",
        "2186d2cc3756": "FlashAttentionBackend._apply_cuda_graph_metadata, 0.5.20 to 0.5.21",
        "b1d7e271dbbd": "FlashAttentionBackend._maybe_init_local_attn_metadata, 0.5.20 to 0.5.21",
        "61400ce446c7": "FlashAttentionBackend._maybe_update_local_attn_metadata_for_replay, 0.5.20 to 0.5.21",
        "b11216987506": "make_local_attention_virtual_batches, 0.5.20 to 0.5.23",
        "98e384b52bb3": "FlashAttentionBackend.init_forward_metadata, 0.5.21",
        "1879188e83b5": "FlashAttentionBackend._get_swa_write_locations, 0.5.21",
        "7a930b2b84d6": "FlashAttentionBackend.init_forward_metadata, 0.5.22 to 0.5.23",
        "5860847f2465": "FlashAttentionBackend._apply_cuda_graph_metadata, 0.5.22 to 0.5.23",
        "e4632a3884b5": "FlashAttentionBackend.init_cuda_graph_state, 0.5.22 to 0.5.23",
        "9220c64ca221": "FlashAttentionMetadata, 0.5.22 to 0.5.23",
        "a36a05d317fb": "FlashAttentionBackend._get_swa_write_locations, 0.5.22 to 0.5.23",
        "0e8f3c519e09": "FlashAttentionBackend._maybe_init_local_attn_metadata, 0.5.22 to 0.5.23",
        "c7640dd66618": "LocalAttentionMetadataBuilder, 0.5.22 to 0.5.23",
        "fedfb4e3ad30": "LocalAttentionMetadata, 0.5.22 to 0.5.23",
    },
    patches=(
        PatchPoint((EAGER,), How.AROUND, f"{BODIES}:eager"),
        PatchPoint(REPLAYS, How.AROUND, f"{BODIES}:replay"),
    ),
    tolerance={},
)
