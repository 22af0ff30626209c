# SPDX-License-Identifier: Apache-2.0
"""The explorer draws everything, names the fixes that a launch needs, makes it small, and finds a known defect."""

from __future__ import annotations

import json
from typing import Any

from tests import explore, wheels
from tests.scenarios import explored

SEVERAL = [explore.drawn(number, explore.RELEASES) for number in range(400)]
ANSWERED = {"refused": False, "wrong": [], "applied": ["a", "b", "c", "d", "e"], "replays": 3}
WRONG = ANSWERED | {"wrong": [{"turn": 1}]}


def test_everything_is_drawn_and_the_same_number_draws_the_same() -> None:
    assert json.dumps(explore.drawn(7, explore.RELEASES)) == json.dumps(SEVERAL[7])
    assert {draw["release"] for draw in SEVERAL} == {*explore.RELEASES}
    assert {draw["architecture"] for draw in SEVERAL} == {*explore.HYBRIDS, *explore.OTHERS}
    assert {name for draw in SEVERAL for name in draw["happens"]} == {*explored.HAPPENINGS}
    assert {tuple(draw["graphs"]) for draw in SEVERAL} == {*map(tuple, explore.GRAPHS)}
    for name, values in {**explore.SERVER, **explore.OF_HYBRIDS}.items():
        assert {draw["server"][name] for draw in SEVERAL if name in draw["server"]} == {*values}


def test_nothing_is_drawn_that_a_release_does_not_have() -> None:
    for draw in SEVERAL:
        assert explore.has(draw["release"], draw["architecture"])
        assert explored.HOSTS not in draw["happens"] or explore.has_host_pools(draw["release"])
    buffered = {
        draw["architecture"]
        for draw in SEVERAL
        if draw["release"] == "0.5.12.post1" and "extra" in draw["server"].get("mamba_radix_cache_strategy", "")
    }
    assert buffered == {"Qwen3NextForCausalLM"}
    assert not explore.has("0.5.17", "MiniCPMSALAForCausalLM") and not explore.has_host_pools("0.5.12.post1")


def is_on(name: str, environment: dict[str, str]) -> bool:
    every = environment["SGLANG_BCG_FIXES"] == "auto"
    return every or f"SGLANG_BCG_FIX_{name.upper()}" in environment


def test_the_fixes_that_a_launch_needs_are_named() -> None:
    for needed in (["c"], ["a", "e"], ["a", "b", "c", "d", "e"]):

        def run(draw: explore.Draw, environment: dict[str, str], needed: list[str] = needed) -> explore.Found:
            return ANSWERED if all(is_on(name, environment) for name in needed) else WRONG

        line = explore.examined(SEVERAL[0], run, stock=True)
        assert sorted(line["fixes"]) == needed and line["outcome"] == "answers wrongly"
        number, release = SEVERAL[0]["number"], SEVERAL[0]["release"]
        said = [*explore.summary([line])]
        assert all(f"found again 1 times: {name}, first on {release} by number {number}" in said for name in needed)


def test_a_launch_is_made_as_small_as_what_is_wrong_with_it_needs() -> None:
    draw = next(draw for draw in SEVERAL if explored.ABORTS in draw["happens"] and len(draw["happens"]) > 1)
    draw["server"]["page_size"] = 64

    def run(draw: explore.Draw, environment: dict[str, str]) -> explore.Found:
        needs = draw["turns"] >= 3 and explored.ABORTS in draw["happens"] and draw["server"]["page_size"] == 64
        return WRONG if needs else ANSWERED

    small = explore.examined(draw, run, stock=False)["small"]
    assert (small["turns"], small["happens"], small["graphs"]) == (3, [explored.ABORTS], [])
    plain = {name: values[0] for name, values in {**explore.SERVER, **explore.OF_HYBRIDS}.items()} | {"page_size": 64}
    assert {name: small["server"][name] for name in plain if name in small["server"]}.items() <= plain.items()


def test_one_that_sglang_refuses_with_and_without_fixes_is_no_find() -> None:
    def refuses(refused: bool) -> Any:
        return lambda draw, environment: {"refused": refused, "ends": "ValueError: page size 64 is none"}

    line = explore.examined(SEVERAL[0], refuses(True), stock=False)
    assert line["outcome"] == "is refused: ValueError: page size N is none" and "small" not in line
    assert "small" in explore.examined(SEVERAL[0], refuses(False), stock=False)


def test_a_known_defect_is_found_with_the_fixes_off_and_not_with_them_on() -> None:
    draw = {
        **{"release": "0.5.16", "architecture": "FalconH1ForCausalLM", "happens": [explored.THINKS]},
        **{"model": explore.HYBRIDS["FalconH1ForCausalLM"][1], "graphs": [], "turns": 9, "seed": 4},
        "server": explore.with_old_names(
            {
                "dtype": "float32",
                "disable_overlap_schedule": True,
                "page_size": 64,
                "chunked_prefill_size": 192,
                "enable_mixed_chunk": True,
                "mamba_radix_cache_strategy": "extra_buffer",
            }
        ),
    }
    stock, patched = (explore.run(draw, fixes) for fixes in (explore.NO_FIX, explore.EVERY_FIX))
    assert explore.outcome(stock) == "answers wrongly" and explore.outcome(patched) == explore.RIGHT
    assert patched["hits"]


def test_what_happens_to_requests_happens() -> None:
    """Structured output ends the launch at a token that its grammar does not allow."""
    draw = next(
        draw for draw in SEVERAL if draw["release"] == wheels.NEWEST and draw["architecture"] == "LlamaForCausalLM"
    )
    happens = [explored.RANKS, explored.FORMS, explored.SLEEPS, explored.HOSTS]
    found = explore.run({**draw, "happens": happens, "turns": 24, "seed": 1, "graphs": []}, explore.EVERY_FIX)
    assert explore.outcome(found) == explore.RIGHT, found
    assert all(found[name] for name in happens)
