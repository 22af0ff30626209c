# SPDX-License-Identifier: Apache-2.0
"""Answers of every probe on every release; on a source that it does not know, it says so.

`python -m tests.releases.test_verdicts` writes the table anew; read what changed against the releases' source.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.model import SECTIONS, Fix
from sglang_bcg_fixes.planning.plan import ask
from sglang_bcg_fixes.planning.registry import declared_in, fix_modules, kernel_modules
from sglang_bcg_fixes.source import forms, verdicts
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import processes, wheels
from tests.mutated import Mutated
from tests.wheels import RELEASES

TABLE = verdicts.FILE
MODULES = [importlib.import_module(name) for name in fix_modules()]
FIXES = {module.__name__.rpartition(".")[2]: declared_in(module) for module in MODULES}
# words are tested, too: the ledger counts a file that is read with its docstring
TEXTS = [pathlib.Path(str(module.__file__)).read_text() for module in MODULES]
Root = Callable[[str], pathlib.Path]
# no case of `bcg-fixes verify` starts a server with their flags yet
ON_NO_GPU = {
    "host_states_left_behind",
    "image_positions_flat",
    "sparse_read_done_early",
}
Mutation = Callable[[str, ast.FunctionDef], str]


@functools.cache
def source_in(root: pathlib.Path) -> Source:
    return Source(Folder(root))


def table() -> dict[str, dict[str, str]]:
    loaded: dict[str, dict[str, str]] = json.loads(TABLE.read_text())
    return loaded


def releases_with(fix: Fix, *verdicts: Verdict) -> list[str]:
    return [release for release in RELEASES if table().get(release, {}).get(fix.id) in verdicts]


AFFECTED = [(fix, release) for fix in FIXES.values() for release in releases_with(fix, Verdict.AFFECTED)]
WATCHED = [
    (fix, releases[0]) for fix in FIXES.values() if (releases := releases_with(fix, Verdict.AFFECTED, Verdict.LATENT))
]


@pytest.mark.parametrize("release", RELEASES)
def test_verdicts_are_those_of_the_table(release: str, release_root: Root) -> None:
    source = source_in(release_root(release))
    findings = {name: ask(fix, source) for name, fix in FIXES.items()}
    said = {name: finding.verdict.value for name, finding in findings.items()}
    reasons = "\n".join(f"{name}: {finding.reason}" for name, finding in findings.items())
    assert said == table().get(release), f"python -m tests.releases.test_verdicts, or mend the probe\n{reasons}"


@pytest.mark.parametrize(("fix", "release"), AFFECTED, ids=lambda value: getattr(value, "id", value))
def test_an_affected_release_has_a_way_round(fix: Fix, release: str, release_root: Root) -> None:
    source = source_in(release_root(release))
    offered = [way.option for way in fix.workarounds if source.has_option(way.option)]
    assert offered or "No flag" in fix.section("Change")


@pytest.mark.parametrize("fix", FIXES.values(), ids=lambda fix: fix.id)
def test_the_docstring_has_every_section(fix: Fix) -> None:
    assert fix.title
    assert all(fix.section(name) for name in SECTIONS)


@pytest.mark.parametrize("fix", [fix for fix in FIXES.values() if fix.patches], ids=lambda fix: fix.id)
def test_a_fix_that_is_on_names_cases_that_run_it_on_a_gpu(fix: Fix) -> None:
    assert bool(fix.verify or fix.default == "off") is (fix.id not in ON_NO_GPU)


def test_the_forms_are_those_that_are_read_and_no_others(release_root: Root) -> None:
    """Whoever adds a form by hand, leaves one over or gives it to another fix is told."""
    kernels = [importlib.import_module(name).KERNEL for name in kernel_modules()]
    met: forms.Table = {}
    for release in RELEASES:
        source = source_in(release_root(release))
        for reader in (*FIXES.values(), *kernels):
            for item in ask(reader, source).evidence:
                entry = met.setdefault(item.where, {}).setdefault(item.form, {"releases": [], "read_for": []})
                entry["releases"] += [release] if release not in entry["releases"] else []
                entry["read_for"] += [reader.id] if reader.id not in entry["read_for"] else []
    for of in met.values():
        for entry in of.values():
            entry["read_for"].sort()
    read, known = (
        {(where, form, str(entry)) for where, of in table.items() for form, entry in of.items()}
        for table in (met, forms.load())
    )
    assert not read ^ known, "run `make forms ID=NAME` with the fix or kernel in `read_for`"
    assert not [reader.id for reader in (*FIXES.values(), *kernels) if reader.known]


def test_probes_import_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; from sglang_bcg_fixes.planning import registry; registry.discover(); "
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'sglang')])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def insert(text: str, line: int, column: int, addition: str) -> str:
    """The text with something put in at a position as `ast` counts it: lines from 1, columns in bytes."""
    lines = text.splitlines(keepends=True)
    raw = lines[line - 1].encode()
    lines[line - 1] = (raw[:column] + addition.encode() + raw[column:]).decode()
    return "".join(lines)


def renamed(text: str, node: ast.FunctionDef) -> str:
    column = text.splitlines()[node.lineno - 1].index(f"def {node.name}") + len("def ")
    return insert(text, node.lineno, column, "drifted_")


def with_another_statement(text: str, node: ast.FunctionDef) -> str:
    last = node.body[-1]
    return insert(text, last.lineno, last.col_offset, f"drifted = True\n{' ' * last.col_offset}")


def with_another_call(text: str, node: ast.FunctionDef) -> str:
    called = next(item.func for item in ast.walk(node) if isinstance(item, ast.Call))
    assert called.end_lineno and called.end_col_offset
    return insert(text, called.end_lineno, called.end_col_offset, "_drifted")


def with_another_decorator(text: str, node: ast.FunctionDef) -> str:
    return insert(text, node.decorator_list[0].lineno, node.decorator_list[0].col_offset, "drifted_")


def mutants(fix: Fix, release: str, root: pathlib.Path, mutation: Mutation) -> list[tuple[str, Source]]:
    """The release with one definition changed, once for every whole function that the probe read."""
    source = source_in(root)
    found = []
    for item in ask(fix, source).evidence:
        # a header or a single assignment is read on its own: there the rest of the function may change
        definition = source.find(item.where)
        if definition is None or not isinstance(definition.node, ast.FunctionDef):
            continue
        if mutation is with_another_decorator and not definition.node.decorator_list:
            continue
        if mutation is with_another_call and not definition.calls:
            continue
        text = source.text(item.file)
        assert text is not None
        changed = mutation(text, definition.node)
        assert changed != text
        found.append((item.where, Source(Mutated(Folder(root), item.file, changed))))
    return found


@pytest.mark.parametrize("mutation", [renamed, with_another_statement, with_another_call, with_another_decorator])
@pytest.mark.parametrize(("fix", "release"), WATCHED, ids=lambda value: getattr(value, "id", value))
def test_a_source_that_drifted_is_unknown(fix: Fix, release: str, mutation: Mutation, release_root: Root) -> None:
    found = mutants(fix, release, release_root(release), mutation)
    if mutation in (renamed, with_another_statement):
        assert found, f"{fix.id} reads no function as a whole: its answer must name the one that its body changes"
    for where, source in found:
        assert ask(fix, source).verdict is Verdict.UNKNOWN, f"{mutation.__name__}: {where}"


def test_what_the_newest_release_still_has_is_ready_to_be_reported() -> None:
    live = {name for name, verdict in json.loads(TABLE.read_text())[RELEASES[-1]].items() if verdict == "affected"}
    reports = os.listdir(processes.REPOSITORY / "docs" / "upstream")
    missing = [name for name in sorted(live) if FIXES[name].default == "auto" and f"{name}.md" not in reports]
    assert live and not missing


def main() -> None:
    rows: dict[str, dict[str, str]] = {}
    for release in RELEASES:
        source = source_in(wheels.unpacked(release))
        found = {name: ask(fix, source) for name, fix in FIXES.items()}
        rows[release] = {name: finding.verdict.value for name, finding in found.items()}
        unread = {name: finding.reason for name, finding in found.items() if finding.verdict is Verdict.UNKNOWN}
        print(release, *(f"{name} is unknown: {reason}" for name, reason in unread.items()), sep="\n  ")
    TABLE.write_text(json.dumps(rows, indent=2, sort_keys=False) + "\n")


if __name__ == "__main__":
    main()
