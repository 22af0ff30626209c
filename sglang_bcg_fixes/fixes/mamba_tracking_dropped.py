# SPDX-License-Identifier: Apache-2.0
"""NemotronH answers worse when a prompt is found in the prefix cache (extra_buffer)

Symptom: NemotronH answers worse on the second and later runs of the same prompts, when prefixes are found in the cache:
GSM8K 0.965, then 0.900 to 0.920 in the upstream report. Needs the extra-buffer strategy of the Mamba prefix cache.
Cause: Mamba2 and lightning attention layers write a checkpoint of their state only if the batch carries
mamba_track_mask. The batch of a breakable replay does not: never on 0.5.13, and from 0.5.14 not with speculative
decoding. The scheduler assumes that the checkpoint was written and caches a slot that holds another request's state.
Change: A batch that wants a checkpoint runs without a graph where the runner does not carry the mask; one warning says
so. Gated delta net and KDA keep their graphs: they read what to write from the metadata of the real batch. Under DP
attention, where all ranks must decide alike, such a server replays no batch.
Remove when: No release before 0.5.18 has to be served.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, MAMBA2_LAYERS, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import MAY_REPLAY, OLD_PREFILL, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import flag_of
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

MIXER = "sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.forward"
ASK_THE_METADATA = frozenset({"GDNAttnBackend", "KDAAttnBackend"})

logger = logging.getLogger("sglang_bcg_fixes")

ID = "mamba_tracking_dropped"


def probe(source: Source) -> Finding:
    mixer = source.need(MIXER)
    if not mixer.mentions("forward_batch.mamba_track_mask"):
        return absent("Mamba2 layers write no checkpoints in prefill", mixer)
    old = source.find(f"{OLD_PREFILL}._init_buffers")
    if old:
        if old.mentions("enable_mamba_track=False"):
            return affected("the breakable runner never carries mamba_track_mask", mixer, old)
        return drifted("the breakable runner allocates its buffers", mixer, old)
    gate = source.need(f"{PREFILL}._is_mamba_track_enabled")
    if "self.model_runner.spec_algorithm.is_none" in gate.calls:
        return affected("the prefill runner carries no mamba_track_mask with speculative decoding", mixer, gate)
    return fixed("the prefill runner carries mamba_track_mask with and without speculative decoding", mixer, gate)


def can_run(original: Callable[..., bool], self: Any, forward_batch: Any) -> bool:
    if not original(self, forward_batch):
        return False
    if self.buffer_registry.has_slot("mamba_track_mask") or not wants_checkpoint(self.model_runner, forward_batch):
        return True
    warn_once()
    return False


def wants_checkpoint(model_runner: Any, forward_batch: Any) -> bool:
    """Tell whether a layer would look for the mask in the batch and find something to write."""
    backend = model_runner.attn_backend
    # under two-batch overlap, or with a separate decode backend, the hybrid backend is inside another
    for wrapper in ("primary", "prefill_backend"):
        backend = getattr(backend, wrapper, backend)
    linear = getattr(backend, "linear_attn_backend", None)
    if linear is None or ASK_THE_METADATA & {base.__name__ for base in type(linear).__mro__}:
        return False
    if forward_batch.global_num_tokens_cpu is not None:
        arguments = model_runner.server_args
        return bool(arguments.enable_mamba_extra_buffer() and not arguments.disable_radix_cache)
    return forward_batch.mamba_track_mask is not None and bool(forward_batch.mamba_track_mask.any())


@functools.cache
def warn_once() -> None:
    ways = " or ".join(way.flags for way in PREFILL_GRAPHS_OFF)
    logger.warning(
        "bcg-fixes %s: a prefill that writes a checkpoint for the prefix cache runs without its graph, which would not "
        "write it; so will others. %s starts without prefill graphs, %s=off replays and leaves the cache wrong",
        ID,
        ways,
        flag_of(ID),
    )


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/pull/31099",
        "https://github.com/sgl-project/sglang/pull/32606",
        "https://github.com/sgl-project/sglang/pull/34043",
    ),
    probe=probe,
    patches=(PatchPoint(MAY_REPLAY, How.AROUND, can_run),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("falcon_h1_checkpoints",),
    concerns=wrong(MAMBA2_LAYERS, EXTRA_BUFFERS, PREFILL_GRAPHS),
)
