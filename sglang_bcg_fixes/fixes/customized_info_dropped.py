"""A replayed prefill drops what a model adds to its answer

Symptom: With a model that fills in customized_info (SGLang's own do not: plugins' and private ones), meta_info has one
entry less than there are tokens, and each entry stands beside the token before its own; or there is none at all for a
request that only prefills. Eagerly, and in decode, it is there.
Cause: Behind a replay the runner makes a new answer of the parts it knows, to cut the padding off. The runner of decode
graphs knows this part, the one of prefill graphs does not.
Change: The new answer is given the customized_info of the one that it was made of. With 0.5.11's graphs, which hold the
whole model, no Python runs at a replay that could make it; single_request_capture changes that, and keeps it.
Remove when: No release before 0.5.21 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.model import Fix, How, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.source.tree import Source, absent, affected, fixed

TRIM = f"{PREFILL}._trim_logits_output"
REPLAYS = (f"{OLD_PREFILL}.replay", f"{PREFILL}.execute")
PART = "customized_info"


def probe(source: Source) -> Finding:
    answer = answer_maker(source)
    if answer.mentions(PART):
        return fixed("the answer of a replay keeps customized_info", answer)
    if not trims(source) and "self.model_runner.model.forward" not in answer.calls:
        return absent("no Python that could make customized_info runs at a replay", answer)
    return affected("the answer of a replay is made without customized_info", answer)


def answer_maker(source: Source) -> Definition:
    return source.need(TRIM, *REPLAYS)


def trims(source: Source) -> bool:
    return source.find(TRIM) is not None


def keep_when_trimming(original: Callable[..., Any], self: Any, output: Any) -> Any:
    trimmed = original(self, output)
    trimmed.customized_info = output.customized_info
    return trimmed


def keep_when_replaying(original: Callable[..., Any], self: Any, forward_batch: Any, **kwargs: Any) -> Any:
    # a compiler would see another function in the place of forward, and compile the model again
    if self.layer_model is None:
        return original(self, forward_batch, **kwargs)
    model, answers = self.model_runner.model, []
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        answers.append(forward(*args, **kwargs))
        return answers[-1]

    with replaced(model, "forward", watched):
        output = original(self, forward_batch, **kwargs)
    if answers and hasattr(output, PART):
        output.customized_info = answers[-1].customized_info
    return output


FIX = Fix(
    id="customized_info_dropped",
    doc=__doc__,
    upstream=(),
    probe=probe,
    patches=(
        PatchPoint((TRIM,), How.AROUND, keep_when_trimming, needed=trims),
        PatchPoint(REPLAYS, How.AROUND, keep_when_replaying, needed=lambda source: not trims(source)),
    ),
    mitigations=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
)
