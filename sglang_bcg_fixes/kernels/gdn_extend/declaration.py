"""Gated delta net inside the captured prefill, without a break at its layers

Under breakable prefill graphs every gated delta net layer (Qwen3-Next, Qwen3.5) is an eager break, whose dozen launches
cost the host more than the GPU has to do. Here these layers are captured with kernels that find their work on the
device; the break stays for full attention. A layer keeps its break with deterministic inference, two-batch overlap, DP
attention, context parallelism, pipeline stages, hierarchical cache, strided state pools, or states that are not fp32. A
batch runs eagerly with more than 128 sequences, or where a draft is verified or extended. On 0.5.11 to 0.5.12.post1 the
break comes from the fix linear_attention_captured: with that off, such a model gets no prefill graphs, with or without
this.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.runners import MAY_REPLAY, OLD_PREFILL, PREFILL
from sglang_bcg_fixes.engine.graph_break import DECORATOR_MODULES
from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.gdn_extend import program
from sglang_bcg_fixes.kernels.gdn_extend.reference import TOLERANCE
from sglang_bcg_fixes.model import Accepted, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, absent, affected

BACKEND_MODULE = "sglang.srt.layers.attention.linear.gdn_backend"
BACKEND = f"{BACKEND_MODULE}:GDNAttnBackend"
PREPARED = f"{BACKEND}.init_forward_metadata"
LAYER = "sglang.srt.layers.radix_linear_attention:RadixLinearAttention.forward"
CAPTURE = (f"{PREFILL}.capture", f"{OLD_PREFILL}._capture_all")
REPLAY = tuple(f"{module}:BreakableCUDAGraph.replay" for module in DECORATOR_MODULES)
MAMBA = "sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase"
# what is read of the step, and what a checkpoint is
STEP = (
    f"{MAMBA}._forward_metadata",
    f"{MAMBA}._init_track_conv_indices",
    f"{MAMBA}._init_track_ssm_indices",
    f"{MAMBA}._track_mamba_state_extend",
)
BODIES = "sglang_bcg_fixes.kernels.gdn_extend.adapter"
FOLDER = "sglang_bcg_fixes.kernels.gdn_extend"
NOT_MEASURED = "no times of a server with it are published yet: docs/kernels.md"


def probe(source: Source) -> Finding:
    if not source.has_module(BACKEND_MODULE):
        return absent("this release has no gated delta net")
    read = [
        source.need(LAYER),
        source.need(PREPARED),
        source.need(f"{BACKEND}.forward_extend"),
        *map(source.need, STEP),
        source.need(*CAPTURE),
        source.need(*MAY_REPLAY),
        source.need(*REPLAY),
    ]
    return affected("what an extend of such a layer does is known for this source", *read)


KERNEL = Kernel(
    op="gdn_extend",
    doc=__doc__,
    impls=(
        # written for Hopper; there it is the faster one
        Impl("cuda", program.installed, f"{FOLDER}.cuda"),
        Impl("triton", has_triton, f"{FOLDER}.triton", only_by_name=NOT_MEASURED),
        Impl(
            "reference",
            Accepted,
            f"{FOLDER}.stepwise",
            only_by_name="plain torch, token after token; for tests",
        ),
    ),
    probe=probe,
    patches=(
        PatchPoint((PREPARED,), How.AFTER, f"{BODIES}:prepared"),
        PatchPoint((LAYER,), How.AROUND, f"{BODIES}:forward"),
        PatchPoint(CAPTURE, How.AROUND, f"{BODIES}:capture"),
        PatchPoint(MAY_REPLAY, How.AROUND, f"{BODIES}:can_replay"),
        PatchPoint(REPLAY, How.BEFORE, f"{BODIES}:before_replay"),
    ),
    # SGLang imports it for such a model only, when all the others have been
    awaits=(BACKEND_MODULE,),
    # of RMS(error) over RMS(reference)
    tolerance=dict.fromkeys(("output", "conv", "state"), TOLERANCE),
)
