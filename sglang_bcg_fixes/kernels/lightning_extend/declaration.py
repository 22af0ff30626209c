# SPDX-License-Identifier: Apache-2.0
"""Faster prefill of short prompts with lightning attention (Ling and Ring 2.5)

Under breakable prefill graphs every lightning attention layer (MiniCPM-SALA, Ling and Ring 2.5) is an eager break. Here
these layers are captured: `seg_la` runs SGLang's own kernels with the launch of the largest batch, and has the bits of
its eager run; `triton` is ours. Full attention keeps its break. A layer keeps its break in the cases of gdn_extend,
with an FP8 cache that has scales, and with `linear_backend: minimax`. A batch runs eagerly if it has more than 512
sequences, or more than 128 with `seg_la`, or verifies or extends a draft. Before 0.5.17 SGLang's kernels write no
checkpoint, so there `seg_la` captures nothing with the extra-buffer strategy. Ling and Ring 2.5 have prefill graphs
only with hybrids_without_graphs on. Off by default: servers answer long prompts no sooner with it.
"""

from __future__ import annotations

from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.linear_extend.places import RUNNER, STEP, patches
from sglang_bcg_fixes.model import How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, absent, affected

LINEAR = "sglang.srt.layers.attention.linear"
BACKEND_MODULE = f"{LINEAR}.lightning_backend"
BACKEND = f"{BACKEND_MODULE}:LightningAttentionBackend"
PREPARED = f"{BACKEND}.init_forward_metadata"
LAYER = "sglang.srt.layers.radix_attention:RadixAttention.forward"
# what a layer is given, and what it is told of a step
READ = (
    LAYER,
    PREPARED,
    f"{BACKEND}.forward_extend",
    f"{BACKEND}._linear_attention_entry",
    f"{LINEAR}.linear_metadata:BailingLinearMetadata.prepare_mixed",
)
MODULES = ("sglang.kernels.ops.attention.linear.seg_la", f"{LINEAR}.seg_la")
KERNELS = ("seg_la_fwd", "seg_la_p_kernel", "seg_la_sum_kernel")
TRACKED = f"{BACKEND}._prepare_seg_la_track_store"
BODIES = "sglang_bcg_fixes.kernels.lightning_extend.adapter"
FOLDER = "sglang_bcg_fixes.kernels.lightning_extend"
NO_GAIN = "servers answer long prompts no sooner with it: docs/kernel_times.md"


def probe(source: Source) -> Finding:
    if not source.has_module(BACKEND_MODULE):
        return absent("this release has no lightning attention")
    read = [*map(source.need, (*READ, *STEP))]
    read += [source.need(*(f"{module}:{name}" for module in MODULES)) for name in KERNELS]
    read += [source.need(*places) for places in RUNNER]
    tracked = source.find(TRACKED)
    read += [tracked] if tracked else []
    return affected("what an extend of such a layer does is known for this source", *read)


KERNEL = Kernel(
    op="lightning_extend",
    doc=__doc__,
    impls=(
        Impl("seg_la", has_triton, f"{FOLDER}.seg_la", only_by_name=NO_GAIN),
        Impl("triton", has_triton, f"{FOLDER}.triton", only_by_name=NO_GAIN),
    ),
    probe=probe,
    patches=(
        *patches(BODIES, PREPARED),
        PatchPoint((LAYER,), How.AROUND, f"{BODIES}:forward"),
    ),
    # SGLang imports it for hybrid models only, after all the others
    awaits=(BACKEND_MODULE,),
    # no concern: whose time it takes less of, nobody has measured
    bit_exact=False,
)
