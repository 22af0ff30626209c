# SPDX-License-Identifier: Apache-2.0
"""A release with one fix alone, and what the fix's probe says of a release of which a piece is replaced."""

from __future__ import annotations

import importlib
from typing import Any

from sglang_bcg_fixes.model import Fix
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.source.finding import Finding, Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import mutated, processes, wheels
from tests.fixes import settings


def found(fix: str, release: str, program: str, *arguments: str, flag: str = "on", **environment: Any) -> Any:
    """The result of a program in which this fix has this flag, and every other one is off."""
    return logged(fix, release, program, *arguments, flag=flag, **environment)[0]


def logged(
    fix: str, release: str, program: str, *arguments: str, flag: str = "on", **environment: Any
) -> tuple[Any, str]:
    """The result, and the whole log."""
    given = settings.only(fix, flag) | environment
    return processes.beside(wheels.unpacked(release), "-m", program, *arguments, timeout=600, **given)


def verdict(fix: str, release: str, *change: str) -> Verdict:
    """Have the probe itself judge a release with this change: the file, what is in it, and what takes its place."""
    judged: Verdict = importlib.import_module(f"sglang_bcg_fixes.fixes.{fix}").probe(changed(release, *change)).verdict
    return judged


def asked(fix: Fix, release: str, *change: str) -> Finding:
    """Have it judged as a plan does, which takes a form that nobody has read for unknown."""
    return plan.ask(fix, changed(release, *change))


def changed(release: str, path: str, old: str, new: str) -> Source:
    return Source(mutated.rewritten(wheels.unpacked(release), path, old, new))
