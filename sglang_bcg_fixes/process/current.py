"""The plugin in this process, for what SGLang calls: it hands over nothing of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_bcg_fixes.process.process import Process

_begun: list[Process] = []


def begin(process: Process) -> None:
    _begun.append(process)


def has_begun() -> bool:
    return bool(_begun)


def process() -> Process:
    return _begun[0]
