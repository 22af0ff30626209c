# SPDX-License-Identifier: Apache-2.0
"""The launches that attention inside the graph makes faster, as far as a command and a model's config.json tell.

A fix says where its defect can do harm, and errs by naming too many launches. A promise errs the other way: nothing
that is known may stand against it. The kernel itself decides in the server: kernels/attention_extend/refusals.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from sglang_bcg_fixes.anatomy import launches
from sglang_bcg_fixes.anatomy.launches import ON_HOPPER, PREFILL_GRAPHS, named
from sglang_bcg_fixes.concern import Concern, Condition, Harm, Launch
from sglang_bcg_fixes.kernels.attention_extend.declaration import KERNEL
from sglang_bcg_fixes.model import Choice

ATTENTION = KERNEL.op
# with one of these inside, a hybrid's graph has no other break
LINEAR = {"gdn_extend", "mamba2_extend", "short_conv_extend", "kda_extend"}
ONE, TWO_BYTES = (None, "1"), (None, "auto", "bf16", "bfloat16", "half", "float16")
# a flag that is given has one of these words
WORDS: dict[tuple[str, ...], tuple[str | None, ...]] = {
    ("--kv-cache-dtype",): TWO_BYTES,
    ("--dtype",): TWO_BYTES,
    **dict.fromkeys((launches.ATTENTION_PARTS, *launches.PARTS), ONE),
    ("--tp-size", "--tensor-parallel-size", "--tp"): ONE,
    ("--device",): (None, "cuda"),
    ("--mamba-ssm-dtype",): (None, "float32"),
    ("--model-impl",): (None, "auto", "sglang"),
    ("--page-size",): (None, *(str(1 << power) for power in range(11))),
}
# they keep a break, or hide what does
FLAGS = (
    *("--rl-on-policy-target", "--modelopt-quant", "--enable-paged-experts", "--enable-flexkv"),
    *("--enable-unified-memory", "--enable-kv-cache-sharding", "--enable-page-major-kv-layout"),
    *launches.DIVIDED_PREFILL,
)
# latent, sparse, local or bidirectional attention, a cap of logits, a cache in FP8
KEYS = re.compile("kv_lora|^index_|sparse_(att|conf)|dual_chunk|attention_chunk|bidirect|attn_logit|kv_cache")
# the same in models that no key tells
NAMES = named(
    *("Qwen4Exp*", "Inkling*", "DeepseekV4*", "MiniMaxM3*", "Dots*", "Grok*", "Gemma2*", "Llama4*", "MuseSpark*"),
    *("IQuestQ1*", "UnlimitedOCR*", "SDAR*", "HrmText*", "Mllama*", "MossVL*", "Whisper*"),
)
CONDITIONS = (launches.EMBEDDINGS, launches.PREFILL_SIZES, launches.KEYS_FROM_ELSEWHERE, launches.ADAPTIVE)
# the smallest heads that were measured, and the longest context that its tables hold
LEAST_HEAD, LONGEST = 128, 1 << 22


def attends_with_fa3(launch: Launch) -> bool | None:
    """Prefill and decode alike. On Hopper it is the default of most models, so without a flag it is open."""
    of_both, *each = (launch.word(flag) for flag in launches.BACKENDS)
    words = {word or of_both for word in each}
    if words - {None, "fa3"} or (None in words and launches.makes_branches(launch)):
        return False
    return None if None in words else True


def is_captured(launch: Launch) -> bool:
    return (
        all(launch.word(*names) in allowed for names, allowed in WORDS.items())
        and not launch.given(*FLAGS)
        # a file beside config.json may ask for a cache in FP8
        and "modelopt" not in (launch.word("--quantization") or "")
        and not any(map(KEYS.search, launch.keys))
        and set(map(str, launch.values("mamba_ssm_dtype"))) <= {"float32"}
        and all(condition.holds(launch) is False for condition in (NAMES, launches.DIFFUSION, *CONDITIONS))
        and launches.may_capture_linear_layers(launch) is True
        and has_known_sizes(launch)
    )


def has_known_sizes(launch: Launch) -> bool:
    """A size that is no number tells nothing."""
    text = launch.config.get("text_config")
    sizes = text if isinstance(text, Mapping) else launch.config
    width, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
    given = {key: size for key, size in sizes.items() if key.endswith("head_dim") and size is not None}
    of_heads = [size for key, size in given.items() if not launches.STATES.search(key)]
    if "head_dim" not in given and type(width) is type(heads) is int and heads > 0:
        of_heads.append(width // heads)
    contexts = [launch.number("--context-length") or 1, *launch.values("max_position_embeddings")]
    if not of_heads or any(type(number) is not int for number in (*of_heads, *contexts)):
        return False
    return len({*of_heads}) == 1 and of_heads[0] >= LEAST_HEAD and max(contexts) <= LONGEST


def has_no_other_break(launch: Launch, operations: Collection[str]) -> bool:
    return launches.is_hybrid(launch) is False or not LINEAR.isdisjoint(operations)


def concerns_of(choice: Choice) -> tuple[Concern, ...]:
    return (PROMISE,) if choice.op == ATTENTION else choice.subject.concerns


FA3, CAPTURED = Condition("the fa3 attention backend", attends_with_fa3), Condition("plain attention", is_captured)
PROMISE = Concern(Harm.SLOWER, (FA3, CAPTURED, PREFILL_GRAPHS, ON_HOPPER))
