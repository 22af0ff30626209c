# SPDX-License-Identifier: Apache-2.0
"""All fixes and kernels: ours by a scan of the package, other packages' by entry point."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from sglang_bcg_fixes import api, fixes, flags, kernels
from sglang_bcg_fixes.model import OURS, Fix, Kernel, Retired
from sglang_bcg_fixes.planning import well_formed

T = TypeVar("T")
KINDS = {Fix: "fix id", Kernel: "kernel", Retired: "retired flag"}
# part of the lab: only a server that is being measured imports it
INSTRUMENTS = "sglang_bcg_fixes.lab.verify.instruments"


class RegistryError(Exception):
    """A package contributes something that cannot be used."""


@dataclasses.dataclass(frozen=True)
class Registry:
    """Usable fixes and kernels; `owners` has the package of each that is not ours."""

    fixes: tuple[Fix, ...]
    kernels: tuple[Kernel, ...]
    owners: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] = ()
    retired: tuple[Retired, ...] = ()

    def settings(self, environ: Mapping[str, str] | None = None) -> flags.Settings:
        """The settings in force in this process, or in one with these variables."""
        return flags.read(self.fixes, self.kernels, environ, self.retired)

    def warnings(self) -> list[str]:
        """A sentence on each setting of this process that nobody reads, or soon nobody will."""
        return [*flags.look_alikes(self.fixes, self.kernels), *flags.said_of(self.retired)]

    def fix(self, name: str) -> Fix | None:
        return next((fix for fix in self.fixes if fix.id == name), None)

    def owner(self, name: str) -> str:
        """The package that contributes this fix or kernel."""
        return self.owners.get(name, OURS)


class BuiltIn:
    """The plugin's own: files and folders in `fixes/` without a leading underscore, and what `kernels/` declares."""

    @api.hookimpl
    def bcg_fixes(self) -> Sequence[Fix]:
        return [declared_in(importlib.import_module(name)) for name in fix_modules()]

    @api.hookimpl
    def bcg_kernels(self) -> Sequence[Kernel]:
        return [importlib.import_module(name).KERNEL for name in kernel_modules()]

    @api.hookimpl
    def bcg_retired_flags(self) -> Sequence[Retired]:
        return flags.RETIRED


def fix_modules() -> list[str]:
    names = sorted(info.name for info in pkgutil.iter_modules(fixes.__path__))
    return [f"{fixes.__name__}.{name}" for name in names if not name.startswith("_")]


def kernel_modules() -> list[str]:
    """The operations that declare themselves; a folder without `declaration.py` is a helper."""
    folders = [f"{kernels.__name__}.{info.name}" for info in pkgutil.iter_modules(kernels.__path__) if info.ispkg]
    return [f"{name}.declaration" for name in sorted(folders) if importlib.util.find_spec(f"{name}.declaration")]


def declared_in(module: ModuleType) -> Fix:
    """The fix of a file or folder in `fixes/`, with its id and its words: its name and docstring."""
    fix = getattr(module, "FIX", None)
    if not isinstance(fix, Fix):
        raise RegistryError(f"{module.__file__}: declares no FIX; copy fixes/_template.py")
    if fix.id or fix.doc:
        raise RegistryError(
            f"{module.__file__}: its FIX says its id or doc; leave both out, the file's stem and docstring are taken"
        )
    return dataclasses.replace(fix, id=module.__name__.rpartition(".")[2], doc=module.__doc__ or "")


def discover() -> Registry:
    """All fixes and kernels; one that cannot be used is an error that names its package."""
    found = collect()
    if found.problems:
        raise RegistryError("; ".join(found.problems))
    return found


def collect() -> Registry:
    """Everything usable, and a sentence on each thing that is not, with its package."""
    manager = pluggy.PluginManager(api.PROJECT)
    manager.add_hookspecs(api)
    manager.register(BuiltIn(), name=api.PROJECT)
    if flags.instruments():
        manager.register(importlib.import_module(INSTRUMENTS))
    problems: list[str] = []
    entries = {}
    for entry in importlib.metadata.entry_points(group=api.PROJECT):
        try:
            register(manager, entry)
            entries[entry.name] = entry
        except RegistryError as error:
            problems.append(str(error))
    owners: dict[str, str] = {}
    fixes = contributed(manager.hook.bcg_fixes, Fix, entries, owners, problems)
    kernels = contributed(manager.hook.bcg_kernels, Kernel, entries, owners, problems, fixes)
    names = [row.name for row in flags.table(fixes, kernels)]
    retired = list(retired_flags(manager.hook.bcg_retired_flags, entries, problems, names))
    return Registry(
        fixes=tuple(sorted(fixes, key=lambda fix: fix.id)),
        kernels=tuple(sorted(kernels, key=lambda kernel: kernel.op)),
        owners=owners,
        problems=tuple(problems),
        retired=tuple(retired),
    )


def register(manager: pluggy.PluginManager, entry: importlib.metadata.EntryPoint) -> None:
    try:
        module = entry.load()
        manager.register(module, name=entry.name)
        try:
            manager.check_pending()
        except pluggy.PluginValidationError:
            manager.unregister(module)
            raise
    except Exception as error:
        owner = owner_of(entry)
        raise RegistryError(
            f"entry point '{entry.name} = {entry.value}' of {owner} cannot be loaded ({type(error).__name__}: "
            f"{error}); mend or uninstall {owner}"
        ) from error


def owner_of(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unknown package"


def contributed(
    hook: pluggy.HookCaller,
    kind: type[T],
    entries: Mapping[str, importlib.metadata.EntryPoint],
    owners: dict[str, str],
    problems: list[str],
    others: Sequence[Any] = (),
) -> list[T]:
    """Collect what each package gives, ours first, and note its problems and owners; ids of `others` are taken."""
    found: list[T] = []
    for given in sorted(hook.get_hookimpls(), key=lambda each: (each.plugin_name in entries, each.plugin_name)):
        entry = entries.get(given.plugin_name)
        if entry is None:
            ours: Any = given.function()
            found += ours
            continue
        owner = owner_of(entry)
        for item in items_of(given, owner, problems):
            wrong = well_formed.fault(item, kind) or already_declared(item, [*others, *found], owners)
            if wrong:
                problems.append(f"{owner} contributes {name_of(item)}, which cannot be used: {wrong}; {way_out(owner)}")
                continue
            owners[name_of(item)] = owner
            found.append(item)
    return found


def retired_flags(
    hook: pluggy.HookCaller,
    entries: Mapping[str, importlib.metadata.EntryPoint],
    problems: list[str],
    names: Sequence[str],
) -> Iterator[Retired]:
    """Every package's, each with the version of its package; `names` are the flags that there are."""
    owners: dict[str, str] = {}
    versions = {owner_of(entry): entry.dist.version for entry in entries.values() if entry.dist}
    for flag in contributed(hook, Retired, entries, owners, problems):
        owner = owners.get(flag.name)
        if owner is None:
            yield flag
        elif wrong := not_retired(flag, names):
            problems.append(f"{owner} retires {flag.name}, which cannot be: {wrong}; {way_out(owner)}")
        else:
            yield dataclasses.replace(flag, owner=owner, version=versions.get(owner, ""))


def not_retired(flag: Retired, names: Sequence[str]) -> str | None:
    if flag.name in names:
        return "it is a flag still"
    return f"{flag.now} is no flag{flags.nearest(flag.now, names)}" if flag.now and flag.now not in names else None


def items_of(given: pluggy.HookImpl, owner: str, problems: list[str]) -> Sequence[Any]:
    name = given.function.__name__
    try:
        items = given.function()
    except Exception as error:
        problems.append(f"{owner}: its {name}() fails ({type(error).__name__}: {error}); {way_out(owner)}")
        return ()
    if not isinstance(items, tuple | list):
        problems.append(
            f"{owner}: its {name}() gives {well_formed.shown(items)}, which is not a list; {way_out(owner)}"
        )
        return ()
    return items


def already_declared(item: Any, found: Sequence[Any], owners: Mapping[str, str]) -> str | None:
    name = item.id
    # a report has one state for each id
    other = next((other for other in found if other.id == name), None)
    if other is None:
        return None
    return f"more than one package declares the {KINDS[type(other)]} {name}, {owners.get(name, OURS)} is the other"


def name_of(item: Any) -> str:
    name = getattr(item, "id", None)
    return name if name and isinstance(name, str) else "a fix or kernel"


def way_out(owner: str) -> str:
    return f"mend or uninstall {owner}"
