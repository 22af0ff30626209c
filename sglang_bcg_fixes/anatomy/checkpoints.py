# SPDX-License-Identifier: Apache-2.0
"""The slots that a request saves its states to, in turn, and where the scheduler exchanges them."""

from __future__ import annotations

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
