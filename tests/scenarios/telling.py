# SPDX-License-Identifier: Apache-2.0
"""The line in which a program beside a release tells what it found.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 SGLANG_PLUGINS=bcg_fixes python -m tests.scenarios.NAME ARGUMENTS

Such a program imports SGLang inside functions: not before the stand-ins are there for what exists only as a CUDA build.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.engine.ledger import Ledger
from sglang_bcg_fixes.model import Fix


def result(found: Any) -> None:
    print("RESULT", json.dumps(found))


def with_and_without(act: Callable[[], Any], **beside: Any) -> None:
    """Print what the act gives with the fixes that are applied, and once they have been undone."""
    result({**beside, **given_with_and_without(act)})


def given_with_and_without(act: Callable[[], Any]) -> dict[str, Any]:
    """Give what `with_and_without` prints.

    The modules that the fixes change must have been imported: until then a fix waits, and is not applied.
    """
    ledger = plugin.load().ledger
    found = {"applied": ledger.applied(), "with": act()}
    # one that was applied later may stand round an earlier one
    for name in reversed(found["applied"]):
        ledger.undo(name)
    return {**found, "without": act()}


def before_and_after(fix: Fix, act: Callable[[], Any]) -> None:
    """Print what the act gives before the fix is applied, and what it gives after that."""
    without = act()
    Ledger().apply(fix)
    result({"without": without, "with": act()})


def with_and_perhaps_without(act: Callable[[], Any]) -> None:
    """Print what the act gives as `with_and_without` does, or without fixes alone where none is applied."""
    result(given_with_and_perhaps_without(act))


def given_with_and_perhaps_without(act: Callable[[], Any]) -> dict[str, Any]:
    """Give what `with_and_perhaps_without` prints."""
    return given_with_and_without(act) if plugin.load().ledger.applied() else {"applied": [], "without": act()}
