# SPDX-License-Identifier: Apache-2.0
"""States and keys beside the cache of hybrid models, on prefixes from the host: red, green, and other models."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import host_states_left_behind as fix
from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "host_states_left_behind"
KINDS = "states", "qsa", "dsa"
# tokens that are found, whether what is beside them is theirs, and whether the answer of the layers is the cold one
FOUND, COLD, WRONG = [128, True, True], [0, True, True], [128, False, True]
SAID = "HiCache keeps no prefix of this model on the host"


def run(release: str, kind: str, **server: Any) -> tuple[Any, str]:
    return alone.logged(FIX, release, "tests.scenarios.host_hits", kind, json.dumps(server))


@pytest.mark.parametrize(("release", "trees"), [("0.5.20", ["python"]), ("0.5.21", ["python", "rust"])])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_that_has_left_the_gpu_is_computed_anew(release: str, kind: str, trees: list[str]) -> None:
    found, log = run(release, kind)
    assert found["trees"] == trees and found["applied"] == [FIX] and SAID in log
    assert found["with"] == {"device": FOUND, "on the host": False, "host": COLD}
    assert found["without"] == {"device": FOUND, "on the host": True, "host": WRONG}


def test_neither_is_it_written_when_it_leaves_the_gpu() -> None:
    found, _ = run("0.5.21", "states", hicache_write_policy="write_back")
    assert found["with"] == {"device": FOUND, "on the host": False, "host": COLD}
    assert found["without"] == {"device": FOUND, "on the host": True, "host": WRONG}


def test_other_hybrid_models_keep_their_host_hits() -> None:
    found, log = run("0.5.21", "nothing")
    assert found["applied"] == [FIX] and SAID not in log
    assert found["with"] == found["without"] == {"device": FOUND, "on the host": True, "host": FOUND}


@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_release_carries_it_and_is_left_as_it_is(kind: str) -> None:
    found, _ = run(NEWEST, kind)
    assert found["applied"] == []
    assert found["without"] == {"device": FOUND, "on the host": True, "host": FOUND}


def tree(hybrid: bool, states: tuple[object, ...] = (), **keys: Any) -> Any:
    return SimpleNamespace(
        supports_mamba=lambda: hybrid,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: SimpleNamespace(**keys)),
        req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(_slot_siblings=states)),
    )


@pytest.mark.parametrize(
    ("of", "names"),
    [
        (tree(True), []),
        (tree(True, full_kv_pool=SimpleNamespace()), []),
        (tree(True, (object(),), qsa_compressed_k_buffer_pool=[]), ["states of n-gram embeddings", "index keys (QSA)"]),
        (tree(True, full_kv_pool=SimpleNamespace(index_k_with_scale_buffer=[])), ["index keys (DSA)"]),
        # those of models without a recurrence are carried
        (tree(False, full_kv_pool=SimpleNamespace(index_k_with_scale_buffer=[])), []),
    ],
)
def test_pools_are_judged_and_not_names_of_models(of: Any, names: list[str]) -> None:
    assert fix.left_behind(of) == names
    # nor is anything fetched that another server has stored
    assert fix.fetch_nothing(lambda self, request: request, of, "asked") == (None if names else "asked")


@pytest.mark.parametrize(
    ("release", "file", "old", "new"),
    [
        (NEWEST, "hybrid_cache/hybrid_pool_assembler.py", "host_pool=QSAIndexerPoolHost(", "host_pool=OtherPoolHost("),
        ("0.5.21", "unified_radix_cache.py", "if host_indices is None:", "if not host_indices:"),
    ],
)
def test_a_later_source_is_read_and_not_guessed(release: str, file: str, old: str, new: str) -> None:
    assert alone.verdict(FIX, release, f"sglang/srt/mem_cache/{file}", old, new) is Verdict.UNKNOWN
