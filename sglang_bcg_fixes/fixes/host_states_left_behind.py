# SPDX-License-Identifier: Apache-2.0
"""Wrong answers on prefixes from host memory: HiCache, GLM-5.3-Flash and Qwen3.8-Flash-Next

Symptom: With --enable-hierarchical-cache, a prompt whose prefix is loaded from host memory is answered wrong. The
answer has status 200, all of the prefix counts as cached, and nothing is in the log.
Cause: Keys, values and the recurrence's states are carried to the host. What these models keep beside them is not: the
index keys of sparse attention (DSA, QSA), and states of n-gram embeddings (PLE). A prefix that comes back meets those
of another request, or none.
Change: Nothing of such a model is written to the host, and nothing is fetched from storage behind it. A prefix that
has left the GPU is computed anew. The log says so at the start. With --hicache-write-policy write_back SGLang's own log
then names host memory pressure. Other models are carried as before.
Remove when: 0.5.20 and 0.5.21 need not be served.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import HOST_CACHE, named
from sglang_bcg_fixes.anatomy.workarounds import HOST_CACHE_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

CACHE = "sglang.srt.mem_cache"
POOLS_BESIDE = f"{CACHE}.ple_state_pool"
REGISTER = f"{CACHE}.memory_pool:MambaPool.register_slot_state"
HOST_POOL = f"{CACHE}.pool_host.mamba:MambaPoolHost"
STACK = f"{CACHE}.hybrid_cache.hybrid_pool_assembler:build_hybrid_mamba_stack"
# with the tree in Rust, too
TREE = f"{CACHE}.unified_radix_cache:UnifiedRadixCache"
WRITE, FETCH = f"{TREE}._execute_and_commit_kv_backup", f"{TREE}.prefetch_from_storage"
BEGIN = f"{TREE}.init_hicache"
NO_ROOM = "if host_indices is None:"
logger = logging.getLogger("sglang_bcg_fixes")
MESSAGE = (
    "HiCache keeps no prefix of this model on the host: this SGLang does not carry its %s there. A prefix that has left"
    " the GPU is computed anew. Leave out --enable-hierarchical-cache to free that host memory."
)


def probe(source: Source) -> Finding:
    if not source.has_module(POOLS_BESIDE):
        return absent("no hybrid model of this release keeps anything beside keys, values and the recurrence's states")
    register = source.need(REGISTER)
    stack, host_pool, write = source.need(STACK), source.need(f"{HOST_POOL}.__init__"), source.need(WRITE)
    carries = (stack.mentions("QSAIndexerPoolHost"), stack.mentions("decls"), host_pool.mentions("slot_state"))
    if all(carries):
        return fixed("index keys and states beside the cache are carried to the host", register, stack, host_pool)
    if any(carries) or not write.mentions(NO_ROOM):
        return drifted("prefixes are carried to the host", stack, host_pool, write)
    read = (register, stack, host_pool, write, source.need(FETCH), source.need(BEGIN).header)
    return affected("keys, values and the recurrence's states alone are carried to the host", *read)


def left_behind(tree: Any) -> list[str]:
    """Name what the pools of a hybrid model hold for a prefix, and the host does not get."""
    if not tree.supports_mamba():
        return []
    keys = tree.token_to_kv_pool_allocator.get_kvcache()
    found = {
        "states of n-gram embeddings": getattr(tree.req_to_token_pool.mamba_pool, "_slot_siblings", ()),
        "index keys (QSA)": hasattr(keys, "qsa_compressed_k_buffer_pool"),
        "index keys (DSA)": hasattr(getattr(keys, "full_kv_pool", None), "index_k_with_scale_buffer"),
    }
    return [name for name, held in found.items() if held]


def write_nothing(original: Callable[..., int], self: Any, *args: Any, **kwargs: Any) -> int:
    # as where the host has no room
    return 0 if left_behind(self) else original(self, *args, **kwargs)


def fetch_nothing(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    # as where there is no storage
    return None if left_behind(self) else original(self, *args, **kwargs)


def say_so(result: Any, self: Any, *_: Any, **__: Any) -> Any:
    names = left_behind(self)
    if names:
        logger.warning(MESSAGE, " and ".join(names))
    return result


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/issues/39156",
        "https://github.com/sgl-project/sglang/issues/39830",
        "https://github.com/sgl-project/sglang/pull/39862",
    ),
    probe=probe,
    patches=(
        PatchPoint((WRITE,), How.AROUND, write_nothing),
        PatchPoint((FETCH,), How.AROUND, fetch_nothing),
        PatchPoint((BEGIN,), How.AFTER, say_so),
    ),
    workarounds=HOST_CACHE_OFF,
    concerns=wrong(HOST_CACHE, named("Glm5Next*", "Qwen4Exp*")),
)
