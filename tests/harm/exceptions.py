# SPDX-License-Identifier: Apache-2.0
"""Cases where a patched server has less than a stock one: the fix that takes it, and the wrong answer it prevents.

`shown_by` is STOCK_ROW where the stock server's own row shows the wrong answer, and otherwise the test that does.
"""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

from tests.harm import rules

STOCK_ROW = "the stock server's row"


class Excused(NamedTuple):
    """A rule that may be broken; `releases` and `architectures` are names or patterns of them."""

    rule: str
    fix: str
    releases: tuple[str, ...]
    architectures: tuple[str, ...]
    prevents: str
    shown_by: str = STOCK_ROW

    def covers(self, release: str, architecture: str, rule: str) -> bool:
        return rule == self.rule and matches(release, self.releases) and matches(architecture, self.architectures)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# a layer that SGLang captures and that must not be is another break
EXCUSED = (
    Excused(
        rules.MORE_BREAKS,
        "linear_attention_captured",
        ("0.5.11", "0.5.12", "0.5.12.post1"),
        ("Qwen3Next*", "Qwen3_5*", "BailingMoeV2_5*", "KimiLinear*"),
        "linear layers that are captured read the batch of the capture: another state, or freed memory",
    ),
    Excused(
        rules.MORE_BREAKS,
        "ssm_mixer_captured",
        ("*",),
        ("FalconH1*",),
        "Mamba mixers that are captured read the batch of the capture: another state, or freed memory",
    ),
    # rows without numbers go to no expert, rows of zeros do, and then its product rounds otherwise
    Excused(
        rules.DIFFERS_MORE,
        "attention_tail_uninitialised",
        ("0.5.1[1-5]*",),
        ("MixtralForCausalLM",),
        "the rows behind the last token hold what was in freed memory, and experts, scales and collectives read them; "
        "what is given up is the last place of one logit",
        "tests/fixes/test_uninitialised_tails.py::test_padded_rows_are_zero_and_real_rows_as_before",
    ),
)


def excuse(release: str, architecture: str, rule: str) -> Excused | None:
    return next((row for row in EXCUSED if row.covers(release, architecture, rule)), None)
