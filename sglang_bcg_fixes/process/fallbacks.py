# SPDX-License-Identifier: Apache-2.0
"""The reason why a prefill runs eagerly: SGLang counts such passes without one."""

from __future__ import annotations

import bisect
import sys
from typing import Any

from sglang_bcg_fixes.engine.slots import core
from sglang_bcg_fixes.engine.wrappers import INNER, MARK, is_ours


def why(runner: Any, batch: Any) -> str:
    """The fix that refused it, or the first of SGLang's own reasons that the batch shows."""
    fix = refusing_fix(runner, batch)
    if fix is not None:
        return f"fix {fix}"
    tokens = 0 if batch.input_ids is None else len(batch.input_ids)
    padded = bucket(runner.capture_num_tokens, tokens)
    most = getattr(sys.modules[type(runner).__module__], "_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR", None)
    captured, wanted = getattr(runner, "capture_hidden_mode", None), batch.capture_hidden_mode
    reasons = {
        "drafts are verified": batch.forward_mode.is_target_verify(),
        "longer than the largest bucket": padded is None,
        "padding would be most of it": most is not None and padded is not None and padded > tokens * most,
        "input embeddings": batch.input_embeds is not None or batch.replace_embeds is not None,
        "hidden states are wanted": captured is not None and wanted is not None and captured < wanted,
        "logprobs are wanted": batch.return_logprob,
        "another rank": batch.global_num_tokens_cpu is not None,
        # only the runner of 0.5.11 captures the whole model, which is for one request
        "several requests": batch.batch_size > 1 and not hasattr(runner, "layer_model"),
    }
    return next((reason for reason, holds in reasons.items() if holds), "by the runner")


def bucket(captured: list[int], wanted: int) -> int | None:
    index = bisect.bisect_left(captured, wanted)
    return captured[index] if index < len(captured) else None


def refusing_fix(runner: Any, batch: Any) -> str | None:
    """The innermost that says no, where it is a fix of ours and not SGLang itself."""
    kind = type(runner)
    asked = [core(getattr(kind, "can_run_graph", None) or kind.can_run)]
    while is_ours(asked[-1]) and INNER in vars(asked[-1]):
        asked.append(core(vars(asked[-1])[INNER]))
    # from inside, so that whatever counts refusals outside is not asked again
    for gate in reversed(asked):
        if not gate(runner, batch):
            return str(getattr(gate, MARK)) if is_ours(gate) else None
    return None
