# SPDX-License-Identifier: Apache-2.0
"""Faster prefill of short prompts with FlashAttention-3: attention inside the graph

SGLang's breakable prefill graphs stop before every attention layer, and the host launches it. For few new tokens the
host is the longer part. Here each bucket of up to 512 tokens gets a second graph that holds SGLang's own FlashAttention
calls, and with the linear kernels inside has no break at all. A prefill of up to three requests is replayed from it
where it has the bits of SGLang's graph: FlashAttention must split the keys alike. Everything else is replayed from
SGLang's graph, as before. A server has no second graphs with another attention backend or GPU, latent attention, an FP8
cache, chunked local attention, or an option that docs/kernels.md lists. By default it has none either with several
ranks, heads smaller than 128, or a cap of logits.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.runners import EXECUTOR, MAY_REPLAY, OLD_PREFILL
from sglang_bcg_fixes.engine.graph_break import CONTEXT_MODULES, DECORATOR_MODULES
from sglang_bcg_fixes.kernels.fa_metadata.declaration import BACKEND, EAGER, MODULE
from sglang_bcg_fixes.kernels.linear_extend.places import CAPTURE, REPLAY
from sglang_bcg_fixes.model import Accepted, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, affected

LAYER = "sglang.srt.layers.radix_attention:RadixAttention.forward"
LAYERS = "sglang.srt.layers.radix_attention"
# the break of each release, of which it has one
BREAKS = (
    f"{LAYERS}:RadixAttention._eager_attention",
    f"{LAYERS}:_unified_attention_with_output_impl",
    f"{LAYERS}:unified_attention_with_output",
)
CAPTURE_ONE = (
    f"{EXECUTOR}.runner_backend.breakable_cuda_graph_backend:BreakableCudaGraphBackend.capture_one",
    f"{OLD_PREFILL}._capture_one",
)
BODIES = "sglang_bcg_fixes.kernels.attention_extend.adapter"
FOLDER = "sglang_bcg_fixes.kernels.attention_extend"


def probe(source: Source) -> Finding:
    read = [
        source.need(LAYER),
        source.need(*BREAKS),
        source.need(f"{BACKEND}.forward_extend"),
        source.need(EAGER),
        source.need(f"{MODULE}:FlashAttentionMetadata"),
        source.need(*CAPTURE),
        source.need(*CAPTURE_ONE),
        source.need(*MAY_REPLAY),
        source.need(*REPLAY),
        source.need(*(f"{module}:_current_capture_var" for module in DECORATOR_MODULES)),
        source.need(*(f"{module}:eager_on_graph" for module in DECORATOR_MODULES)),
        source.need(*(f"{module}:is_in_breakable_cuda_graph" for module in CONTEXT_MODULES)),
    ]
    return affected("what an attention layer does in a break is known for this source", *read)


KERNEL = Kernel(
    op="attention_extend",
    doc=__doc__,
    impls=(Impl("fa3", Accepted, f"{FOLDER}.fa3", measured_on=("sm_90",)),),
    probe=probe,
    patches=(
        PatchPoint(CAPTURE, How.AROUND, f"{BODIES}:capture"),
        PatchPoint(CAPTURE_ONE, How.AROUND, f"{BODIES}:capture_one"),
        PatchPoint((LAYER,), How.AROUND, f"{BODIES}:forward"),
        PatchPoint(MAY_REPLAY, How.AROUND, f"{BODIES}:can_replay"),
        PatchPoint(REPLAY, How.AROUND, f"{BODIES}:replay"),
    ),
    # SGLang imports it where a server uses it, when everything else is there
    awaits=(MODULE,),
    bit_exact=True,
)
