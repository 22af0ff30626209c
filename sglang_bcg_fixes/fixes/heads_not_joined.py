# SPDX-License-Identifier: Apache-2.0
"""Gemma3n (text) and MiniCPM-SALA do not start with breakable prefill graphs

Symptom: Gemma3n stops at start-up while breakable prefill graphs are captured: `RuntimeError: mat1 and mat2 shapes
cannot be multiplied`. So does MiniCPM-SALA with lightning attention, from 0.5.19: `ValueError: Expected hidden_size to
be 4096, but found: 128`, or as Gemma3n without a norm. Where these graphs are the default, no flag is needed.
Cause: Their attention hands queries to the attention layer by heads, with three dimensions. FlashAttention, FlashInfer,
TensorRT-LLM and lightning attention give their output back with two; in a graph break the layer allocates it in the
shape of the queries. Gemma3's and Gemma4's layers join the heads of such an output, these do not.
Change: A hook on each attention layer of a `Gemma3nForCausalLM`, and on each lightning layer of MiniCPM-SALA, joins the
heads of an output that has three dimensions, which is a view. One that has two is handed on as it is. Gemma3n's output
is the same eagerly from the Triton and PyTorch-native backends, and it is joined there, too.
`Gemma3nForConditionalGeneration` is left alone: a graph would drop what its layers are given beside the embeddings.
Remove when: Every release that has to be served joins the heads before these models' output projections.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.attention_break import join_heads
from sglang_bcg_fixes.anatomy.launches import PREFILL_GRAPHS, TRITON, named
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import (
    Finding,
    Fix,
    How,
    PatchPoint,
    Source,
    absent,
    affected,
    drifted,
    ends,
    fixed,
    latent,
)

MODEL = "sglang.srt.models.gemma3n_causal"
ATTENTION = f"{MODEL}:Gemma3nAttention"
MAKE = f"{MODEL}:Gemma3nForCausalLM.__init__"
LAYER = "sglang.srt.layers.radix_attention"
# newest first
ALLOCATES = (
    "sglang.srt.layers.attention.graph_utils:allocate_attention_outputs",
    f"{LAYER}:_new_attention_output",
    f"{LAYER}:RadixAttention.forward",
)
LIKE_THE_QUERIES = ("torch.empty_like(q", "else query.shape")
JOINS = frozenset({"attn_output.flatten", "attn_output.reshape", "attn_output.view"})
MIXER = "sglang.srt.models.minicpm:MiniCPMLightningMixer"
MIXER_JOINS = frozenset({"o.flatten", "o.reshape", "o.view"})


def probe(source: Source) -> Finding:
    if not source.has_module(MODEL):
        return absent("this release has no Gemma3n")
    attends, allocates = source.need(f"{ATTENTION}.forward"), source.need(*ALLOCATES)
    made = source.need(f"{ATTENTION}.__init__")
    rotary = made.need_assignment_to("self.rotary_emb")
    read = [attends, allocates, rotary, made.need_assignment_to("self.attn"), source.need(MAKE).header]
    if not JOINS.isdisjoint(attends.calls):
        return fixed("Gemma3n joins the heads before its output projection", *read)
    if not attends.mentions("q.unflatten(-1, (self.num_heads, self.head_dim))\n    attn_output = self.attn(q,"):
        return drifted("Gemma3n hands its queries on", *read)
    mixes = source.find(f"{MIXER}.forward")
    if mixes is not None:
        read += [mixes, source.need(f"{MIXER}.__init__").need_assignment_to("self.attn")]
        if not mixes.mentions("o = self.attn(q, k, v, forward_batch)"):
            return drifted("MiniCPM-SALA hands its queries on", *read)
    if not any(map(allocates.mentions, LIKE_THE_QUERIES)):
        return drifted("a break allocates its output", *read)
    reason = "a break gives its output back by heads, as Gemma3n hands its queries in, and nothing joins them"
    if rotary.mentions("config.rope_local_base_freq"):
        return latent(f"{reason}; with the transformers that this release requires, Gemma3n cannot be built", *read)
    return affected(reason, *read)


def has_mixers_that_do_not_join(source: Source) -> bool:
    mixes = source.find(f"{MIXER}.forward")
    return mixes is not None and MIXER_JOINS.isdisjoint(mixes.calls)


def join_in_each_layer(nothing: None, self: Any, *_: Any, **__: Any) -> None:
    from sglang.srt.models.gemma3n_causal import Gemma3nAttention

    for module in self.modules():
        if isinstance(module, Gemma3nAttention):
            module.attn.register_forward_hook(join_heads)


def join_in_the_mixer(nothing: None, self: Any, *_: Any, **__: Any) -> None:
    self.attn.register_forward_hook(join_heads)


FIX = Fix(
    probe=probe,
    patches=(
        PatchPoint((MAKE,), How.AFTER, join_in_each_layer),
        PatchPoint((f"{MIXER}.__init__",), How.AFTER, join_in_the_mixer, needed=has_mixers_that_do_not_join),
    ),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=(
        *ends(named("Gemma3nForCausalLM"), PREFILL_GRAPHS | TRITON),
        *ends(named("MiniCPMSALAForCausalLM"), PREFILL_GRAPHS),
    ),
)
