"""The table of n-gram embeddings as the real runner allots it, beside the real pool that numbers the requests."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from tests import processes

CODE = """
import json, types
from cpu_sglang import stand_ins
stand_ins.install()
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang_bcg_fixes.fixes.ngram_table_overflow import FIX
from sglang_bcg_fixes.engine.ledger import Ledger

REQUESTS, LENGTH = 3, 16
pool = ReqToTokenPool(REQUESTS, LENGTH, "cpu", enable_memory_saver=False)

def table(used=True):
    runner = types.SimpleNamespace(model_config=types.SimpleNamespace(use_ngram_embedding=used, context_len=LENGTH),
        req_to_token_pool=pool, device="cpu", server_args=types.SimpleNamespace(chunked_prefill_size=8),
        model=types.SimpleNamespace(modules=list), max_running_requests=REQUESTS, token_table=None)
    ModelRunner.maybe_init_ngram_embedding(runner)
    return runner.token_table

found = {"last": max(pool.free_slots), "without": list(table().shape)}
Ledger().apply(FIX)
print("RESULT", json.dumps({**found, "with": list(table().shape), "dtype": str(table().dtype), "none": table(False)}))
"""


def test_the_last_request_has_a_row(release_root: Callable[[str], pathlib.Path]) -> None:
    found, _ = processes.beside(release_root("0.5.11"), "-c", CODE)
    assert found["last"] == 3 and found["without"] == [3, 16]
    assert found["with"] == [4, 16] and found["dtype"] == "torch.int32"
    assert found["none"] is None
