# SPDX-License-Identifier: Apache-2.0
"""The key that an ended request is cached under, and where each release has what a request holds."""

from __future__ import annotations

from typing import Any

FILE = "sglang.srt.managers.schedule_batch"
# newest first
LENGTHS = ("owned_kv_len", "effective_kv_committed_len", "_cache_commit_len")
KEYS = tuple(f"{FILE}:Req.{name}" for name in LENGTHS)
RELEASE = "sglang.srt.mem_cache.common:release_kv_cache"
# of a request that is to leave nothing in the cache when it ends
SKIPS = "skip_radix_cache_insert"


def key_length(request: Any) -> int:
    """Count the tokens that an ended request is cached under."""
    length: int = next(getattr(request, name) for name in LENGTHS if hasattr(request, name))()
    return length


def held(request: Any, name: str) -> Any:
    """A value of the request, or of what later releases keep what it holds in."""
    return getattr(request if hasattr(request, name) else request.kv, name)
