# SPDX-License-Identifier: Apache-2.0
"""Proofs of rows: what each has read, a digest of all of that, and where proofs are kept.

tests/recorded has those that are committed, a file for each file of tests; the user's cache has every one ever made
here, so that going back to an earlier state opens nothing. See tests/recorded/README.md.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.source import forms as forms_of
from sglang_bcg_fixes.source.syntax import canonical
from tests.processes import REPOSITORY

# raised with each change of what a digest or a key is made of
FORMAT = 3
FOLDER = REPOSITORY / "tests" / "recorded"
# ids of fixes in the order in which they came; a proof that knows the first 84 is not asked about the others
FIX_IDS = FOLDER / "fixes.txt"
RECORDED, FIXES = "tests/recorded/", "sglang_bcg_fixes/fixes/"
# before a module of which the words count, and all modules of a folder but the private ones
TEXT, MODULES = "text:", "[!_]*.py"
# before a folder of which the modules count, and a fix of which only counts whom it concerns
PACKAGES, CONCERNS = "modules:", "concerns:"
# pytest's section of pyproject.toml
OPTIONS = "options of pytest"
KERNELS = "sglang_bcg_fixes/kernels/*/declaration.py"
FORMS, VERDICTS = "sglang_bcg_fixes/source/forms.json", "sglang_bcg_fixes/source/verdicts.json"
READS_FORMS = "sglang_bcg_fixes/source/forms.py"
PROVEN = "sglang_bcg_fixes/kernels/proven.json"
OF_RELEASES, OF_TESTS = "cpu_sglang/requirements.txt", "tests/requirements.txt"
# all that a row's processes inherit
VARIABLES = (
    "HOME",
    "LANG",
    "LC_",
    "OPENBLAS_",
    "PATH",
    "PIP_",
    "SSL_",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
    "XDG_CACHE_HOME",
    flags.CACHE_DIR,
)
# they read headers, which no hook sees: all that there are count
COMPILERS = ("g++", "gcc", "c++", "cc", "nvcc", "ptxas", "cuobjdump", "nvdisasm", "ptxas-blackwell")
SOURCES = ("csrc/**/*.[ch]*", "tests/kernels/*.[ch]*", "sglang_bcg_fixes/kernels/**/*.cu*")
# they read nothing of ours but what they are handed: where libraries are, what machine this is, and a script's engine
HARMLESS = ("node", "file", "ldconfig", "ld", "objdump", "uname", "nvidia-smi", "lscpu", "lsb_release", "rustc")
IMPORT = re.compile(r"sglang_bcg_fixes\.fixes(?:\.(\w+|\{)| import (\([^)]*\)|[^\n]*))")

Signature = Mapping[str, tuple[int, int]]


class Unproved(Exception):
    """The row has passed, and that cannot be recorded."""


class Ended(Protocol):
    """The end of a row: see tests/ledger.py."""

    seconds: float
    outcomes: dict[str, str]
    notes: list[tuple[int, str, str]]


@dataclasses.dataclass
class Plan:
    """A row's processes with the plugin: on which releases, with which fixes, and if all others were off."""

    releases: list[str]
    is_default: bool
    on: list[str]
    # so many of fixes.txt
    known: int


@dataclasses.dataclass
class Proof:
    """One row was right with these files."""

    key: str
    seconds: float
    on: str
    reads: list[str]
    programs: list[str]
    packages: list[str]
    # what it ran with: see `environment`
    environment: str = ""
    plan: Plan | None = None
    skipped: list[str] = dataclasses.field(default_factory=list)
    # programs of which nobody knows what they have read, and this folder: with one of them the row runs every time
    unseen: list[str] = dataclasses.field(default_factory=list)


class Tree:
    """The repository's files, each read once until one changes."""

    def __init__(self, root: pathlib.Path = REPOSITORY) -> None:
        self.root = root
        self._digests: dict[str, str] = {}
        self._trees: dict[str, ast.Module | None] = {}
        self._imports: dict[str, frozenset[str]] = {}
        self._closures: dict[str, frozenset[str]] = {}
        self._verdicts: dict[str, dict[str, str]] = {}
        self._files: dict[str, list[str]] = {}
        self._forms: dict[str, str] = {}
        self._seen: Signature = {}

    def refreshed(self) -> Signature:
        """Forget what was read if anything has changed since, and return the signature of what is there."""
        now = self.signature()
        if now != self._seen:
            self.forget()
            self._seen = now
        return now

    def forget(self) -> None:
        self._digests.clear()
        self._trees.clear()
        self._imports.clear()
        self._closures.clear()
        self._verdicts.clear()
        self._files.clear()
        self._forms.clear()

    def signature(self) -> Signature:
        """When each file was last written, and its size: equal while nobody touches any."""
        found: dict[str, tuple[int, int]] = {}
        for folder, folders, files in os.walk(self.root):
            inside = os.path.relpath(folder, self.root)
            top = inside == "."
            folders[:] = [
                name
                for name in folders
                if name != "__pycache__"
                and not (top and not is_kept(name))
                and not (top and name == "recorded")
                and not (inside == "tests" and name == "recorded")
            ]
            for name in files:
                path = os.path.join(folder, name)
                try:
                    stat = os.stat(path)
                except FileNotFoundError:
                    continue
                found[os.path.normpath(os.path.join(inside, name))] = (stat.st_mtime_ns, stat.st_size)
        return found

    def syntax(self, name: str) -> ast.Module | None:
        if name not in self._trees:
            try:
                self._trees[name] = ast.parse((self.root / name).read_bytes())
            except (OSError, SyntaxError, ValueError):
                self._trees[name] = None
        return self._trees[name]

    def digest(self, read: str) -> str:
        """Of code without docstrings and comments, of anything else by its bytes, of a folder by its names."""
        if read not in self._digests:
            self._digests[read] = self._digest(read)
        return self._digests[read]

    def _digest(self, read: str) -> str:
        if read == OPTIONS:
            text = (self.root / "pyproject.toml").read_text()
            return hashed(*re.findall(r"^\[tool\.pytest\..*?(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL))
        if read.startswith(CONCERNS):
            return self.concerns(read.removeprefix(CONCERNS))
        name = read.removeprefix(TEXT).removeprefix(PACKAGES)
        path = self.root / name
        if read.endswith("/"):
            if not path.is_dir():
                return "absent"
            if read.startswith(PACKAGES):
                return hashed(*sorted(f"{info.name} {info.ispkg}" for info in pkgutil.iter_modules([str(path)])))
            return hashed(*sorted(filter(is_kept, os.listdir(path))))
        if not path.is_file():
            return "absent"
        data = path.read_bytes()
        if name.endswith(".py") and read == name:
            # a package beside it would be imported in its place
            shadow = (self.root / name.removesuffix(".py") / "__init__.py").is_file()
            return hashed(code_digest(data), str(shadow))
        return hashlib.sha256(data).hexdigest()

    def files_of(self, fix: str) -> list[str]:
        """The file of a fix, or the modules of its folder; the first declares it."""
        if fix not in self._files:
            modules = sorted((self.root / FIXES / fix).glob("*.py"))
            self._files[fix] = [file.relative_to(self.root).as_posix() for file in modules] or [f"{FIXES}{fix}.py"]
        return self._files[fix]

    def concerns(self, name: str) -> str:
        """Hash a fix's `concerns`, with what they name of its own."""
        named: dict[str, ast.AST] = {}
        modules = filter(None, map(self.syntax, self.files_of(id_of(name))))
        for node in (node for module in modules for node in module.body):
            if isinstance(node, ast.FunctionDef):
                named[node.name] = node
            elif isinstance(node, ast.Assign):
                targets = (each for target in node.targets for each in ast.walk(target))
                named |= {each.id: node.value for each in targets if isinstance(each, ast.Name)}
        declared = named.get("FIX")
        left: list[ast.AST] = [word.value for word in getattr(declared, "keywords", ()) if word.arg == "concerns"]
        found = []
        while left:
            part = left.pop()
            found.append(repr(canonical(part)))
            left += [named.pop(each.id) for each in ast.walk(part) if isinstance(each, ast.Name) and each.id in named]
        return hashed(*sorted(found))

    def imports(self, name: str) -> frozenset[str]:
        """The repository's files that are imported whenever this one is."""
        if name not in self._imports:
            tree = self.syntax(name)
            self._imports[name] = frozenset(self._imported(name, tree)) if tree else frozenset()
        return self._imports[name]

    def _imported(self, name: str, tree: ast.Module) -> Iterator[str]:
        package = pathlib.PurePosixPath(name).parent.parts
        for count in range(1, len(package) + 1):
            yield from self._file(package[:count])
        for node in tree.body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._module(tuple(alias.name.split(".")))
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else ()
                whole = (*base, *(node.module.split(".") if node.module else ()))
                yield from self._module(whole)
                for alias in node.names:
                    yield from self._file((*whole, alias.name))

    def _module(self, parts: tuple[str, ...]) -> Iterator[str]:
        for count in range(1, len(parts) + 1):
            yield from self._file(parts[:count])

    def _file(self, parts: tuple[str, ...]) -> Iterator[str]:
        if parts and parts[0] in ("sglang_bcg_fixes", "cpu_sglang", "tests"):
            module, package = f"{'/'.join(parts)}.py", f"{'/'.join(parts)}/__init__.py"
            if (self.root / module).is_file():
                yield module
            elif (self.root / package).is_file():
                yield package

    def closure(self, name: str) -> frozenset[str]:
        """The file, and all that is imported whenever it is; but no fixes: those count by what they do in a row."""
        if name not in self._closures:
            found, left = {name}, [name]
            while left:
                new = [other for other in self.imports(left.pop()) if other not in found and not is_fix(other)]
                found.update(new)
                left += new
            self._closures[name] = frozenset(found)
        return self._closures[name]

    def expanded(self, reads: Iterable[str], plan: Plan | None = None) -> set[str]:
        """Everything that a list of readings stands for: see `reduced`."""
        found = self.planned_with(plan)
        for read in reads:
            if read.endswith(MODULES):
                found |= self.beside(read)
            else:
                found |= self.closure(read) if read.endswith(".py") and ":" not in read else {read}
        return found

    def beside(self, pattern: str) -> set[str]:
        """All modules of a folder, and what they import; or their texts alone."""
        paths = self.root.glob(pattern.removeprefix(TEXT))
        names = [path.relative_to(self.root).as_posix() for path in paths]
        return (
            {f"{TEXT}{name}" for name in names} if pattern.startswith(TEXT) else set().union(*map(self.closure, names))
        )

    def planned_with(self, plan: Plan | None) -> set[str]:
        """The files that a process reads to plan: fixes that are on, what all import, and the kernels' declarations."""
        if not plan or not plan.known:
            return set()
        known = {name: self.files_of(name) for name in fix_ids()[: plan.known]}
        found = set().union(*(self.closure(file) - {file} for files in known.values() for file in files))
        found.update(*(known[name] for name in plan.on if name in known))
        return found | self.beside(KERNELS) if plan.is_default else found

    def without_kernels(self, reads: set[str]) -> set[str]:
        """Without what the declarations of kernels alone import: where all that is not named is off, so are they."""
        declared = self.beside(KERNELS)
        kept = reads - declared
        return kept | (self.expanded(kept) & reads)

    def reduced(self, reads: Iterable[str], plan: Plan | None = None) -> list[str]:
        """Leave out what others of these import each time, and name a folder in the place of all its modules."""
        left = set(reads) - self.planned_with(plan)
        for folder in [read for read in left if read.endswith("/")]:
            # a new one counts already, because the folder was listed
            modules = {path.relative_to(self.root).as_posix() for path in self.root.glob(f"{folder}{MODULES}")}
            for as_text in ("", TEXT):
                named = {f"{as_text}{name}" for name in modules}
                if len(named) > 1 and named <= left:
                    left = left - named | {f"{as_text}{folder}{MODULES}"}
        code = (read for read in left if read.endswith(".py") and ":" not in read and not read.endswith(MODULES))
        # one that imports all the others stays for last
        for read in sorted(code, key=self._width):
            if read in left and read in self.expanded(left - {read}):
                left.remove(read)
        return sorted(left)

    def verdicts(self, release: str) -> dict[str, str]:
        """The verdicts on a release."""
        if not self._verdicts:
            self._verdicts = json.loads((self.root / VERDICTS).read_text())
        return self._verdicts.get(release, {})

    def forms(self, release: str) -> str:
        """Hash a release's part of forms.json: its forms, what each was read for, and what a GPU has run there."""
        if not self._forms:
            rows: dict[str, list[Any]] = {}
            for where, forms in sorted(forms_of.load(self.root / FORMS).items()):
                for form, known in sorted(forms.items()):
                    for name in known["releases"]:
                        rows.setdefault(name, []).append([where, form, sorted(known["read_for"])])
            self._forms = {name: hashed(json.dumps([*of, *self.proven(name)])) for name, of in rows.items()}
        return self._forms.get(release, hashed("[]"))

    def proven(self, release: str) -> list[str]:
        """Tell what proven.json has results of on this release, by its source as planning/proven.py does."""
        having: dict[str, set[str]] = {}
        mine: dict[str, set[str]] = {}
        for forms in forms_of.load(self.root / FORMS).values():
            for form, known in forms.items():
                having.setdefault(form, set()).update(known["releases"])
                if release in known["releases"]:
                    for reader in known["read_for"]:
                        mine.setdefault(reader, set()).add(form)
        table: dict[str, Any] = json.loads((self.root / PROVEN).read_text())
        shared = {op: (having[form] for form in mine.get(op, ())) for op in table}
        return sorted(op for op, measured in table.items() if set(measured).intersection(*shared[op]))

    def _width(self, read: str) -> tuple[int, str]:
        return len(self.closure(read)), read


def is_kept(entry: str) -> bool:
    """False for what caches and builds leave in a folder."""
    hidden = entry.startswith(".") and entry not in (".ci", ".github")
    return not hidden and entry not in ("__pycache__", "build", "dist", "site") and not entry.endswith(".egg-info")


def hashed(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def code_digest(data: bytes) -> str:
    """Hash what a file says to Python; kept in the user's cache, because parsing all of them takes seconds."""
    # of this form alone: another one has hashed something else
    kept = flags.cache_dir() / "proofs" / f"code-{FORMAT}" / hashlib.sha256(data).hexdigest()[:32]
    if kept.is_file():
        return kept.read_text()
    try:
        made = hashed(repr(canonical(ast.parse(data))))
    except SyntaxError:
        return hashlib.sha256(data).hexdigest()
    written(kept, made)
    return made


def written(file: pathlib.Path, text: str) -> None:
    """Write it whole, or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as draft:
        draft.write(text)
    os.chmod(draft.name, 0o644)
    os.replace(draft.name, file)


def is_fix(name: str) -> bool:
    return name.startswith(FIXES) and name.endswith(".py") and not id_of(name).startswith("_")


def id_of(name: str) -> str:
    """The fix that a file of `fixes/` is, or that the folder is in which it lies."""
    return name.removeprefix(FIXES).partition("/")[0].removesuffix(".py")


def fixes_in(root: pathlib.Path) -> set[str]:
    names = {info.name for info in pkgutil.iter_modules([str(root / FIXES)])}
    return {name for name in names if not name.startswith("_")}


def notes_in(folder: pathlib.Path) -> list[tuple[int, str, str]]:
    """The notes of a row's processes: process, kind and what."""
    found = []
    for file in folder.iterdir():
        if file.name.isdigit():
            for line in file.read_text(errors="surrogateescape").splitlines():
                pid, kind, what = line.split("\t", 2)
                found.append((int(pid), kind, what))
    return found


def fix_ids() -> list[str]:
    return FIX_IDS.read_text().split() if FIX_IDS.is_file() else []


def number_of_fixes(root: pathlib.Path = REPOSITORY) -> int:
    """All fixes that there are, the new ones at the end of fixes.txt."""
    known = fix_ids()
    new = sorted(fixes_in(root))
    if set(new) - set(known):
        known += [name for name in new if name not in known]
        written(FIX_IDS, "\n".join(known) + "\n")
    return len(known)


def found_in(tree: Tree, release: str, notes: Sequence[tuple[int, str, str]]) -> tuple[Plan | None, set[str]]:
    """The decisions and readings of the processes. A fix that all of them left off is no reading of theirs."""
    by_process: dict[int, set[tuple[str, str]]] = {}
    plans: dict[int, list[str]] = {}
    for pid, kind, what in notes:
        by_process.setdefault(pid, set()).add((kind, what))
        if kind == "plan":
            plans.setdefault(pid, []).append(what)
    made = [what.split(" ") for told in plans.values() for what in told]
    on = {name for _, _, ids in made for name in ids.split(",") if name}
    reads: set[str] = set()
    for pid, noted in by_process.items():
        # only what the plugin has planned with is known to have been planned with
        with_plan = pid in plans
        reads_forms = ("code", READS_FORMS) in noted
        for kind, what in noted:
            if kind in ("code", "used"):
                if not is_fix(what):
                    reads.add(what)
                elif kind == "used" or not with_plan or id_of(what) in on:
                    # whole, where it is a folder
                    reads.update(tree.files_of(id_of(what)))
            elif kind in ("folder", "modules"):
                if not with_plan or f"{what}/" != FIXES:
                    reads.add(f"{PACKAGES if kind == 'modules' else ''}{what or '.'}/")
            elif kind == "options":
                reads.add(OPTIONS)
            elif kind == "concerns" and id_of(what) not in on:
                reads.add(f"{CONCERNS}{what}")
            elif kind == "data":
                by_slice = with_plan or (what == FORMS and release and not reads_forms)
                if not by_slice or what not in (FORMS, VERDICTS, PROVEN):
                    reads.add(f"{TEXT}{what}" if what.endswith(".py") else what)
    for name in sorted(reads):
        if name.endswith(".py") and not name.startswith((FIXES, TEXT, CONCERNS)):
            reads.update(*(tree.files_of(fix) for fix in named_fixes(tree, name)))
    if not made and not any(is_fix(what) for _, kind, what in notes if kind == "code"):
        sliced = {release} if release else set()
    else:
        sliced = {version for version, _, _ in made} | ({release} if release else set())
    if not sliced:
        return None, reads
    is_default = any(how == "all" for _, how, _ in made)
    if made and not is_default and all(pid in plans for pid, kind, what in notes if is_declaration(kind, what)):
        reads = tree.without_kernels(reads)
    return Plan(sorted(sliced), is_default, sorted(on), number_of_fixes() if made else 0), reads


def is_declaration(kind: str, what: str) -> bool:
    return kind == "code" and pathlib.PurePosixPath(what).match(KERNELS)


def named_fixes(tree: Tree, name: str) -> set[str]:
    """Fixes that a file other than the plugin's own imports; all of them where it makes the name as it runs."""
    if name.startswith("sglang_bcg_fixes/"):
        return set()
    text = (tree.root / name).read_text(errors="replace") if (tree.root / name).is_file() else ""
    there = fixes_in(tree.root)
    found: set[str] = set()
    for module, names in IMPORT.findall(text):
        if module == "{":
            return there
        found |= {module, *re.findall(r"\w+", names)} & there
    return found


def verdicts_for(plan: Plan, tree: Tree) -> list[str]:
    """The part of fixes that were not on: a verdict, and how one would come to be on by default."""
    ids = fix_ids()[: plan.known]
    found = []
    for release in plan.releases:
        verdicts = tree.verdicts(release)
        found += [f"{release} {name} {verdicts.get(name, 'gone')}" for name in ids]
        if plan.is_default:
            # any other fix that could apply there would be on, too
            could = sorted(name for name, verdict in verdicts.items() if verdict not in ("fixed", "absent"))
            found += [f"{name} {declaration(tree, name)}" for name in could]
    return found


def declaration(tree: Tree, name: str) -> str:
    """Hash a fix's declaration, but for its words."""
    module = tree.syntax(tree.files_of(name)[0])
    made = (node for node in (module.body if module else ()) if isinstance(node, ast.Assign))
    values = [
        keyword
        for node in made
        if isinstance(node.value, ast.Call) and getattr(node.targets[0], "id", "") == "FIX"
        for keyword in node.value.keywords
        if keyword.arg not in ("doc", "upstream", "concerns", "workarounds", "verify")
    ]
    return hashed(*(ast.dump(value) for value in values))


@functools.cache
def version_of_program(name: str) -> str:
    """The version that a compiler tells; other programs count by their name."""
    file = shutil.which(name)
    if name not in COMPILERS or file is None:
        return name if file else f"{name} absent"
    done = subprocess.run([file, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


@functools.cache
def pins(requirements: str) -> dict[str, str]:
    """The installed version of each package that a file of requirements names; "" of those not here."""
    found = {}
    for name in re.findall(r"^([\w.-]+)==", (REPOSITORY / requirements).read_text(), re.MULTILINE):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


@functools.cache
def environment() -> str:
    """Name what all rows run with: Python, and what a release and the plugin need of packages."""
    needed = pins(OF_RELEASES) | {"pluggy": importlib.metadata.version("pluggy")}
    return f"Python {sys.version_info.major}.{sys.version_info.minor}, packages {hashed(json.dumps(needed))[:8]}"


@functools.cache
def names_of_packages() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def packages_in(notes: Iterable[tuple[int, str, str]]) -> list[str]:
    """The packages of the tests alone that were opened; what a release needs counts always."""
    opened = {what for _, kind, what in notes if kind == "package"}
    used = {name.lower() for each in opened for name in names_of_packages().get(each, ())}
    return sorted(used & pins(OF_TESTS).keys())


# files that pytest would find beside the tests, or above them
FOUND_BY_PYTEST = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg")


def inputs(tree: Tree, file: str, proof: Proof) -> set[str]:
    """Every file and folder that the row rests on; what has its place in no list of readings stands here."""
    found = tree.expanded(proof.reads, proof.plan)
    folders = [folder.as_posix() for folder in pathlib.PurePosixPath(file).parents]
    found |= {name if folder == "." else f"{folder}/{name}" for folder in folders for name in FOUND_BY_PYTEST}
    if any(name in COMPILERS for name in proof.programs):
        sources = {source for pattern in SOURCES for source in tree.root.glob(pattern) if source.is_file()}
        found |= {source.relative_to(tree.root).as_posix() for source in sources if "__pycache__" not in source.parts}
    # safetensors opens weights without a word to Python; they lie beside a model's configuration
    models = [pathlib.PurePosixPath(read).parent for read in found if read.endswith("/config.json")]
    weights = (path for model in models for path in (tree.root / model).glob("*.safetensors"))
    found |= {path.relative_to(tree.root).as_posix() for path in weights}
    if proof.plan:
        found.add("entry_points.toml")
    return found


def tables(tree: Tree, proof: Proof) -> set[str]:
    """The files of which the row rests on a part."""
    if not proof.plan:
        return set()
    ids = fix_ids() if proof.plan.is_default else ()
    return {FORMS, VERDICTS, PROVEN, *(file for name in ids for file in tree.files_of(name))}


def importable(tree: Tree) -> list[str]:
    """Modules that would be imported in the place of a package, and the kernels that would be found."""
    top = (path.name for path in tree.root.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
    kernels = (path.parent.name for path in tree.root.glob("sglang_bcg_fixes/kernels/*/declaration.py"))
    return [*sorted(top), *sorted(kernels)]


def key_of(tree: Tree, file: str, release: str, tests: Sequence[str], proof: Proof) -> str:
    """The digest of everything that the row rests on, as it is now."""
    parts = [str(FORMAT), tree.digest("tests/traced.py"), environment(), file, release, *sorted(tests)]
    parts += [f"{name}={pins(OF_TESTS).get(name, '')}" for name in proof.packages]
    parts += [version_of_program(name) for name in proof.programs]
    parts += [f"{read}={tree.digest(read)}" for read in sorted(inputs(tree, file, proof))]
    parts += importable(tree)
    if proof.plan:
        parts += [tree.forms(name) for name in proof.plan.releases]
        parts += verdicts_for(proof.plan, tree)
    return hashed(*parts)[:20]


def proof_of(tree: Tree, file: str, release: str, tests: Sequence[str], ended: Ended, before: Signature) -> Proof:
    """The proof that a row which has passed is, or why it is none."""
    programs = sorted({what for _, kind, what in ended.notes if kind == "program"} - set(HARMLESS))
    if set(ended.outcomes) != set(tests):
        raise Unproved("other tests were run than were collected")
    tree.refreshed()
    plan, reads = found_in(tree, release, ended.notes)
    # what was recorded before this is recorded
    recorded = {read for read in reads if read.startswith(RECORDED) and read.endswith((".json", "/"))}
    reads -= recorded
    proof = Proof(
        key="",
        seconds=round(ended.seconds, 1),
        on=datetime.date.today().isoformat(),
        reads=tree.reduced(reads, plan),
        programs=[name for name in programs if name in COMPILERS],
        unseen=[name for name in programs if name not in COMPILERS] + [RECORDED] * bool(recorded),
        packages=packages_in(ended.notes),
        environment=environment(),
        plan=plan,
        skipped=sorted(name for name, outcome in ended.outcomes.items() if outcome == "skipped"),
    )
    proof.key = key_of(tree, file, release, tests, proof)
    # behind it, so that nothing can change between the look and the key
    now = tree.signature()
    resting = inputs(tree, file, proof) | tables(tree, proof)
    touched = sorted(name for name in resting if seen(name, before) != seen(name, now))
    if touched:
        raise Unproved(f"{touched[0]} has changed while it ran")
    return proof


def seen(read: str, signature: Signature) -> object:
    """The signature's part of a reading: of a folder, its names."""
    if read.endswith("/"):
        inside = read.removeprefix("./")
        return {name.removeprefix(inside).partition("/")[0] for name in signature if name.startswith(inside)}
    return signature.get(read.removeprefix(TEXT).removeprefix(CONCERNS))


def as_data(proof: Proof) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(proof).items() if value not in (None, [], "")}


def from_data(data: Mapping[str, Any]) -> Proof:
    given = {"reads": [], "programs": [], "packages": [], **data}
    if given.get("plan"):
        plan = given["plan"] = Plan(**given["plan"])
        if type(plan.known) is not int or not are_words(plan.releases) or not are_words(plan.on):
            raise ValueError("its plan is none")
    made = Proof(**given)
    lists = (made.reads, made.programs, made.packages, made.skipped, made.unseen)
    if not all(map(are_words, lists)) or not isinstance(made.seconds, int | float):
        raise ValueError("it has something else where words belong")
    return made


def are_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def file_of(file: str) -> pathlib.Path:
    return FOLDER / pathlib.PurePosixPath(file).relative_to("tests").with_suffix(".json")


class Broken(Exception):
    """A file of tests/recorded that no program has written like this."""


def only_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"it has {twice!r} twice")
    return dict(pairs)


def committed(file: str) -> dict[str, Proof]:
    """The recorded proofs of a file of tests, by release."""
    path = file_of(file)
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(), object_pairs_hook=only_once)
        shared = data["shared"]
        return {
            release: from_data({**row, **{name: shared[row[name]] for name in SHARED if name in row}})
            for release, row in data["rows"].items()
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        where = path.relative_to(REPOSITORY)
        words = f"{where} cannot be read ({type(error).__name__}: {error}), so its rows are open"
        raise Broken(f"{words}; `git checkout {where}`, or `make test-all` writes it anew") from error


SHARED = ("environment", "reads", "plan", "packages", "programs")


def write(file: str, proofs: Mapping[str, Proof]) -> None:
    """Put these rows into tests/recorded; what rows have in common stands once, and each row on a line."""
    with only_one():
        written(file_of(file), as_text({**last(file), **proofs}))


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Let one process at a time read a file and write it anew."""
    kept = flags.cache_dir() / "proofs" / "lock"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def as_text(rows: Mapping[str, Proof]) -> str:
    shared: list[Any] = []
    lines = []
    for release in sorted(rows, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        data = as_data(rows[release])
        for name in SHARED:
            if name in data:
                if data[name] not in shared:
                    shared.append(data[name])
                data[name] = shared.index(data[name])
        lines.append(f"  {json.dumps(release)}: {json.dumps(data)}")
    common = ",\n".join(f"  {json.dumps(one)}" for one in shared)
    return '{"shared": [\n' + common + '\n ],\n "rows": {\n' + ",\n".join(lines) + "\n }\n}\n"


def cached(file: str, release: str) -> list[Proof]:
    """Every proof of the row that was ever made here; one that cannot be read is none."""
    path = cache_of(file, release)
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            found.append(from_data(json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def cache_of(file: str, release: str) -> pathlib.Path:
    name = re.sub(r"[^\w.]", "-", f"{file.removesuffix('.py')} {release}".strip())
    return flags.cache_dir() / "proofs" / "rows" / f"{name}.jsonl"


def remember(file: str, release: str, proof: Proof) -> None:
    path = cache_of(file, release)
    path.parent.mkdir(parents=True, exist_ok=True)
    (doubts() / proof.key).unlink(missing_ok=True)
    with path.open("a") as kept:
        kept.write(json.dumps(as_data(proof)) + "\n")


def doubt(key: str) -> None:
    """Open a row that has failed, here, until it passes."""
    written(doubts() / key, "")


def doubts() -> pathlib.Path:
    return flags.cache_dir() / "proofs" / "doubted"


def last(file: str) -> dict[str, Proof]:
    """The rows of a file as they were recorded, be that true still or not."""
    try:
        return committed(file)
    except Broken:
        return {}


def find(tree: Tree, file: str, release: str, tests: Sequence[str], here: Proof | None) -> Proof | None:
    """A proof of the row as it is now: the recorded one, or one that was made here."""
    for proof in candidates(file, release, here):
        if proof.key == key_of(tree, file, release, tests, proof) and not (doubts() / proof.key).exists():
            return proof
    return None


def is_known_here(file: str, release: str, here: Proof | None) -> bool:
    """True where some state of the row was proved with this Python and these packages, recorded or here."""
    return any(proof.environment == environment() for proof in candidates(file, release, here))


def candidates(file: str, release: str, here: Proof | None) -> Iterator[Proof]:
    """The recorded proof, and those that were made here, the last one first."""
    if here:
        yield here
    yield from reversed(cached(file, release))


def problems(files: Iterable[str]) -> Iterator[str]:
    """A sentence on each file of proofs that is not as it was written, or that nothing belongs to."""
    known = {file_of(file) for file in files}
    for path in sorted(FOLDER.rglob("*.json")):
        if path not in known:
            yield f"{path.relative_to(REPOSITORY)} belongs to no file of tests; remove it"
    for file in sorted(files):
        try:
            committed(file)
        except Broken as broken:
            yield str(broken)
