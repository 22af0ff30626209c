# SPDX-License-Identifier: Apache-2.0
"""Faster prefill of Qwen3-Next and Qwen3.5 (gated delta net runs inside the graph)

Under breakable prefill graphs every gated delta net layer (Qwen3-Next, Qwen3.5) is an eager break, whose dozen launches
take the host longer than they take the GPU. Here these layers are captured, with kernels that read their work on the
device; full attention keeps its break. A layer keeps its break with deterministic inference, two-batch overlap, DP
attention, --moe-a2a-backend, --moe-dense-tp-size, context parallelism, pipeline stages, a hierarchical or an external
cache, strided state pools, or states that are not fp32 (bfloat16 is taken if an implementation is named). A batch runs
eagerly if it has more than 512 sequences, or verifies or extends a draft. On 0.5.11 to 0.5.12.post1 the break comes
from the fix linear_attention_captured; without it such a model gets no prefill graphs, whatever this does.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.launches import GATED_DELTA, LINEAR_INSIDE, ON_HOPPER, WANTED_PREFILL_GRAPHS
from sglang_bcg_fixes.concern import slower
from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.gdn_extend import program
from sglang_bcg_fixes.kernels.linear_extend.places import RUNNER, STEP, known, patches
from sglang_bcg_fixes.model import Accepted, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, absent

BACKEND_MODULE = "sglang.srt.layers.attention.linear.gdn_backend"
BACKEND = f"{BACKEND_MODULE}:GDNAttnBackend"
PREPARED = f"{BACKEND}.init_forward_metadata"
LAYER = "sglang.srt.layers.radix_linear_attention:RadixLinearAttention.forward"
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
        *(source.need(*places) for places in RUNNER),
    ]
    return known(source, BACKEND, *read)


KERNEL = Kernel(
    op="gdn_extend",
    doc=__doc__,
    impls=(
        # written for Hopper, where it is faster
        Impl("cuda", program.installed, f"{FOLDER}.cuda"),
        Impl("triton", has_triton, f"{FOLDER}.triton", only_by_name=NOT_MEASURED),
        Impl(
            "reference",
            Accepted,
            f"{FOLDER}.stepwise",
            only_by_name="plain torch, token by token; for tests",
        ),
    ),
    probe=probe,
    patches=(
        *patches(BODIES, PREPARED),
        PatchPoint((LAYER,), How.AROUND, f"{BODIES}:forward"),
    ),
    # SGLang imports it for such a model only, after all the others
    awaits=(BACKEND_MODULE,),
    bit_exact=False,
    concerns=slower(GATED_DELTA, WANTED_PREFILL_GRAPHS, LINEAR_INSIDE, ON_HOPPER),
)
