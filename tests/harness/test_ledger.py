# SPDX-License-Identifier: Apache-2.0
"""A recorded row is open as soon as anything has changed that it has read, and not before."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.planning import registry
from tests import ledger, mutants, proofs, traced, wheels
from tests.processes import REPOSITORY
from tests.proofs import Plan, Proof, Tree

Edit = Callable[[str, str, str], None]
TEST, RELEASE = "tests/fixes/test_no_bucket_fits.py", "0.5.23"
FIX = "sglang_bcg_fixes/fixes/no_bucket_fits.py"
ANOTHER = "sglang_bcg_fixes/fixes/kda_raw_beta.py"
# a fix that is a folder
FOLDER = "sglang_bcg_fixes/fixes/hybrids_without_graphs"
MODULES = sorted(file.relative_to(REPOSITORY).as_posix() for file in (REPOSITORY / FOLDER).glob("*.py"))
ALONE = Plan([RELEASE], is_default=False, on=["no_bucket_fits"], known=83)
WITH_THE_FOLDER = dataclasses.replace(ALONE, on=["hybrids_without_graphs"], known=len(proofs.fix_ids()))
BY_DEFAULT = dataclasses.replace(ALONE, is_default=True)
READS = [
    TEST,
    FIX,
    "tests/scenarios/oversized_buckets.py",
    "sglang_bcg_fixes/kernels/",
    "cpu_sglang/models/llama/config.json",
]
PARTS = ("sglang_bcg_fixes", "cpu_sglang", "csrc", "tests", "tools")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    for part in PARTS:
        shutil.copytree(REPOSITORY / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "recorded"))
    for name in ("setup.py", "entry_points.toml"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


@pytest.fixture
def edit(copied: pathlib.Path) -> Iterator[Edit]:
    """Replace a piece of a file of the copy until the test ends."""
    before: dict[pathlib.Path, bytes | None] = {}

    def edit(name: str, old: str, new: str) -> None:
        file = copied / name
        before.setdefault(file, file.read_bytes() if file.is_file() else None)
        text = file.read_text() if file.is_file() else ""
        assert old in text, name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.replace(old, new, 1))

    yield edit
    for file, content in before.items():
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)


def proof(plan: Plan | None = ALONE, programs: tuple[str, ...] = ()) -> Proof:
    return Proof("", 1.0, "2026-11-28", READS, list(programs), ["pytest"], proofs.environment(), plan)


def key(root: pathlib.Path, plan: Plan | None = ALONE, programs: tuple[str, ...] = (), test: str = "one") -> str:
    return proofs.key_of(Tree(root), TEST, RELEASE, [test], proof(plan, programs))


def test_another_folder_opens_nothing(copied: pathlib.Path) -> None:
    assert key(copied) == key(REPOSITORY)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (FIX, "The server stops at start-up", "The server ends at start-up"),
        (TEST, "as far as the real ModelRunner comes", "as far as ModelRunner comes"),
        ("tests/processes.py", "# of a release that runs on the CPU", "# of a release"),
        # what nothing of it reads
        ("sglang_bcg_fixes/cli/doctor.py", "def ", "def _"),
        # a fix that is off
        (ANOTHER, "def probe(source: Source) -> Finding:", "def probe(source: Source) -> Finding:\n    1 + 1"),
        ("csrc/fa_metadata/fa_metadata.cuh", "", "// another header\n"),
    ],
)
def test_what_makes_no_difference_opens_nothing(
    copied: pathlib.Path, edit: Edit, name: str, old: str, new: str
) -> None:
    before = key(copied)
    edit(name, old, new)
    assert key(copied) == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (FIX, "memory_usage_gb=0", "memory_usage_gb=1"),
        (TEST, '["EagerRunner", True]', '["EagerRunner", False]'),
        # imported by the test, each time
        ("tests/processes.py", 'os.environ.get("TESTS_PATIENCE", "1")', 'os.environ.get("TESTS_PATIENCE", "2")'),
        ("tests/scenarios/oversized_buckets.py", "10**6", "10**7"),
        ("cpu_sglang/models/llama/config.json", "{", "{ "),
        # a new file in a folder that is listed
        ("sglang_bcg_fixes/kernels/another.py", "", "ANOTHER = 1\n"),
        ("entry_points.toml", "sglang_bcg_fixes.plugin:load", "sglang_bcg_fixes.plugin:unload"),
        # what pytest would find beside the test, and above it
        ("tests/fixes/conftest.py", "", "import pytest\n"),
        ("tests/pytest.ini", "", "[pytest]\n"),
        # weights, which no hook sees, beside the configuration that was read
        ("cpu_sglang/models/llama/model.safetensors", "", "weights"),
        # a package that would be imported in the place of another, and one in the place of a module
        ("torch/__init__.py", "", "VERSION = 1\n"),
        ("tests/wheels/__init__.py", "", "RELEASES = ()\n"),
    ],
)
def test_what_was_read_opens_it_and_a_revert_closes_it(
    copied: pathlib.Path, edit: Edit, name: str, old: str, new: str
) -> None:
    before = key(copied)
    edit(name, old, new)
    assert key(copied) != before
    file = copied / name
    file.write_text(file.read_text().replace(new, old, 1))
    if not file.read_text():
        file.unlink()
        if not list(file.parent.iterdir()):
            file.parent.rmdir()
    assert key(copied) == before
    if not file.is_file():
        file.parent.mkdir(exist_ok=True)
        file.write_text("")


def test_a_fix_that_was_on_by_default_opens_it_and_one_that_cannot_be_there_does_not(
    copied: pathlib.Path, edit: Edit
) -> None:
    verdicts = json.loads((REPOSITORY / proofs.VERDICTS).read_text())[RELEASE]
    there, fixed = (
        next(name for name in sorted(verdicts) if verdicts[name] == wanted and name != "no_bucket_fits")
        for wanted in ("affected", "fixed")
    )
    alone, by_default = key(copied), key(copied, BY_DEFAULT)
    edit(f"sglang_bcg_fixes/fixes/{fixed}.py", "    probe=probe,", "    probe=probe,\n    guard=True,")
    assert (key(copied), key(copied, BY_DEFAULT)) == (alone, by_default)
    edit(f"sglang_bcg_fixes/fixes/{there}.py", "    probe=probe,", "    probe=probe,\n    guard=True,")
    assert key(copied) == alone and key(copied, BY_DEFAULT) != by_default


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_a_fix_opens_the_rows_where_the_fix_is_on(copied: pathlib.Path, edit: Edit, name: str) -> None:
    without = dataclasses.replace(WITH_THE_FOLDER, on=["no_bucket_fits"])
    plans = (WITH_THE_FOLDER, without, dataclasses.replace(without, is_default=True))
    before = [key(copied, plan) for plan in plans]
    edit(name, "from __future__ import annotations", "from __future__ import annotations\n\n1 + 1")
    now = [key(copied, plan) for plan in plans]
    assert now[0] != before[0] and now[1:] == before[1:]


def test_a_new_module_of_a_fix_opens_the_rows_where_it_is_on_and_its_declaration_those_by_default(
    copied: pathlib.Path, edit: Edit
) -> None:
    without = dataclasses.replace(WITH_THE_FOLDER, on=["no_bucket_fits"])
    plans = (WITH_THE_FOLDER, without, dataclasses.replace(without, is_default=True))
    before = [key(copied, plan) for plan in plans]
    edit(f"{FOLDER}/another.py", "", "ANOTHER = 1\n")
    now = [key(copied, plan) for plan in plans]
    assert now[0] != before[0] and now[1:] == before[1:]
    edit(f"{FOLDER}/__init__.py", "    probe=probe,", "    probe=probe,\n    guard=True,")
    declared = [key(copied, plan) for plan in plans]
    assert declared[0] != now[0] and declared[1] == before[1] and declared[2] != before[2]


def test_a_flipped_verdict_opens_the_rows_of_its_release(copied: pathlib.Path) -> None:
    file = copied / proofs.VERDICTS
    text, table = file.read_text(), json.loads(file.read_text())
    other = dataclasses.replace(ALONE, releases=["0.5.11"])
    before = key(copied), key(copied, other)
    table[RELEASE]["kda_raw_beta"] = "latent"
    file.write_text(json.dumps(table))
    now = key(copied), key(copied, other)
    # a fix that came later is nothing that an earlier run could have left off
    table = json.loads(text)
    table[RELEASE]["a_new_fix"] = "affected"
    file.write_text(json.dumps(table))
    with_another = key(copied), key(copied, BY_DEFAULT)
    file.write_text(text)
    assert now[0] != before[0] and now[1] == before[1]
    assert with_another[0] == before[0] and with_another[1] != key(copied, BY_DEFAULT)


def test_a_table_of_forms_that_grows_opens_the_rows_of_the_releases_that_it_grows_for(copied: pathlib.Path) -> None:
    file = copied / proofs.FORMS
    text, table = file.read_text(), json.loads(file.read_text())
    other = dataclasses.replace(ALONE, releases=["0.5.11"])
    before = key(copied), key(copied, other)
    table["sglang.srt.new:definition"] = {"000000000000": {"releases": [RELEASE], "read_for": ["no_bucket_fits"]}}
    file.write_text(json.dumps(table))
    now = key(copied), key(copied, other)
    file.write_text(text)
    assert now[0] != before[0] and now[1] == before[1]


def test_a_result_on_a_gpu_opens_the_rows_of_the_releases_with_that_source(copied: pathlib.Path) -> None:
    file = copied / proofs.PROVEN
    table = json.loads(file.read_text())
    plans = {
        release: dataclasses.replace(ALONE, releases=[release]) for release in ("0.5.12", "0.5.12.post1", "0.5.17")
    }
    before = {release: key(copied, plan) for release, plan in plans.items()}
    table["short_conv_extend"]["0.5.12.post1"] = "accuracy-lfm2.json"
    file.write_text(json.dumps(table))
    opened = {release for release, plan in plans.items() if key(copied, plan) != before[release]}
    assert opened == {"0.5.12", "0.5.12.post1"}, "the definitions of both are the same"


def test_a_header_opens_what_has_called_a_compiler_and_so_does_another_compiler(
    copied: pathlib.Path, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(copied, None, ("g++",))
    edit("csrc/fa_metadata/fa_metadata.cuh", "", "// another header\n")
    assert key(copied, None, ("g++",)) != before
    monkeypatch.setattr(proofs, "version_of_program", lambda name: f"{name} absent")
    assert key(REPOSITORY, None, ("g++",)) != before


def test_other_tests_open_it(copied: pathlib.Path) -> None:
    assert key(copied, test="one") != key(copied, test="two")


@pytest.fixture
def kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Recorded rows and the cache, of this test alone."""
    # read once, and not from a folder without requirements
    proved()
    monkeypatch.setenv(flags.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(proofs, "FOLDER", tmp_path / "recorded")
    monkeypatch.setattr(proofs, "REPOSITORY", tmp_path)
    return proofs.file_of(TEST)


def proved() -> Proof:
    made = proof(programs=("g++",))
    made.key = proofs.key_of(Tree(REPOSITORY), TEST, RELEASE, ["one"], made)
    return made


def found() -> tuple[Proof, bool] | None:
    """The proof, and true if it is the recorded one."""
    here = proofs.last(TEST).get(RELEASE)
    proof = proofs.find(Tree(REPOSITORY), TEST, RELEASE, ["one"], here)
    return (proof, proof is here) if proof else None


def test_a_row_is_believed_as_it_was_written(kept: pathlib.Path) -> None:
    assert found() is None
    made = proved()
    proofs.write(TEST, {RELEASE: made, "0.5.17": dataclasses.replace(made, seconds=2.0)})
    assert found() == (made, True)
    assert list(proofs.committed(TEST)) == ["0.5.17", RELEASE]
    assert list(proofs.problems([TEST])) == []


def test_what_was_proved_here_is_believed_without_being_recorded(kept: pathlib.Path) -> None:
    made = proved()
    proofs.remember(TEST, RELEASE, dataclasses.replace(made, key="an earlier one"))
    proofs.remember(TEST, RELEASE, made)
    proofs.remember(TEST, RELEASE, dataclasses.replace(made, key="a later one"))
    assert found() == (made, False)
    proofs.doubt(made.key)
    assert found() is None
    proofs.remember(TEST, RELEASE, made)
    assert found() == (made, False)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text.replace('"key": "', '"key": "0'), None),
        (lambda text: text.replace('"known": 83', '"known": 82'), None),
        (lambda text: text.replace('"tests/scenarios/oversized_buckets.py", ', ""), None),
        (lambda text: text[: len(text) // 2], "cannot be read (JSONDecodeError"),
        (lambda text: text.replace(f'  "{RELEASE}"', f'  "{RELEASE}": {{}},\n  "{RELEASE}"'), "twice"),
        (lambda text: text.replace('"shared"', '"common"'), "cannot be read (KeyError"),
        (lambda text: text.replace('"seconds": 1.0', '"seconds": "1"'), "something else where words belong"),
        (lambda text: text.replace('["g++"]', "[1]"), "something else where words belong"),
        (lambda text: text.replace('"known": 83', '"known": "83"'), "its plan is none"),
    ],
    ids=[
        *("another key", "other fixes", "fewer files", "half of it", "a row twice", "another word"),
        *("seconds in words", "a program without a name", "fixes in words"),
    ],
)
def test_what_was_changed_by_hand_or_cut_is_open(
    kept: pathlib.Path, damage: Callable[[str], str], said: str | None
) -> None:
    proofs.write(TEST, {RELEASE: proved()})
    text = kept.read_text()
    assert damage(text) != text
    kept.write_text(damage(text))
    assert found() is None
    told = list(proofs.problems([TEST]))
    assert len(told) == (said is not None)
    assert said is None or (said in told[0] and "make test-all" in told[0])
    # and the next proof is written whole
    proofs.write(TEST, {RELEASE: proved()})
    assert found() is not None


def test_two_runs_at_once_lose_nothing(kept: pathlib.Path) -> None:
    made = proved()
    releases = [f"0.5.{number}" for number in range(12)]
    children = []
    for release in releases:
        child = os.fork()
        if child == 0:
            proofs.write(TEST, {release: made})
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(releases)
    assert list(proofs.committed(TEST)) == releases


def test_a_file_that_no_test_has_is_told(kept: pathlib.Path) -> None:
    proofs.write("tests/fixes/test_nothing.py", {"": proved()})
    assert ["belongs to no file of tests" in sentence for sentence in proofs.problems([TEST])] == [True]


def ended(outcomes: dict[str, str], notes: list[tuple[int, str, str]]) -> ledger.Ended:
    row = ledger.Row(TEST, RELEASE, ["one"])
    return ledger.Ended(row, 1.0, outcomes, {}, "", notes, 0)


@pytest.mark.parametrize("name", [TEST, "csrc/fa_metadata/fa_metadata.cuh", proofs.VERDICTS, ANOTHER, proofs.FORMS])
def test_a_file_that_was_edited_while_its_row_ran_proves_nothing(copied: pathlib.Path, name: str) -> None:
    tree = Tree(copied)
    before = tree.signature()
    notes = [(1, "code", TEST), (1, "program", "g++"), (1, "plan", f"{RELEASE} all no_bucket_fits")]
    assert proofs.proof_of(tree, TEST, RELEASE, ["one"], ended({"one": "passed"}, notes), before).key
    (copied / name).touch()
    with pytest.raises(proofs.Unproved, match=f"{name} has changed while it ran"):
        proofs.proof_of(tree, TEST, RELEASE, ["one"], ended({"one": "passed"}, notes), before)


def test_other_tests_than_were_collected_prove_nothing(copied: pathlib.Path) -> None:
    tree = Tree(copied)
    found = ended({"one": "passed"}, [(1, "code", TEST)])
    with pytest.raises(proofs.Unproved, match="other tests were run"):
        proofs.proof_of(tree, TEST, RELEASE, ["one", "two"], found, tree.signature())


def test_a_row_that_runs_another_program_is_run_every_time(copied: pathlib.Path) -> None:
    tree = Tree(copied)
    notes = [(1, "code", TEST), (1, "program", "make"), (1, "program", "g++"), (1, "program", "uname")]
    made = proofs.proof_of(tree, TEST, RELEASE, ["one"], ended({"one": "passed"}, notes), tree.signature())
    assert (made.unseen, made.programs) == (["make"], ["g++"])
    notes = [(1, "code", TEST), (1, "data", "tests/recorded/fixes/test_no_bucket_fits.json")]
    made = proofs.proof_of(tree, TEST, RELEASE, ["one"], ended({"one": "passed"}, notes), tree.signature())
    assert made.unseen == ["tests/recorded/"]


def test_a_fix_counts_whole_where_it_was_not_left_off_by_a_plan() -> None:
    plan = (1, "plan", f"{RELEASE} only no_bucket_fits")
    planned = [
        plan,
        (1, "code", FIX),
        (1, "code", ANOTHER),
        (1, "data", proofs.FORMS),
        (1, "folder", proofs.FIXES[:-1]),
    ]
    tree = Tree(REPOSITORY)
    made, reads = proofs.found_in(tree, RELEASE, planned)
    assert made and (made.on, made.is_default, reads) == (["no_bucket_fits"], False, {FIX})
    # by a process without one, by name, and by a scenario that makes the name as it runs
    assert ANOTHER in proofs.found_in(tree, RELEASE, [*planned, (2, "code", ANOTHER)])[1]
    assert ANOTHER in proofs.found_in(tree, RELEASE, [*planned, (1, "used", ANOTHER)])[1]
    by_name = (1, "code", "tests/scenarios/draft_extend_extent.py")
    assert ANOTHER in proofs.found_in(tree, RELEASE, [*planned, by_name])[1]
    assert (
        proofs.FORMS
        in proofs.found_in(tree, RELEASE, [*planned, (2, "data", proofs.FORMS), (2, "code", proofs.READS_FORMS)])[1]
    )


def test_a_fix_that_is_a_folder_counts_as_one() -> None:
    assert len(MODULES) == 6
    planned = [*((1, "code", name) for name in MODULES), (1, "plan", f"{RELEASE} only no_bucket_fits")]
    tree = Tree(REPOSITORY)
    assert all(map(proofs.is_fix, MODULES)) and {*map(proofs.id_of, MODULES)} == {"hybrids_without_graphs"}
    assert not proofs.is_fix("sglang_bcg_fixes/fixes/__init__.py")
    assert "hybrids_without_graphs" in proofs.fixes_in(REPOSITORY)
    assert not {*MODULES} & proofs.found_in(tree, RELEASE, planned)[1]
    its_plan = (1, "plan", f"{RELEASE} only hybrids_without_graphs")
    for more in (its_plan, (1, "used", MODULES[-1]), (2, "code", MODULES[-1])):
        assert {*MODULES} <= proofs.found_in(tree, RELEASE, [*planned, more])[1]
    by_name = (1, "code", "tests/scenarios/admitted_hybrids.py")
    assert {*MODULES} <= proofs.found_in(tree, RELEASE, [*planned, by_name])[1]


def traced_run(code: str, folder: pathlib.Path, **environment: str) -> tuple[int, set[tuple[str, str]]]:
    """Run Python as a row does, and return what it has noted."""
    traced.install()
    folder.mkdir(exist_ok=True)
    given = {**os.environ, traced.FOLDER: str(folder), traced.CODE: str(traced.__file__), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=given, cwd=REPOSITORY)
    return done.returncode, {(kind, what) for _, kind, what in proofs.notes_in(folder)}


def test_what_is_read_is_noted_until_the_process_is_killed(tmp_path: pathlib.Path) -> None:
    code = """if True:
        import os, pathlib, signal, subprocess, sys
        import tests.wheels
        pathlib.Path("README.md").read_text()
        pathlib.Path("tests/mutated.py").read_text()
        os.listdir("csrc")
        subprocess.run([sys.executable, "-c", "open('LICENSE')"])
        subprocess.run([sys.executable, "-c", "open('CHANGELOG.md')"], env={})
        subprocess.run(["true"])
        if not os.fork():
            open("Makefile")
            os._exit(0)
        os.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    status, notes = traced_run(code, tmp_path / "notes")
    assert status == -signal.SIGKILL
    assert {("data", "README.md"), ("data", "tests/mutated.py"), ("folder", "csrc")} <= notes
    assert {("data", "LICENSE"), ("data", "Makefile")} <= notes
    assert {("code", "tests/wheels.py"), ("code", "sglang_bcg_fixes/flags.py")} <= notes
    assert {("program", "python without a trace"), ("program", "true")} <= notes
    # what is beside an imported file is no reading, and neither is what an untraced one has opened
    assert not {("folder", "tests"), ("data", "CHANGELOG.md")} & notes


WITH_A_CONDITION = "sglang_bcg_fixes/fixes/layer_loads_unawaited.py"
OF_A_FIX_THAT_IS_OFF = """if True:
    import inspect, os
    from sglang_bcg_fixes import concern, plugin
    from sglang_bcg_fixes.planning import registry
    assert not plugin.load().plan.applied
    open(os.devnull)
    fix = registry.discover().fix("no_bucket_fits")
    body = fix.patches[0].body
    assert list(inspect.signature(body).parameters) == ["original", "model_runner", "rest"]
    fix.probe(plugin.load().source)
    launch = concern.Launch(plugin.load().source, {}, {"--enable-hierarchical-cache": ()})
    assert registry.discover().fix("layer_loads_unawaited").concerns[0].touches(launch)
    # a folder, of whose modules one has what the probe calls, and tells whom it concerns
    hybrids = registry.discover().fix("hybrids_without_graphs")
    hybrids.probe(plugin.load().source)
    hybrids.concerns[-1].touches(launch)
"""


def test_a_row_that_runs_more_of_a_fix_that_is_off_than_its_probe_rests_on_its_body(tmp_path: pathlib.Path) -> None:
    called = """
    class GraphCapture: pass
    import sys, types
    sys.modules["sglang.srt.model_executor.model_runner_components.cuda_graph_setup"] = sys.modules["__main__"]
    answer = GraphCapture()
    assert body(lambda model_runner: answer, model_runner=None) is body(lambda **_: answer, model_runner=1) is answer
"""
    paths = os.pathsep.join([str(wheels.unpacked(RELEASE)), str(REPOSITORY)])
    given = {"PYTHONPATH": paths, "SGLANG_BCG_FIXES": "off", "SGLANG_BCG_REPORT_DIR": str(tmp_path)}
    for number, (code, reads) in enumerate(((OF_A_FIX_THAT_IS_OFF, False), (OF_A_FIX_THAT_IS_OFF + called, True))):
        status, notes = traced_run(code, tmp_path / str(number), **given)
        assert (status, ("used", FIX) in notes) == (0, reads)
        plan, read = proofs.found_in(Tree(REPOSITORY), RELEASE, [(1, *note) for note in notes])
        assert plan and (FIX in read, ANOTHER in read, plan.on) == (reads, False, [])
        assert f"{proofs.CONCERNS}{WITH_A_CONDITION}" in read and WITH_A_CONDITION not in read
        assert f"{proofs.CONCERNS}{FOLDER}/feed_forward.py" in read and not read & {*MODULES}


def test_whom_a_fix_that_is_off_concerns_counts_without_its_body(copied: pathlib.Path, edit: Edit) -> None:
    found = dataclasses.replace(proof(), reads=[*READS, f"{proofs.CONCERNS}{WITH_A_CONDITION}"])
    keys = [proofs.key_of(Tree(copied), TEST, RELEASE, ["one"], found)]
    for old in ("_is_full_backend", "has_module(LAYER_BY_LAYER)"):
        edit(WITH_A_CONDITION, old, "another")
        keys.append(proofs.key_of(Tree(copied), TEST, RELEASE, ["one"], found))
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("name", "old", "is_of_it"),
    [
        ("feed_forward.py", "named(*NEMOTRON_NAMES)", True),
        ("__init__.py", "named(BAILING_NAME)", True),
        ("latent.py", "BailingMoeV2_5ForCausalLM", True),
        ("feed_forward.py", "isinstance(layer, feed_forward)", False),
        ("mixers.py", "output[real:].zero_()", False),
    ],
)
def test_whom_a_folder_concerns_counts_without_its_bodies(
    copied: pathlib.Path, edit: Edit, name: str, old: str, is_of_it: bool
) -> None:
    before = Tree(copied).digest(f"{proofs.CONCERNS}{FOLDER}/feed_forward.py")
    edit(f"{FOLDER}/{name}", old, "another")
    assert (Tree(copied).digest(f"{proofs.CONCERNS}{FOLDER}/feed_forward.py") != before) is is_of_it


def test_every_function_of_a_fix_is_watched() -> None:
    of_folder = (name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in MODULES)
    for module in map(importlib.import_module, {*registry.fix_modules(), *of_folder}):
        assert module.__file__
        whole = compile(pathlib.Path(module.__file__).read_text(), module.__file__, "exec")
        watched = {function.__code__ for function in traced.functions_of(module)}
        assert set(defined_in(whole)) == watched, module


def defined_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The functions of a module, and of the classes in it; what runs while it is imported is none."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType) and not each.co_name.endswith(("expr>", "comp>")):
            yield from [each] if each.co_flags & inspect.CO_OPTIMIZED else defined_in(each)


def test_a_sample_is_drawn_by_the_last_commit_and_keeps_to_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ledger.Row(f"tests/test_{number}.py", "", [], proof=proof()) for number in range(50)]
    heads = iter("aab")
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=f"{next(heads)}\n", stderr="")
    )
    first, again, other = (ledger.sample(rows, 10.0) for _ in range(3))
    assert [row.name for row in first] == [row.name for row in again] != [row.name for row in other]
    assert sum(row.seconds for row in first) == 10.0


def test_rows_on_what_the_last_commits_have_touched_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(file: str, release: str, *reads: str) -> ledger.Row:
        return ledger.Row(file, release, ["one"], last=dataclasses.replace(proof(None), reads=list(reads)))

    everywhere, here = "sglang_bcg_fixes/model.py", "docs/faq.md"
    rows = [row("tests/test_one.py", release, everywhere) for release in wheels.RELEASES]
    touched = [
        row("tests/test_two.py", wheels.RELEASES[7], here),
        # nothing is known of it but its file
        ledger.Row("tests/test_new.py", "", ["one"]),
        row("tests/test_two.py", wheels.RELEASES[8], everywhere, here),
    ]
    monkeypatch.setattr(ledger, "touched_lately", lambda folder: {everywhere, here, "tests/test_new.py"})
    started: list[ledger.Row] = []

    class Worker:
        def run(self, row: ledger.Row, *_: object, **__: object) -> ledger.Ended:
            started.append(row)
            return ended({}, [])

        def end(self) -> None:
            pass

    monkeypatch.setattr(ledger, "Worker", Worker)
    monkeypatch.setattr(ledger.Run, "take", lambda *_: None)
    ledger.Run(argparse.Namespace(jobs=2)).run_all([*rows, *touched])
    assert len(started) == len(rows) + len(touched)
    assert set(map(id, started[: len(touched)])) == set(map(id, touched))


def test_rows_in_between_run_after_all_that_ci_is_red_for(monkeypatch: pytest.MonkeyPatch) -> None:
    between = ledger.Row("tests/test_one.py", wheels.RELEASES[3], ["one"], is_between=True)
    needed = ledger.Row("tests/test_one.py", wheels.RELEASES[0], ["one"])
    sampled = ledger.Row("tests/test_two.py", "", ["one"])
    ran: list[list[ledger.Row]] = []
    monkeypatch.setattr(traced, "install", lambda: None)
    monkeypatch.setattr(ledger, "known", lambda run: [between, needed])
    monkeypatch.setattr(ledger, "start_lint", lambda: None)
    monkeypatch.setattr(ledger, "close", lambda *_: 0)
    monkeypatch.setattr(ledger.Run, "choose", lambda *_: [sampled])
    monkeypatch.setattr(ledger.Run, "run_all", lambda run, rows: ran.append(rows))
    monkeypatch.setenv("MINUTES", "75")
    monkeypatch.setattr(sys, "argv", ["ledger"])
    assert ledger.main() == 0 and ran == [[needed], [sampled], [between]]


def test_what_the_last_commits_have_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    # as git tells two commits, and where there are none
    told = iter(("Makefile\0tests/\u00e4 b.py\0\0README.md\0", ""))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=next(told)))
    assert ledger.touched_lately(REPOSITORY) == {"Makefile", "tests/\u00e4 b.py", "README.md"}
    assert ledger.touched_lately(REPOSITORY) == set()


def test_a_mistake_is_one_place_of_code(tmp_path: pathlib.Path) -> None:
    header = tmp_path / "made.cuh"
    text = "#if A < B\n// a + b\ntemplate < int N >\nint f(int a) { return a + N; } // a - b\n"
    header.write_text(text)
    assert mutants.mutated(header, random.Random(0)) == (
        text.replace("a + N", "a - N"),
        "another operator: int f(int a) { return a + N; } // a - b  ->  int f(int a) { return a - N; } // a - b",
    )
    module = tmp_path / "made.py"
    module.write_text("def f(a: int) -> bool:\n    return a < 0\n")
    found = {mutants.mutated(module, random.Random(seed)) for seed in range(9)}
    assert {made[0].splitlines()[1].strip() for made in found if made} == {"return a <= 0", "return a < 1"}


@pytest.mark.parametrize(
    ("file", "word"),
    [
        (FIX, "no_bucket_fits"),
        (f"{FOLDER}/mixers.py", "hybrids_without_graphs"),
        ("sglang_bcg_fixes/kernels/gdn_extend/triton.py", "gdn_extend"),
        ("sglang_bcg_fixes/kernels/fa_metadata/adapter/forms.py", "fa_metadata"),
        ("sglang_bcg_fixes/kernels/active.py", "active"),
        ("csrc/mamba2_extend/mamba2_extend.cuh", "mamba2_extend"),
        ("csrc/hopper.cuh", "hopper"),
    ],
)
def test_the_word_by_which_tests_name_a_file(file: str, word: str) -> None:
    assert mutants.subject(file) == word
