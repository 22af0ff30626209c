# SPDX-License-Identifier: Apache-2.0
"""Mamba2 inside the captured prefill, without a break at its layers

Under breakable prefill graphs every Mamba2 mixer (NemotronH, Falcon-H1) is an eager break, with its projections, its
convolution, the kernels of its scan and some waits for the GPU. Here these layers are captured, with kernels that read
their work on the device; projections and the gated norm are SGLang's own, captured beside them; full attention keeps
its break. A layer keeps its break in the cases of gdn_extend. A batch runs eagerly if it has more than 512 sequences,
or verifies or extends a draft. Falcon-H1's break comes from the fix ssm_mixer_captured; without it that model gets no
prefill graphs, whatever this does. Granite hybrid and, from 0.5.19, NemotronH, which SGLang refuses them, have some
with the fix hybrids_without_graphs on. By default only NemotronH and Falcon-H1 have these kernels, and on Hopper: no
other servers were measured.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.launches import FALCON_H1, LINEAR_INSIDE, NEMOTRON_H, ON_HOPPER, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.mamba2 import PREPARE
from sglang_bcg_fixes.concern import slower
from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.linear_extend.places import BACKENDS, RUNNER, STEP, patches
from sglang_bcg_fixes.model import Accepted, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, absent, affected

BACKEND = f"{BACKENDS}:Mamba2AttnBackend"
PREPARED = f"{BACKEND}.init_forward_metadata"
LAYER = f"{BACKEND}.forward"
MIXER = "sglang.srt.layers.attention.mamba.mamba:MambaMixer2.forward"
NEMOTRON = "sglang.srt.models.nemotron_h"
BREAK = f"{NEMOTRON}:breakable_nemotron_mamba2_with_output"
BROKEN = f"{NEMOTRON}:nemotron_mamba2_with_output"
BODIES = "sglang_bcg_fixes.kernels.mamba2_extend.adapter"
FOLDER = "sglang_bcg_fixes.kernels.mamba2_extend"
# architectures whose servers were measured
MEASURED = ("NemotronH", "FalconH1")


def probe(source: Source) -> Finding:
    if not source.find(BACKEND):
        return absent("this release has no Mamba2")
    read = [*map(source.need, (LAYER, PREPARED, MIXER, PREPARE, BREAK, BROKEN, *STEP))]
    read += [source.need(*places) for places in RUNNER]
    return affected("what an extend of such a layer does is known for this source", *read)


KERNEL = Kernel(
    op="mamba2_extend",
    doc=__doc__,
    impls=(
        Impl("triton", has_triton, f"{FOLDER}.triton", measured_on=("sm_90",)),
        Impl("reference", Accepted, f"{FOLDER}.stepwise", only_by_name="plain torch, token by token; for tests"),
    ),
    probe=probe,
    patches=(
        *patches(BODIES, PREPARED),
        PatchPoint((LAYER,), How.AROUND, f"{BODIES}:forward"),
        PatchPoint((BREAK,), How.AROUND_BREAK, f"{BODIES}:nemotron_break"),
    ),
    # SGLang imports all models together, where it needs one; other processes are spared the others of these modules
    awaits=(NEMOTRON,),
    bit_exact=False,
    concerns=slower(NEMOTRON_H | FALCON_H1, PREFILL_GRAPHS, LINEAR_INSIDE, ON_HOPPER),
)
