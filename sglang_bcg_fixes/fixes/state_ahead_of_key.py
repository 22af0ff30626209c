# SPDX-License-Identifier: Apache-2.0
"""Next turn wrong, or server ends: stripped thinking; grammars with speculation (hybrids)

Symptom: Hybrid models (Qwen3.5, Qwen3-Next, NemotronH, Kimi-Linear and others) with --strip-thinking-cache and the
extra-buffer strategy of the Mamba prefix cache, when thinking and answer have passed a multiple of
--mamba-track-interval. On 0.5.11 to 0.5.15.post1 "It is required cache_len=" ends the server. On 0.5.16 to 0.5.21 the
next turn is answered wrong, and nothing is in the log. The same happens without that flag where speculation has
accepted tokens behind the end of a grammar (0.5.14 to 0.5.22) or behind a stop (0.5.22), with the strategy no_buffer;
behind the end of a grammar with an extra buffer, too (0.5.14 to 0.5.21).
Cause: When a request has ended, its cached key is cut back: to the prompt without the thinking, to the stop, or to the
end of the grammar. The state of a recurrence cannot be cut back. The last checkpoint, or with no_buffer the live state,
is behind the key's end, and is cached under it all the same. With an extra buffer SGLang counts all accepted tokens
back from the grammar's end, finds a checkpoint that it has counted before, and caches the other one under its length.
Change: Nothing of such a request is cached when it ends. Its prompt was cached before the answer began, and stays.
Remove when: No release before 0.5.23 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.cached_keys import KEYS, RELEASE, SKIPS, held, key_length
from sglang_bcg_fixes.anatomy.checkpoints import CHECK, PROCESSOR
from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, HYBRID, NO_BUFFER, SPECULATION, STRIPPED_THINKING
from sglang_bcg_fixes.model import Workaround
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, wrong

TREES = "sglang.srt.mem_cache"
COMPONENTS = (
    f"{TREES}.unified_cache.components.mamba:MambaComponent",
    f"{TREES}.unified_cache.components.mamba_component:MambaComponent",
    f"{TREES}.unified_cache_components.mamba_component:MambaComponent",
)
SELECTS = tuple(f"{component}._select_finished_checkpoint" for component in COMPONENTS)
DONATES = tuple(f"{component}.prepare_for_caching_req" for component in COMPONENTS)
OLD_TREE = f"{TREES}.mamba_radix_cache:MambaRadixCache.cache_finished_req"
ACCEPT = f"{PROCESSOR}._accept_grammar_tokens"
GUARD = f"{PROCESSOR}._mamba_can_cache_finished_req"
COUNTED_BACK = "prev = cur - result.num_correct_drafts_per_req_cpu[i] - 1"
SHORTER_KEYS_OFF = Workaround(
    flags="(leave out) --strip-thinking-cache; with speculation --disable-radix-cache",
    option="--disable-radix-cache",
    effect="thinking takes room in the prefix cache; without that cache every prompt is computed anew",
)


def probe(source: Source) -> Finding:
    releases, key, donates = source.need(RELEASE), source.need(*KEYS), source.need(*DONATES)
    guard = source.find(GUARD)
    if guard is not None:
        if guard.mentions("req.owned_kv_len() != req.kv.kv_committed_len"):
            return fixed("no state is cached under a key that ends before it", guard, donates)
        return drifted("a state and its key are compared", guard)
    if not releases.mentions(SKIPS):
        return drifted("a request is kept out of the cache", releases)
    read = [releases, key, donates, *([source.need(CHECK)] if cuts_at_a_grammar(source) else [])]
    if cuts_at_a_stop(source):
        return affected("a live state is cached under a key that ends at a stop before it", *read)
    if cuts_thinking(source):
        # the default tree before 0.5.16
        read += [source.need(OLD_TREE)] if source.has_module(OLD_TREE.partition(":")[0]) else []
        return affected("a checkpoint is cached under a key that ends before it", *read)
    return drifted("a key is cut back", key)


def cuts_thinking(source: Source) -> bool:
    """Tell whether a checkpoint may lie behind a key that is cut back."""
    return selects(source) is None and source.need(*KEYS).mentions("strip_thinking_cache")


def cuts_at_a_stop(source: Source) -> bool:
    key = source.need(*KEYS)
    return selects(source) is not None and source.find(GUARD) is None and key.mentions("output_ids_through_stop")


def cuts_at_a_grammar(source: Source) -> bool:
    return source.find(ACCEPT) is not None and source.find(GUARD) is None


def counts_a_cut_run_back(source: Source) -> bool:
    return cuts_at_a_grammar(source) and source.need(CHECK).mentions(COUNTED_BACK)


def counts_what_is_kept(source: Source) -> bool:
    return cuts_at_a_grammar(source) and not counts_a_cut_run_back(source)


def selects(source: Source) -> object | None:
    """The method that chooses an earlier checkpoint where there is one."""
    return next(filter(None, map(source.find, SELECTS)), None)


def keep_checkpoint_out(req: Any, tree_cache: Any, *_: Any, **__: Any) -> None:
    # one that has not ended is not cached, and may come back
    if not req.finished() or not tree_cache.supports_mamba():
        return
    saved = held(req, "mamba_last_track_seqlen")
    if tree_cache.req_to_token_pool.enable_mamba_extra_buffer and saved is not None and saved > key_length(req):
        req.skip_radix_cache_insert = True


def keep_live_state_out(req: Any, tree_cache: Any, *_: Any, **__: Any) -> None:
    if not req.finished() or not tree_cache.supports_mamba():
        return
    if not tree_cache.req_to_token_pool.enable_mamba_extra_buffer and held(req, "kv_committed_len") > key_length(req):
        req.skip_radix_cache_insert = True


def keep_cut_run_out(retained: list[int], self: Any, req: Any, tokens: int | list[int]) -> list[int]:
    # the count of the request's tokens is cut back too, and the key's length tells nothing later
    verified = 1 if isinstance(tokens, int) else len(tokens)
    if len(retained) < verified and self.tree_cache.supports_mamba():
        req.skip_radix_cache_insert = True
    return retained


def keep_cut_live_state_out(retained: list[int], self: Any, req: Any, tokens: int | list[int]) -> list[int]:
    tree = self.tree_cache
    # the pool of a model without states does not have that name
    if tree.supports_mamba() and not tree.req_to_token_pool.enable_mamba_extra_buffer:
        keep_cut_run_out(retained, self, req, tokens)
    return retained


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/24380",),
    probe=probe,
    patches=(
        PatchPoint((RELEASE,), How.BEFORE, keep_checkpoint_out, needed=cuts_thinking),
        PatchPoint((RELEASE,), How.BEFORE, keep_live_state_out, needed=cuts_at_a_stop),
        PatchPoint((ACCEPT,), How.AFTER, keep_cut_run_out, needed=counts_a_cut_run_back),
        PatchPoint((ACCEPT,), How.AFTER, keep_cut_live_state_out, needed=counts_what_is_kept),
    ),
    workarounds=(SHORTER_KEYS_OFF,),
    verify=("qwen3_next_stripped_thinking",),
    concerns=(
        *wrong(HYBRID, EXTRA_BUFFERS.where(cuts_thinking), STRIPPED_THINKING),
        *wrong(HYBRID, NO_BUFFER.where(cuts_at_a_grammar), SPECULATION),
        *wrong(HYBRID, EXTRA_BUFFERS.where(counts_a_cut_run_back), SPECULATION),
    ),
)
