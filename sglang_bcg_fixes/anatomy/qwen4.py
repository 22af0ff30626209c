# SPDX-License-Identifier: Apache-2.0
"""Qwen4's n-gram embeddings, which some releases prepare in a break of the graph."""

from __future__ import annotations

from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, absent

MODEL = "sglang.srt.models.qwen4_exp"
BREAK = f"{MODEL}:_breakable_prepare_ple_batch"


def nothing_in_a_break(source: Source, where: str) -> Finding | None:
    """Answer for a probe of what this definition does there, where nothing is done there."""
    if not source.has_module(MODEL):
        return absent("this release has no Qwen4")
    read = source.need(where)
    if source.find(BREAK) is None:
        return absent("its n-gram embeddings are not prepared in a break", read)
    return None
