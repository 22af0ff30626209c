# SPDX-License-Identifier: Apache-2.0
"""All fixes at once, and two that patch one module: each mends what it mends alone, and nothing else changes.

`pytest --everything` combines every two.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes
from tests.releases import fix_pairs

FOUND_IN = {
    "0.5.11": (
        "decode_req_indices_stale",
        "draft_extend_cache_extent",
        "layers_routed_by_id",
        "linear_attention_captured",
        "single_request_capture",
        "swa_stale_padding",
        "unbroken_mixer_captured",
    ),
    "0.5.12.post1": (
        "decode_req_indices_stale",
        "draft_extend_cache_extent",
        "layers_routed_by_id",
        "linear_attention_captured",
        "stack_call_signature",
        "swa_stale_padding",
        "unbroken_mixer_captured",
    ),
}
ILLEGAL = "illegal memory access"
RIGHT_IN_A_GRAPH = {"right": True, "replayed": True}
RIGHT_WITHOUT = {"right": True, "replayed": False}
CAPTURED = [fix_pairs.BUCKET]


def expected(release: str, on: set[str]) -> dict[str, Any]:
    """The expected observations; of an error, a part of its text."""
    mended, early = on.__contains__, release == "0.5.11"
    captured: Any = CAPTURED
    one: Any = RIGHT_IN_A_GRAPH
    two: Any = RIGHT_IN_A_GRAPH
    if early and not mended("single_request_capture"):
        two = RIGHT_WITHOUT
    if not mended("linear_attention_captured"):
        if mended("unbroken_mixer_captured"):
            captured, one, two = "captured nothing", RIGHT_WITHOUT, RIGHT_WITHOUT
        else:
            one = ILLEGAL
            two = two if two is RIGHT_WITHOUT else ILLEGAL
    no_order = not early and not mended("stack_call_signature")
    return {
        "list of a draft": RIGHT_WITHOUT if mended("layers_routed_by_id") else "no attribute 'qk_head_dim'",
        "capture": captured,
        "one request": one,
        "two requests": two,
        "phi": "no attribute 'flatten'" if no_order else CAPTURED,
        "draft extend": [20, 5] if mended("draft_extend_cache_extent") else [24, 9],
        "rows": [1, 2, 3, 0 if mended("decode_req_indices_stale") else 4],
        "slots": [5, 6, 7, 8 if early and not mended("swa_stale_padding") else 0],
        "breakable runner": early or mended("swa_stale_padding"),
    }


@pytest.mark.parametrize("release", FOUND_IN)
def test_each_fix_does_the_same_beside_every_other(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, release: str, everything: bool
) -> None:
    fixes, target = FOUND_IN[release], tmp_path / "found.json"
    combined = fix_pairs.combinations(fixes, every_pair=everything)
    assert len(combined) > 3
    done = processes.on_cpu(
        release_root(release),
        *("-m", "tests.releases.fix_pairs", str(target), *map("+".join, combined)),
        environment={"SGLANG_BCG_REPORT_DIR": str(tmp_path / "reports")},
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(target.read_text())
    assert [tuple(row["on"]) for row in rows] == combined
    for row in rows:
        on = set(row.pop("on"))
        seen: dict[str, Any] = {}
        # a fix is applied where its module is imported, which not every one of the processes does
        assert {fix for observed in row.values() for fix in observed.pop("applied")} == on
        for observed in row.values():
            seen |= observed
        wanted = expected(release, on)
        assert seen.keys() == wanted.keys()
        for what, outcome in wanted.items():
            as_wanted = outcome in seen[what] if isinstance(outcome, str) else outcome == seen[what]
            assert as_wanted, f"{release} with {sorted(on) or 'none'}: {what} is {seen[what]}, not {outcome}"
