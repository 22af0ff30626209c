# SPDX-License-Identifier: Apache-2.0
"""The slots that a request saves its states to, in turn, and where the scheduler exchanges them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MANAGERS = "sglang.srt.managers"
PROCESSOR = f"{MANAGERS}.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor"
UPDATE = f"{PROCESSOR}._mamba_prefix_cache_update"
CHECK = f"{PROCESSOR}._mamba_check_track_boundary"
OLD_UPDATE = f"{MANAGERS}.scheduler_output_processor_mixin:SchedulerOutputProcessorMixin._mamba_prefix_cache_update"
# of the slot that the next state goes to; None where a request has no slots
INDEX = "mamba_next_track_idx"


def holder(request: Any) -> Any:
    """The object with the index: a request, or what later releases keep what it holds in."""
    return request if hasattr(request, INDEX) else request.kv


def processed_length(request: Any) -> int:
    """Count the tokens that ended steps have read; the newest one has not been read yet."""
    return len(request.origin_input_ids) + len(request.output_ids) - 1


def check_processed(
    check: Callable[..., tuple[bool, int]], processor: Any, request: Any, batch: Any, result: Any, i: int
) -> tuple[bool, int]:
    """Ask CHECK by the length of the step whose result is processed, not by that of a step in flight."""
    ahead = request.kv_committed_len
    request.kv_committed_len = processed_length(request)
    try:
        return check(processor, request, batch, result, i)
    finally:
        request.kv_committed_len = ahead
