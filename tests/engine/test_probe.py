# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import dataclasses
import pathlib
import zipfile

import pytest

from sglang_bcg_fixes.planning.plan import ask
from sglang_bcg_fixes.source import options, releases
from sglang_bcg_fixes.source.finding import Finding, Verdict
from sglang_bcg_fixes.source.syntax import Definition, Drifted
from sglang_bcg_fixes.source.tree import Folder, Source, Wheel, affected
from tests.engine.bodies import fix

TEXT = '''
"""Module."""
from somewhere import eager_on_graph

def outer():
    """Says what it does."""
    return inner(1, self.attn(2))

if True:
    def conditional(): pass
else:
    pass
try:
    def tried(): pass
except ImportError:
    def tried(): return 2

class Thing:
    limit: int = 3
    def method(self, a, *, b): return a

    @eager_on_graph(capture_stub=None)
    def stubbed(self): pass

    @eager_on_graph
    def bare(self): pass

    @eager_on_graph(enable=False)
    def disabled(self): pass

product = eager_on_graph(True)(outer)
not_a_product = eager_on_graph(False)(outer)
other = some_decorator(True)(outer)
'''

ARGUMENTS = """
class Args:
    new_style: A[int, "a text"] = 1
    renamed: A[str, Arg(help="a text", cli_name="--name", aliases=["--alias", "--other-alias"]), NS("a")] = ""
    formatted: Annotated[int, f"a {text}"] = 1
    yes_or_no: A[bool, Arg(action=argparse.BooleanOptionalAction)] = False
    hidden: A[int, Arg(no_cli=True)] = 1
    undescribed: A[int, NS("a")] = 1
    plain: int = 1

    def add_cli_args(parser):
        parser.add_argument("--old-style", "-o", "--older-style", type=int)
        if True:
            parser.add_argument("--deprecated", dest="new_style", action=Deprecated)
        parser.add_argument("positional")
        print("--no-option")
"""
OPTIONS = {
    "--new-style": "new_style",
    "--name": "renamed",
    "--alias": "renamed",
    "--other-alias": "renamed",
    "--formatted": "formatted",
    "--yes-or-no": "yes_or_no",
    "--no-yes-or-no": "yes_or_no",
    "--old-style": "old_style",
    "--older-style": "old_style",
    "--deprecated": "new_style",
}


@pytest.fixture
def source(tmp_path: pathlib.Path) -> Source:
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (package / "thing.py").write_text(TEXT)
    (package / "server_args.py").write_text(ARGUMENTS)
    (package / "arg_groups" / "fields").mkdir(parents=True)
    (package / "arg_groups" / "fields" / "more.py").write_text("class More:\n    in_a_group: A[int, 'more'] = 1\n")
    return Source(Folder(tmp_path))


def zipped(root: pathlib.Path) -> Source:
    file = root / "sglang-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path in root.rglob("*.py"):
            archive.write(path, path.relative_to(root))
    return Source(Wheel(file))


def test_a_wheel_answers_as_its_folder_does(source: Source, tmp_path: pathlib.Path) -> None:
    wheel = zipped(tmp_path)
    for where in ("outer", "conditional", "tried", "Thing.method", "Thing.limit", "product"):
        one, other = source.find(f"sglang.srt.thing:{where}"), wheel.find(f"sglang.srt.thing:{where}")
        assert one and other and one.evidence == other.evidence
    for option in ("--old-style", "--new-style", "--in-a-group", "--nowhere"):
        assert source.has_option(option) == wheel.has_option(option) == (option != "--nowhere")
        assert source.value_of(option) == wheel.value_of(option)
    assert wheel.find("sglang.srt.gone:x") is None and not wheel.has_module("sglang.srt.gone")


def test_options_are_those_that_a_parser_gets() -> None:
    assert options.options_in(ast.parse(ARGUMENTS)) == OPTIONS


def test_what_was_forgotten_is_read_again(source: Source) -> None:
    before = source.need("sglang.srt.thing:outer")
    source.forget()
    assert source.has_module("sglang.srt.thing") and source.has_module("sglang.srt.server_args")
    again = source.need("sglang.srt.thing:outer")
    assert again.node is not before.node and again.evidence == before.evidence


def test_whether_there_is_a_module_is_no_question_to_its_syntax(source: Source, tmp_path: pathlib.Path) -> None:
    (tmp_path / "sglang" / "srt" / "newer.py").write_text("a syntax of tomorrow")
    (tmp_path / "sglang" / "srt" / "folder").mkdir()
    (tmp_path / "sglang" / "srt" / "folder" / "__init__.py").write_text("")
    for asked in (source, zipped(tmp_path)):
        assert asked.has_module("sglang.srt.newer") and asked.has_module("sglang.srt.folder")
        assert not asked.has_module("sglang.srt.gone")
        with pytest.raises(SyntaxError):
            asked.find("sglang.srt.newer:x")


def test_what_a_definition_tells(source: Source) -> None:
    outer = source.need("sglang.srt.thing:outer")
    assert outer.calls == {"inner", "self.attn"} and outer.evidence.file == "sglang/srt/thing.py"
    assert source.need("sglang.srt.thing:Thing.method").parameters == ("self", "a", "b")
    assert source.need("sglang.srt.thing:tried").mentions("return 2"), "the last definition wins"
    with pytest.raises(Drifted, match=r"Thing\.gone or sglang\.srt\.thing:gone"):
        source.need("sglang.srt.thing:Thing.gone", "sglang.srt.thing:gone")


@pytest.mark.parametrize(
    ("name", "is_break"),
    [
        ("product", True),
        ("Thing.stubbed", True),
        ("Thing.bare", True),
        ("not_a_product", False),
        ("Thing.disabled", False),
        ("other", False),
        ("outer", False),
        ("gone", False),
    ],
)
def test_graph_breaks_are_told_apart(source: Source, name: str, is_break: bool) -> None:
    assert source.is_graph_break("sglang.srt.thing", name) is is_break


def form(text: str) -> str:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    return Definition("m:f", "m.py", node).form


def test_a_form_ignores_layout_and_words_and_sees_every_change() -> None:
    plain = form("def f(a, b=1):\n    return a + b\n")
    assert plain == form('def f(a, b = 1):\n    """Adds."""\n    # adds\n    return (a +\n            b)\n')
    for other in (
        "def f(a, b=2):\n return a + b",
        "def f(a, b=1):\n return b + a",
        "@x\ndef f(a, b=1):\n return a + b",
    ):
        assert form(other) != plain


def test_a_form_is_the_same_in_every_python() -> None:
    text = (
        "def f(a: int, *b, c=f'{1!r:>{2}}', **d) -> None:\n    with a as b, c: pass\n    return [x async for x in y]\n"
    )
    # computed with 3.10, 3.11, 3.12 and 3.13
    assert form(text) == "49b2a30a5c61"


def test_an_unread_form_is_unknown_whatever_it_looks_like(source: Source) -> None:
    outer = source.need("sglang.srt.thing:outer")
    drifting = fix("one")

    def probe(source: Source) -> Finding:
        return affected("it looks bad", outer)

    unread = ask(dataclasses.replace(drifting, probe=probe), source)
    assert unread.verdict is Verdict.UNKNOWN and "looks affected: it looks bad" in unread.reason
    read = ask(dataclasses.replace(drifting, probe=probe, known={outer.form: "outer"}), source)
    assert read.verdict is Verdict.AFFECTED


def test_folders_that_a_user_may_name(source: Source, tmp_path: pathlib.Path) -> None:
    assert isinstance(source.files, Folder)
    for named in (tmp_path, tmp_path / "sglang"):
        assert releases.in_folder(named).has_module("sglang.srt.thing")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "python").symlink_to(tmp_path)
    assert releases.in_folder(checkout).has_module("sglang.srt.thing")
    with pytest.raises(releases.ReleaseError, match="site-packages"):
        releases.in_folder(tmp_path / "sglang" / "srt")
    with pytest.raises(releases.ReleaseError, match="no such file"):
        releases.in_wheel(tmp_path / "gone.whl")
