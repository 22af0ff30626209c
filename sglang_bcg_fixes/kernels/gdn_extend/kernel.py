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

from sglang_bcg_fixes.graph_break import DECORATOR_MODULES
from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.gdn_extend import program
from sglang_bcg_fixes.kernels.gdn_extend.reference import TOLERANCE
from sglang_bcg_fixes.model import Accepted, Finding, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.probe import Source, absent, affected
from sglang_bcg_fixes.runners import MAY_REPLAY, OLD_PREFILL, PREFILL

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
BODIES = "sglang_bcg_fixes.kernels.gdn_extend.installed"
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
        Impl("cuda", program.installed, f"{FOLDER}.cuda", graph_safe=True),
        Impl("triton", has_triton, f"{FOLDER}.triton", graph_safe=True, only_by_name=NOT_MEASURED),
        Impl(
            "reference",
            Accepted,
            f"{FOLDER}.stepwise",
            graph_safe=True,
            only_by_name="plain torch, token after token; for tests",
        ),
    ),
    probe=probe,
    known={
        "ee8bb62e5f13": "RadixLinearAttention.forward, 0.5.11 to 0.5.12.post1",
        "c586ccebc30b": "GDNAttnBackend.init_forward_metadata, 0.5.11 to 0.5.16",
        "a110053cf2ed": "GDNAttnBackend.forward_extend, 0.5.11 to 0.5.12.post1",
        "8c4059c49f09": "MambaAttnBackendBase._forward_metadata, 0.5.11 to 0.5.13.post1",
        "666d7440823f": "MambaAttnBackendBase._init_track_conv_indices, 0.5.11 to 0.5.15.post1",
        "8c74eddfc0ae": "MambaAttnBackendBase._init_track_ssm_indices, 0.5.11 to 0.5.12.post1",
        "f449de754310": "MambaAttnBackendBase._track_mamba_state_extend, 0.5.11 to 0.5.16",
        "099e02893b1d": "BreakableCudaGraphRunner._capture_all, 0.5.11 to 0.5.13.post1",
        "7acbf663b8d2": "BreakableCudaGraphRunner.can_run, 0.5.11",
        "a8cce8be88f5": "BreakableCUDAGraph.replay, 0.5.11 to 0.5.16",
        "56db3c96d527": "BreakableCudaGraphRunner.can_run, 0.5.12 to 0.5.12.post1",
        "580388ac0c5e": "RadixLinearAttention.forward, 0.5.13 to 0.5.13.post1",
        "0fb75e801faa": "GDNAttnBackend.forward_extend, 0.5.13 to 0.5.13.post1",
        "6616249c1b17": "MambaAttnBackendBase._init_track_ssm_indices, 0.5.13 to 0.5.15.post1",
        "ad15bbae8576": "BreakableCudaGraphRunner.can_run, 0.5.13 to 0.5.13.post1",
        "e1487df8c21d": "RadixLinearAttention.forward, 0.5.14 to 0.5.18",
        "10f1baa7cbe8": "GDNAttnBackend.forward_extend, 0.5.14",
        "eda3c5768e65": "MambaAttnBackendBase._forward_metadata, 0.5.14",
        "e5de42434ff6": "PrefillCudaGraphRunner.capture, 0.5.14 to 0.5.18",
        "3ea6f8a472d5": "PrefillCudaGraphRunner.can_run_graph, 0.5.14",
        "fdd14f13f402": "GDNAttnBackend.forward_extend, 0.5.15 to 0.5.15.post1",
        "51fe26a85415": "MambaAttnBackendBase._forward_metadata, 0.5.15 to 0.5.15.post1",
        "8aa21770f271": "PrefillCudaGraphRunner.can_run_graph, 0.5.15 to 0.5.15.post1",
        "83c5df41a8f7": "GDNAttnBackend.forward_extend, 0.5.16",
        "6229ce8efbb2": "MambaAttnBackendBase._forward_metadata, 0.5.16",
        "9ab1681ef2a8": "MambaAttnBackendBase._init_track_conv_indices, 0.5.16 to 0.5.17",
        "c25a4550216b": "MambaAttnBackendBase._init_track_ssm_indices, 0.5.16 to 0.5.17",
        "90333b982f2f": "PrefillCudaGraphRunner.can_run_graph, 0.5.16",
        "34215e87e1f9": "GDNAttnBackend.init_forward_metadata, 0.5.17 to 0.5.19",
        "fe07a3e43467": "GDNAttnBackend.forward_extend, 0.5.17",
        "34042f7a5daf": "MambaAttnBackendBase._forward_metadata, 0.5.17 to 0.5.19",
        "09cbec869225": "MambaAttnBackendBase._track_mamba_state_extend, 0.5.17 to 0.5.19",
        "661831589cb6": "PrefillCudaGraphRunner.can_run_graph, 0.5.17",
        "cc1138d9b142": "BreakableCUDAGraph.replay, 0.5.17 to 0.5.23",
        "b5506c3b2d32": "GDNAttnBackend.forward_extend, 0.5.18",
        "73ad22977dab": "MambaAttnBackendBase._init_track_conv_indices, 0.5.18 to 0.5.19",
        "f65c9dbe630d": "MambaAttnBackendBase._init_track_ssm_indices, 0.5.18",
        "3de6b62ea9d2": "PrefillCudaGraphRunner.can_run_graph, 0.5.18",
        "9781134d8f1b": "RadixLinearAttention.forward, 0.5.19",
        "a691cc3d5d8c": "GDNAttnBackend.forward_extend, 0.5.19",
        "b83d32d7b220": "MambaAttnBackendBase._init_track_ssm_indices, 0.5.19",
        "12ee6a99c728": "PrefillCudaGraphRunner.capture, 0.5.19",
        "c1a3ce368cce": "PrefillCudaGraphRunner.can_run_graph, 0.5.19",
        "af273264a49e": "RadixLinearAttention.forward, 0.5.20 to 0.5.21",
        "f5556f30c79e": "GDNAttnBackend.init_forward_metadata, 0.5.20",
        "7ed2747498e1": "GDNAttnBackend.forward_extend, 0.5.20",
        "f806b848a6f2": "MambaAttnBackendBase._forward_metadata, 0.5.20",
        "4a98ff15a0e3": "MambaAttnBackendBase._init_track_conv_indices, 0.5.20",
        "dff01cd09677": "MambaAttnBackendBase._init_track_ssm_indices, 0.5.20",
        "dcfc73084c88": "MambaAttnBackendBase._track_mamba_state_extend, 0.5.20 to 0.5.23",
        "6b2c7d374c35": "PrefillCudaGraphRunner.capture, 0.5.20 to 0.5.22",
        "e59b654df577": "PrefillCudaGraphRunner.can_run_graph, 0.5.20",
        "f1d0e0c25eb8": "GDNAttnBackend.init_forward_metadata, 0.5.21",
        "302778d248cf": "GDNAttnBackend.forward_extend, 0.5.21",
        "ee73abb995e4": "MambaAttnBackendBase._forward_metadata, 0.5.21 to 0.5.22",
        "463efd09d968": "MambaAttnBackendBase._init_track_conv_indices, 0.5.21 to 0.5.23",
        "769cf5664ddd": "MambaAttnBackendBase._init_track_ssm_indices, 0.5.21 to 0.5.23",
        "bb2ea7e5516a": "PrefillCudaGraphRunner.can_run_graph, 0.5.21",
        "143274e3df7b": "RadixLinearAttention.forward, 0.5.22",
        "065390ca00d1": "GDNAttnBackend.init_forward_metadata, 0.5.22 to 0.5.23",
        "9ea3acdd264a": "GDNAttnBackend.forward_extend, 0.5.22 to 0.5.23",
        "d30c7c1a668e": "PrefillCudaGraphRunner.can_run_graph, 0.5.22",
        "34a4aefae03d": "RadixLinearAttention.forward, 0.5.23",
        "9e3c6867c63e": "MambaAttnBackendBase._forward_metadata, 0.5.23",
        "0ba5fba54dbd": "PrefillCudaGraphRunner.capture, 0.5.23",
        "312d8b3b674b": "PrefillCudaGraphRunner.can_run_graph, 0.5.23",
    },
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
