# SPDX-License-Identifier: Apache-2.0
"""List where a release may replay what is no longer true: by syntax alone, for somebody to read.

    python tools/suspects.py 0.5.23 [--beside 0.5.22]     # a release that pip can fetch, or a folder that holds sglang/

Four questions, which have found most of the defects that this package knows. With --beside, only what the other release
does not have: what a new release brings. A suspect is no defect; it is a line to read. Those that suspects.json judges
are left out, unless --all asks for them: a fix is for them, or a line of the release shows why they are harmless.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import fnmatch
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.tree import Folder, Source, Wheel

JUDGED = pathlib.Path(__file__).with_suffix(".json")
BATCH = "sglang.srt.model_executor.forward_batch_info:ForwardBatch"
ANSWER = "sglang.srt.layers.logits_processor:LogitsProcessorOutput"
DROPPED, LOST, REPLACED, FROZEN = "dropped", "lost", "replaced", "frozen"
QUESTIONS = {
    DROPPED: "a field that the batch of a replay does not get, and that layers or models read",
    LOST: "a field of the answer that a replay does not return, and that somebody reads",
    REPLACED: "a tensor of a backend, a pool or an adapter that is made at the start and replaced later",
    FROZEN: "a decision of the host where a capture runs once and replays do not",
}
RUNNERS = ("sglang/srt/model_executor", "sglang/srt/model_executor/runner")
CAPTURED = ("sglang/srt/layers", "sglang/srt/models")
READERS = tuple(
    f"sglang/srt/{folder}"
    for folder in ("managers", "speculative", "layers", "sampling", "dllm", "beam_search", "disaggregation")
)
HOLDERS = ("sglang/srt/layers/attention", "sglang/srt/mem_cache", "sglang/srt/lora")
BATCH_NAMES, ANSWER_NAMES = {"forward_batch", "batch"}, {"logits_output", "output", "logits_processor_output"}
# each is answered by the mode of the batch, which a runner admits or not
ADMITTED = {"forward_mode", "batch_size"}
# values that the host reads from the device
READ_BY_THE_HOST = {"item", "tolist", "cpu", "numpy"}
MAKERS = {"empty", "zeros", "ones", "full", "tensor", "arange", "cat", "stack", "randn", "from_numpy"}
COPIES = {"to", "clone", "contiguous", "cuda"}
Functions = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Suspect:
    question: str
    path: str
    function: str
    what: str
    line: int = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.what}"


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The end of some suspects, given as patterns of "question path function/what".

    Either a fix of this package is for them, or they are harmless because of what a definition says.
    """

    suspects: list[str]
    fix: str = ""
    because: str = ""
    where: str = ""
    says: str = ""

    def covers(self, suspect: Suspect) -> bool:
        path, what = suspect.path.removeprefix("sglang/srt/"), suspect.what.rpartition(" ")[2]
        name = f"{suspect.question} {path} {suspect.function}/{what}"
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.suspects)

    def holds(self, source: Source) -> bool:
        """Tell whether the release still says what makes them harmless; a fix's own probe tells the rest."""
        if self.fix:
            return True
        found = source.find(self.where)
        return found is not None and found.mentions(self.says)


def judgements() -> list[Judgement]:
    return [Judgement(**each) for each in json.loads(JUDGED.read_text())]


def unjudged(source: Source, found: Sequence[Suspect]) -> list[Suspect]:
    holding = [each for each in judgements() if each.holds(source)]
    return [suspect for suspect in found if not any(each.covers(suspect) for each in holding)]


@dataclasses.dataclass(frozen=True)
class Module:
    path: str
    tree: ast.Module

    def functions(self) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Functions of the module and of its classes, by their qualified names."""
        for node in self.tree.body:
            if isinstance(node, Functions):
                yield node.name, node
            elif isinstance(node, ast.ClassDef):
                yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, Functions))


class Reader:
    """The modules of one source, each parsed once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.parsed: dict[str, Module | None] = {}

    def modules(self, *folders: str) -> Iterator[Module]:
        for path in sorted({path for folder in folders for path in self.paths(folder)}):
            if path not in self.parsed:
                text = self.source.text(path)
                self.parsed[path] = Module(path, ast.parse(text, path)) if text else None
            module = self.parsed[path]
            if module:
                yield module

    def paths(self, folder: str) -> Iterator[str]:
        files = self.source.files
        if isinstance(files, Wheel):
            yield from (name for name in files.names if name.startswith(f"{folder}/") and name.endswith(".py"))
        elif isinstance(files, Folder):
            yield from (str(path.relative_to(files.root)) for path in (files.root / folder).rglob("*.py"))

    def fields(self, where: str) -> list[str]:
        found = self.source.need(where).node
        assert isinstance(found, ast.ClassDef)
        return [
            each.target.id
            for each in found.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]


def suspects(source: Source) -> list[Suspect]:
    reader = Reader(source)
    answers = (dropped(reader), lost(reader), replaced(reader), frozen(reader))
    return [each for found in answers for each in sorted(found, key=lambda each: (each.path, each.line))]


def dropped(reader: Reader) -> Iterator[Suspect]:
    kept = set()
    for module in reader.modules(*RUNNERS):
        if "cuda_graph_runner" in module.path and "decode" not in module.path:
            for name, function in module.functions():
                made = calls(function, "ForwardBatch")
                if is_of_a_replay(name) and made:
                    kept |= {word.arg for call in made for word in call.keywords if word.arg}
                    kept |= {target.attr for target in assigned(function)}
    missing = set(reader.fields(BATCH)) - kept if kept else set()
    yield from reads(reader, CAPTURED, BATCH_NAMES, missing, DROPPED)


def lost(reader: Reader) -> Iterator[Suspect]:
    fields = reader.fields(ANSWER)
    missing: set[str] = set()
    for module in reader.modules(*RUNNERS):
        if "cuda_graph_runner" in module.path:
            for _, function in module.functions():
                for call in calls(function, "LogitsProcessorOutput"):
                    missing |= set(fields) - {word.arg for word in call.keywords if word.arg}
    yield from reads(reader, READERS, ANSWER_NAMES, missing, LOST)


def reads(
    reader: Reader, folders: Sequence[str], names: set[str], fields: set[str], question: str
) -> Iterator[Suspect]:
    for module in reader.modules(*folders):
        for name, function in module.functions():
            seen: set[str] = set()
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in fields - seen:
                    owner = node.value
                    called = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                    if called in names:
                        seen.add(node.attr)
                        yield Suspect(question, module.path, name, f"reads {called}.{node.attr}", node.lineno)


def replaced(reader: Reader) -> Iterator[Suspect]:
    for module in reader.modules(*HOLDERS):
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                yield from replaced_in(module.path, node)


def replaced_in(path: str, holder: ast.ClassDef) -> Iterator[Suspect]:
    methods = [each for each in holder.body if isinstance(each, Functions)]
    made = {
        target.attr for each in methods if is_of_the_start(each.name) for target in assigned(each) if of_self(target)
    }
    for each in methods:
        if is_of_the_start(each.name):
            continue
        for statement in ast.walk(each):
            if isinstance(statement, ast.Assign) and makes_a_tensor(statement.value):
                for target in statement.targets:
                    if isinstance(target, ast.Attribute) and of_self(target) and target.attr in made:
                        what = f"replaces self.{target.attr}"
                        yield Suspect(REPLACED, path, f"{holder.name}.{each.name}", what, statement.lineno)


def frozen(reader: Reader) -> Iterator[Suspect]:
    for module in reader.modules(*CAPTURED):
        # attention runs in breaks, and its metadata before a replay
        if "/attention/" in module.path:
            continue
        for name, function in module.functions():
            if not any(argument.arg in BATCH_NAMES for argument in arguments(function)):
                continue
            seen: set[str] = set()
            for what, line in decisions(function):
                if what not in seen:
                    seen.add(what)
                    yield Suspect(FROZEN, module.path, name, what, line)


def decisions(function: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            for each in ast.walk(node.test):
                of = each.value.id if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) else ""
                if isinstance(each, ast.Attribute) and of in BATCH_NAMES and each.attr not in ADMITTED:
                    yield f"decides by {of}.{each.attr}", each.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READ_BY_THE_HOST:
            yield f"reads {ast.unparse(node.func)}() on the host", node.lineno


def is_of_a_replay(name: str) -> bool:
    method = name.rpartition(".")[2]
    return method == "_build_static_batch" or any(word in method for word in ("replay", "load"))


def is_of_the_start(method: str) -> bool:
    return method.strip("_").startswith(("init", "create", "alloc", "build", "make", "setup"))


def calls(function: ast.AST, name: str) -> list[ast.Call]:
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [call for call in found if isinstance(call.func, ast.Name) and call.func.id == name]


def assigned(function: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(function):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (each for each in targets if isinstance(each, ast.Attribute))


def of_self(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id == "self"


def makes_a_tensor(value: ast.AST) -> bool:
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    name = value.func.attr
    by_torch = isinstance(value.func.value, ast.Name) and value.func.value.id == "torch"
    return (by_torch and name.removesuffix("_like") in MAKERS) or (not by_torch and name in COPIES)


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def report(found: Sequence[Suspect], beside: Sequence[Suspect] = ()) -> Iterator[str]:
    known = set(beside)
    for question, sentence in QUESTIONS.items():
        mine = [each for each in found if each.question == question]
        new = [each for each in mine if each not in known]
        count = f"{len(new)} of {len(mine)} are new" if beside else str(len(mine))
        yield f"{question}, {sentence}: {count}"
        groups = collections.defaultdict(list)
        for each in new:
            groups[each.what].append(each)
        for what, places in sorted(groups.items()):
            yield f"  {what}"
            yield from (f"    {each.path.removeprefix('sglang/srt/')}:{each.line} {each.function}" for each in places)


def source_of(name: str) -> Source:
    folder = pathlib.Path(name)
    if folder.is_dir():
        return releases.in_folder(folder)
    return releases.in_wheel(releases.fetch(name, flags.cache_dir() / "wheels"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("release", help="such as 0.5.24, or a folder")
    parser.add_argument("--beside", metavar="RELEASE", help="leave out what this one has, too")
    parser.add_argument("--all", action="store_true", help="also those that suspects.json judges")
    options = parser.parse_args(arguments)
    try:
        source = source_of(options.release)
        found = suspects(source)
        if not options.all:
            found = unjudged(source, found)
        beside = suspects(source_of(options.beside)) if options.beside else []
    except releases.ReleaseError as error:
        print(f"suspects: {error}", file=sys.stderr)
        return 2
    print("\n".join(report(found, beside)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
