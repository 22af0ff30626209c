# SPDX-License-Identifier: Apache-2.0
"""Show the definitions of a new release or fix that nobody has read yet; after a yes, record them.

    python tools/forms.py release 0.5.24 [--root FOLDER] [--yes]    # make release V=0.5.24
    python tools/forms.py fix stale_page_table [--yes]              # make forms ID=stale_page_table

Prints each definition in a form that the fixes were not read against, as a diff from the previous release, and each
verdict that changes. A yes means that you have read them: they go into sglang_bcg_fixes/source/forms.json, and a
release also into tools/releases.txt and source/verdicts.json. No fix file changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import importlib.util
import itertools
import json
import pathlib
import sys
from collections.abc import Collection, Mapping, Sequence

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from sglang_bcg_fixes.model import Fix, Kernel  # noqa: E402
from sglang_bcg_fixes.planning import registry  # noqa: E402
from sglang_bcg_fixes.source import forms  # noqa: E402
from sglang_bcg_fixes.source.finding import Evidence, Finding, Verdict  # noqa: E402
from sglang_bcg_fixes.source.syntax import Drifted  # noqa: E402
from sglang_bcg_fixes.source.tree import Folder, Source, unknown  # noqa: E402

AFTERWARDS = """
Next: check docs/upstream for defects that this release has fixed, and run
    make docs
    .venv-test/bin/python tools/matrix_page.py
    .venv-test/bin/python -m tests.releases.test_layer_stack
    .venv-test/bin/python -m tests.releases.test_registry_graphs
    .venv-test/bin/python -m tests.releases.test_kinds_of_request    # half an hour
    make harm                                                        # an hour
    make test-all"""


@dataclasses.dataclass(frozen=True)
class Project:
    """Files that name releases."""

    releases: pathlib.Path
    forms: pathlib.Path
    verdicts: pathlib.Path

    def known_releases(self) -> list[str]:
        return self.releases.read_text().split()


HERE = Project(
    REPOSITORY / "tools" / "releases.txt",
    REPOSITORY / "sglang_bcg_fixes" / "source" / "forms.json",
    REPOSITORY / "sglang_bcg_fixes" / "source" / "verdicts.json",
)


@dataclasses.dataclass(frozen=True)
class Read:
    """A definition as one fix or kernel reads it in one release."""

    reader: str
    release: str
    evidence: Evidence


def all_declared() -> list[Fix | Kernel]:
    kernels = [importlib.import_module(name).KERNEL for name in registry.kernel_modules()]
    return [*all_fixes(), *kernels]


def all_fixes() -> list[Fix]:
    return [registry.declared_in(importlib.import_module(name)) for name in registry.fix_modules()]


def declared(name: str) -> Fix | Kernel:
    """Load a fix or kernel by name alone: one that is being written may not be discoverable yet."""
    fix, kernel = f"sglang_bcg_fixes.fixes.{name}", f"sglang_bcg_fixes.kernels.{name}.declaration"
    if exists(fix):
        return registry.declared_in(importlib.import_module(fix))
    if exists(kernel):
        found: Kernel = importlib.import_module(kernel).KERNEL
        return found
    raise SystemExit(f"there is no fixes/{name}.py and no kernels/{name}/declaration.py in sglang_bcg_fixes")


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def looks(reader: Fix | Kernel, source: Source) -> Finding:
    """The probe's answer, whether or not its evidence has been read."""
    try:
        return reader.probe(source)
    except Drifted as drift:
        return unknown(f"this source has {drift}")


def reads(readers: Sequence[Fix | Kernel], sources: Mapping[str, Source]) -> list[Read]:
    return [
        Read(reader.id, release, item)
        for reader in readers
        for release, source in sources.items()
        for item in looks(reader, source).evidence
    ]


def new_in(table: forms.Table, found: Sequence[Read]) -> list[Read]:
    """Definitions in a form that their reader was not read against."""
    known = {(name, form) for of in table.values() for form, entry in of.items() for name in entry["read_for"]}
    return [read for read in found if (read.reader, read.evidence.form) not in known]


def noted(table: forms.Table, found: Sequence[Read], order: Sequence[str]) -> forms.Table:
    """Add these to the table, releases oldest first."""
    merged: forms.Table = {
        where: {
            form: {"releases": [*known["releases"]], "read_for": [*known["read_for"]]} for form, known in of.items()
        }
        for where, of in table.items()
    }
    for read in found:
        of = merged.setdefault(read.evidence.where, {})
        entry = of.setdefault(read.evidence.form, {"releases": [], "read_for": []})
        entry["releases"] = sorted({*entry["releases"], read.release}, key=order.index)
        entry["read_for"] = sorted({*entry["read_for"], read.reader})
    return {
        where: dict(sorted(of.items(), key=lambda item: [order.index(name) for name in item[1]["releases"]]))
        for where, of in merged.items()
    }


def without(table: forms.Table, out: Collection[tuple[str, str]]) -> forms.Table:
    """Leave out these forms, and definitions of which none is left."""
    kept = {where: {form: of[form] for form in of if (where, form) not in out} for where, of in table.items()}
    return {where: of for where, of in kept.items() if of}


def shown(new: Sequence[Read], sources: Mapping[str, Source], before: Mapping[str, Source]) -> str:
    """Show each new form once: its readers, its place, and its diff from the previous release."""
    grouped: dict[tuple[str, str], list[Read]] = {}
    for read in new:
        grouped.setdefault((read.evidence.where, read.evidence.form), []).append(read)
    lines = []
    for (where, form), of in grouped.items():
        first = of[0]
        lines += ["", f"{where} [{form}]", f"    {first.evidence.file}:{first.evidence.line}"]
        lines.append(f"    in {', '.join(dict.fromkeys(read.release for read in of))}")
        lines.append(f"    read by {', '.join(dict.fromkeys(read.reader for read in of))}")
        lines += difference(text_of(before.get(first.release), where), text_of(sources[first.release], where))
    return "\n".join(lines)


def text_of(source: Source | None, where: str) -> list[str]:
    """Text of the definition, or of the whole function whose header or assignment was read."""
    found = source.find(where.partition("'s ")[0]) if source else None
    return found.text.splitlines() if found else []


def difference(old: list[str], new: list[str]) -> list[str]:
    if old == new:
        return ["    as in the previous release, and not read for these yet", *(f"      {line}" for line in new)]
    return [f"    {line}" for line in difflib.unified_diff(old, new, "before", "now", lineterm="", n=5)]


def is_signed(assume_yes: bool, again: str) -> bool:
    if assume_yes:
        return True
    if not sys.stdin.isatty():
        print(f"\nNothing is written. Read the above, then run .venv-test/bin/{again}")
        return False
    return input("\nHave you read all of the above, and do the fixes hold? [y/N] ").strip().lower() in ("y", "yes")


def take_in(release: str, source: Source, before: Source, project: Project, assume_yes: bool, root: str = "") -> int:
    """Add a release after the last one; `root` is the folder that was named for it."""
    readers, fixes = all_declared(), all_fixes()
    table, last = forms.load(project.forms), project.known_releases()[-1]
    found = reads(readers, {release: source})
    new = new_in(table, found)
    rows = json.loads(project.verdicts.read_text())
    findings = {fix.id: looks(fix, source) for fix in fixes}
    verdicts = {name: finding.verdict.value for name, finding in findings.items()}
    print(f"{release}: {len(new)} definitions in a form that has not been read")
    print(shown(new, {release: source}, {release: before}))
    for name, verdict in verdicts.items():
        if verdict != rows[last].get(name):
            print(f"{name}: {rows[last].get(name)} in {last}, {verdict} in {release}: {findings[name].reason}")
    lost = [name for name, finding in findings.items() if finding.verdict is Verdict.UNKNOWN]
    if lost:
        print(f"\nThe code that these read is missing: update the probes, or they stay unknown: {', '.join(lost)}")
    if not is_signed(assume_yes, f"python tools/forms.py release {release}{f' --root {root}' if root else ''} --yes"):
        return 1
    releases = [*project.known_releases(), release]
    dump(noted(table, found, releases), project.forms)
    project.verdicts.write_text(json.dumps({**rows, release: verdicts}, indent=2) + "\n")
    project.releases.write_text("".join(f"{name}\n" for name in releases))
    print(AFTERWARDS)
    return 0


def read_for(name: str, sources: Mapping[str, Source], project: Project, assume_yes: bool) -> int:
    """Add the forms that one fix or kernel reads in every release."""
    reader, table = declared(name), forms.load(project.forms)
    for release, source in sources.items():
        finding = looks(reader, source)
        print(f"{release:14} {finding.verdict.value:9} {finding.reason}")
    found = reads([reader], sources)
    new = new_in(table, found)
    releases = list(sources)
    print(shown(new, sources, {now: sources[then] for then, now in itertools.pairwise(releases)}))
    mine = {
        (where, form): entry["read_for"]
        for where, of in table.items()
        for form, entry in of.items()
        if name in entry["read_for"]
    }
    for where, form in sorted(mine.keys() - {(read.evidence.where, read.evidence.form) for read in found}):
        print(f"no longer read: {where} [{form}]")
    # the releases of a form are those in which somebody reads it
    others = reads([declared(other) for other in sorted({*itertools.chain(*mine.values())} - {name})], sources)
    shared = [read for read in others if (read.evidence.where, read.evidence.form) in mine]
    after = noted(without(table, mine), [*found, *shared], releases)
    if after == table:
        print("Every form that it reads has been read.")
        return 0
    if new and not is_signed(assume_yes, f"python tools/forms.py fix {name} --yes"):
        return 1
    dump(after, project.forms)
    print('Recorded. A new fix goes on with step 4 of "Add a fix" in CONTRIBUTING.md')
    return 0


def dump(table: forms.Table, file: pathlib.Path) -> None:
    """One line a form, so that a new release is a short difference."""
    parts = []
    for where in sorted(table):
        lines = [f'  "{form}": {json.dumps(known)}' for form, known in table[where].items()]
        parts.append(f' "{where}": {{\n' + ",\n".join(lines) + "\n }")
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> int:
    from tests import wheels

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    one = modes.add_parser("release", help="add a release")
    one.add_argument("version")
    one.add_argument("--root", type=pathlib.Path, help="a folder with its sglang/ (default: fetch it with pip)")
    other = modes.add_parser("fix", help="show the forms that a fix or kernel reads in every release")
    other.add_argument("id")
    for mode in (one, other):
        mode.add_argument("--yes", action="store_true", help="everything printed has been read")
    options = parser.parse_args()
    if options.mode == "fix":
        sources = {release: source_of(wheels.unpacked(release), release) for release in HERE.known_releases()}
        return read_for(options.id, sources, HERE, options.yes)
    if options.version in HERE.known_releases():
        parser.error(f"{options.version} is in {HERE.releases.relative_to(REPOSITORY)} already")
    last = HERE.known_releases()[-1]
    root = options.root or wheels.unpacked(options.version)
    before = source_of(wheels.unpacked(last), last)
    named = str(options.root or "")
    return take_in(options.version, source_of(root, options.version), before, HERE, options.yes, named)


def source_of(root: pathlib.Path, release: str) -> Source:
    return Source(Folder(root), release)


if __name__ == "__main__":
    raise SystemExit(main())
