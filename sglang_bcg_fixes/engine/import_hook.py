# SPDX-License-Identifier: Apache-2.0
"""Callbacks right after a module's import, or when no import is under way, so that none comes at a wrong moment."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Sequence

from .slots import sglang_modules


class ImportWatcher(importlib.abc.MetaPathFinder):
    """Finds no module itself: it lets the other finders find an awaited one and listens to its loader."""

    def __init__(self) -> None:
        self._awaited: dict[str, list[Callable[[], None]]] = {}
        # executed, although the import system has not yet been told
        self._executed: set[str] = set()
        self._when_idle: list[Callable[[], None]] = []
        # never waited for: another thread may hold the lock of a module that a callback imports
        self._catching_up = threading.Lock()
        self._under_way: types.ModuleType | None = None

    def is_complete(self, name: str) -> bool:
        """Tell whether SGLang's module has all of its names."""
        module = sys.modules.get(name)
        return module is not None and not self._is_half_imported(module)

    def is_idle(self) -> bool:
        """Tell whether no module of SGLang is half imported: to import another one then cannot close a circle."""
        # an outer import takes seconds and a thousand inner ones: the module that was found last time will do
        if self._under_way is None or not self._is_half_imported(self._under_way):
            self._under_way = next(filter(self._is_half_imported, sglang_modules()), None)
        return self._under_way is None

    def _is_half_imported(self, module: types.ModuleType) -> bool:
        # not getattr, which would import what a lazy module stands for
        spec = object.__getattribute__(module, "__dict__").get("__spec__")
        return bool(getattr(spec, "_initializing", False)) and spec.name not in self._executed

    def call_when_idle(self, callback: Callable[[], None]) -> None:
        """Call it with the first import that begins when no other is under way."""
        self._when_idle.append(callback)
        self._begin()

    def catch_up(self) -> None:
        """Call what waits for no import to be under way, unless one is or another thread does it."""
        if not self._when_idle or not self._catching_up.acquire(blocking=False):
            return
        try:
            if self.is_idle():
                callbacks, self._when_idle = self._when_idle, []
                for callback in callbacks:
                    callback()
        finally:
            self._catching_up.release()

    def call_after(self, module: str, callback: Callable[[], None]) -> None:
        self._awaited.setdefault(module, []).append(callback)
        self._begin()

    def _begin(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        self.catch_up()
        if name not in self._awaited:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            self._listen(name, spec.loader)
        return spec

    def _listen(self, name: str, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self._executed.add(name)
            try:
                for callback in self._awaited.pop(name, []):
                    callback()
            finally:
                self._executed.discard(name)

        # on this one loader: its type stays what tools that look at loaders expect
        loader.exec_module = exec_module  # type: ignore[method-assign]
