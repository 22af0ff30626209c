# SPDX-License-Identifier: Apache-2.0
"""Mistakes at random in fixes, kernels and all other code: is there a row that opens, and does it notice?

    python -m tests.mutants --number 10 --seed 7        `make mutants SEED=7`

Each is made in a copy of the repository, and the rows that it opens run there until one fails. One that nobody notices
is printed with its line: a test is missing, or the change makes no difference. tests/recorded/mutants.jsonl has each
that was made.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from tests.processes import REPOSITORY

RECORDED = REPOSITORY / "tests" / "recorded" / "mutants.jsonl"
CODE = ("sglang_bcg_fixes/**/[!_]*.py", "csrc/**/*.cuh")
OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# of CUDA, where both stand between blanks
IN_CUDA = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
IN_CUDA |= {"+": "-", "-": "+", "*": "+", "%": "/"}
DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue)
# of words for a person
TOLD = ("logger.", "say(", "warn")


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Everything that runs in a server: what the patch points name, and what that calls here."""
    there = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    points = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "PatchPoint"
    ]
    left = [name.id for point in points for body in point.args[2:3] for name in names_in(body)]
    if not left:
        # its points are made elsewhere: all but the probe
        left = [name for name in there if name != "probe"]
    found: dict[str, ast.AST] = {}
    while left:
        name = left.pop()
        if name in there and name not in found:
            found[name] = there[name]
            left += [used.id for used in names_in(there[name])]
    return [node for each in found.values() for node in ast.walk(each) if isinstance(node, ast.FunctionDef)]


def names_in(node: ast.AST) -> Iterator[ast.Name]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def places(tree: ast.Module) -> list[tuple[ast.AST, str, Any]]:
    """Each node that can be another one, how, and where it stands."""
    found: dict[int, tuple[ast.AST, str, Any]] = {}
    for function in functions(tree):
        docstring = function.body[0] if ast.get_docstring(function) is not None else None
        # what a type is called makes no difference
        types = {id(each) for node in ast.walk(function) for each in typed(node)}
        for node in ast.walk(function):
            if id(node) in types:
                continue
            if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER_COMPARISON:
                found[id(node)] = (node, "another comparison", None)
            elif isinstance(node, ast.BinOp) and type(node.op) in OTHER_OPERATOR:
                found[id(node)] = (node, "another operator", None)
            elif isinstance(node, ast.BoolOp):
                found[id(node)] = (node, "and for or", None)
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                found[id(node)] = (node, "without not", None)
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                found[id(node)] = (node, "one more", None)
            for field in ("body", "orelse"):
                for number, statement in enumerate(getattr(node, field, ()) if isinstance(node, ast.stmt) else ()):
                    told = any(word in ast.unparse(statement) for word in TOLD)
                    if isinstance(statement, DROPPED) and statement is not docstring and not told:
                        found[id(statement)] = (node, "a line less", (field, number))
    return list(found.values())


def typed(node: ast.AST) -> Iterator[ast.AST]:
    for field in ("annotation", "returns"):
        named = getattr(node, field, None)
        yield from ast.walk(named) if named else ()


def change(node: ast.AST, how: str, where: Any) -> None:
    if how == "another comparison":
        assert isinstance(node, ast.Compare)
        node.ops[0] = OTHER_COMPARISON[type(node.ops[0])]()
    elif how == "another operator":
        assert isinstance(node, ast.BinOp)
        node.op = OTHER_OPERATOR[type(node.op)]()
    elif how == "and for or":
        assert isinstance(node, ast.BoolOp)
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif how == "without not":
        assert isinstance(node, ast.UnaryOp)
        # twice is none
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif how == "one more":
        assert isinstance(node, ast.Constant) and isinstance(node.value, int)
        node.value += 1
    else:
        field, number = where
        getattr(node, field)[number] = ast.Pass()


def mutated(file: pathlib.Path, source: random.Random) -> tuple[str, str] | None:
    """The file with one mistake, and what it is."""
    text = file.read_text()
    if file.suffix == ".cuh":
        return mutated_cuda(text, source)
    tree = ast.parse(text)
    found = places(tree)
    if not found:
        return None
    before = ast.unparse(tree).splitlines()
    node, how, where = source.choice(found)
    change(node, how, where)
    after = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
    pairs = list(zip(before, after, strict=False))
    old, new = next(((one.strip(), other.strip()) for one, other in pairs if one != other), ("", ""))
    return "\n".join(after) + "\n", f"{how}: {old}  ->  {new}"


def mutated_cuda(text: str, source: random.Random) -> tuple[str, str] | None:
    found = [
        (line, operator)
        for line in re.finditer(r"^(?!\s*(?:#|//|template)).+$", text, re.MULTILINE)
        for operator in re.finditer(r"(?<= )(?:[<>=!]=|[<>]|&&|\|\||[-+*%])(?= )", line[0].partition("//")[0])
    ]
    if not found:
        return None
    line, operator = source.choice(found)
    other = IN_CUDA[operator[0]]
    new = line[0][: operator.start()] + other + line[0][operator.end() :]
    return f"{text[: line.start()]}{new}{text[line.end() :]}", f"another operator: {line[0].strip()}  ->  {new.strip()}"


def subject(name: str) -> str:
    """The word by which tests name what is in a file: a fix, an operation, or else a module."""
    folders = pathlib.PurePosixPath(name).parts[:-1]
    of_package = folders[2:] if folders[:2] in (("sglang_bcg_fixes", "kernels"), ("sglang_bcg_fixes", "fixes")) else ()
    below = folders[1:] if folders[0] == "csrc" else of_package
    return below[0] if below else pathlib.PurePosixPath(name).stem


def copied(folder: pathlib.Path) -> pathlib.Path:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def fate(folder: pathlib.Path, about: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the rows that are open there, and tell who has noticed."""
    found = folder / "noticed.json"
    command = [sys.executable, "-m", "tests.ledger", "--first-failure", str(found), "--about", about]
    command += ["--jobs", str(options.jobs), *(["--near"] if options.near else [])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if not found.is_file():
        raise SystemExit(done.stdout + done.stderr)
    told: dict[str, Any] = json.loads(found.read_text())
    found.unlink()
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--near", action="store_true", help="only rows of tests that name the fix, kernel or module")
    parser.add_argument("--under", metavar="FOLDER", default="", help="only mistakes in files below it")
    options = parser.parse_args()
    survived = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = copied(pathlib.Path(temporary))
        names = (file.relative_to(folder).as_posix() for pattern in CODE for file in folder.glob(pattern))
        files = sorted(name for name in names if name.startswith(options.under))
        for number in range(options.number):
            # each by itself, so that one can be made again
            source = random.Random(f"{options.seed} {number}")
            made = None
            while made is None:
                name = source.choice(files)
                made = mutated(folder / name, source)
            text = (folder / name).read_text()
            (folder / name).write_text(made[0])
            told = fate(folder, subject(name), options)
            (folder / name).write_text(text)
            survived += not told["noticed by"]
            print(f"[{number + 1}/{options.number}] {name}: {made[1]}", flush=True)
            print(f"    {told['noticed by'] or 'NOBODY'} ({told['run']} of {told['open']} rows run)", flush=True)
            row = {"seed": options.seed, "number": number, "file": name, "mistake": made[1], "near": options.near}
            with RECORDED.open("a") as lines:
                lines.write(json.dumps({**row, **told}) + "\n")
    print(f"{options.number - survived} noticed, {survived} not")
    return int(survived > 0)


if __name__ == "__main__":
    raise SystemExit(main())
