# SPDX-License-Identifier: Apache-2.0
"""Faster prefill of NemotronH, Falcon-H1, Granite hybrid (Mamba2 runs inside the graph)

Under breakable prefill graphs every Mamba2 mixer (NemotronH, Falcon-H1) is an eager break, with its projections, its
convolution, the kernels of its scan and some waits for the GPU. Here these layers are captured, with kernels that read
their work on the device; projections and the gated norm are SGLang's own, captured beside them; full attention keeps
its break. A layer keeps its break in the cases of gdn_extend. A batch runs eagerly if it has more than 512 sequences,
or verifies or extends a draft. Falcon-H1's break comes from the fix ssm_mixer_captured; without it that model gets no
prefill graphs, whatever this does. Granite hybrid and, from 0.5.19, NemotronH, which SGLang refuses them, have some
with the fix hybrids_without_graphs, Granite by default where it was measured. By default the models of a release have
these kernels whose servers gained with them in all that was measured there, on Hopper: NemotronH and Falcon-H1 on
0.5.12.post1, 0.5.15.post1 and 0.5.17, Falcon-H1 and Granite hybrid on 0.5.22 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_bcg_fixes.anatomy.launches import LINEAR_INSIDE, ON_HOPPER, WANTED_PREFILL_GRAPHS, named
from sglang_bcg_fixes.anatomy.mamba2 import PREPARE
from sglang_bcg_fixes.concern import Condition, Launch, slower
from sglang_bcg_fixes.kernels import has_triton
from sglang_bcg_fixes.kernels.linear_extend.places import BACKENDS, RUNNER, STEP, known, patches
from sglang_bcg_fixes.kernels.mamba2_extend import program
from sglang_bcg_fixes.model import Accepted, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.source import forms
from sglang_bcg_fixes.source.finding import Finding, Verdict
from sglang_bcg_fixes.source.syntax import Drifted
from sglang_bcg_fixes.source.tree import Source, absent

BACKEND = f"{BACKENDS}:Mamba2AttnBackend"
PREPARED = f"{BACKEND}.init_forward_metadata"
LAYER = f"{BACKEND}.forward"
MIXER = "sglang.srt.layers.attention.mamba.mamba:MambaMixer2.forward"
NEMOTRON = "sglang.srt.models.nemotron_h"
BREAK = f"{NEMOTRON}:breakable_nemotron_mamba2_with_output"
BROKEN = f"{NEMOTRON}:nemotron_mamba2_with_output"
BODIES = "sglang_bcg_fixes.kernels.mamba2_extend.adapter"
FOLDER = "sglang_bcg_fixes.kernels.mamba2_extend"
# by the beginning of an architecture's name: the releases whose servers were faster with it
MEASURED = {
    "NemotronH": ("0.5.12.post1", "0.5.15.post1", "0.5.17"),
    "FalconH1": ("0.5.12.post1", "0.5.15.post1", "0.5.17", "0.5.22", "0.5.23"),
    "GraniteMoeHybrid": ("0.5.22", "0.5.23"),
}


def probe(source: Source) -> Finding:
    if not source.find(BACKEND):
        return absent("this release has no Mamba2")
    read = [*map(source.need, (LAYER, PREPARED, MIXER, PREPARE, BREAK, BROKEN, *STEP))]
    read += [source.need(*places) for places in RUNNER]
    return known(source, BACKEND, *read)


def measured_with(found: Iterable[str]) -> list[str]:
    """List the beginnings of architectures' names that were measured on a source with these forms."""
    read = list(found)
    return [name for name, releases in MEASURED.items() if forms.with_all(releases, read)]


def is_measured(launch: Launch) -> bool | None:
    try:
        found = probe(launch.source)
    except Drifted:
        # a source that nobody has read was not measured either
        return False
    names = measured_with(item.form for item in found.evidence) if found.verdict is Verdict.AFFECTED else []
    return named(*(f"{name}*" for name in names)).holds(launch)


KERNEL = Kernel(
    op="mamba2_extend",
    doc=__doc__,
    impls=(
        # written for Hopper, where it is faster
        Impl("cuda", program.installed, f"{FOLDER}.cuda", measured_on=("sm_90",)),
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
    concerns=slower(
        Condition("a model that was measured on this release", is_measured),
        WANTED_PREFILL_GRAPHS,
        LINEAR_INSIDE,
        ON_HOPPER,
    ),
)
