# SPDX-License-Identifier: Apache-2.0
"""Faster prefill of LFM2 with graphs (short convolutions run inside them)

With the fix hybrids_without_graphs, which gives LFM2 and LFM2-MoE the prefill graphs that SGLang refuses them, every
short convolution is an eager break. Here these layers are captured, with a kernel that reads its work on the device;
both gates and the projections are SGLang's own, captured beside it; attention keeps its break. Without that fix there
are no graphs, and this does nothing. A layer keeps its break unless hidden states and windows are of one half precision
(windows are bfloat16, or of SGLANG_MAMBA_CONV_DTYPE), and in the cases of gdn_extend. A batch runs eagerly if it has
more than 512 sequences, or verifies or extends a draft. Zaya, whose layers convolve twice and in groups, and Inkling,
whose backend and windows are its own, are left alone. By default it runs on Hopper and 0.5.23, whose servers of LFM2
were faster with it in all that was measured.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.mamba2 import PREPARE
from sglang_bcg_fixes.anatomy.short_convolutions import LAYER, LFM2, LFM2_MOE, MOE_LAYER
from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.linear_extend.places import BACKENDS, MAMBA, RUNNER, known, patches
from sglang_bcg_fixes.model import Accepted, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, absent, drifted

BACKEND_MODULE = "sglang.srt.layers.attention.linear.short_conv_backend"
BACKEND = f"{BACKEND_MODULE}:ShortConvAttnBackend"
# of such layers, too, where a release has not got the other
OLD_BACKEND = f"{BACKENDS}:Mamba2AttnBackend"
PREPARED = tuple(f"{backend}.init_forward_metadata" for backend in (BACKEND, OLD_BACKEND))
# a step's fields, and what a layer is told of them
STEP = f"{MAMBA}._forward_metadata"
TOLD = (f"{BACKEND}._refresh_cache_indices", f"{BACKEND}.conv_state_metadata")
LAYERS = (LAYER, MOE_LAYER)
BODIES = "sglang_bcg_fixes.kernels.short_conv_extend.adapter"
FOLDER = "sglang_bcg_fixes.kernels.short_conv_extend"


def probe(source: Source) -> Finding:
    if not all(map(source.has_module, (LFM2, LFM2_MOE))):
        return absent("this release has no LFM2, or none with experts")
    layers = [*map(source.need, LAYERS)]
    read = [*layers, source.need(*PREPARED), source.need(STEP), *(source.need(*places) for places in RUNNER)]
    has_own = source.has_module(BACKEND_MODULE)
    read += map(source.need, TOLD if has_own else (PREPARE,))
    if not all(layer.mentions("activation=None") for layer in layers):
        return drifted("the layers convolve", *read)
    return known(source, BACKEND if has_own else OLD_BACKEND, *read)


KERNEL = Kernel(
    op="short_conv_extend",
    doc=__doc__,
    impls=(
        Impl("triton", has_triton, f"{FOLDER}.triton", measured_on=("sm_90",)),
        Impl("reference", Accepted, f"{FOLDER}.stepwise", only_by_name="plain torch; for tests"),
    ),
    probe=probe,
    patches=(
        *patches(BODIES, *PREPARED),
        *(PatchPoint((layer,), How.AROUND, f"{BODIES}:forward") for layer in LAYERS),
    ),
    # SGLang imports all models together, where it needs one; other processes are spared the others of these modules
    awaits=(LFM2,),
    # no concern: whose time it takes less of, nobody has measured
    bit_exact=False,
)
