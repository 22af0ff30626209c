"""Replays of latent attention are prepared for the form that was not captured

Symptom: DeepSeek, Kimi-Linear and other models with latent attention (MLA) end at their first replayed prefill, with a
shape mismatch in `q.view` on FlashAttention 3. Only where the breakable backend is chosen explicitly: its default is
off for these models.
Cause: 0.5.17 pins the absorbed form (MLA) under a breakable graph for every model, and still tells each replay that the
expanded one (MHA) was captured, unless the model is on a list that has one name.
Change: A fix would leave that out where the absorbed form is pinned, and have TensorRT-LLM plan for it. This version
only watches for it.
Remove when: 0.5.17 has not to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.mitigations import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, absent, affected, fixed, unknown
from sglang_bcg_fixes.runners import PREFILL

HANDLER = "sglang.srt.models.deepseek_common.attention_backend_handler:_handle_attention_backend"
RESTORE = f"{PREFILL}._restore_mha_capture_state"


def probe(source: Source) -> Finding:
    restore = source.find(RESTORE)
    if restore is None:
        return absent("the runner prepares no replay for the expanded form")
    handler = source.need(HANDLER)
    if "is_in_breakable_cuda_graph" not in handler.calls:
        return absent("the expanded form is captured, too", handler, restore)
    load = source.need(f"{PREFILL}.load_batch")
    if load.mentions("self.has_mha_companion_layers and (not self.mla_pinned_under_bcg)"):
        return affected("the absorbed form is captured, and replays are prepared for the other one", handler, load)
    if load.mentions("self.has_mha_companion_layers and (not is_cuda())"):
        return fixed("on CUDA replays are not prepared for the expanded form", handler, load)
    return unknown("replays are prepared in a way that no known release does", handler, load)


FIX = Fix(
    id="mla_replay_prepared_as_mha",
    doc=__doc__,
    upstream=(),
    probe=probe,
    known={
        "71e152dac645": "_handle_attention_backend, 0.5.16",
        "57900f0e98a5": "PrefillCudaGraphRunner._restore_mha_capture_state, 0.5.16",
        "36655451c160": "_handle_attention_backend, 0.5.17 to 0.5.19",
        "e1d6250b9115": "PrefillCudaGraphRunner.load_batch, 0.5.17",
        "92d205a6594f": "PrefillCudaGraphRunner.load_batch, 0.5.18",
        "0afcfecdfd81": "PrefillCudaGraphRunner.load_batch, 0.5.19",
        "4d9bacfaaebe": "_handle_attention_backend, 0.5.20 to 0.5.23",
        "1356cad61526": "PrefillCudaGraphRunner.load_batch, 0.5.20",
        "904932e172a1": "PrefillCudaGraphRunner.load_batch, 0.5.21",
        "6106f4655ca1": "PrefillCudaGraphRunner.load_batch, 0.5.22",
        "0436d47b0308": "PrefillCudaGraphRunner.load_batch, 0.5.23",
    },
    mitigations=PREFILL_GRAPHS_OFF,
)
