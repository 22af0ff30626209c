# SPDX-License-Identifier: Apache-2.0
"""The methods we install over FlashAttentionBackend's metadata methods: the same fields, filled by a launch or two.

Nothing here allocates what SGLang preallocates, and nothing waits for the device. Batches that are not known to give
equal results fall back to SGLang's own method; the log gives each reason once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.fa_metadata.adapter import eager_step, replay_step
from sglang_bcg_fixes.kernels.fa_metadata.adapter.step import FallBack
from sglang_bcg_fixes.kernels.fa_metadata.declaration import KERNEL

Original = Callable[..., Any]


def eager(original: Original, self: Any, forward_batch: Any) -> Any:
    try:
        return eager_step.EagerStep(self, forward_batch).fill()
    except FallBack as reason:
        active.selected(KERNEL.op).fall_back(str(reason))
    return original(self, forward_batch)


def replay(original: Original, self: Any, *positional: Any, **named: Any) -> Any:
    given = dict(zip(parameters(original), positional, strict=False)) | named
    try:
        return replay_step.ReplayStep(self, given).fill()
    except FallBack as reason:
        active.selected(KERNEL.op).fall_back(str(reason))
    return original(self, *positional, **named)


@functools.cache
def parameters(original: Original) -> tuple[str, ...]:
    """List the parameters after `self`; releases have them in different orders."""
    return tuple(inspect.signature(original).parameters)[1:]
