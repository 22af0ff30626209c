"""Questions to the source of one SGLang, answered from its syntax trees; nothing of it is imported."""

from __future__ import annotations

import ast
import functools
import hashlib
import pathlib
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import Protocol

from sglang_bcg_fixes.model import Evidence, Finding, Fix, Kernel, Verdict
from sglang_bcg_fixes.source import forms

# the largest file of Python in any release has less than half a MiB
LARGEST = 16 << 20
ANEW = "remove it and fetch the wheel again, or name another one"
Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Drifted(Exception):
    """A definition that the probe needs is not where any release we know has it."""


class Unreadable(Exception):
    """A file of the source cannot be read, and what to do."""


class Files(Protocol):
    """Where the source comes from: a folder or a wheel."""

    def read(self, path: str) -> str | None: ...

    def modules(self, folder: str) -> list[str]: ...


class Folder:
    """A folder that contains `sglang/`."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    def read(self, path: str) -> str | None:
        file = self.root / path
        return text_of(file.read_bytes(), str(file)) if file.is_file() else None

    def modules(self, folder: str) -> list[str]:
        return sorted(f"{folder}/{file.name}" for file in (self.root / folder).glob("*.py"))


class Wheel:
    """A wheel, read in place."""

    def __init__(self, file: pathlib.Path) -> None:
        self.file = file
        try:
            self.archive = zipfile.ZipFile(file)
        except (OSError, zipfile.BadZipFile) as error:
            raise Unreadable(f"{file} cannot be read as a wheel ({error}); {ANEW}") from error
        self.names = frozenset(self.archive.namelist())

    def read(self, path: str) -> str | None:
        return text_of(self._content(path), f"{path} in {self.file}") if path in self.names else None

    def check(self) -> None:
        """Read all that may be asked for once: a file that is damaged is no source that nobody knows."""
        for path in sorted(self.names):
            if path.endswith((".py", "/METADATA")):
                self._content(path)

    def _content(self, path: str) -> bytes:
        size = self.archive.getinfo(path).file_size
        if size > LARGEST:
            raise Unreadable(f"{path} in {self.file} has {size >> 20} MiB, which no source of SGLang has; {ANEW}")
        try:
            return self.archive.read(path)
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            # the last two: packed in a way that python cannot unpack, or behind a password
            raise Unreadable(f"{path} in {self.file} cannot be unpacked ({error}); {ANEW}") from error

    def modules(self, folder: str) -> list[str]:
        return sorted(name for name in self.names if name.endswith(".py") and name.rpartition("/")[0] == folder)


def text_of(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"{name} is no UTF-8 text ({error}); install or fetch this SGLang again") from error


def canonical(node: object) -> object:
    """A syntax tree as nested tuples that leave out what does not change behaviour.

    Docstrings, positions and empty fields go, so the result is the same in every version of Python.
    """
    if isinstance(node, ast.AST):
        fields: list[object] = []
        for name, value in ast.iter_fields(node):
            if name in ("ctx", "kind", "type_comment") or value is None or value == []:
                continue
            if name == "body" and isinstance(value, list) and is_docstring(value[0]):
                value = value[1:]
            if isinstance(node, ast.JoinedStr):
                # some releases of python 3.12 end a format with an empty piece
                value = [piece for piece in value if not (isinstance(piece, ast.Constant) and piece.value == "")]
            fields.append((name, canonical(value)))
        return (type(node).__name__, *fields)
    if isinstance(node, list):
        return tuple(canonical(item) for item in node)
    return repr(node)


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class Definition:
    """One named piece of a module: a class, a function, a method or an assignment."""

    def __init__(self, where: str, file: str, node: Named) -> None:
        self.where = where
        self.file = file
        self.node = node

    @functools.cached_property
    def form(self) -> str:
        """A hash of what the definition does, the same in every version of Python."""
        return hashlib.sha256(repr(canonical(self.node)).encode()).hexdigest()[:12]

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.where, self.file, self.node.lineno, self.form)

    @functools.cached_property
    def text(self) -> str:
        return ast.unparse(self.node)

    @functools.cached_property
    def calls(self) -> frozenset[str]:
        """The dotted names that it calls: {"torch.empty", "self.attn", ...}."""
        return frozenset(ast.unparse(node.func) for node in ast.walk(self.node) if isinstance(node, ast.Call))

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        if not isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return ()
        args = self.node.args
        return tuple(arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))

    @functools.cached_property
    def decorators(self) -> tuple[str, ...]:
        return tuple(ast.unparse(node) for node in getattr(self.node, "decorator_list", ()))

    def mentions(self, text: str) -> bool:
        """Whether its code, comments and layout apart, contains this text as `ast.unparse` writes it."""
        return text in self.text

    @functools.cached_property
    def header(self) -> Definition:
        """The function without its body: all that a caller has to know, and a form that changes only with that."""
        assert isinstance(self.node, ast.FunctionDef)
        node = ast.FunctionDef(self.node.name, self.node.args, [], [], self.node.returns, lineno=self.node.lineno)
        return Definition(f"{self.where}'s header", self.file, node)

    def assignment_to(self, target: str) -> Definition | None:
        """The first statement in it that assigns to a target such as "self.hf_config", on its own."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign) and target in (ast.unparse(item) for item in node.targets):
                return Definition(f"{self.where}'s {target}", self.file, node)
        return None

    def need_assignment_to(self, target: str) -> Definition:
        found = self.assignment_to(target)
        if found is None:
            raise Drifted(f"no assignment to {target} in {self.where}")
        return found


class Source:
    """One SGLang to be asked about; `version` is for display only and decides nothing."""

    def __init__(self, files: Files, version: str = "unknown") -> None:
        self.files = files
        self.version = version
        self._trees: dict[str, ast.Module | None] = {}

    def text(self, path: str) -> str | None:
        return self.files.read(path)

    def has_module(self, module: str) -> bool:
        return any(self.text(path) is not None for path in files_of(module))

    def forget(self) -> None:
        """Let go of the syntax trees, some 30 MB; what is asked later is parsed again."""
        self._trees.clear()

    def find(self, where: str) -> Definition | None:
        """The definition at "package.module:Name.attribute", or None."""
        module, _, qualified = where.partition(":")
        path, tree = self._tree(module)
        if tree is None:
            return None
        scope: ast.AST = tree
        for name in qualified.split("."):
            # the last definition wins, as it does when the module runs
            candidates = [node for node in statements(scope) if name in bound_names(node)]
            if not candidates:
                return None
            scope = candidates[-1]
        assert isinstance(scope, Named)
        return Definition(where, path, scope)

    def need(self, *alternatives: str) -> Definition:
        """The first of these definitions that exists; a probe that finds none of them answers unknown."""
        for where in alternatives:
            found = self.find(where)
            if found:
                return found
        raise Drifted(f"no {' or '.join(alternatives)}")

    def has_option(self, option: str) -> bool:
        """Whether SGLang's command line knows this option ("--attention-backend") in this release."""
        # an option is a string in the parser or, in later releases, a field of the class it is derived from
        field = rf"^    {option.removeprefix('--').replace('-', '_')}\s*:"
        return f'"{option}"' in self._options or re.search(field, self._options, re.MULTILINE) is not None

    @functools.cached_property
    def _options(self) -> str:
        files = ["sglang/srt/server_args.py", *self.files.modules("sglang/srt/arg_groups/fields")]
        return "\n".join(self.text(file) or "" for file in files)

    def is_graph_break(self, module: str, name: str) -> bool:
        """Whether a name (or "Class.method") of the module is made a break by SGLang's `eager_on_graph`."""
        found = self.find(f"{module}:{name}")
        if found is None:
            return False
        if isinstance(found.node, ast.Assign) and isinstance(found.node.value, ast.Call):
            return is_enabled_break(found.node.value.func)
        return any(is_enabled_break(node) for node in getattr(found.node, "decorator_list", ()))

    def _tree(self, module: str) -> tuple[str, ast.Module | None]:
        for path in files_of(module):
            if path not in self._trees:
                text = self.text(path)
                self._trees[path] = None if text is None else ast.parse(text, path)
            tree = self._trees[path]
            if tree is not None:
                return path, tree
        return files_of(module)[0], None


def files_of(module: str) -> tuple[str, str]:
    """Where the source of a module can be."""
    stem = module.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def is_enabled_break(node: ast.expr) -> bool:
    """Whether an expression is `eager_on_graph` put to use: bare, or called with anything but False."""
    if isinstance(node, ast.Call):
        disabled = any(isinstance(a, ast.Constant) and a.value is False for a in (*node.args, *keyword_values(node)))
        return not disabled and ast.unparse(node.func).endswith("eager_on_graph")
    return ast.unparse(node).endswith("eager_on_graph")


def keyword_values(node: ast.Call) -> list[ast.expr]:
    return [keyword.value for keyword in node.keywords]


def statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a scope, those under if, try and with included, those of inner functions not."""
    for field in ("body", "orelse", "handlers", "finalbody"):
        for node in getattr(scope, field, ()):
            yield node
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from statements(node)


def bound_names(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Assign):
        return tuple(target.id for target in node.targets if isinstance(target, ast.Name))
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return (node.target.id,)
    return ()


def affected(reason: str, *read: Definition) -> Finding:
    return Finding(Verdict.AFFECTED, reason, tuple(item.evidence for item in read))


def latent(reason: str, *read: Definition) -> Finding:
    return Finding(Verdict.LATENT, reason, tuple(item.evidence for item in read))


def fixed(reason: str, *read: Definition) -> Finding:
    return Finding(Verdict.FIXED, reason, tuple(item.evidence for item in read))


def absent(reason: str, *read: Definition) -> Finding:
    return Finding(Verdict.ABSENT, reason, tuple(item.evidence for item in read))


def unknown(reason: str, *read: Definition) -> Finding:
    return Finding(Verdict.UNKNOWN, reason, tuple(item.evidence for item in read))


def ask(fix: Fix | Kernel, source: Source) -> Finding:
    """The verdict on one defect; a source in a form that nobody has read is unknown, whatever it looks like."""
    try:
        finding = fix.probe(source)
    except Drifted as drift:
        return unknown(f"this source has {drift}")
    except Exception as error:
        # one bad probe must not take the others down; unknown is shown, never silent
        return unknown(f"its probe failed: {type(error).__name__}: {error}")
    if not isinstance(finding, Finding):
        return unknown(f"its probe gives a {type(finding).__name__}, which is no Finding")
    read = forms.read_for(fix.id) | fix.known.keys()
    new = [item for item in finding.evidence if item.form not in read]
    if new and finding.verdict is not Verdict.UNKNOWN:
        reason = (
            f"{new[0]} is in a form that has not been read yet (it looks {finding.verdict.value}: {finding.reason})"
        )
        return Finding(Verdict.UNKNOWN, reason, finding.evidence)
    return finding
