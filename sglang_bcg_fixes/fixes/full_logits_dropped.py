# SPDX-License-Identifier: Apache-2.0
"""Diffusion LLMs (SDAR, LLaDA 2) die at the first replayed prefill

Symptom: A server of a diffusion LLM (SDAR, LLaDA 2; --dllm-algorithm) ends at its first replayed prefill, with an error
about 'NoneType' that has no attribute 'shape' or, up to 0.5.15.post1, is not subscriptable. Its batches replay a
prefill graph where no decode graph takes them: with more requests than the largest decode graph has, or without decode
graphs.
Cause: These models answer with the logits of every token, full_logits, and with no next_token_logits. After a replay
the runner builds a new answer from the fields it knows, to cut off the padding. The decode graph runner knows
full_logits, the prefill graph runner does not; up to 0.5.15.post1 it also cuts next_token_logits that are not there.
Change: The new answer takes full_logits of the one it was built from, without the rows of padding. Up to 0.5.15.post1
SGLang gets them as next_token_logits and cuts them itself, under breakable graphs: full and compiled ones run no Python
of the model there. Full prefill graphs (--cuda-graph-backend-prefill full) end before there are logits, with this fix
and without. On 0.5.11 the graphs hold the whole model, which single_request_capture changes.
Remove when: Every release that has to be served keeps full_logits after a replayed prefill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DIFFUSION, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.replayed_answers import answer_maker, passed_through, points, runs_the_model
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, Source, absent, affected, ends, fixed

PART = "full_logits"


def probe(source: Source) -> Finding:
    answer = answer_maker(source)
    if answer.mentions(PART):
        return fixed("the answer of a replay keeps full_logits", answer)
    if not runs_the_model(source):
        return absent("the graphs hold the whole model, and single_request_capture changes that", answer)
    return affected("the answer of a replay is made without full_logits", answer)


def keep_when_trimming(original: Callable[..., Any], self: Any, output: Any) -> Any:
    trimmed = original(self, output)
    if output.full_logits is not None:
        trimmed.full_logits = output.full_logits[: self.raw_num_tokens]
    return trimmed


def keep_when_replaying(original: Callable[..., Any], self: Any, forward_batch: Any, **kwargs: Any) -> Any:
    lent = []

    def lend(answer: Any) -> Any:
        if getattr(answer, PART, None) is None or answer.next_token_logits is not None:
            return answer
        lent.append(dataclasses.replace(answer, next_token_logits=answer.full_logits))
        return lent[-1]

    with passed_through(self, lend):
        output = original(self, forward_batch, **kwargs)
    if lent:
        output.full_logits, output.next_token_logits = output.next_token_logits, None
    return output


FIX = Fix(
    probe=probe,
    patches=points(keep_when_trimming, keep_when_replaying),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(DIFFUSION, PREFILL_GRAPHS),
)
