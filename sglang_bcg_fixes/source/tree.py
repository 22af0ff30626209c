# SPDX-License-Identifier: Apache-2.0
"""Questions to the source of one SGLang, answered from its syntax trees; nothing of it is imported."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import zipfile
import zlib
from collections.abc import Iterable
from typing import Protocol

from sglang_bcg_fixes.source import options
from sglang_bcg_fixes.source.finding import Finding, Verdict
from sglang_bcg_fixes.source.syntax import Definition, Drifted, Named, bound_names, is_enabled_break, parse, statements

# the largest file of Python in any release has less than half a MiB
LARGEST = 16 << 20
ENTRIES = re.compile(r"^EntryClass\b[^=]*=(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"#.*")
ANEW = "remove it and fetch the wheel again, or name another one"


class Unreadable(Exception):
    """A file of the source cannot be read, and what to do."""


class Files(Protocol):
    """Access to the source files: a folder or a wheel."""

    def read(self, path: str) -> str | None: ...

    def modules(self, folder: str) -> list[str]: ...


class Folder:
    """A folder that contains `sglang/`."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

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

    def __str__(self) -> str:
        return str(self.file)

    def read(self, path: str) -> str | None:
        return text_of(self._content(path), f"{path} in {self.file}") if path in self.names else None

    def check(self) -> None:
        """Read every file once: a damaged one must not pass for an unknown source."""
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
        raise Unreadable(f"{name} is not UTF-8 text ({error}); install or fetch this SGLang again") from error


class Source:
    """One SGLang to be asked about; `version` is for display only and decides nothing."""

    def __init__(self, files: Files, version: str = "unknown") -> None:
        self.files = files
        self.version = version
        self._trees: dict[str, ast.Module | None] = {}
        # many probes read the same definition, and keep what they have made of it
        self._found: dict[str, Definition | None] = {}

    def text(self, path: str) -> str | None:
        return self.files.read(path)

    def has_module(self, module: str) -> bool:
        return any(self.text(path) is not None for path in files_of(module))

    def forget(self) -> None:
        """Let go of the syntax trees, some 30 MB; what is asked later is parsed again."""
        self._trees.clear()
        self._found.clear()

    def find(self, where: str) -> Definition | None:
        """The definition at "package.module:Name.attribute", or None."""
        if where not in self._found:
            self._found[where] = self._look_up(where)
        return self._found[where]

    def _look_up(self, where: str) -> Definition | None:
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
        """Tell whether this release's command line has an option such as "--attention-backend"."""
        return option in self._options

    def option(self, word: str) -> str:
        """The option that a word of a command stands for: SGLang takes its beginning, where only one begins so."""
        found = [option for option in self._options if option.startswith(word)]
        return found[0] if len(found) == 1 and word not in self._options else word

    def value_of(self, option: str) -> str:
        """The name of the value that an option sets; others may set it, too, and then the last one counts."""
        return self._options.get(option, option)

    @functools.cached_property
    def _options(self) -> dict[str, str]:
        return {name: value for tree in self.trees_of_options() for name, value in options.options_in(tree).items()}

    def trees_of_options(self) -> list[ast.Module]:
        """The modules that declare the command line: they add to a parser or, later, have the fields that it is of."""
        return self._trees_of(["sglang/srt/server_args.py", *self.files.modules("sglang/srt/arg_groups/fields")])

    def trees_of_choices(self) -> list[ast.Module]:
        """The modules with words that options take."""
        files = self.files.modules("sglang/srt/arg_groups")
        return self._trees_of(file for file in files if file.endswith("choices.py"))

    def _trees_of(self, files: Iterable[str]) -> list[ast.Module]:
        trees = [self._tree(file.removesuffix(".py").replace("/", "."))[1] for file in files]
        return [tree for tree in trees if tree]

    @functools.cached_property
    def architectures(self) -> frozenset[str]:
        """The names in SGLang's registry: each file of a model says which of its classes are models."""
        texts = (self.text(path) or "" for path in self.files.modules("sglang/srt/models"))
        entries = (COMMENT.sub("", found[1]) for text in texts for found in ENTRIES.finditer(text))
        return frozenset(name for entry in entries for name in re.findall(r"\b[A-Za-z]\w+", entry))

    def is_graph_break(self, module: str, name: str) -> bool:
        """Tell whether SGLang's `eager_on_graph` makes this name (or "Class.method") a break."""
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
                self._trees[path] = None if text is None else parse(text, path)
            tree = self._trees[path]
            if tree is not None:
                return path, tree
        return files_of(module)[0], None


def files_of(module: str) -> tuple[str, str]:
    """The paths where the source of a module can be."""
    stem = module.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


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


def drifted(happens: str, *read: Definition) -> Finding:
    """Unknown: this happens, and nobody has read how."""
    return unknown(f"{happens} in a way that no known release does", *read)
