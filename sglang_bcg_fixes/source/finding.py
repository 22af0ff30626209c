# SPDX-License-Identifier: Apache-2.0
"""The answer of a probe: a verdict on one defect, the reason, and the definitions that it rests on."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class Verdict(str, enum.Enum):
    """The state of one defect in the source of one SGLang.

    Latent: the code is there that goes wrong, and nothing that this release ships leads to it; only other code can.
    """

    AFFECTED = "affected"
    LATENT = "latent"
    FIXED = "fixed"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One definition that a probe looked at: where it stands and what it hashes to."""

    where: str
    file: str
    line: int
    form: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.where.partition(':')[2]} [{self.form}]"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A probe's answer: the verdict, one printable sentence of reason, and what it rests on.

    `rules` is what the patched code must know of the source beside that, of a type of its own.
    """

    verdict: Verdict
    reason: str
    evidence: tuple[Evidence, ...] = ()
    rules: Any = None
