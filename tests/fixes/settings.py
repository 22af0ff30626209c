# SPDX-License-Identifier: Apache-2.0
"""Environments under which a release is looked at."""

from __future__ import annotations

from typing import Any


def only(fix_id: str, flag: str = "on") -> dict[str, Any]:
    """Settings of a process in which this fix has this flag, and every other one is off."""
    return {"SGLANG_BCG_FIXES": "off", f"SGLANG_BCG_FIX_{fix_id.upper()}": flag}
