# SPDX-License-Identifier: Apache-2.0
"""The words that most fixes are written with: a probe's answers, what is patched, and the harm.

What few need, they import from where it is. The vocabulary of launches and of workarounds is in `anatomy/`.
"""

from __future__ import annotations

from sglang_bcg_fixes.concern import ends, possible, slower, wrong
from sglang_bcg_fixes.model import Fix, How, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, absent, affected, drifted, fixed, latent, unknown

__all__ = [
    "Finding",
    "Fix",
    "How",
    "PatchPoint",
    "Source",
    "absent",
    "affected",
    "drifted",
    "ends",
    "fixed",
    "latent",
    "possible",
    "slower",
    "unknown",
    "wrong",
]
