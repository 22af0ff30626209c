# SPDX-License-Identifier: Apache-2.0
"""The table of n-gram embeddings as the real runner allots it, beside the pool of its requests."""

from __future__ import annotations

import types
from typing import Any

from cpu_sglang import stand_ins
from sglang_bcg_fixes.engine.ledger import Ledger
from sglang_bcg_fixes.fixes import ngram_table_overflow
from sglang_bcg_fixes.planning.registry import declared_in
from tests.scenarios import telling

FIX = declared_in(ngram_table_overflow)

REQUESTS, LENGTH = 3, 16


def main() -> None:
    stand_ins.install()
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    pool = ReqToTokenPool(REQUESTS, LENGTH, "cpu", enable_memory_saver=False)

    def table(used: bool = True) -> Any:
        runner = types.SimpleNamespace(
            model_config=types.SimpleNamespace(use_ngram_embedding=used, context_len=LENGTH),
            req_to_token_pool=pool,
            device="cpu",
            server_args=types.SimpleNamespace(chunked_prefill_size=8),
            model=types.SimpleNamespace(modules=list),
            max_running_requests=REQUESTS,
            token_table=None,
        )
        ModelRunner.maybe_init_ngram_embedding(runner)
        return runner.token_table

    found = {"last": max(pool.free_slots), "without": list(table().shape)}
    Ledger().apply(FIX)
    telling.result({**found, "with": list(table().shape), "dtype": str(table().dtype), "none": table(False)})


if __name__ == "__main__":
    main()
