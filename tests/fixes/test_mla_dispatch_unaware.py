# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek under breakable graphs, and the real dispatch and planning of the backends that need a GPU."""

from __future__ import annotations

import pytest

from tests import processes, wheels

# one of each form of the handlers, of what plans, and of the runner
RELEASES = ("0.5.11", "0.5.12.post1", "0.5.13.post1", "0.5.14", "0.5.15.post1")


@pytest.mark.parametrize(
    ("release", "several_requests"), [*((release, "off") for release in RELEASES), ("0.5.11", "auto")]
)
def test_latent_attention_is_captured_in_the_form_that_the_break_can_run(release: str, several_requests: str) -> None:
    found, _ = processes.beside(
        wheels.unpacked(release),
        *("-m", "tests.scenarios.mla_dispatch"),
        SGLANG_BCG_FIX_MLA_DISPATCH_UNAWARE="on",
        SGLANG_BCG_FIX_SINGLE_REQUEST_CAPTURE=several_requests,
        # it is undone alone, so the runner that others patch too must be imported after the modules of small_deepseek
        cold=True,
    )
    assert found["applied"]
    # the two forms round differently, in float16 and with logits of about 2
    assert found["same tokens"] and 0 < found["difference"] < 0.005, found
    # the old runner warms up before the first of two graphs, and twice before each is captured
    assert found["forwards"] == ([False, *[False, False, True] * 2] if release in RELEASES[:3] else [])
    assert found["bitwise equal to eager absorbed"]
    # single_request_capture lets nothing be captured when this fix is not there
    wrong = "is invalid for input of size" if several_requests == "off" else "captured nothing"
    assert wrong in found["error"], found

    methods, plans = found["mended"]["inside"]
    assert set(methods.values()) == {"MLA"} and plans == ["paged", "paged", True]
    assert found["mended"]["verified as a prefill"] is False
    stock = found["stock"]
    assert found["mended"]["outside"] == stock["outside"] == stock["inside"]
    methods, plans = stock["inside"]
    assert all(method.startswith("MHA") for method in methods.values()), methods
    assert plans == ["ragged", False]
