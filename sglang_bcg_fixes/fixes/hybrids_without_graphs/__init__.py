# SPDX-License-Identifier: Apache-2.0
"""Slower: Granite 4 hybrid, LFM2, Ling 2.5 and NemotronH run without prefill graphs

Symptom: Prefill runs eagerly, also where breakable prefill graphs are asked for. Answers are right. The log says
"Disable prefill CUDA graph because some layers do not apply Standard GQA". Before 0.5.14 it names piecewise graphs.
NemotronH has this from 0.5.19. The other models, and Ring 2.5, have it in every release.
Cause: SGLang looks for each layer's attention or mixer under names that it knows. It captures nothing where one layer
has none. It does not know `mamba`, Granite's Mamba2 mixers, nor `conv`, LFM2's short convolutions. Ling calls its
latent attention `attention`, where SGLang looks for grouped queries. NemotronH has layers that are feed-forward only.
From 0.5.19 these do not count. 0.5.23 counts experts again, on GPUs of compute capability 12.0 only.
Change: It is for speed alone. While a server sets up its graphs, layers show mixers and attention under known names.
Feed-forward layers count. SGLang's own code then captures the model. Each mixer runs as an eager break on the real
tokens, and padded rows are zeroed. mamba2_extend and short_conv_extend take mixers into the graph. By default only
Granite without experts is captured, on 0.5.22, 0.5.23 and Hopper, up to 4,096 tokens. There mamba2_extend has to take
every mixer. A GPU has measured what this gains: see docs/kernel_times.md. LFM2 gained with varied lengths only. With
SGLANG_BCG_FIX_HYBRIDS_WITHOUT_GRAPHS=on all these models are captured, in every release, also with breaks. Long prompts
may then take longer than without graphs, the most with Ling. Where mixers break the graph, Granite and LFM2 keep the
bits of eager prefill. Inside it they round differently, and a trained Granite gave the same answers. Ling's logprobs
may round differently: SGLang captures another form of latent attention than it runs eagerly. The log says why nothing
is captured. docs/graphs_by_model.md lists what is left alone. No flag of SGLang gives these models graphs.
Remove when: Every release that has to be served captures these models itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy import latent_attention
from sglang_bcg_fixes.anatomy.forward_batch import CONTEXT
from sglang_bcg_fixes.anatomy.launches import LATENT, LINEAR_INSIDE, ON_HOPPER, WANTED_PREFILL_GRAPHS, named
from sglang_bcg_fixes.anatomy.runners import CAPTURE_PREFILL, EXECUTOR, SETUP_MODULE
from sglang_bcg_fixes.anatomy.short_convolutions import LAYER, LFM2, LFM2_MOE, MOE_LAYER
from sglang_bcg_fixes.concern import Condition
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.fixes.hybrids_without_graphs.feed_forward import (
    COUNT,
    FEED_FORWARD,
    NEMOTRON,
    NEMOTRON_NAMES,
    counts_layers,
    feed_forward_counted,
    is_nemotron_with_uncounted_layers,
)
from sglang_bcg_fixes.fixes.hybrids_without_graphs.latent import (
    BAILING,
    BAILING_NAME,
    LATENT_NAME,
    LATENT_PART,
    latent_attention_shown,
)
from sglang_bcg_fixes.fixes.hybrids_without_graphs.measured import MEASURED, is_measured
from sglang_bcg_fixes.fixes.hybrids_without_graphs.mixers import (
    GRANITE,
    KNOWN_NAME,
    MIXERS,
    break_round_the_convolution,
    mixers_shown,
)
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, slower, unknown

CONVOLUTIONS = (LAYER, MOE_LAYER)
MAMBA2 = "sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.forward"
LAYERS = (
    f"{GRANITE}:GraniteMoeHybridMambaDecoderLayer.forward",
    f"{LFM2}:Lfm2DecoderLayer.forward",
    f"{LFM2_MOE}:Lfm2MoeDecoderLayer.forward",
)
BAILING_LAYERS = tuple(
    f"{BAILING}:{name}.forward" for name in ("BailingMoELinearDecoderLayer", "BailingMoELinearAttention")
)
NEMOTRON_BREAK = "breakable_nemotron_mamba2_with_output"
# each of these looks at one token at a time
FEED_FORWARDS = (f"{NEMOTRON}:{FEED_FORWARD}.forward", f"{NEMOTRON}:NemotronHMLP.forward")
EXPERTS = f"{NEMOTRON}:NemotronHMoE"
RUNNER = f"{EXECUTOR}.model_runner:ModelRunner"
OLD_CAPTURES = (f"{RUNNER}.init_prefill_cuda_graph", f"{RUNNER}.init_piecewise_cuda_graphs")
COLLECT = f"{EXECUTOR}.model_runner_components.layer_setup:compute_attention_and_moe_layers"
NUMBER = tuple(
    f"{SETUP_MODULE}:{name}" for name in ("_align_pipeline_layers", COUNT, "index_attention_layers_by_global_id")
)
CHOSEN = f"{EXECUTOR}.cuda_graph_config:check_cuda_graph_backend"


def probe(source: Source) -> Finding:
    if not all(map(source.has_module, (GRANITE, LFM2, LFM2_MOE))):
        return absent("this release has no Granite hybrid, or no LFM2")
    capture = source.need(CAPTURE_PREFILL, *OLD_CAPTURES)
    collect = source.need(COLLECT, capture.where)
    read = [capture, *map(source.need, (*LAYERS, *CONVOLUTIONS, MAMBA2))]
    read += [collect] if collect.where != capture.where else []
    read += filter(None, map(source.find, (*NUMBER, CHOSEN)))
    read.append(source.need(*(f"{module}:eager_on_graph" for module in graph_break.DECORATOR_MODULES)))
    read.append(source.need(*CONTEXT))
    # the form of latent attention that is captured, and that replays are prepared for
    read += map(source.need, (*BAILING_LAYERS, *latent_attention.CHOOSE))
    read += map(source.need, latent_attention.PREPARES if source.find(latent_attention.RESTORE) else ())
    ways = (f"layer, '{KNOWN_NAME}'", f"layer, '{LATENT_NAME}'", f"layer.{LATENT_NAME}, '{LATENT_PART}'")
    if not all(collect.mentions(f"hasattr({way})") for way in ways):
        return drifted("the layers of a model are collected", *read)
    if not capture.mentions("some layers do not apply Standard GQA"):
        return drifted("a model is refused prefill graphs", *read)
    if any(collect.mentions(f"hasattr(layer, '{name}')") for name in MIXERS.values()):
        return unknown("these mixers are collected, which no known release does", *read)
    if counts_layers(source):
        read += map(source.need, (*FEED_FORWARDS, f"{EXPERTS}.forward", f"{EXPERTS}._forward_core"))
        read += filter(None, [source.find(f"{NEMOTRON}:NemotronHMoEDecoderLayer.forward")])
        if not source.is_graph_break(NEMOTRON, NEMOTRON_BREAK):
            return drifted("NemotronH's mixers break a graph", *read)
    return affected("a layer whose mixer is called `mamba` or `conv` has no attention that is found", *read)


def has_capture_function(source: Source) -> bool:
    return source.find(CAPTURE_PREFILL) is not None


def has_capture_method(source: Source) -> bool:
    return not has_capture_function(source)


def admit(original: Callable[..., Any], *, model_runner: Any, **rest: Any) -> Any:
    with mixers_shown(model_runner), latent_attention_shown(model_runner), feed_forward_counted(model_runner):
        return original(model_runner=model_runner, **rest)


def admit_by_method(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with mixers_shown(self), latent_attention_shown(self):
        return original(self, *args, **kwargs)


def admit_measured(original: Callable[..., Any], *, model_runner: Any, **rest: Any) -> Any:
    with mixers_shown(model_runner, if_measured=True):
        return original(model_runner=model_runner, **rest)


FIX = Fix(
    probe=probe,
    patches=(
        PatchPoint((CAPTURE_PREFILL,), How.AROUND, admit, needed=has_capture_function, asked=True),
        PatchPoint(OLD_CAPTURES, How.AROUND, admit_by_method, needed=has_capture_method, asked=True),
        PatchPoint((CAPTURE_PREFILL,), How.AROUND, admit_measured, needed=has_capture_function, asked=False),
        *(PatchPoint((where,), How.AROUND, break_round_the_convolution, asked=True) for where in CONVOLUTIONS),
    ),
    # its break runs what the other is round
    after=("short_conv_prefix_ignored",),
    verify=("granite_hybrid_prefill_graph", "lfm2_prefill_graph"),
    concerns=slower(WANTED_PREFILL_GRAPHS, named(*(name for name, _ in MIXERS)))
    + slower(WANTED_PREFILL_GRAPHS, named(BAILING_NAME), LATENT)
    + slower(
        WANTED_PREFILL_GRAPHS,
        Condition(f"from 0.5.19 a model named {' or '.join(NEMOTRON_NAMES)}", is_nemotron_with_uncounted_layers),
    ),
    measured=(
        Condition(f"a model named {' or '.join(MEASURED)}, as it was measured", is_measured),
        *(LINEAR_INSIDE, ON_HOPPER),
    ),
)
