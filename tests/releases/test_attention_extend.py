# SPDX-License-Identifier: Apache-2.0
"""Prefill graphs with attention inside, against each release's own graphs and eager prefill, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_bcg_fixes.kernels.attention_extend.declaration import KERNEL
from tests import processes, wheels
from tests.releases import attention_prefill
from tests.wheels import NEWEST

Found = dict[str, Any]

# whose capture returns the graph and the answer
ONE = "0.5.12.post1"
# a window, sinks, and slots of its own
WINDOW = ("gpt_oss", '{"dtype": "bfloat16"}')
RUN = (
    *((release, "llama") for release in (ONE, "0.5.14", "0.5.17", "0.5.20", NEWEST)),
    *((release, *WINDOW) for release in (ONE, "0.5.17", NEWEST)),
)
TOO_MANY = "one more"
LAYERS = 2
HYBRID = "qwen3_5_text"
# windows as the model's, which is in half precision here
LINEAR_INSIDE = {"SGLANG_BCG_KERNEL_GDN_EXTEND": "triton", "SGLANG_MAMBA_CONV_DTYPE": "float16"}
ROUNDED = 0.05


def run(release: str, scenario: str, *arguments: str, **environment: str) -> Found:
    found: Found
    found, _ = processes.beside(
        wheels.unpacked(release),
        *("-m", "tests.releases.attention_prefill", scenario, *arguments),
        environment={KERNEL.flag: "fa3", **environment},
        timeout=600,
    )
    return found


def wrong_in(report: Found) -> list[str]:
    """Name what is not as in a report of graphs with attention inside."""
    wrong = []
    if report["twins"] != [[16, 1], [8, 1]]:
        wrong.append(f"twins {report['twins']}")
    # noted for the replay with attention inside, and for the one without
    if report["left"] != {"more than 3 requests in a batch": 2}:
        wrong.append(f"left {report['left']}")
    for name, batch in report["batches"].items():
        if batch["segments"] != [LAYERS + 1 if name == TOO_MANY else 1, LAYERS + 1]:
            wrong.append(f"{name}: segments {batch['segments']}")
        if not batch["same"] or batch["as eager"] != 0.0:
            wrong.append(f"{name}: other bits")
    return wrong


@pytest.mark.parametrize("case", RUN, ids=" ".join)
def test_replays_have_no_break_and_the_bits_of_graphs_with_breaks_and_of_eager(case: tuple[str, ...]) -> None:
    release, *model = case
    report = run(release, "right", *model)
    assert set(report["breaks"].values()) == {LAYERS} and TOO_MANY in report["batches"]
    assert wrong_in(report) == []


def test_what_a_captured_layer_cannot_read_is_replayed_with_breaks() -> None:
    report = run(NEWEST, "others", "llama")
    waits = report["loaded by layer"].pop()
    assert report == {
        "before": 1,
        "loaded by layer": [LAYERS + 1],
        "another backend": LAYERS + 1,
        "afterwards": 1,
        # the prefix is a batch, too
        "left": {"keys that are loaded layer by layer": 2, "another attention backend than the captured one": 2},
    }
    # the cache was told of every layer
    assert waits >= 2 * LAYERS


def assert_breaks_stay(report: Found, breaks: int) -> None:
    assert set(report["breaks"].values()) == {breaks} and report["twins"] == [] and report["ended"] == 0
    assert len(report["batches"]) == len(attention_prefill.BRIEF)
    for batch in report["batches"].values():
        assert batch == {"segments": [breaks + 1] * 2, "same": True, "as eager": 0.0}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        # nothing is applied before SGLang imports FlashAttention's backend
        (("llama", '{"attention_backend": "torch_native"}'), None),
        # two of linear attention, and two of attention
        ((HYBRID,), f"{LAYERS} layers that keep their break"),
    ],
    ids=["another backend", "linear layers outside"],
)
def test_refused_servers_answer_as_before(model: tuple[str, ...], reason: str | None) -> None:
    report = run(NEWEST, "brief", *model)
    assert_breaks_stay(report, 2 * LAYERS if HYBRID in model else LAYERS)
    assert report["left"] == ({reason: 1} if reason else {})


@pytest.mark.parametrize("release", ["0.5.17", NEWEST])
def test_with_linear_attention_inside_too_a_hybrid_has_no_break(release: str) -> None:
    report = run(release, "brief", HYBRID, **LINEAR_INSIDE)
    assert set(report["breaks"].values()) == {LAYERS} and report["left"] == {}
    assert report["twins"] == [[16, 1], [8, 1]] and len(report["batches"]) == len(attention_prefill.BRIEF)
    for batch in report["batches"].values():
        assert batch["segments"] == [1, LAYERS + 1] and batch["same"], batch
        # the linear kernel rounds otherwise than SGLang's
        assert batch["as eager"] < ROUNDED, batch


# by the release and the model whose answers show each: the other has no window, or no other place for the answer
MISTAKES = {
    (ONE, "llama"): {"leaves its graph for SGLang's", "forgets the window's pages", "forgets the window's slots"},
    (NEWEST, *WINDOW): {"copies no answer"},
}


@pytest.mark.parametrize("case", MISTAKES, ids=" ".join)
def test_mutants_are_noticed(case: tuple[str, ...]) -> None:
    release, *model = case
    found = run(release, "mutants", *model)
    assert set(found) == {"none", *attention_prefill.MUTANTS}
    wrong = {name: [report] if isinstance(report, str) else wrong_in(report) for name, report in found.items()}
    assert {name for name, seen in wrong.items() if not seen} == {"none", *MISTAKES[case]}
    # by their answers, and not by an error
    assert {name: seen for name, seen in found.items() if isinstance(seen, str)} == {}
    assert found[attention_prefill.PADDING]["twins"] == []
    (reason,) = (each for each in found[attention_prefill.PADDING]["left"] if each.startswith("FlashAttention has"))
    assert "rows of padding that are no zeros" in reason
