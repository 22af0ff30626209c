# SPDX-License-Identifier: Apache-2.0
"""Wrong answers, or the server ends, at full load with --strip-thinking-cache

Symptom: Any model with --strip-thinking-cache, once requests are retracted: the log says "KV cache pool is full.
Retract requests." Later answers of other requests are wrong, or the server ends: once it is idle with "pool memory leak
detected!", as on an H200, and on 0.5.22 and 0.5.23 with `AssertionError: req.kv.cache_protected_len=...` as the
retracted request ends.
Cause: A request that comes back after it was retracted is computed and cached with the thinking that it had. When it
ends, its key is cut back to the prompt, and all slots behind that are freed, also those that the prefix cache has. They
get new owners, and are freed again when the cache evicts them: two requests share slots.
Change: A request that the cache has more of than its prompt is cached with all its tokens, as without that flag. Others
are cut back as before.
Remove when: Every release that has to be served frees no slot that the prefix cache has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.cached_keys import KEYS, RELEASE, held
from sglang_bcg_fixes.anatomy.launches import PREFIX_CACHE, STRIPPED_THINKING
from sglang_bcg_fixes.anatomy.workarounds import THINKING_KEPT
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, wrong

CUTS = tuple(f"min({of}.kv_committed_len, len(self.origin_input_ids))" for of in ("self", "self.kv"))
FREES = "sglang.srt.mem_cache.common:_release_overallocated_kv_indices"


def probe(source: Source) -> Finding:
    key = source.need(*KEYS)
    if not key.mentions("strip_thinking_cache"):
        return absent("a key is not cut back to the prompt", key)
    if not any(key.mentions(cut) for cut in CUTS):
        return drifted("a key is cut back", key)
    # a function of its own from 0.5.16 on
    return affected("slots behind the prompt are freed, also those in the cache", key, source.need(FREES, RELEASE))


def key_with_what_is_cached(original: Callable[..., int], self: Any) -> int:
    length = original(self)
    if length >= held(self, "cache_protected_len"):
        return length
    committed: int = held(self, "kv_committed_len")
    return committed


FIX = Fix(
    probe=probe,
    patches=(PatchPoint(KEYS, How.AROUND, key_with_what_is_cached),),
    workarounds=THINKING_KEPT,
    verify=("llama_stripped_thinking_at_full_load",),
    concerns=wrong(STRIPPED_THINKING, PREFIX_CACHE),
)
