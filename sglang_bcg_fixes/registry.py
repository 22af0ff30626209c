"""Everything that can be applied: our own fixes by a scan of the package, other packages' by entry point."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TypeVar

import pluggy

from sglang_bcg_fixes import fixes, hookspecs, kernels
from sglang_bcg_fixes.model import Fix, Kernel
from sglang_bcg_fixes.verify import instruments

T = TypeVar("T")


class RegistryError(Exception):
    """A package contributes something that cannot be used."""


@dataclasses.dataclass(frozen=True)
class Registry:
    fixes: tuple[Fix, ...]
    kernels: tuple[Kernel, ...]

    def fix(self, name: str) -> Fix | None:
        return next((fix for fix in self.fixes if fix.id == name), None)


class BuiltIn:
    """What this package has: the files in `fixes/` without an underscore in front, and `kernel.py` in `kernels/`."""

    @hookspecs.hookimpl
    def bcg_fixes(self) -> Sequence[Fix]:
        return [declared_in(importlib.import_module(name)) for name in fix_modules()]

    @hookspecs.hookimpl
    def bcg_kernels(self) -> Sequence[Kernel]:
        return [importlib.import_module(name).KERNEL for name in kernel_modules()]


def fix_modules() -> list[str]:
    names = sorted(info.name for info in pkgutil.iter_modules(fixes.__path__))
    return [f"{fixes.__name__}.{name}" for name in names if not name.startswith("_")]


def kernel_modules() -> list[str]:
    """Of the operations that declare themselves; a folder without `kernel.py` is help for others."""
    folders = [f"{kernels.__name__}.{info.name}" for info in pkgutil.iter_modules(kernels.__path__) if info.ispkg]
    return [f"{name}.kernel" for name in sorted(folders) if importlib.util.find_spec(f"{name}.kernel")]


def declared_in(module: ModuleType) -> Fix:
    fix = getattr(module, "FIX", None)
    stem = module.__name__.rpartition(".")[2]
    if not isinstance(fix, Fix):
        raise RegistryError(f"{module.__file__}: declares no FIX; copy fixes/_template.py")
    if fix.id != stem:
        raise RegistryError(f"{module.__file__}: its FIX has the id '{fix.id}', which must be the file's stem '{stem}'")
    return fix


def discover() -> Registry:
    """All fixes and kernels; a package that cannot be loaded is an error that names it."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(BuiltIn(), name=hookspecs.PROJECT)
    manager.register(instruments)
    for entry in importlib.metadata.entry_points(group=hookspecs.PROJECT):
        try:
            manager.register(entry.load(), name=entry.name)
        except Exception as error:
            owner = entry.dist.name if entry.dist else "an unknown package"
            raise RegistryError(
                f"entry point '{entry.name} = {entry.value}' of {owner} cannot be loaded ({type(error).__name__}: "
                f"{error}); mend or uninstall {owner}"
            ) from error
    manager.check_pending()
    found = Registry(
        fixes=tuple(sorted(flatten(manager.hook.bcg_fixes()), key=lambda fix: fix.id)),
        kernels=tuple(sorted(flatten(manager.hook.bcg_kernels()), key=lambda kernel: kernel.op)),
    )
    refuse_duplicates("fix id", [fix.id for fix in found.fixes])
    refuse_duplicates("kernel", [kernel.op for kernel in found.kernels])
    return found


def flatten(groups: Iterable[Sequence[T]]) -> list[T]:
    return [item for group in groups for item in group]


def refuse_duplicates(kind: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RegistryError(f"more than one package declares the {kind} {', '.join(twice)}; uninstall one of them")
