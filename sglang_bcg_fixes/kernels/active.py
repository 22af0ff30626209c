# SPDX-License-Identifier: Apache-2.0
"""The implementation of each operation in this process, and its fallbacks to SGLang's own code."""

from __future__ import annotations

import collections
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.model import Choice, Impl, Rejected, flag_of_kernel

logger = logging.getLogger("sglang_bcg_fixes")


class CannotRun(RuntimeError):
    """None of the permitted implementations of the operation can run on this device."""

    def __init__(self, op: str, implementation: str, reason: str) -> None:
        self.reason = f"{implementation} does not run on this device: {reason}"
        super().__init__(f"bcg-fixes: {op}: {self.reason}. Set {flag_of_kernel(op)}=off to serve without it")


class Selected:
    """One operation in this process; its module needs torch and often a GPU, so it is imported late."""

    def __init__(self, choice: Choice) -> None:
        assert choice.impl, choice.op
        self.op = choice.op
        self.forms = {item.where: item.form for item in choice.finding.evidence}
        self.rules = choice.finding.rules
        self.fallbacks: collections.Counter[str] = collections.Counter()
        self.impl = choice.impl
        self._others = list(choice.others)
        self.required = choice.required
        self._modules: dict[int | None, Any] = {}

    def module(self, device: int | None) -> Any:
        """Return the module of the implementation that runs on this device."""
        if device not in self._modules:
            self._modules[device] = self._load(device)
        return self._modules[device]

    def fall_back(self, reason: str) -> None:
        """Count a fallback to SGLang's own code; the first one of each reason is noted."""
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            note(f"{self.op} is left to SGLang's own code here: {reason}")

    def _load(self, device: int | None) -> Any:
        module, reason = self._tried(device)
        unable: list[str] = []
        while reason:
            failed = CannotRun(self.op, self.impl.name, "; ".join([reason, *unable]))
            if self.required or not self._others:
                raise failed
            unable.append(CannotRun(self.op, self.impl.name, reason).reason)
            self.impl = self._others.pop(0)
            module, reason = self._tried(device)
        for each in unable:
            logger.warning("bcg-fixes: %s: %s; %s takes its place", self.op, each, self.impl.name)
        if device is not None and hasattr(module, "origin"):
            logger.debug("bcg-fixes: %s: %s runs as %s", self.op, self.impl.name, module.origin(device))
        return module

    def _tried(self, device: int | None) -> tuple[Any, str]:
        """Import the implementation's module; the second value says why it does not run on this device, or is empty."""
        module, reason = loaded(self.impl, device)
        if not (reason or self.required or device is None):
            reason = unmeasured(self.op, self.impl, device)
        return module, reason


def unmeasured(op: str, impl: Impl, device: int) -> str:
    """Say why `auto` passes over an implementation on this GPU; nothing where it does not."""
    if not impl.measured_on:
        return ""
    import torch

    here = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    if here in impl.measured_on:
        return ""
    there = " and ".join(impl.measured_on)
    return f"it was measured on {there}, and this is an {here}; {flag_of_kernel(op)}={impl.name} takes it here too"


def loaded(impl: Impl, device: int | None) -> tuple[Any, str]:
    """Import the module; the second value says why it cannot run there, or is empty."""
    module = importlib.import_module(impl.module)
    ready = getattr(module, "ready", None)
    answer = ready(device) if ready and device is not None else None
    return module, answer.reason if isinstance(answer, Rejected) else ""


_selected: dict[str, Selected] = {}
# parts of the CUDA implementation's work that Triton's kernels take, by operation
_to_triton: dict[str, list[str]] = {}
_after_note: list[Callable[[], None]] = []


def use(choice: Choice) -> None:
    _selected[choice.op] = Selected(choice)


def is_used(op: str) -> bool:
    return op in _selected


def selected(op: str) -> Selected:
    return _selected[op]


@functools.cache
def leave_to_triton(op: str, what: str) -> None:
    """Note that Triton's kernels take a part of the CUDA implementation's work; each part is noted once."""
    _to_triton.setdefault(op, []).append(what)
    note(f"{op} is left to Triton here: {what}")


def note(message: str) -> None:
    logger.debug("bcg-fixes: %s", message)
    for report in _after_note:
        report()


def call_after_note(report: Callable[[], None]) -> None:
    """Call it when something is left to other code that so_far() did not show before."""
    _after_note.append(report)


def so_far(op: str) -> dict[str, Any]:
    """Return which implementation runs by now, the reasons why SGLang's own code did, and what Triton took."""
    if not is_used(op):
        return {}
    left, to_triton = list(selected(op).fallbacks), list(_to_triton.get(op, ()))
    return {"impl": selected(op).impl.name, "left": left, "to_triton": to_triton}
