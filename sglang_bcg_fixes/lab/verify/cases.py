# SPDX-License-Identifier: Apache-2.0
"""The cases of `bcg-fixes verify` as data: a tiny model, its server's flags, the calls, and what is compared.

Fixes name their cases, in `Fix.verify`; cases do not name fixes.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable, Mapping, Sequence

from sglang_bcg_fixes.anatomy.launches import GRAPHS_SAVED, has_breakable_graphs_by_default
from sglang_bcg_fixes.anatomy.refusals import none_without_breaks
from sglang_bcg_fixes.anatomy.runners import CAPTURE_PREFILL, PREFILL
from sglang_bcg_fixes.lab.verify.models import LOCAL_CHUNK, MODELS, VOCABULARY
from sglang_bcg_fixes.model import flag_of_kernel
from sglang_bcg_fixes.source.tree import Source

Value = str | int | float | bool | tuple[int, ...]
Flags = dict[str, Value]

NEW_TOKENS = 12
# where another rounding would change later tokens
FEW = 4
SEED = 1
# of which one is in the runner of every release that captures latent attention without breaks, but for the first
CAPTURES_LATENT_ATTENTION = ("_has_unsupported_mha_prefix", "_prepare_chunked_prefix_capture")
# of states in host memory, the newer first
POOLS = ("pool_host.mamba", "memory_pool_host")
# the only flags given where everything else is SGLang's own choice
SIZES: Flags = {
    "--skip-tokenizer-init": True,
    "--context-length": 8192,
    "--max-running-requests": 32,
    "--max-total-tokens": 32768,
    "--max-mamba-cache-size": 96,
    "--mem-fraction-static": 0.7,
}


class Standard(str, enum.Enum):
    """Standard of comparison: what must be equal, and to what."""

    BITS = "every token and logprob of the reference, which refuses to replay"
    BREAKS = "every token and logprob of the reference, whose attention layers keep their breaks"
    TOKENS = "every token of the reference, which refuses to replay"
    ACCEPTED = "every token and the number of drafts' verifications of the reference, which refuses to replay"
    REPEATED = "every token and logprob of the same request before"
    ANSWERED = "nothing: the server must start and answer everything"

    @property
    def needs_reference(self) -> bool:
        return self in (Standard.BITS, Standard.BREAKS, Standard.TOKENS, Standard.ACCEPTED)


@dataclasses.dataclass(frozen=True)
class Call:
    """One /generate with all its prompts; `again` is the index of an earlier call with the same prompts.

    If it `thinks`, all that is generated is thinking. `after_sleep` means that the server has given memory back and
    taken it again.
    """

    part: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int = NEW_TOKENS
    again: int | None = None
    thinks: bool = False
    after_sleep: bool = False


class Script:
    """The calls of a case in order; a fixed seed gives every server the same prompts."""

    def __init__(self) -> None:
        self.random = random.Random(SEED)
        self.calls: list[Call] = []

    def tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(2, VOCABULARY) for _ in range(length))

    def ask(self, part: str, lengths: Sequence[int], new_tokens: int = NEW_TOKENS) -> int:
        return self.say(part, [self.tokens(length) for length in lengths], new_tokens)

    def say(
        self, part: str, prompts: Sequence[tuple[int, ...]], new_tokens: int = NEW_TOKENS, thinks: bool = False
    ) -> int:
        self.calls.append(Call(part, tuple(prompts), new_tokens, thinks=thinks))
        return len(self.calls) - 1

    def ask_again(self, part: str, call: int, after_sleep: bool = False) -> None:
        again = dataclasses.replace(self.calls[call], part=part, again=call, after_sleep=after_sleep)
        self.calls.append(again)


def around_every_bucket(buckets: Sequence[int]) -> list[Call]:
    """Ask alone and in batches of 1 to 16, one less and one more than each bucket, larger after smaller."""
    script, largest = Script(), max(buckets)
    exact = []
    for size in sorted(buckets, reverse=True):
        exact.append(script.ask("edges", [size]))
        script.ask("edges", [size - 1])
        script.ask("edges", [size + 1])
    for length in (1, 2, 17, 50, largest // 3):
        script.ask("odd lengths", [length])
    for call in reversed(exact):
        script.ask_again("larger after smaller", call)
    together = [
        script.ask(f"{count} together", ragged(script.random, count, largest)) for count in (2, 3, 4, 5, 8, 11, 16)
    ]
    script.ask("together to a bucket's edge", [1, 2, buckets[0] - 3])
    script.ask("chunked", [largest + largest // 2])
    script.ask("chunked", [2 * largest + largest // 3])
    for call in (together[-1], together[0], exact[0], exact[-1]):
        script.ask_again("again at the end", call)
    return script.calls


def ragged(source: random.Random, count: int, total: int) -> list[int]:
    """Lengths from 1 up that fit into one prefill together."""
    return [1, *(source.randrange(1, total // count) for _ in range(count - 1))]


def warm_prefixes(buckets: Sequence[int]) -> list[Call]:
    """Ask for the same beginning repeatedly, alone and together, from the radix cache; also twice in full."""
    script = Script()
    for length in (buckets[0] + 5, max(buckets) // 2 + 40):
        prefix = script.tokens(length)
        script.say("cold", [prefix])
        script.say("its beginning is warm", [prefix + script.tokens(1)])
        script.say("its beginning is warm", [prefix + script.tokens(70)])
        script.say("all of it is warm", [prefix])
        script.say("warm beginnings together", [prefix + script.tokens(tail) for tail in (3, 20, 9, 1)])
        script.ask("cold", [length])
        script.say("warm after a cold one", [prefix + script.tokens(30)])
    return script.calls


def new_prompts(buckets: Sequence[int]) -> list[Call]:
    """Ask around every bucket, but nothing twice: the radix cache would answer repeats with other kernels."""
    return [call for call in around_every_bucket(buckets) if call.again is None]


def alone_after_a_batch(buckets: Sequence[int]) -> list[Call]:
    """Ask alone in decode graphs of four rows, before and after a batch of four has left stale rows.

    The cache is small, so that one of the later requests reuses the batch's slots.
    """
    script = Script()
    alone = [script.ask("alone, rows never used", [100], 24) for _ in range(4 if len(buckets) < 3 else 12)]
    for call in (*alone, *alone):
        if call == alone[0]:
            script.ask("four rows", [16, 9, 12, 16], 24)
        script.ask_again("alone after four", call)
    return script.calls


def short_drafts(buckets: Sequence[int]) -> list[Call]:
    """Ask short prompts, where the new tokens are most of what the draft attends to."""
    script = Script()
    for length in range(4, 28, 6 if len(buckets) < 3 else 2):
        script.ask("alone", [length], 32)
    script.ask("four together", [5, 9, 6, 14], 32)
    return script.calls


def turns_after_thinking(buckets: Sequence[int]) -> list[Call]:
    """Ask again behind a prompt whose thinking has passed a checkpoint, or has not."""
    script = Script()
    for length in (100, 250, 30):
        # of 64, as far as a checkpoint from the next
        for thinking in (8, 60, 200):
            prompt = script.tokens(length)
            script.say("thinking", [prompt], thinking, thinks=True)
            script.say("next turn", [prompt + script.tokens(40)])
    return script.calls


MOST_TOGETHER = 3


def odd_steps(buckets: Sequence[int]) -> list[Call]:
    """Ask one to three prompts of random lengths, many times; every other step goes on behind an earlier prompt."""
    script = Script()
    known = [script.tokens(length) for length in (200, 1000, 3000)]
    for prompt in known:
        script.say("first", [prompt], 1)
    for _ in range(64 if len(buckets) < 3 else 512):
        together = script.random.randint(1, MOST_TOGETHER)
        new = [script.tokens(script.random.randint(1, 509 // together)) for _ in range(together)]
        is_warm = script.random.random() < 0.5
        if is_warm:
            new = [script.random.choice(known) + each for each in new]
        script.say(f"{together} behind a prefix" if is_warm else f"{together} new", new, 2)
    return script.calls


# three requests of 60 tokens do not fit any more once each has 40 more
FULL, LONG_THOUGHT = 300, 100


def others_after_thinking_at_full_load(buckets: Sequence[int]) -> list[Call]:
    """Ask with an empty cache, then think until one request is retracted, then ask the first again.

    There is no room left by then for what was asked first: it is computed anew.
    """
    script = Script()
    for _ in range(1 if len(buckets) < 3 else 3):
        others = script.ask("others", [70, 80, 90], 4)
        script.say("thinking", [script.tokens(60) for _ in range(3)], LONG_THOUGHT, thinks=True)
        script.ask_again("others, after a retraction", others)
    return script.calls


def before_and_after_sleep(buckets: Sequence[int]) -> list[Call]:
    """Ask alone and together, in decode graphs with and without padding, twice after each sleep."""
    script = Script()
    asked = [script.ask("awake", lengths, 24) for lengths in ([100], [16, 9, 12], [40, 7, 30, 21])]
    for _ in range(2):
        for call in asked:
            script.ask_again("after sleep", call, after_sleep=True)
        for call in asked:
            script.ask_again("awake again", call)
    return script.calls


# tails of prompts that leave room for padding, which is bounded
SHORT_OF_A_BUCKET = 9


def behind_prefixes(buckets: Sequence[int]) -> list[Call]:
    """Ask cold, then behind prefixes of each answer's prompt, shorter and longer than the rest, alone and together."""
    script = Script()
    for size in buckets:
        script.ask("cold", [size], FEW)
    for length in (buckets[0] + 5, max(buckets) // 2 + 40, max(buckets) + max(buckets) // 2):
        prefix = script.tokens(length)
        script.say("cold, of two chunks" if length > max(buckets) else "cold", [prefix], FEW)
        for size in buckets:
            script.say("behind a prefix", [prefix + script.tokens(size - SHORT_OF_A_BUCKET)], FEW)
        together = [prefix + script.tokens(tail) for tail in (buckets[0] // 2, buckets[0] // 2 - 3)]
        script.say("two behind a prefix", together, FEW)
    script.ask("cold, after prefixes", [buckets[0] - SHORT_OF_A_BUCKET], FEW)
    return script.calls


def within_and_beyond_a_chunk(buckets: Sequence[int]) -> list[Call]:
    """Ask within the chunk that a local layer sees, and beyond it, in one part of prefill and in several."""
    script = Script()
    within = [size for size in buckets if size <= LOCAL_CHUNK]
    for size in within:
        script.ask("within the chunk", [size], FEW)
        script.ask("within the chunk", [size - SHORT_OF_A_BUCKET], FEW)
    script.ask("two within the chunk", [LOCAL_CHUNK // 2, LOCAL_CHUNK // 4], FEW)
    for size in buckets:
        if size > LOCAL_CHUNK:
            script.ask("beyond the chunk", [size - SHORT_OF_A_BUCKET], FEW)
    script.ask("one of two beyond the chunk", [LOCAL_CHUNK + 40, 30], FEW)
    script.ask("of several parts", [max(buckets) + LOCAL_CHUNK // 2], FEW)
    script.ask("of several parts", [2 * max(buckets) + LOCAL_CHUNK // 2], FEW)
    script.ask("within the chunk again", [within[0]], FEW)
    return script.calls


# tokens of a prompt whose answer is still being given while others are computed in chunks
SHORT, PAGE = 40, 16


def beside_a_running_answer(buckets: Sequence[int]) -> list[Call]:
    """Ask a prompt of several chunks beside a short one, whose answer takes a token from each, then go on behind it."""
    script, chunk = Script(), max(buckets)
    for rest in (300, 120):
        long = script.tokens(3 * chunk + rest)
        script.say("chunks beside an answer", [script.tokens(SHORT), long])
        for tail in (30, 50, 90):
            script.say("behind the chunks", [long + script.tokens(tail)])
    return script.calls


# tokens in the cache of a GPU, and of what else is asked until nothing of an earlier prompt is left there
FEW_SLOTS, OTHERS = 2048, 3


def from_host_memory(buckets: Sequence[int]) -> list[Call]:
    """Ask twice, let others take the place on the GPU, and ask again: from the cache, and from its copy in memory."""
    script = Script()
    for length in (300, 700):
        asked = script.tokens(length)
        script.say("cold", [asked], FEW)
        warm = script.say("warm", [asked], FEW)
        for _ in range(2):
            for _ in range(OTHERS):
                script.ask("others", [FEW_SLOTS // 3, FEW_SLOTS // 6], FEW)
            script.ask_again("from host memory", warm)
    return script.calls


def of_the_drafts_of(source: Source, adaptive: bool) -> Flags:
    flags: Flags = {
        "--speculative-algorithm": "NEXTN" if adaptive else "EAGLE",
        # the pools are sized by the first number of steps, and the largest candidate is 7
        "--speculative-num-steps": 7 if adaptive else 3,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": 8 if adaptive else 4,
    }
    if adaptive:
        flags["--speculative-adaptive"] = True
        rule = source.find("sglang.srt.speculative.adaptive_spec_params:adaptive_unsupported_reason")
        if rule and rule.mentions("disable_overlap_schedule"):
            flags["--disable-overlap-schedule"] = True
    return flags


def of_a_draft_with_a_window(source: Source) -> Flags:
    # Triton attention lists no window for the decode steps of a draft, which a single step does without
    return {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-num-steps": 1,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": 2,
        "--speculative-draft-window-size": 16,
    }


def drafts_with_a_window(source: Source) -> bool:
    """Tell whether that flag is for EAGLE3, too."""
    return (
        source.find("sglang.srt.models.llama_eagle3:LlamaForCausalLMEagle3.get_attention_sliding_window_size")
        is not None
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """One case; a pass of kind `phase` must be replayed, with at least `requests` in one of them.

    `module` must exist for SGLang to know the model, and `served` says whether it is served with these flags; `watches`
    names defects that the case shows and that this version has no fix for, and `extra` are flags added to those of
    every case, as the `environment` is added. With `by_default` the server is started as users start it: only pool
    sizes are given, so that several servers fit. If it is `inside`, which is for Hopper and run by name alone, the
    patched server must replay prefills with attention inside the graph. If it is `unbroken`, which is run by name alone
    and for Hopper, too, its prefill graphs have no breaks. If it `resumes`, what is asked again must come from a cache.
    """

    name: str
    sentence: str
    model: str
    standard: Standard = Standard.BITS
    script: Callable[[Sequence[int]], list[Call]] = around_every_bucket
    phase: str | None = "prefill"
    requests: int = 1
    draft: str | None = None
    decode_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    extra: Callable[[Source], Flags] = lambda source: {}
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    watches: tuple[str, ...] = ()
    module: str = ""
    served: Callable[[Source], bool] = lambda source: True
    # speculative decoding of earlier releases returns none
    logprobs: bool = True
    by_default: bool = False
    inside: bool = False
    unbroken: bool = False
    resumes: bool = False

    @property
    def wants_prefill_graphs(self) -> bool:
        return self.phase == "prefill"

    def applies_to(self, source: Source) -> bool:
        return (not self.module or source.has_module(self.module)) and self.served(source)

    def flags(self, source: Source, buckets: Sequence[int], eager: bool = False) -> Flags:
        """Choose flags by the options that this source has, never by its version."""
        if self.by_default:
            return {**SIZES, **self.extra(source), **(prefill_graphs(source, ()) if eager else {})}
        newer = source.has_option("--cuda-graph-bs-decode")
        flags: Flags = {
            "--skip-tokenizer-init": True,
            "--dtype": "bfloat16",
            "--attention-backend": "triton",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
            "--random-seed": 0,
            "--context-length": 4096,
            "--chunked-prefill-size": max(buckets),
            # a request that has just ended still counts for a step, and would keep the last of a batch waiting
            "--max-running-requests": 2 * max(self.decode_sizes),
            "--max-total-tokens": 32768,
            # share of the memory free at start: the pools are small, and other servers start at the same time
            "--mem-fraction-static": 0.7,
            "--disable-radix-cache": True,
            "--cuda-graph-bs-decode" if newer else "--cuda-graph-bs": self.decode_sizes,
            **prefill_graphs(source, buckets if self.wants_prefill_graphs and not eager else (), self.unbroken),
            **self.extra(source),
        }
        return {option: value for option, value in flags.items() if value is not False}


def prefill_graphs(source: Source, buckets: Sequence[int], unbroken: bool = False) -> Flags:
    """Flags for breakable graphs of these sizes, or for graphs without breaks, or for none."""
    if source.has_option("--cuda-graph-backend-prefill"):
        if not buckets:
            return {"--cuda-graph-backend-prefill": "disabled"}
        kind = "full" if unbroken else "breakable"
        return {"--cuda-graph-backend-prefill": kind, "--cuda-graph-bs-prefill": tuple(buckets)}
    if not buckets:
        return {"--disable-piecewise-cuda-graph": True}
    return {
        "--enable-breakable-cuda-graph": True,
        # these releases refuse some of the models by default
        "--enforce-piecewise-cuda-graph": True,
        "--piecewise-cuda-graph-tokens": tuple(buckets),
    }


def with_radix_cache(source: Source) -> Flags:
    # by chance of timing, a request goes on from the cache's copy of its last token or from its own
    return {"--disable-radix-cache": False, "--disable-overlap-schedule": True, "--max-mamba-cache-size": 64}


def with_a_mixer_first(source: Source) -> Flags:
    """Flags for models whose first layer has no key and value cache, where SGLang's triton attention looks for one.

    LFM2 is refused it in every release, and Granite hybrid ends at its start before 0.5.18. SGLang's own choice serves
    both: fa3 on Hopper, and flashinfer on other GPUs.
    """
    return {**with_radix_cache(source), "--attention-backend": False}


def extra_buffers(source: Source) -> Flags:
    renamed = source.has_option("--mamba-radix-cache-strategy")
    return {"--mamba-radix-cache-strategy" if renamed else "--mamba-scheduler-strategy": "extra_buffer"}


def with_checkpoints(source: Source) -> Flags:
    """Flags for a radix cache that keeps the mixer states that prefill checkpoints."""
    return {**with_radix_cache(source), **extra_buffers(source)}


def without_its_thinking(source: Source) -> Flags:
    """Flags for a prefix cache that keeps the prompts of requests that think, and not what they thought."""
    return {
        **with_radix_cache(source),
        # the tokenizer says which token ends the thinking
        "--skip-tokenizer-init": False,
        "--reasoning-parser": "qwen3",
        "--strip-thinking-cache": True,
    }


def without_its_thinking_but_checkpoints(source: Source) -> Flags:
    return {**with_checkpoints(source), **without_its_thinking(source), "--mamba-track-interval": 64}


def without_its_thinking_at_full_load(source: Source) -> Flags:
    return {**without_its_thinking(source), "--max-total-tokens": FULL, "--schedule-conservativeness": 0.01}


def with_mixed_chunks(source: Source) -> Flags:
    return {**with_checkpoints(source), "--enable-mixed-chunk": True, "--page-size": PAGE}


def can_be_asked_to_think(source: Source) -> bool:
    """Tell whether the engine takes it; earlier releases take it over HTTP alone."""
    generate = source.find("sglang.srt.entrypoints.engine:Engine.generate")
    return generate is not None and "require_reasoning" in generate.parameters


def keeps_checkpoints(source: Source) -> bool:
    """Tell whether the mixers write checkpoints; earlier releases refuse to start such a model with them."""
    mixer = source.find("sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.forward")
    return mixer is not None and mixer.mentions("mamba_track_mask")


def with_flash_attention(source: Source) -> Flags:
    return {**with_radix_cache(source), "--attention-backend": "fa3", "--context-length": 8192}


def with_local_attention(source: Source) -> Flags:
    # with a pool of their own for local layers, no batch is replayed
    return {"--attention-backend": "fa3", "--disable-hybrid-swa-memory": True}


def captures_without_breaks(source: Source) -> bool:
    return none_without_breaks(source) is None


def captures_local_attention_without_breaks(source: Source) -> bool:
    """Tell whether graphs are made behind a vision model; the first releases take Llama 4 for no language model."""
    setup = source.find(CAPTURE_PREFILL)
    return setup is not None and "resolve_language_model" in setup.calls and captures_without_breaks(source)


def captures_latent_attention_without_breaks(source: Source) -> bool:
    """Tell whether such a server starts; the first releases capture a form that the layer cannot take."""
    known = any(source.find(f"{PREFILL}.{name}") for name in CAPTURES_LATENT_ATTENTION)
    return known and captures_without_breaks(source)


def with_host_memory(source: Source) -> Flags:
    """Flags for a prefix cache that has a copy of every prefix in host memory; the GPU holds few of them."""
    return {
        "--disable-radix-cache": False,
        "--enable-hierarchical-cache": True,
        "--hicache-ratio": 4.0,
        "--max-total-tokens": FEW_SLOTS,
        # a prefix is copied when it is cached, and not only when it is found
        "--hicache-write-policy": "write_through",
    }


def with_states_in_host_memory(source: Source) -> Flags:
    return {
        **with_host_memory(source),
        # SGLang's choice, as the first layer has no key and value cache
        "--attention-backend": False,
        "--max-mamba-cache-size": 64,
        "--page-size": 64,
        # the only one that states are copied in by SGLang's kernels
        "--hicache-mem-layout": "page_first",
        **extra_buffers(source),
    }


def copies_states_by_kernel(source: Source) -> bool:
    """Tell whether states go to host memory by a kernel of their own; earlier releases have no such layout."""
    copies = [source.find(f"sglang.srt.mem_cache.{pool}:MambaPoolHost._copy_tensor_all_layers_lf_pf") for pool in POOLS]
    return any(copy and "transfer_kv_mamba_lf_pf" in copy.calls for copy in copies)


def mixture_in_triton(source: Source) -> Flags:
    return {"--moe-runner-backend": "triton"}


def sees_in_graphs_by_default(source: Source) -> bool:
    """Tell whether vision models get graphs by default; some releases make none unless asked."""
    listed = source.find("sglang.srt.configs.model_config:multimodal_breakable_cuda_graph_supported_model_archs")
    is_listed = listed is not None and listed.mentions(MODELS["qwen3_5"].architecture)
    return is_listed and has_breakable_graphs_by_default(source)


def small_cache(source: Source) -> Flags:
    return {**mixture_in_triton(source), "--max-total-tokens": 512}


def prefill_buckets(flags: Flags) -> tuple[int, ...]:
    """The sizes of breakable graphs that these flags ask for; none where SGLang chooses them."""
    found = flags.get("--cuda-graph-bs-prefill", flags.get("--piecewise-cuda-graph-tokens"))
    return found if isinstance(found, tuple) else ()


QWEN3_5_TEXT = Case(
    "qwen3_5_text_prefill_graph",
    "Qwen3.5 without images: linear attention runs anew in every replay.",
    "qwen3_5_text",
    module="sglang.srt.models.qwen3_5_text",
)
QWEN3_5 = Case(
    "qwen3_5_prefill_graph",
    "Qwen3.5 as published, a vision model, is replayed for text prompts.",
    "qwen3_5",
    module="sglang.srt.models.qwen3_5",
)
EAGLE = Case(
    "eagle_triton_draft_extend",
    "As many drafts are accepted when the draft's extend step is replayed as when it is not.",
    "llama_eagle_target",
    draft="llama_eagle_draft",
    standard=Standard.ACCEPTED,
    script=short_drafts,
    logprobs=False,
    phase="draft_extend",
    decode_sizes=(1, 2, 4),
    extra=lambda source: of_the_drafts_of(source, adaptive=False),
)
LLAMA_INSIDE = Case(
    "llama_attention_inside",
    "With attention inside the graph answers have the bits of eager prefill, at random lengths and behind prefixes.",
    "llama",
    script=odd_steps,
    extra=with_flash_attention,
    inside=True,
)
HYBRID_INSIDE = dataclasses.replace(
    LLAMA_INSIDE,
    name="qwen3_next_attention_inside",
    sentence="A hybrid's prefill in one graph has the bits of the same server's graph with breaks at attention.",
    model="qwen3_next",
    standard=Standard.BREAKS,
    environment={flag_of_kernel("gdn_extend"): "cuda"},
)
LLAMA_HOST_MEMORY = Case(
    "llama_host_memory",
    "Prefixes come from host memory as they were; stock may answer right, too: its copies depend on timing.",
    "llama",
    standard=Standard.REPEATED,
    script=from_host_memory,
    logprobs=False,
    phase=None,
    decode_sizes=(1, 2, 4),
    extra=with_host_memory,
    resumes=True,
)
CASES = (
    Case(
        "qwen3_next_prefill_graph",
        "Linear attention runs anew in every replay, with the batch's own state.",
        "qwen3_next",
    ),
    Case(
        "qwen3_next_prefix_cache",
        "A hybrid model resumes from the cached state of a prefix.",
        "qwen3_next",
        script=warm_prefixes,
        extra=with_radix_cache,
    ),
    QWEN3_5_TEXT,
    dataclasses.replace(
        QWEN3_5_TEXT,
        name="qwen3_5_text_by_default",
        sentence="Qwen3.5 without images is replayed and right where no flag asks for graphs.",
        script=new_prompts,
        served=has_breakable_graphs_by_default,
        by_default=True,
    ),
    QWEN3_5,
    dataclasses.replace(
        QWEN3_5,
        name="qwen3_5_by_default",
        sentence="Qwen3.5 as published is replayed and right where no flag asks for graphs.",
        script=new_prompts,
        served=sees_in_graphs_by_default,
        by_default=True,
    ),
    Case(
        "llama_several_requests",
        "A prefill batch of several requests is replayed, and each gets its own answer.",
        "llama",
        requests=2,
    ),
    Case(
        "llama_stack_by_structure",
        "The layers that structure finds are those that SGLang's names find.",
        "llama",
    ),
    Case(
        "llama_prefix_cache",
        "Prefixes come from the radix cache, and the rest of the prompt from a replay.",
        "llama",
        script=warm_prefixes,
        extra=with_radix_cache,
    ),
    Case(
        "gpt_oss_decode_padding",
        "Padded rows of a decode graph leave the sliding window cache of other requests alone.",
        "gpt_oss",
        standard=Standard.REPEATED,
        script=alone_after_a_batch,
        phase="decode",
        decode_sizes=(4,),
        extra=small_cache,
    ),
    Case(
        "gpt_oss_breakable_start",
        "A sliding window model starts with breakable prefill graphs and answers.",
        "gpt_oss",
        extra=mixture_in_triton,
    ),
    Case(
        "qwen3_next_adaptive_speculation",
        "A hybrid model that drafts with a layer of its own checkpoint starts with adaptive speculation.",
        "qwen3_next_mtp",
        standard=Standard.ANSWERED,
        script=short_drafts,
        logprobs=False,
        phase=None,
        decode_sizes=(1, 2, 4),
        extra=lambda source: of_the_drafts_of(source, adaptive=True),
        module="sglang.srt.models.qwen3_next_mtp",
    ),
    EAGLE,
    dataclasses.replace(
        EAGLE,
        name="eagle_prefix_only_worker",
        sentence="The fix for other packages' draft workers changes nothing for SGLang's own.",
    ),
    Case(
        "qwen3_next_stripped_thinking",
        "The next turn of a hybrid model goes on from the prompt's state, not from one behind the thinking.",
        "qwen3_next_thinks",
        script=turns_after_thinking,
        extra=without_its_thinking_but_checkpoints,
        served=can_be_asked_to_think,
    ),
    Case(
        "llama_stripped_thinking_at_full_load",
        "Requests that think are retracted, and later requests share no cache slots.",
        "llama_thinks",
        standard=Standard.REPEATED,
        script=others_after_thinking_at_full_load,
        phase="decode",
        decode_sizes=(1, 2, 4),
        extra=without_its_thinking_at_full_load,
        served=can_be_asked_to_think,
    ),
    Case(
        "llama_sleep",
        "Decode graphs answer after sleep as before; stock may, too: few kernels read what only capture wrote.",
        "llama",
        standard=Standard.REPEATED,
        script=before_and_after_sleep,
        phase="decode",
        decode_sizes=(1, 2, 4),
        extra=lambda source: {"--enable-memory-saver": True},
        environment={GRAPHS_SAVED: "1"},
    ),
    Case(
        "eagle3_windowed_draft",
        "A server whose draft model attends to a sliding window starts, and replays its draft's extend step.",
        "llama",
        draft="llama_eagle3_draft",
        standard=Standard.ANSWERED,
        script=short_drafts,
        logprobs=False,
        phase="draft_extend",
        decode_sizes=(1, 2, 4),
        extra=of_a_draft_with_a_window,
        served=drafts_with_a_window,
    ),
    Case(
        "phi_prefill_graph",
        "A model that takes forward_batch before positions is captured with the right ones.",
        "phi",
    ),
    Case(
        "cohere_prefill_graph",
        "A model that takes three arguments is captured.",
        "cohere",
    ),
    Case(
        "falcon_h1_prefill_graph",
        "A Mamba2 mixer runs anew in every replay, with the batch's own state.",
        "falcon_h1",
        module="sglang.srt.models.falcon_h1",
    ),
    Case(
        "falcon_h1_checkpoints",
        "A replayed prefill writes the state checkpoints that the prefix cache resumes from.",
        "falcon_h1",
        script=warm_prefixes,
        extra=with_checkpoints,
        served=keeps_checkpoints,
        module="sglang.srt.models.falcon_h1",
    ),
    Case(
        "granite_hybrid_prefill_graph",
        "Granite hybrid, which SGLang makes no graphs for, is replayed, and its mixers run anew.",
        "granite_hybrid",
        script=warm_prefixes,
        extra=with_a_mixer_first,
        module="sglang.srt.models.granitemoehybrid",
    ),
    Case(
        "lfm2_prefill_graph",
        "LFM2, which SGLang makes no graphs for, is replayed, and its short convolutions run anew.",
        "lfm2",
        script=warm_prefixes,
        extra=with_a_mixer_first,
        module="sglang.srt.models.lfm2",
    ),
    Case(
        "kimi_linear_prefill_graph",
        "Delta attention next to latent attention is replayed.",
        "kimi_linear",
        # eager prefill uses other kernels for latent attention, so logprobs round differently
        standard=Standard.TOKENS,
        module="sglang.srt.models.kimi_linear",
    ),
    Case(
        "deepseek_unbroken_prefix",
        "Latent attention in graphs without breaks attends to all of a prefix, longer or shorter than the rest.",
        "deepseek_v2",
        # eager prefill plans for other lengths, so logprobs round differently
        standard=Standard.TOKENS,
        script=behind_prefixes,
        extra=with_flash_attention,
        # prefixes count from this length on as they do in servers whose chunks are not as small
        environment={"SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "1"},
        served=captures_latent_attention_without_breaks,
        unbroken=True,
    ),
    Case(
        "llama_4_unbroken_chunk",
        "Local layers in graphs without breaks attend to their chunk of a prompt, and not to what is before it.",
        "llama4",
        standard=Standard.TOKENS,
        script=within_and_beyond_a_chunk,
        extra=with_local_attention,
        served=captures_local_attention_without_breaks,
        unbroken=True,
    ),
    Case(
        "qwen3_next_mixed_chunks",
        "A hybrid model goes on behind a prompt that was computed in chunks while another was being answered.",
        "qwen3_next",
        # with logprobs nothing is mixed
        logprobs=False,
        standard=Standard.TOKENS,
        script=beside_a_running_answer,
        phase="decode",
        decode_sizes=(1, 2, 4),
        extra=with_mixed_chunks,
    ),
    dataclasses.replace(
        LLAMA_HOST_MEMORY,
        name="ling_host_memory",
        sentence="States of lightning attention, which has no convolution, come back from host memory as they were.",
        model="ling",
        extra=with_states_in_host_memory,
        served=copies_states_by_kernel,
    ),
    LLAMA_HOST_MEMORY,
    LLAMA_INSIDE,
    dataclasses.replace(
        LLAMA_INSIDE,
        name="gpt_oss_attention_inside",
        sentence="Windows and sinks have the bits of eager prefill where attention is inside the graph.",
        model="gpt_oss",
        extra=lambda source: {**mixture_in_triton(source), **with_flash_attention(source)},
    ),
    HYBRID_INSIDE,
    dataclasses.replace(
        HYBRID_INSIDE,
        name="falcon_h1_attention_inside",
        sentence="Attention and a Mamba2 mixer in one graph have the bits of the same server's graph with breaks.",
        model="falcon_h1",
        environment={flag_of_kernel("mamba2_extend"): "cuda"},
        module="sglang.srt.models.falcon_h1",
    ),
)
BUCKETS, FEW_BUCKETS = (64, 128, 256, 512, 1024), (128, 512)


def named(name: str) -> Case | None:
    return next((case for case in CASES if case.name == name), None)
