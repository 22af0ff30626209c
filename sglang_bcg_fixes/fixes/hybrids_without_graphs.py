# SPDX-License-Identifier: Apache-2.0
"""Slower: Granite 4 hybrid, LFM2, Ling 2.5 and NemotronH run without prefill graphs

Symptom: Granite 4 hybrid (GraniteMoeHybridForCausalLM), LFM2 (Lfm2ForCausalLM, Lfm2MoeForCausalLM) and Ling 2.5 and
Ring 2.5 (BailingMoeV2_5ForCausalLM) prefill eagerly in every release, and NemotronH (NemotronHForCausalLM,
NemotronHPuzzleForCausalLM) from 0.5.19, also where breakable prefill graphs are asked for. The log says "Disable
prefill CUDA graph because some layers do not apply Standard GQA" (piecewise before 0.5.14). Answers are right.
Cause: A server counts the layers whose attention it finds under names that it knows, and captures nothing where one has
none. Granite's Mamba2 mixers are called `mamba` and LFM2's short convolutions `conv`, which it does not know; those of
other hybrid models it does know, and captures them with a break of the graph at each. Ling's latent attention (MLA) is
called `attention`, where SGLang looks for grouped queries, and for latent attention as `self_attn`. NemotronH has
layers that are feed-forward only: `-` and `E` in hybrid_override_pattern. Until 0.5.18 such layers counted too; 0.5.23
admits the experts (`E`) again, on GPUs of compute capability 12.0 (RTX 50 series, RTX PRO 6000) only.
Change: Nothing is answered wrongly without it, so it is for speed alone. By default only what has gained on a GPU is
captured: Granite without experts up to 4,096 tokens, on 0.5.23 and Hopper, and only where mamba2_extend takes every
mixer into the graph. For 16 clients whose requests have a quarter to all of 1,024 tokens in and 256 out an HTTP server
of Granite gave 1.36 to 1.39 times the tokens per second of one without graphs. Where all of them have one length, come
together and leave together, it gave 0.78 to 0.81 in the first two runs, and 0.99 to 1.05 in those after them. The first
token of a prompt alone comes after 0.26 of the time without graphs with 253 tokens, 0.36 with 1,021 and 0.48 with
4,093; longer prompts gain about as little as padding may take, and run eagerly. A model that was trained for it gives
the same answers. Tensor parallelism, quantization, a memory saver, forward hooks and --cuda-graph-prefill-max-context
are left alone: nobody has measured them, or SGLang serves them without graphs only. The log says why nothing is
captured. LFM2 is left alone, too: it gave 1.04 to 1.06 times the tokens per second with varied lengths, and 0.92 to
0.99 with one. With SGLANG_BCG_FIX_HYBRIDS_WITHOUT_GRAPHS=on all models named above are captured, in every release, also
with breaks: on an H200 with 0.5.17 the first token of 253 tokens then comes after 0.51 to 0.77 of the time without
graphs, that of 8,189 after 0.96 to 1.06 of it, the most with Ling, whose captured form of latent attention is the
slower one for long prompts; on 0.5.23 breaks took up to 1.20 times as long at single lengths. docs/kernels.md has the
times. On Hopper with 0.5.12.post1, 0.5.17 and 0.5.23 replays of Granite and LFM2 with breaks had every bit of the eager
answers. While a server of these models sets up its prefill graphs, layers of Granite and LFM2 show their mixer under a
name that it knows, and NemotronH's feed-forward layers count, so that its own code numbers the layers and captures
them. Each mixer runs as an eager break, on the real tokens and with the batch of the replay, into an output whose
padded tail is zeroed: a short convolution in one of this fix, Granite's Mamba2 mixer in that of ssm_mixer_captured,
NemotronH's in SGLang's own; but inside the graph where mamba2_extend takes a Mamba2 mixer, or short_conv_extend a short
convolution. A feed-forward layer looks at one token at a time, and is captured as it is. Ling's layers show their
attention as `self_attn`, and a linear layer joins the heads of what its break gives back, as heads_not_joined does. Its
latent attention is captured in the form in which that release captures DeepSeek's: absorbed, and in 0.5.16 expanded.
Eager prefill computes some batches in the other form, so replays give differently rounded logprobs; with the same form
every bit is equal. 0.5.16 and 0.5.17 prefill eagerly behind a cached prefix, as they do DeepSeek. Other models, drafts,
whatever SGLang admits by itself, and other kinds of prefill graphs are left as they were. So are these models, and one
line of the log says why, where a mixer would not break, where Ling's attention is not on fa3 or a fix that its replays
need is off (mla_dispatch_unaware before 0.5.16, mla_replay_prepared_as_mha in 0.5.17), and with speculation, LoRA, DP
attention, pipeline stages, context parallelism, two-batch overlap, a hierarchical cache and deterministic inference,
which nobody has tried. Attention may be SGLang's own choice, fa3 on Hopper and flashinfer elsewhere. SGLang refuses
--attention-backend triton to Lfm2ForCausalLM, and before 0.5.18 it ends with "layer_id=0 not in full attention layers"
where Granite's first layer is a mixer. On Blackwell it chooses triton for Granite before 0.5.13: there give
--attention-backend flashinfer. No flag of SGLang gives these models graphs.
Remove when: Every release that has to be served captures these models itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy import latent_attention, ranks
from sglang_bcg_fixes.anatomy.attention_break import join_heads
from sglang_bcg_fixes.anatomy.forward_batch import CONTEXT, is_captured_into_a_prefill_graph, prefill_batch
from sglang_bcg_fixes.anatomy.launches import LATENT, LINEAR_INSIDE, ON_HOPPER, WANTED_PREFILL_GRAPHS, named
from sglang_bcg_fixes.anatomy.runners import CAPTURE_PREFILL, EXECUTOR, SETUP_MODULE
from sglang_bcg_fixes.anatomy.short_convolutions import LAYER, LFM2, LFM2_MOE, MOE_LAYER
from sglang_bcg_fixes.concern import Condition, Launch
from sglang_bcg_fixes.engine import graph_break, wrappers
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.mamba2_extend import declaration as mamba2_extend
from sglang_bcg_fixes.kernels.short_conv_extend import declaration as short_conv_extend
from sglang_bcg_fixes.model import flag_of
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, slower, unknown

if TYPE_CHECKING:
    from torch import Tensor

ID = "hybrids_without_graphs"
MODELS = "sglang.srt.models"
GRANITE = f"{MODELS}.granitemoehybrid"
CONVOLUTIONS = (LAYER, MOE_LAYER)
MAMBA2 = "sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.forward"
LAYERS = (
    f"{GRANITE}:GraniteMoeHybridMambaDecoderLayer.forward",
    f"{LFM2}:Lfm2DecoderLayer.forward",
    f"{LFM2_MOE}:Lfm2MoeDecoderLayer.forward",
)
# a model's own class, where it is defined, and the name under which its layers have their mixer
MIXERS = {
    ("GraniteMoeHybridForCausalLM", GRANITE): "mamba",
    ("Lfm2ForCausalLM", LFM2): "conv",
    ("Lfm2MoeForCausalLM", LFM2_MOE): "conv",
}
# bytes of a GPU: for the graphs, and for what a start takes after them
LEAST_FREE = 4 << 30
# which gained on a GPU with all mixers inside the graph, and the largest size that `auto` captures: above it, padding
# may take more than the graph gains
MEASURED = {"GraniteMoeHybridForCausalLM": 4096}
LEFT_IF_MEASURED = (
    *("--enable-memory-saver", "--forward-hooks", "--quantization", "--enable-lora", "--lora-paths"),
    *("--cuda-graph-prefill-max-context", "--speculative-algorithm"),
)
# of a layer, and of the configuration; those that were measured have none
EXPERTS_OF_GRANITE, COUNT_OF_EXPERTS = "block_sparse_moe", "num_local_experts"
BAILING = f"{MODELS}.bailing_moe_linear"
# whose linear layers SGLang finds, but not its latent attention, which all its layers have under this name
BAILING_NAME = "BailingMoeV2_5ForCausalLM"
BAILING_ATTENTION = "attention"
# the name under which every release looks for latent attention, and what that is called there
LATENT_NAME, LATENT_PART = "self_attn", "attn_mqa"
BAILING_LAYERS = tuple(
    f"{BAILING}:{name}.forward" for name in ("BailingMoELinearDecoderLayer", "BailingMoELinearAttention")
)
NEMOTRON = f"{MODELS}.nemotron_h"
# whose mixers SGLang finds, and breaks the graph at
NEMOTRON_NAMES = ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM")
NEMOTRON_BREAK = "breakable_nemotron_mamba2_with_output"
# where its configuration has the kinds of its layers
PATTERN = "hybrid_override_pattern"
# the class of its layers without a mixer and without attention
FEED_FORWARD = "NemotronHMLPLikeDecoderLayer"
# each of these looks at one token at a time
FEED_FORWARDS = (f"{NEMOTRON}:{FEED_FORWARD}.forward", f"{NEMOTRON}:NemotronHMLP.forward")
EXPERTS = f"{NEMOTRON}:NemotronHMoE"
# the name of a layer's linear attention, under which every release looks for it
KNOWN_NAME = "linear_attn"
SSM_BREAK = "ssm_mixer_captured"
RUNNER = f"{EXECUTOR}.model_runner:ModelRunner"
OLD_CAPTURES = (f"{RUNNER}.init_prefill_cuda_graph", f"{RUNNER}.init_piecewise_cuda_graphs")
COLLECT = f"{EXECUTOR}.model_runner_components.layer_setup:compute_attention_and_moe_layers"
# they number and count what was collected, where a release has them
COUNT = "has_standard_gqa_for_all_local_layers"
NUMBER = tuple(
    f"{SETUP_MODULE}:{name}" for name in ("_align_pipeline_layers", COUNT, "index_attention_layers_by_global_id")
)
CHOSEN = f"{EXECUTOR}.cuda_graph_config:check_cuda_graph_backend"

logger = logging.getLogger("sglang_bcg_fixes")


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


def counts_layers(source: Source) -> bool:
    """Tell whether a feed-forward layer of NemotronH is one layer too few for this release."""
    return source.find(f"{SETUP_MODULE}:{COUNT}") is not None


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


@contextlib.contextmanager
def mixers_shown(model_runner: Any, if_measured: bool = False) -> Iterator[None]:
    """Meanwhile layers of the models that are admitted have their mixer under the name that SGLang looks for.

    With `if_measured` these are the models that were measured, up to a size, and only with all mixers inside the graph.
    """
    with contextlib.ExitStack() as stack:
        name = mixer_of(model_runner.model)
        if if_measured and type(model_runner.model).__name__ not in MEASURED:
            name = None
        if name is not None and asks_for_breaks(model_runner.server_args):
            kinds = admitted_layers(model_runner, name, if_measured)
            if kinds and if_measured:
                settings = prefill_settings()
                stack.enter_context(replaced(settings, "bs", sizes_to_capture(model_runner.model, settings)))
            for kind in kinds:
                # of the class: a part that each layer had twice would have its weights twice
                stack.enter_context(replaced(kind, KNOWN_NAME, property(operator.attrgetter(name))))
        yield


def mixer_of(model: Any) -> str | None:
    """Return the name of the mixers in a model that may be admitted."""
    kind = type(model)
    return MIXERS.get((kind.__name__, kind.__module__))


def asks_for_breaks(arguments: Any) -> bool:
    """Tell whether the graphs that are about to be captured have breaks, by the server's own settings."""
    if hasattr(arguments, "enable_breakable_cuda_graph"):
        return bool(arguments.enable_breakable_cuda_graph)
    from sglang.srt.model_executor import cuda_graph_config as settings

    return bool(settings.check_cuda_graph_backend(settings.Phase.PREFILL, settings.Backend.BREAKABLE))


def admitted_layers(model_runner: Any, name: str, if_measured: bool) -> set[type]:
    """Return the classes of the layers with a mixer; none, with the reason in the log, where the model is refused."""
    layers = {number: layer for number, layer in enumerate(model_runner.model.model.layers) if hasattr(layer, name)}
    # nothing but attention: SGLang itself admits it
    if not layers:
        return set()
    mixers = {number: getattr(layer, name) for number, layer in layers.items()}
    calls = broken_calls(model_runner, name, mixers.values())
    reasons = why_not(model_runner, calls)
    if if_measured:
        reasons = itertools.chain(
            reasons, why_unmeasured(model_runner), why_no_room(model_runner), why_not_inside(model_runner, mixers)
        )
    # a default that leaves a model as SGLang serves it is nothing to warn of
    is_wanted = is_admitted(model_runner, reasons, logging.INFO if if_measured else logging.WARNING)
    return set(map(type, layers.values())) if is_wanted else set()


def why_unmeasured(model_runner: Any) -> Iterator[str]:
    """List what no GPU has measured, or what SGLang itself serves without graphs only."""
    arguments, settings = model_runner.server_args, prefill_settings()
    has_experts = any(getattr(layer, EXPERTS_OF_GRANITE, None) is not None for layer in model_runner.model.model.layers)
    reasons = {
        "experts": has_experts,
        "tensor parallelism": int(arguments.tp_size) > 1,
        "quantization": bool(getattr(model_runner.model_config, "quantization", None)),
        "a memory saver": bool(arguments.enable_memory_saver),
        "hooks of layers": bool(getattr(arguments, "forward_hooks", None)),
        "graphs of a largest context": settings.max_context_size is not None,
        "no small size to capture": not sizes_to_capture(model_runner.model, settings),
    }
    yield from (f"{what}, which nobody has measured" for what, holds in reasons.items() if holds)


def why_no_room(model_runner: Any) -> Iterator[str]:
    """Say that the graphs may not fit: SGLang starts without them, and a capture that runs out of memory ends it."""
    import torch

    if model_runner.device == "cuda" and torch.cuda.mem_get_info()[0] < LEAST_FREE:
        yield f"less than {LEAST_FREE >> 30} GiB of GPU memory are free"


def prefill_settings() -> Any:
    """Return SGLang's settings of prefill graphs, in a release that was measured."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().graph.cuda_graph_config.prefill


def sizes_to_capture(model: Any, settings: Any) -> list[int]:
    """Leave out those whose padding may take more than their graph gains."""
    return [size for size in settings.bs or () if size <= MEASURED[type(model).__name__]]


def why_not_inside(model_runner: Any, mixers: Mapping[int, Any]) -> Iterator[str]:
    """Say why a mixer would break the graph: with breaks some prompts were slower than without graphs."""
    op = mamba2_extend.KERNEL.op
    if not active.is_used(op):
        yield f"{op} does not run in this process"
        return
    from sglang_bcg_fixes.kernels.mamba2_extend import adapter

    reason = adapter.OPERATION.why_not_all(model_runner, mixers)
    if reason:
        yield f"{op}: {reason}"


@contextlib.contextmanager
def latent_attention_shown(model_runner: Any) -> Iterator[None]:
    """Meanwhile Bailing's layers have their attention under the name that SGLang looks for latent attention at."""
    with contextlib.ExitStack() as stack:
        kind = type(model_runner.model)
        if (kind.__name__, kind.__module__) == (BAILING_NAME, BAILING) and asks_for_breaks(model_runner.server_args):
            # a layer of another pipeline stage has none
            layers = [layer for layer in model_runner.model.model.layers if hasattr(layer, BAILING_ATTENTION)]
            linear = [layer for layer in layers if not hasattr(layer.attention, LATENT_PART)]
            reasons = itertools.chain(why_not(model_runner, ()), latent_attention.why_not_captured(model_runner))
            # nothing but grouped queries: SGLang itself admits it
            if len(linear) < len(layers) and is_admitted(model_runner, reasons):
                for layer_kind in set(map(type, layers)):
                    shown = property(operator.attrgetter(BAILING_ATTENTION))
                    stack.enter_context(replaced(layer_kind, LATENT_NAME, shown))
                for layer in linear:
                    stack.callback(layer.attention.attn.register_forward_hook(join_heads).remove)
        yield


@contextlib.contextmanager
def feed_forward_counted(model_runner: Any) -> Iterator[None]:
    """Meanwhile layers of NemotronH that are feed-forward only count as layers that can be captured."""
    kind, setup = type(model_runner.model), sys.modules[SETUP_MODULE]
    is_nemotron = kind.__module__ == NEMOTRON and kind.__name__ in NEMOTRON_NAMES
    if not is_nemotron or not hasattr(setup, COUNT) or not asks_for_breaks(model_runner.server_args):
        yield
        return
    count = getattr(setup, COUNT)

    def count_all(*, attention_layer_count: int, **rest: Any) -> bool:
        feed_forward = getattr(sys.modules[NEMOTRON], FEED_FORWARD)
        more = sum(isinstance(layer, feed_forward) for layer in model_runner.model.model.layers)
        # what SGLang itself admits or would refuse anyway is left to it
        return count(attention_layer_count=attention_layer_count, **rest) or (
            count(attention_layer_count=attention_layer_count + more, **rest)
            and is_admitted(model_runner, why_not(model_runner, ()))
        )

    with replaced(setup, COUNT, count_all):
        yield


def is_admitted(model_runner: Any, reasons: Iterator[str], level: int = logging.WARNING) -> bool:
    """Tell whether the model may be captured, and log where one of these is why not."""
    reason = next(reasons, None)
    if reason is None:
        return True
    kind = type(model_runner.model)
    logger.log(
        level,
        "bcg-fixes %s: no prefill graphs for %s.%s, prefill runs eagerly, as in SGLang: %s. %s=off ends this message",
        ID,
        kind.__module__,
        kind.__qualname__,
        reason,
        flag_of(ID),
    )
    return False


def why_not(model_runner: Any, calls: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """List the reasons to leave this server as it is; `calls` have to be broken, each by its fix."""
    from sglang_bcg_fixes.kernels.linear_extend import serving

    if not all(fix in wrappers.fixes_in(call) for fix, call in calls):
        yield "a mixer would not break the graph"
    if model_runner.is_draft_worker or not model_runner.spec_algorithm.is_none():
        yield "speculation"
    arguments = model_runner.server_args
    if getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None):
        yield "LoRA"
    yield from serving.refused_options(arguments, model_runner, *ranks.resolved_sizes())
    if serving.is_deterministic():
        yield "deterministic inference"


def broken_calls(model_runner: Any, name: str, mixers: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The fix that has to be round what runs each mixer: its backend, or a convolution itself."""
    if name == "mamba":
        backend = getattr(model_runner.attn_backend, "linear_attn_backend", None)
        yield SSM_BREAK, getattr(type(backend), "forward", None)
    else:
        for mixer in mixers:
            yield ID, type(mixer).forward


def break_round_the_convolution(
    original: Callable[..., Tensor], self: Any, hidden_states: Tensor, forward_batch: Any
) -> Tensor:
    if not is_captured_into_a_prefill_graph() or has_a_kernel(self, hidden_states, forward_batch):
        return original(self, hidden_states, forward_batch)
    output = hidden_states.new_empty(hidden_states.shape)
    as_break(original)(self, hidden_states, output)
    return output


def has_a_kernel(mixer: Any, hidden_states: Tensor, forward_batch: Any) -> bool:
    """Tell whether a kernel of this package, which is around the original or this, captures the convolution."""
    if not active.is_used(short_conv_extend.KERNEL.op):
        return False
    from sglang_bcg_fixes.kernels.short_conv_extend import adapter

    return adapter.is_taken(mixer, hidden_states, forward_batch)


@functools.cache
def as_break(original: Callable[..., Tensor]) -> Callable[..., None]:
    def run_on_real_tokens(mixer: Any, hidden_states: Tensor, output: Tensor) -> None:
        batch = prefill_batch()
        real = batch.extend_num_tokens
        output[:real].copy_(original(mixer, hidden_states[:real], batch))
        output[real:].zero_()

    broken: Callable[..., None] = graph_break.decorate(run_on_real_tokens, None)
    return broken


def is_nemotron_with_uncounted_layers(launch: Launch) -> bool | None:
    kinds = {kind for pattern in launch.values(PATTERN) for kind in str(pattern)}
    if not counts_layers(launch.source) or (kinds and not kinds & {"-", "E"}):
        return False
    return named(*NEMOTRON_NAMES).holds(launch)


def is_measured(launch: Launch) -> bool | None:
    is_other = COUNT_OF_EXPERTS in launch.keys or launch.given(*LEFT_IF_MEASURED)
    several = launch.number("--tp-size", "--tensor-parallel-size", "--tp") or 1
    return False if is_other or several > 1 else named(*MEASURED).holds(launch)


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
