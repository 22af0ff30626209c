# SPDX-License-Identifier: Apache-2.0
"""Faster prefill of Kimi-Linear with graphs (Kimi delta attention runs inside them)

Under breakable prefill graphs every Kimi delta attention layer (Kimi-Linear, Kimi K3, Ling 3, GLM-5 Next) is an eager
break, in releases up to 0.5.21. Here these layers are captured, with kernels that read their work on the device; full
attention keeps its break. A layer keeps its break in the cases of gdn_extend, and with states that an extend stages for
FlashInfer's verify. A batch runs eagerly if it has more than 512 sequences, or verifies or extends a draft. From 0.5.22
on SGLang captures these layers itself. Before 0.5.17 its own kernels take powers of two for powers of e, so a captured
layer would answer unlike an eager one. By default Kimi-Linear alone has these kernels, on Hopper and 0.5.17, where its
server was measured.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.launches import LINEAR_INSIDE, ON_HOPPER, PREFILL_GRAPHS, named
from sglang_bcg_fixes.concern import slower
from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.linear_extend.places import RUNNER, SEAM, STEP, known, patches
from sglang_bcg_fixes.model import Accepted, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, absent, unknown

LINEAR = "sglang.srt.layers.attention.linear"
BACKEND_MODULE = f"{LINEAR}.kda_backend"
BACKEND = f"{BACKEND_MODULE}:KDAAttnBackend"
PREPARED = f"{BACKEND}.init_forward_metadata"
LAYER = "sglang.srt.layers.radix_linear_attention:RadixLinearAttention.forward"
# what SGLang captures itself
CAPTURED_MODULE = f"{LINEAR}.kda_prefill_graph"
KERNELS = ("sglang.kernels.ops.attention.fla.kda", "sglang.srt.layers.attention.fla.kda")
BODIES = "sglang_bcg_fixes.kernels.kda_extend.adapter"
FOLDER = "sglang_bcg_fixes.kernels.kda_extend"
# the beginning of the architecture's name, of the models whose server was faster with it
MEASURED = ("KimiLinear",)


def probe(source: Source) -> Finding:
    if not source.has_module(BACKEND_MODULE):
        return absent("this release has no Kimi delta attention")
    if source.has_module(CAPTURED_MODULE):
        return absent("SGLang captures these layers itself", source.need(f"{BACKEND}.{SEAM}"))
    chunks = source.need(*(f"{module}:chunk_kda_fwd" for module in KERNELS))
    gates = source.need(*(f"{module}:kda_gate_chunk_cumsum_vector_kernel" for module in KERNELS))
    if not chunks.mentions("scale=RCP_LN2"):
        return absent("SGLang's own kernels decay by powers of two here, so its eager answers are others", chunks)
    if not source.find(PREPARED):
        return unknown("the backend does not prepare a step of its own", chunks)
    read = [*map(source.need, (LAYER, PREPARED, f"{BACKEND}.forward_extend", *STEP))]
    read += [source.need(*places) for places in RUNNER]
    return known(source, BACKEND, chunks, gates, *read)


KERNEL = Kernel(
    op="kda_extend",
    doc=__doc__,
    impls=(
        Impl("triton", has_triton, f"{FOLDER}.triton", measured_on=("sm_90",)),
        Impl("reference", Accepted, f"{FOLDER}.stepwise", only_by_name="plain torch, token by token; for tests"),
    ),
    probe=probe,
    patches=(
        *patches(BODIES, PREPARED),
        PatchPoint((LAYER,), How.AROUND, f"{BODIES}:forward"),
    ),
    # SGLang imports it for such a model only, after all the others
    awaits=(BACKEND_MODULE,),
    bit_exact=False,
    concerns=slower(named(*(f"{name}*" for name in MEASURED)), PREFILL_GRAPHS, LINEAR_INSIDE, ON_HOPPER),
)
