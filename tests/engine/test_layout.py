# SPDX-License-Identifier: Apache-2.0
"""Imports point downwards: a floor knows those below it, a server no commands and no lab, the package no checkout."""

from __future__ import annotations

import ast
import pathlib

from tests import processes

PACKAGE = "sglang_bcg_fixes"
# from the ground up; what is on one floor may know its neighbours in the same room only
FLOORS = (
    ("source",),
    ("concern",),
    ("model",),
    ("flags", "api", "writing"),
    ("engine",),
    ("anatomy",),
    ("kernels",),
    ("fixes",),
    ("planning",),
    ("process",),
    ("plugin",),
    ("lab",),
    ("cli",),
    ("__main__",),
)
# what no wheel holds
OUTSIDE = ("benchmarks", "cpu_sglang", "tests", "tools")
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imported(file: pathlib.Path) -> set[str]:
    """The rooms of the modules that a file names in its imports, wherever they stand in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            found.add(str(node.module).split(".")[1])
    return found & FLOOR.keys()


def test_imports_point_downwards() -> None:
    root = processes.REPOSITORY / PACKAGE
    for file in root.rglob("*.py"):
        room = file.relative_to(root).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        up = {other for other in imported(file) if other != room and FLOOR[other] >= FLOOR[room]}
        assert not up, f"{file.relative_to(root)} imports {', '.join(sorted(up))}, which stands above it"


def test_a_server_imports_neither_the_lab_nor_the_commands() -> None:
    code = f"import sys; import {PACKAGE}.plugin as plugin; plugin.registry.discover(); print(*sys.modules)"
    loaded = processes.python("-c", code).stdout.split()
    assert f"{PACKAGE}.plugin" in loaded
    assert not [name for name in loaded if name.startswith((f"{PACKAGE}.lab", f"{PACKAGE}.cli"))]


def test_no_modules_import_each_other_in_a_circle() -> None:
    root = processes.REPOSITORY / PACKAGE
    modules = {".".join(file.relative_to(root.parent).with_suffix("").parts): file for file in root.rglob("*.py")}
    edges = {name: needed_at_once(file, set(modules)) for name, file in modules.items()}
    while ready := [name for name, needed in edges.items() if not needed & edges.keys()]:
        for name in ready:
            del edges[name]
    assert not edges, f"these import each other: {', '.join(sorted(edges))}"


def needed_at_once(file: pathlib.Path, modules: set[str]) -> set[str]:
    """Modules that its top-level statements import, except for the type checker or inside functions."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & modules or {str(node.module)}
    return found & modules


def test_the_package_imports_nothing_that_only_a_checkout_has() -> None:
    root = processes.REPOSITORY / PACKAGE
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            outside = {name for name in names if name.partition(".")[0] in OUTSIDE}
            assert not outside, f"{file.relative_to(root)} imports {', '.join(sorted(outside))}"


def files_of_fixes() -> list[tuple[str, pathlib.Path]]:
    """Each file of `fixes/`, with the name of its fix: its own, or that of the folder in which it lies."""
    folder = processes.REPOSITORY / PACKAGE / "fixes"
    return [(file.relative_to(folder).parts[0].removesuffix(".py"), file) for file in folder.rglob("*.py")]


def test_a_fix_that_names_itself_has_the_name_of_its_file_or_folder() -> None:
    for fix, file in files_of_fixes():
        assert set(names_said(file)) <= {fix}, f"{file.name} calls itself {', '.join(names_said(file))}"


def names_said(file: pathlib.Path) -> list[str]:
    """The ids that a fix gives to its messages and flags: its constant ID, and what it calls these functions with."""
    tree = ast.walk(ast.parse(file.read_text()))
    named = []
    for node in tree:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["ID"]:
            named.append(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("refusing", "flag_of"):
            named.append(node.args[0])
    return [str(node.value) for node in named if isinstance(node, ast.Constant)]


def test_no_fix_imports_another() -> None:
    for fix, file in files_of_fixes():
        own = f"{PACKAGE}.fixes.{fix}"
        there = {module for module in modules_named(file) if module.startswith(f"{PACKAGE}.fixes")}
        others = {module for module in there if module != own and not module.startswith(f"{own}.")}
        assert not others, f"{file.name} imports another fix; what both need belongs to anatomy/"


def modules_named(file: pathlib.Path) -> set[str]:
    """All modules that a file imports from, wherever its imports stand; of the package itself, what it imports."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    found = {str(node.module) for node in nodes if node.module != PACKAGE}
    return found | {f"{PACKAGE}.{alias.name}" for node in nodes if node.module == PACKAGE for alias in node.names}
