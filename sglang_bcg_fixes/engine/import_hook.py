# SPDX-License-Identifier: Apache-2.0
"""Callbacks right after a module's import, so that nothing is imported earlier than without us."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterable, Sequence


class ImportWatcher(importlib.abc.MetaPathFinder):
    """Finds no module itself: it lets the other finders find an awaited one and listens to its loader."""

    def __init__(self) -> None:
        self._awaited: dict[str, list[Callable[[], None]]] = {}
        self._executing: set[str] = set()

    def is_executing(self, modules: Iterable[str]) -> bool:
        """Tell whether one of these awaited modules is half imported: some of its names are missing."""
        return not self._executing.isdisjoint(modules)

    def call_after(self, module: str, callback: Callable[[], None]) -> None:
        self._awaited.setdefault(module, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
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
            self._executing.add(name)
            try:
                execute(module)
            finally:
                self._executing.discard(name)
            for callback in self._awaited.pop(name, []):
                callback()

        # on this one loader: its type stays what tools that look at loaders expect
        loader.exec_module = exec_module  # type: ignore[method-assign]
