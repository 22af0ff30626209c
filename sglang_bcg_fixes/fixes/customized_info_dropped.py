# SPDX-License-Identifier: Apache-2.0
"""customized_info of your own model loses entries, or is missing, with prefill graphs

Symptom: With a model that fills in customized_info (SGLang's own models do not; plugins' and private ones may),
meta_info has one entry fewer than there are tokens, and each entry is paired with the token before its own. A request
that only prefills gets none at all. Eager prefill and decode are right.
Cause: After a replay the runner builds a new answer from the fields it knows, to cut off the padding. The decode graph
runner knows this field, the prefill graph runner does not.
Change: The new answer takes the customized_info of the one it was built from. On 0.5.11 the graphs hold the whole
model, so no Python runs at a replay that could make it; single_request_capture changes that, and keeps it.
Remove when: No release before 0.5.21 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import MODEL_OF_YOUR_OWN, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.replayed_answers import answer_maker, passed_through, points, runs_the_model
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, Source, absent, affected, fixed, wrong

PART = "customized_info"


def probe(source: Source) -> Finding:
    answer = answer_maker(source)
    if answer.mentions(PART):
        return fixed("the answer of a replay keeps customized_info", answer)
    if not runs_the_model(source):
        return absent("no Python that could make customized_info runs at a replay", answer)
    return affected("the answer of a replay is made without customized_info", answer)


def keep_when_trimming(original: Callable[..., Any], self: Any, output: Any) -> Any:
    trimmed = original(self, output)
    trimmed.customized_info = output.customized_info
    return trimmed


def keep_when_replaying(original: Callable[..., Any], self: Any, forward_batch: Any, **kwargs: Any) -> Any:
    answers = []

    def remember(answer: Any) -> Any:
        answers.append(answer)
        return answer

    with passed_through(self, remember):
        output = original(self, forward_batch, **kwargs)
    if answers and hasattr(output, PART):
        output.customized_info = answers[-1].customized_info
    return output


FIX = Fix(
    probe=probe,
    patches=points(keep_when_trimming, keep_when_replaying),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(PREFILL_GRAPHS, MODEL_OF_YOUR_OWN),
)
