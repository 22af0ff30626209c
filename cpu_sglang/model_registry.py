# SPDX-License-Identifier: Apache-2.0
"""SGLang's registry of models, which imports a model when it is asked for, instead of all two hundred at once.

They are all in one process only to be looked up by name, and importing them takes a quarter of a short test's time.
Models whose import somebody waits for, as a plugin does that patches them, are imported at once all the same.
"""

from __future__ import annotations

import importlib
import logging
import pathlib
import pkgutil
import re
import sys
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from importlib.machinery import PathFinder
from typing import Any

logger = logging.getLogger(__name__)

REGISTRY, PACKAGE = "sglang.srt.models.registry", "sglang.srt.models"


def install() -> None:
    """Call after load_plugins(), before SGLang imports its registry; where that has happened, all is left as it is."""
    if REGISTRY in sys.modules:
        return
    list_modules = pkgutil.iter_modules
    pkgutil.iter_modules = lambda path=None, prefix="": (
        iter(()) if prefix == f"{PACKAGE}." else list_modules(path, prefix)
    )
    try:
        registry: Any = importlib.import_module(REGISTRY)
    finally:
        pkgutil.iter_modules = list_modules
    # it would remember that there are none
    registry.import_model_classes.cache_clear()
    registry.ModelRegistry.models = Models(registry.ModelRegistry.models)
    for module in filter(is_awaited, (f"{PACKAGE}.{file.stem}" for file in files())):
        entries(module)


def entries(module: str) -> list[Any]:
    """List the models of a module; none where it cannot be imported here, which SGLang's own registry ignores too."""
    try:
        found = getattr(importlib.import_module(module), "EntryClass", [])
    except Exception as error:
        logger.warning("no models of %s: %s", module, error)
        return []
    return found if isinstance(found, list) else [found]


def is_awaited(module: str) -> bool:
    """Tell whether a finder that does not look for files would have this module."""
    path = importlib.import_module(PACKAGE).__path__
    return any(finder.find_spec(module, path) for finder in sys.meta_path if finder is not PathFinder)


def files() -> list[pathlib.Path]:
    (folder,) = importlib.import_module(PACKAGE).__path__
    return sorted(pathlib.Path(folder).glob("*.py"))


class Models(dict[str, Any]):
    """Classes by architecture; who wants to see all of them has all imported."""

    def __missing__(self, architecture: str) -> Any:
        for module in modules_that_name(architecture):
            for model in entries(module):
                if model.__name__ == architecture:
                    self[architecture] = model
                    return model
        raise KeyError(architecture)

    def __contains__(self, architecture: object) -> bool:
        try:
            self[str(architecture)]
        except KeyError:
            return False
        return True

    def get(self, architecture: str, default: Any = None) -> Any:
        try:
            return self[architecture]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def keys(self) -> Any:
        return KeysView(self)

    def values(self) -> Any:
        return ValuesView(self)

    def items(self) -> Any:
        return ItemsView(self)

    def _all(self) -> dict[str, Any]:
        registry: Any = importlib.import_module(REGISTRY)
        # those that somebody has put here go first
        return {**registry.import_model_classes(PACKAGE), **dict(super().items())}


def modules_that_name(architecture: str) -> list[str]:
    """Modules of models that may list this class, beginning with those that define it."""
    defined = re.compile(rf"^class {re.escape(architecture)}\b", re.MULTILINE)
    texts = {file.stem: file.read_text() for file in files()}
    naming = [name for name, text in texts.items() if "EntryClass" in text and architecture in text]
    naming.sort(key=lambda name: not defined.search(texts[name]))
    return [f"{PACKAGE}.{name}" for name in naming]
