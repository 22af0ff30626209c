# SPDX-License-Identifier: Apache-2.0
"""Images are ignored, or all prompts fail, with forced prefill graphs (multimodal models)

Symptom: A multimodal model answers as if there were no image, with HTTP 200, or every prompt to it fails with "Boolean
value of Tensor is ambiguous" (0.5.13). Only when forced: --enforce-piecewise-cuda-graph together with
--enable-breakable-cuda-graph before 0.5.14, an explicit breakable prefill backend later; the defaults exclude the
affected models, up to 0.5.15 all multimodal ones.
Cause: A replay replaces the layers' forward with a function, and what that function does not pass on is lost: up to
0.5.12.post1 and on 0.5.15 the embeddings (the graph looks up those of the text itself), in every release the deepstack
embeddings that Qwen3-VL adds to its first layers. On 0.5.13 it takes the truth value of a whole tensor. Up to 0.5.15
the graph is captured with one position for each token, where M-RoPE (Qwen2-VL and others) gives images three. Ernie 4.5
VL has experts of its own for images, and from 0.5.21 Ming's have a router for each kind of token: the graph is
captured with those of text alone.
Change: A batch runs without a graph when it carries what the graph does not take: images where no embeddings reach the
graph, images of a model with deepstack embeddings, with such experts or routers or, on 0.5.14, with M-RoPE, and on
0.5.13 every batch of a model whose layers receive embeddings by keyword. One warning says so. A later turn of a
conversation with images is such a batch, too, even if its own tokens are text. Text alone is replayed as before, except
under DP attention before 0.5.22, where all ranks must decide alike and none knows of the others' images: such a model
then replays nothing.
Remove when: Every release that has to be served passes all of this to the graph, or refuses such a batch.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, IMAGES, REQUESTS_WITH_IMAGES
from sglang_bcg_fixes.anatomy.layer_inputs import (
    captured_forward,
    given_embeddings,
    replayed_forward,
    takes_no_embeddings,
)
from sglang_bcg_fixes.anatomy.ranks import attends_in_parallel
from sglang_bcg_fixes.anatomy.runners import MAY_REPLAY, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import flag_of
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, fixed, wrong

ID = "vlm_embeds_dropped"
DEEPSTACK_MODEL = "sglang.srt.models.qwen3_vl:Qwen3LLMModel.forward"
DEEPSTACK = "input_deepstack_embeds"
MASKED_MODEL = "sglang.srt.models.ernie45_moe_vl:Ernie4_5_VLMoeModel.forward"
MASK = "visual_token_mask"
ROUTERS = tuple(
    f"sglang.srt.models.{where}._forward_gate"
    for where in ("bailing_moe:BailingMoESparseMoeBlock", "bailing_moe_v3:BailingMoE")
)
MODALITIES = "mm_token_modalities"
VOTE = f"{PREFILL}.can_replay_locally"

logger = logging.getLogger("sglang_bcg_fixes")


def probe(source: Source) -> Finding:
    captured, replay = captured_forward(source), replayed_forward(source)
    if replay is None:
        return affected("the whole model is captured without images, looking up the text's embeddings", captured)
    read = [captured, replay, *given_embeddings(source)]
    wrong = []
    if takes_no_embeddings(source):
        wrong.append("the captured graph receives no input_embeds")
    if asks_for_truth(source):
        wrong.append("replay takes the truth value of the embeddings, which raises an error")
    if takes_one_position(source):
        wrong.append("the graph is captured with one position for each token, where M-RoPE gives images three")
    deepstack = source.find(DEEPSTACK_MODEL)
    if deepstack and DEEPSTACK in deepstack.parameters and not replay.mentions(DEEPSTACK):
        read.append(deepstack.header)
        wrong.append("replay drops the deepstack embeddings of Qwen3-VL")
    masked = source.find(MASKED_MODEL)
    if masked and MASK in masked.parameters and not replay.mentions(MASK):
        read.append(masked.header)
        wrong.append("replay drops the mask by which Ernie 4.5 VL chooses a token's experts")
    routers = [found for found in map(source.find, ROUTERS) if found and found.mentions(f"forward_batch.{MODALITIES}")]
    batch = source.need(f"{PREFILL}.load_batch") if routers else None
    if batch and not batch.mentions(MODALITIES):
        read += [*routers, batch]
        wrong.append("the batch of a replay has no modalities, by which Ming chooses a token's router")
    if wrong:
        return affected("; ".join(wrong), *read)
    return fixed("the graph receives the embeddings of images", *read)


def asks_for_truth(source: Source) -> bool:
    replay = replayed_forward(source)
    return replay is not None and replay.mentions("layer_kwargs.get('input_embeds') or")


def takes_one_position(source: Source) -> bool:
    captured = captured_forward(source)
    return "self.layer_model.forward" in captured.calls and "self._get_layer_model_positions" not in captured.calls


def vote_knows_images(source: Source) -> bool:
    vote = source.find(VOTE)
    return vote is not None and "contains_mm_inputs" in vote.parameters


def drops_deepstack_only(source: Source) -> bool:
    return not (takes_no_embeddings(source) or asks_for_truth(source) or vote_knows_images(source))


def drops_positions_only(source: Source) -> bool:
    return takes_one_position(source) and drops_deepstack_only(source)


def refuse_images(original: Callable[..., bool], self: Any, forward_batch: Any) -> bool:
    # compiled and full graphs of the same runner receive them
    breakable = getattr(self, "prefill_backend_name", "breakable") == "breakable"
    drops = breakable and self.is_multimodal and may_have_images(self, forward_batch)
    return decide(original(self, forward_batch), drops, "the embeddings of images")


def refuse_keyword(original: Callable[..., bool], self: Any, forward_batch: Any) -> bool:
    # SGLang's image routine calls by keyword; a language model in between calls its layers by position
    by_keyword = self.is_multimodal and not hasattr(self.model_runner.model, "language_model")
    return decide(original(self, forward_batch), by_keyword, "embeddings that come by keyword")


def refuse_unpassed(original: Callable[..., bool], self: Any, forward_batch: Any) -> bool:
    what = unpassed(self) if may_have_images(self, forward_batch) else ""
    return decide(original(self, forward_batch), bool(what), what)


def refuse_positions(original: Callable[..., bool], self: Any, forward_batch: Any) -> bool:
    has_three = self.layer_model is not None and getattr(self.model_runner.model, "is_mrope_enabled", False)
    drops = has_three and may_have_images(self, forward_batch)
    return decide(original(self, forward_batch), drops, "the positions of images")


def vote_against_unpassed(
    original: Callable[..., bool], self: Any, *, contains_mm_inputs: bool = False, **kwargs: Any
) -> bool:
    can_run = original(self, contains_mm_inputs=contains_mm_inputs, **kwargs)
    what = unpassed(self) if contains_mm_inputs else ""
    return decide(can_run, bool(what), what)


def may_have_images(runner: Any, forward_batch: Any) -> bool:
    """Tell whether this batch or, under DP attention, any rank's may have images, audio or video."""
    # some other options give it the tokens of all ranks, too
    is_of_several = forward_batch.global_num_tokens_cpu is not None
    is_shared = is_of_several and attends_in_parallel(runner.model_runner.server_args)
    return is_shared or bool(forward_batch.contains_mm_inputs())


def unpassed(runner: Any) -> str:
    """Name what a graph of only the layers (compiled ones hold more) is not given beside the embeddings of images."""
    if runner.layer_model is None:
        return ""
    if has_deepstack(runner.model_runner.model):
        return "deepstack embeddings"
    if getattr(runner.model_runner.model_config, "requires_mm_token_modalities", False):
        return "the modalities that tokens are routed by"
    if MASK in inspect.signature(runner.layer_model.forward).parameters:
        return "the mask of the tokens that are an image's"
    return ""


def has_deepstack(model: Any) -> bool:
    # Qwen3-Omni keeps its Qwen3-VL one level down
    return any(
        getattr(part, "num_deepstack_embeddings", 0) and getattr(part, "use_deepstack", None)
        for part in (model, *model.children())
    )


def decide(can_run: bool, drops: bool, what: str) -> bool:
    if can_run and drops:
        warn_once(what)
    return can_run and not drops


@functools.cache
def warn_once(dropped: str) -> None:
    ways = " or ".join(way.flags for way in PREFILL_GRAPHS_OFF)
    logger.warning(
        "bcg-fixes %s: a prefill runs without its graph, which would lose %s; so will others. %s starts without "
        "prefill graphs, %s=off replays and loses them",
        ID,
        dropped,
        ways,
        flag_of(ID),
    )


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/33726",),
    probe=probe,
    patches=(
        PatchPoint(MAY_REPLAY, How.AROUND, refuse_images, needed=takes_no_embeddings),
        PatchPoint(MAY_REPLAY, How.AROUND, refuse_keyword, needed=asks_for_truth),
        PatchPoint(MAY_REPLAY, How.AROUND, refuse_unpassed, needed=drops_deepstack_only),
        PatchPoint(MAY_REPLAY, How.AROUND, refuse_positions, needed=drops_positions_only),
        PatchPoint((VOTE,), How.AROUND, vote_against_unpassed, needed=vote_knows_images),
    ),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(IMAGES, ASKED_FOR, REQUESTS_WITH_IMAGES),
)
