# SPDX-License-Identifier: Apache-2.0
"""Conditions on a server's model and flags, for fixes to say where their defect does harm.

Each is false only where the configuration or a flag rules it out. SGLang decides much later, with the GPU and the
model at hand: what it may decide so or so is not decided here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from sglang_bcg_fixes.concern import Condition, Launch, parts_in, settings_of
from sglang_bcg_fixes.source import graph_settings, served
from sglang_bcg_fixes.source.tree import Source

BACKEND, CONFIG = "--cuda-graph-backend-prefill", graph_settings.OPTION
ENABLE = "--enable-breakable-cuda-graph"
DECODE_BACKEND, NO_GRAPHS = "--cuda-graph-backend-decode", "--disable-cuda-graph"
PREFILL_BUCKETS = "--cuda-graph-bs-prefill"
GRAPHS_SAVED = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
# they name another backend, or none
OTHER_BACKENDS = (BACKEND, "--disable-piecewise-cuda-graph", "--enforce-piecewise-cuda-graph")
BACKENDS = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")
STRATEGY = ("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy")
ALGORITHM = "--speculative-algorithm"
ATTENTION_PARTS = ("--attn-dp-size", "--attention-data-parallel-size")
# the names of several releases
DIVIDED_PREFILL = (
    "--enable-prefill-cp",
    "--enable-prefill-context-parallel",
    "--enable-nsa-prefill-context-parallel",
    "--enable-dsa-prefill-context-parallel",
    "--dwdp-size",
)
# with which our kernels leave every linear layer its break
LEFT_ALONE = (
    "--enable-deterministic-inference",
    "--enable-hicache",
    "--enable-hierarchical-cache",
    "--enable-linear-replayssm",
    "--enable-linear-replayssm-spec",
    "--enable-mis",
    "--enable-two-batch-overlap",
    "--enable-unified-cache-external-linker",
    "--moe-dense-tp-size",
)
# where SGLang makes its settings for servers that only prefill or only decode
OF_ROLES = (
    "sglang.srt.arg_groups.cuda_graph_hook:apply_cuda_graph_disaggregation_roles",
    "sglang.srt.server_args:ServerArgs._apply_cuda_graph_disaggregation_roles",
)
# where SGLang makes its settings for stages, and for NGRAM
OF_STAGES = ("sglang.srt.server_args:ServerArgs._handle_pipeline_parallelism",)
OF_NGRAM = (
    "sglang.srt.arg_groups.speculative_hook:_handle_ngram",
    "sglang.srt.server_args:ServerArgs._handle_speculative_decoding",
)
PARTS = (("--pp-size", "--pipeline-parallel-size"), ("--attn-cp-size", "--attention-context-parallel-size"))
HOPPER, BLACKWELL, AMPERE = CHIPS = ("hopper", "blackwell", "ampere")
# words in the keys of layers with a state of their own; a convolution of an image tower matches too, and does no harm
STATES = re.compile(r"mamba|ssm|linear_|kda|conv|lightning|delta|attn_type_list|recurrent|retention|hybrid_layers")
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "attn"}
# backends that put their own number of tokens in the place of --page-size
PAGED = re.compile("mla|trtllm|fa4|dual_chunk|ascend|xpu")
# they name no such key
LIGHTNING_NAMES = ("Bailing*V2_5*", "Bailing*V3*", "Ring*", "MiniMaxText*", "MiniMaxM1*", "MiniCPMSALA*")
HYBRID_NAMES = (*LIGHTNING_NAMES, "Inkling*", "Jet*", "Zaya*")


def has_breakable_graphs_by_default(source: Source) -> bool:
    choice = source.find("sglang.srt.model_executor.cuda_graph_config:default_prefill_backend")
    return choice is not None and choice.mentions("BREAKABLE")


def flag(*names: str) -> Callable[[Launch], bool | None]:
    """True where one of them is given. In a file given with --config anything may stand."""
    return lambda launch: launch.given(*names) or unless_in_a_file(launch)


def unless_in_a_file(launch: Launch) -> bool | None:
    return None if launch.given("--config") else False


def above(least: int, *names: str) -> Callable[[Launch], bool | None]:
    """True where the number after one of these flags is larger; not decided where there is none."""

    def holds(launch: Launch) -> bool | None:
        number = launch.number(*names)
        return unless_in_a_file(launch) if number is None else number > least

    return holds


def is_one(word: str, *names: str) -> Callable[[Launch], bool | None]:
    """True where this word stands after one of these flags."""
    return lambda launch: any(launch.word(name) == word for name in names) or unless_in_a_file(launch)


def named(*patterns: str) -> Condition:
    """The architecture has one of these names."""

    def holds(launch: Launch) -> bool | None:
        if not launch.architectures:
            return None
        return any(fnmatch.fnmatchcase(name, pattern) for name in launch.architectures for pattern in patterns)

    return Condition(f"the architecture {' or '.join(patterns)}", holds)


def has_key(pattern: str) -> Callable[[Launch], bool | None]:
    return lambda launch: any(re.search(pattern, key) for key in launch.keys)


def is_hybrid(launch: Launch) -> bool | None:
    listed = {kind for kinds in launch.values("layer_types") if isinstance(kinds, list) for kind in map(str, kinds)}
    return any(map(STATES.search, launch.keys)) or bool(listed - ATTENTION_LAYERS) or named(*HYBRID_NAMES).holds(launch)


def has_mamba2(launch: Launch) -> bool | None:
    return has_key("mamba|ssm")(launch) or any("mamba" in str(kind) for kind in launch.values("model_type"))


def has_lightning(launch: Launch) -> bool | None:
    return has_key("lightning|linear_silu|attn_type_list")(launch) or named(*LIGHTNING_NAMES).holds(launch)


def is_of_another_package(launch: Launch) -> bool | None:
    """False where SGLang has a model of this name; another package may still put its own in its place."""
    names = launch.architectures
    return False if names and launch.source.architectures.issuperset(names) else None


def embeds(launch: Launch) -> bool | None:
    """Some models serve either way, by their name alone nobody can tell."""
    if launch.given("--is-embedding"):
        return True
    generates = any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in launch.architectures)
    return unless_in_a_file(launch) if generates else None


def has_windows(launch: Launch) -> bool | None:
    """Many models name the size of a window that they do not use."""
    return any(map(is_windowed, parts_in(launch.config)))


def is_windowed(part: Mapping[Any, Any]) -> bool:
    kinds = part.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return any(re.search("sliding|chunked|swa|local", str(kind)) for kind in kinds)
    if part.get("use_sliding_window") is False:
        return False
    return any(
        re.search("sliding_window|attention_chunk_size|hybrid_layer_pattern", key) for key, _ in settings_of(part)
    )


def is_quantised(launch: Launch) -> bool | None:
    """Scales of activations are computed of every row of a padded batch; a file beside config.json may say it, too."""
    flags = launch.given("--quantization", "--torchao-config")
    return True if flags or has_key("^(quantization|compression)_config$")(launch) else None


def attends_in_parallel(launch: Launch) -> bool | None:
    """Data parallel attention. Other ways to divide a prefill turn it on for some models."""
    if launch.given("--enable-dp-attention"):
        return True
    parts = launch.number(*ATTENTION_PARTS)
    if parts is not None and parts > 1:
        return True
    return None if launch.given(*DIVIDED_PREFILL, "--config") else False


def may_capture_linear_layers(launch: Launch) -> bool | None:
    """False where kernels.linear_extend refuses the whole server."""
    divided = any((launch.number(*names) or 1) > 1 for names in PARTS) or attends_in_parallel(launch)
    if divided or launch.given(*LEFT_ALONE) or launch.word("--moe-a2a-backend") not in (None, "none"):
        return False
    return None if launch.given("--config") else True


def has_uneven_group(launch: Launch) -> bool | None:
    """A batch of attention is shared by ranks that do not divide the smallest default size of a prefill graph, 4."""
    ranks = launch.number("--tp-size", "--tensor-parallel-size", "--tp")
    parts = launch.number(*ATTENTION_PARTS, "--dp-size", "--data-parallel-size", "--dp")
    if ranks is None or parts is None or launch.given(*DIVIDED_PREFILL, "--config"):
        return None
    return 4 % max(ranks // max(parts, 1), 1) != 0


def undecided(launch: Launch) -> None:
    return None


def always(says: str) -> Condition:
    """True of every launch; with `where` it asks the source alone."""
    return Condition(says, lambda launch: True)


def makes_prefill_graphs(launch: Launch) -> bool | None:
    """Breakable ones, by the flags and by what is recorded of this model on this release."""
    if is_refused(launch):
        return False
    if launch.graphs == served.IF_ASKED_FOR and is_asked_for(launch) is False:
        return False
    return wants_prefill_graphs(launch)


def wants_prefill_graphs(launch: Launch) -> bool | None:
    asked = is_asked_for(launch)
    if asked is not False:
        return asked
    if launch.given(NO_GRAPHS, "--disable-prefill-cuda-graph", *OTHER_BACKENDS) or is_left_to_others(launch, "decode"):
        return False
    if not (launch.word("--device") or "cuda").startswith("cuda"):
        return False
    # whether the model and the other flags go with it is SGLang's to say
    return None if has_breakable_graphs_by_default(launch.source) else False


def gets_what_it_asks_for(launch: Launch) -> bool | None:
    return False if is_refused(launch) else is_asked_for(launch)


def is_refused(launch: Launch) -> bool:
    """True for a model that SGLang makes no graphs of; one flag of early releases puts its rules aside."""
    return launch.graphs == served.NEVER and not launch.given("--enforce-piecewise-cuda-graph")


def is_asked_for(launch: Launch) -> bool | None:
    if launch.given(ENABLE) or launch.word(BACKEND) == "breakable":
        return True
    return None if launch.given(CONFIG, "--config") else False


def makes_full_prefill_graphs(launch: Launch) -> bool | None:
    if launch.given(BACKEND):
        return launch.word(BACKEND) == "full"
    return None if launch.given(CONFIG, "--config") else False


def makes_compiled_prefill_graphs(launch: Launch) -> bool | None:
    if launch.given("--enforce-piecewise-cuda-graph") or launch.word(BACKEND) == "tc_piecewise":
        return True
    if launch.given(BACKEND, ENABLE, "--disable-piecewise-cuda-graph"):
        return False
    # before breakable graphs became the default, compiled ones were
    if launch.given(CONFIG) or not has_breakable_graphs_by_default(launch.source):
        return None
    return unless_in_a_file(launch)


def makes_decode_graphs(launch: Launch) -> bool | None:
    backend = launch.word(DECODE_BACKEND)
    if backend is not None:
        return backend != "disabled"
    return not (launch.given(NO_GRAPHS, "--disable-decode-cuda-graph") or is_left_to_others(launch, "prefill"))


def pads_decode(launch: Launch) -> bool | None:
    return False if launch.given("--disable-cuda-graph-padding") or not makes_decode_graphs(launch) else None


def is_left_to_others(launch: Launch, role: str) -> bool:
    """True of a server of this role where SGLang leaves the other one's graphs out, unless a flag chooses them."""
    has_role = launch.word("--disaggregation-mode") == role and not launch.given("--enable-pd-role-switch")
    return has_role and any(map(launch.source.find, OF_ROLES))


def overlaps(launch: Launch) -> bool | None:
    """False where a flag turns it off, or SGLang does because of another one, as its source says."""
    if launch.given("--disable-overlap-schedule"):
        return False
    others = ((OF_STAGES, (launch.number(*PARTS[0]) or 1) > 1), (OF_NGRAM, NGRAM.holds(launch)))
    is_off = any(holds and has_overlap_off(launch.source, places) for places, holds in others)
    return False if is_off else None


def has_overlap_off(source: Source, places: tuple[str, ...]) -> bool:
    settings = next(filter(None, map(source.find, places)), None)
    return settings is not None and settings.mentions("disable_overlap_schedule = True")


def without(*names: str) -> Callable[[Launch], bool | None]:
    """False where a flag turns it off; otherwise it is SGLang's default, which may give way to the model."""
    return lambda launch: False if launch.given(*names) else None


def keeps_extra_buffers(launch: Launch) -> bool | None:
    word = launch.word(*STRATEGY)
    if launch.given("--disable-radix-cache") or word == "no_buffer":
        return False
    return None if word in (None, "auto") else True


def keeps_live_states(launch: Launch) -> bool | None:
    """States at the end of a request alone; some releases choose so by other flags."""
    word = launch.word(*STRATEGY)
    if launch.given("--disable-radix-cache"):
        return False
    return None if word in (None, "auto") else word == "no_buffer"


def drafts_by(*names: str) -> Callable[[Launch], bool | None]:
    """The algorithm of speculation is one of these."""

    def holds(launch: Launch) -> bool | None:
        word = launch.word(ALGORITHM)
        return unless_in_a_file(launch) if word is None else word.upper() in names

    return holds


def speculates(launch: Launch) -> bool | None:
    return launch.given(ALGORITHM, "--speculative-adaptive") or unless_in_a_file(launch)


def makes_branches(launch: Launch) -> bool | None:
    if speculates(launch) is False:
        return False
    if NGRAM.holds(launch):
        # SGLang puts another flag's number in the place of this one
        return None
    number = launch.number("--speculative-eagle-topk")
    return None if number is None else number > 1


def attends_with(name: str, chips: tuple[str, ...]) -> Condition:
    """One of the attention backends has this name; `chips` are those where it can be the default."""

    def holds(launch: Launch) -> bool | None:
        flags = (*BACKENDS, "--speculative-draft-attention-backend")
        words = {launch.word(one) for one in flags} - {None}
        if any(word is not None and name in word for word in words):
            return True
        if launch.given("--attention-backend") and not launch.given("--config"):
            return False
        return None if not launch.chip or launch.chip in chips else False

    return Condition(f"the {name} attention backend", holds)


def attends_with_fa4_before_blackwell(launch: Launch) -> bool | None:
    """By flags only: SGLang chooses it by itself on Blackwell alone."""
    named = any("fa4" in (launch.word(one) or "") for one in BACKENDS)
    if launch.chip == BLACKWELL or not (named or launch.given("--config")):
        return False
    return True if named and launch.chip else None


def has_large_pages(least: int) -> Callable[[Launch], bool | None]:
    """A page has so many tokens. Some backends and models set their own size."""

    def holds(launch: Launch) -> bool | None:
        number = launch.number("--page-size")
        if number is None or (number < least and any(PAGED.search(launch.word(flag) or "") for flag in BACKENDS)):
            return None
        return number >= least

    return holds


def gets_keys_from_elsewhere(launch: Launch) -> bool | None:
    if launch.word("--disaggregation-mode") not in (None, "null"):
        return True
    return flag("--enable-lmcache", "--enable-hisparse", "--radix-cache-backend")(launch)


PREFILL_GRAPHS = Condition("breakable CUDA graphs for prefill", makes_prefill_graphs)
ASKED_FOR = Condition("--cuda-graph-backend-prefill breakable", gets_what_it_asks_for)
# whether the model gets them or not: some of our code gives them to a model that SGLang refuses
WANTED_PREFILL_GRAPHS = Condition("breakable CUDA graphs for prefill", wants_prefill_graphs)
FULL_PREFILL_GRAPHS = Condition("--cuda-graph-backend-prefill full", makes_full_prefill_graphs)
COMPILED_PREFILL_GRAPHS = Condition("piecewise CUDA graphs for prefill", makes_compiled_prefill_graphs)
PREFILL_SIZES = Condition(PREFILL_BUCKETS, flag(PREFILL_BUCKETS, "--piecewise-cuda-graph-tokens", CONFIG))
DECODE_GRAPHS = Condition("CUDA graphs for decode", makes_decode_graphs)
DECODE_PADDING = Condition("padded CUDA graphs for decode", pads_decode)
OVERLAP = Condition("overlap scheduling", overlaps)
PREFIX_CACHE = Condition("prefix caching", without("--disable-radix-cache"))
EXTRA_BUFFERS = Condition("--mamba-radix-cache-strategy extra_buffer", keeps_extra_buffers)
NO_BUFFER = Condition("--mamba-radix-cache-strategy no_buffer", keeps_live_states)
LAZY_BUFFERS = Condition("--mamba-radix-cache-strategy extra_buffer_lazy", is_one("extra_buffer_lazy", *STRATEGY))
STRIPPED_THINKING = Condition("--strip-thinking-cache", flag("--strip-thinking-cache"))
MIXED_CHUNKS = Condition("--enable-mixed-chunk", flag("--enable-mixed-chunk"))
DP_ATTENTION = Condition("--enable-dp-attention", attends_in_parallel)
LORA = Condition("--enable-lora", flag("--enable-lora", "--lora-paths"))
DECODE_CONTEXT = Condition("--dcp-size above 1", above(1, "--dcp-size", "--decode-context-parallel-size"))
HOST_CACHE = Condition("--enable-hierarchical-cache", flag("--enable-hierarchical-cache", "--enable-hicache"))
KEYS_FROM_ELSEWHERE = Condition(
    "--disaggregation-mode, --enable-lmcache, --enable-hisparse or --radix-cache-backend", gets_keys_from_elsewhere
)
TWO_BATCHES = Condition("--enable-two-batch-overlap", flag("--enable-two-batch-overlap"))
ROUTED_EXPERTS = Condition("--enable-return-routed-experts", flag("--enable-return-routed-experts"))
MEMORY_SAVER = Condition("--enable-memory-saver", flag("--enable-memory-saver"))
DIFFUSION = Condition("a diffusion LLM (--dllm-algorithm)", flag("--dllm-algorithm"))
MEGAMOE = Condition("--moe-a2a-backend megamoe", is_one("megamoe", "--moe-a2a-backend", "--moe-runner-backend"))
UNEVEN_GROUP = Condition("attention groups of other than 1, 2 or 4 ranks", has_uneven_group)
SPECULATION = Condition("speculative decoding", speculates)
DRAFT_MODEL = Condition(
    "speculative decoding with a draft model", drafts_by("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP")
)
EAGLE = Condition("--speculative-algorithm EAGLE, EAGLE3 or NEXTN", drafts_by("EAGLE", "EAGLE3", "NEXTN"))
ADAPTIVE = Condition("--speculative-adaptive", flag("--speculative-adaptive"))
NGRAM = Condition("--speculative-algorithm NGRAM", drafts_by("NGRAM"))
BRANCHES = Condition("--speculative-eagle-topk above 1", makes_branches)
PAGES = Condition("--page-size above 1", has_large_pages(2))
PAGES_OF_128 = Condition("--page-size 128 or more", has_large_pages(128))
LINEAR_INSIDE = Condition("options that leave linear layers to our kernels", may_capture_linear_layers)
ON_HOPPER = Condition("a Hopper GPU", lambda launch: launch.chip == HOPPER if launch.chip else None)
FA3 = attends_with("fa3", (HOPPER,))
FLASH_ATTENTION = FA3 | attends_with("fa4", (BLACKWELL,))
FA4 = Condition("the fa4 attention backend before Blackwell", attends_with_fa4_before_blackwell)
TRITON = attends_with("triton", CHIPS)
FLASHINFER = attends_with("flashinfer", CHIPS)
TRTLLM = attends_with("trtllm", (BLACKWELL,))
TRTLLM_MLA = attends_with("trtllm_mla", (BLACKWELL,))
MEMORY_SAVER_FOR_GRAPHS = Condition(f"{GRAPHS_SAVED}=1", lambda launch: launch.is_set(GRAPHS_SAVED))

# decided by requests or by what is loaded, so never here
CODE_OF_YOUR_OWN = Condition("code of your own", undecided)
LITTLE_MEMORY = Condition("too little free GPU memory to capture graphs", undecided)
RELOADED_WEIGHTS = Condition("weights reloaded with recapture_cuda_graph", undecided)
STRUCTURED_OUTPUT = Condition("requests with structured output", undecided)
REQUESTS_WITH_IMAGES = Condition("requests with images or audio", undecided)

HYBRID = Condition("linear-attention or Mamba layers", is_hybrid)
MAMBA2_LAYERS = Condition("Mamba2 layers", has_mamba2)
GATED_DELTA = Condition("gated delta net layers", has_key("^linear_(num_value_heads|conv_kernel_dim)$"))
DELTA_ATTENTION = Condition("Kimi delta attention layers", has_key("^linear_attn_config$|kda"))
LIGHTNING_LAYERS = Condition("lightning attention layers", has_lightning)
LATENT = Condition("MLA attention", has_key("^kv_lora_rank$"))
SPARSE = Condition("sparse attention with an indexer", has_key("^index_|sparse_att"))
LOCAL = Condition("chunked local attention", has_key("^attention_chunk_size$"))
WINDOW = Condition("sliding-window attention", has_windows)
QUANTISED = Condition("quantised weights or activations", is_quantised)
IMAGES = Condition("a multimodal model", has_key("vision|audio|image|visual|video|thinker"))
MODEL_OF_YOUR_OWN = Condition("a model class that SGLang does not have", is_of_another_package)
EMBEDDINGS = Condition("an embedding model", embeds)
DEEPSEEK_V4, FALCON_H1, INKLING = named("DeepseekV4*"), named("FalconH1*"), named("Inkling*")
NEMOTRON_H = named("NemotronH*")
LONGCAT, MINIMAX_M3 = named("Longcat*", "LongCat*"), named("MiniMaxM3*")
