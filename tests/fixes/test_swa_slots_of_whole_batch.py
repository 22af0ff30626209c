"""The halves of a batch in a real sliding window pool."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

CODE = """
import json, types
from cpu_sglang import stand_ins
stand_ins.install()
import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang_bcg_fixes.fixes.swa_slots_of_whole_batch import FIX
from sglang_bcg_fixes.engine.ledger import Ledger

pool = SWAKVPool(
    size=16, size_swa=16, page_size=1, dtype=torch.float32, head_num=1, head_dim=4, swa_attention_layer_ids=[0],
    full_attention_layer_ids=[1], enable_kvcache_transpose=False, device="cpu")
pool.full_to_swa_index_mapping = torch.arange(17).flip(0)
layer, slots = types.SimpleNamespace(layer_id=0), torch.tensor([3, 4, 5, 6, 7])
pool.set_swa_loc(pool.translate_loc_from_full_to_swa(slots))
keys, values = pool.get_kv_buffer(0)

def store(*parts):
    keys.zero_()
    try:
        for part in parts:
            rows = slots[part].view(-1, 1, 1).expand(-1, 1, 4).float()
            pool.set_kv_buffer(layer, slots[part], rows, rows)
    except Exception as error:
        return str(error).partition(":")[0]
    return keys[:, 0, 0].tolist()

def look():
    return {"whole": store(slice(None)), "halves": store(slice(0, 2), slice(2, 5)), "kept": pool.swa_loc.tolist()}

ledger, found = Ledger(), {"without": look()}
ledger.apply(FIX)
print("RESULT", json.dumps({**found, "with": look()}))
"""


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1"])
def test_each_half_goes_to_its_own_slots(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found, _ = processes.beside(release_root(release), "-c", CODE)
    # slot n of the one pool is slot 16 - n of the other
    right = [float(16 - row) if 16 - row in range(3, 8) else 0.0 for row in range(17)]
    same = {"whole": right, "kept": [13, 12, 11, 10, 9]}
    assert found["without"] == {**same, "halves": "shape mismatch"}
    assert found["with"] == {**same, "halves": right}
