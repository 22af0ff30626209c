# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.cli import catalogue, doctor
from sglang_bcg_fixes.cli.harmless import HARMLESS, Harmless
from sglang_bcg_fixes.concern import Harm
from sglang_bcg_fixes.model import SECTIONS, Action, Fix
from sglang_bcg_fixes.planning import plan, registry
from sglang_bcg_fixes.source import offered, releases, verdicts
from tests import processes
from tests.engine.test_plugin import OTHERS_OFF
from tests.wheels import NEWEST

Root = Callable[[str], pathlib.Path]


def on_bare_machine(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return processes.python("-m", "tests.scenarios.bare_machine", *arguments, environment=environ)


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command where nothing of SGLang, torch or triton may be imported."""
    return on_bare_machine("without_packages", *arguments, **environ)


def test_every_declaration_can_be_imported_without_torch() -> None:
    done = on_bare_machine("declarations_without_packages")
    assert processes.result(done) == len(registry.discover().fixes) > 0


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1", NEWEST])
def test_doctor_on_a_folder(release_root: Root, release: str) -> None:
    root = release_root(release)
    done = run("doctor", "--root", str(root))
    assert done.returncode == 0, done.stderr
    assert f"SGLang {release}" in done.stdout
    everything = run("doctor", "--root", str(root), "--all").stdout
    said = verdicts.recorded()[release]
    shown = done.stdout.replace(",", "").replace(":", "").split()
    for fix in registry.discover().fixes:
        assert f"{fix.id}: {fix.title}" in everything
        is_guarded = fix.guard and said[fix.id] == "latent"
        assert (fix.id in shown) is (said[fix.id] == "affected" or is_guarded), fix.id
    assert f"{list(said.values()).count('latent')} latent" in done.stdout and len(done.stdout.splitlines()) <= 20
    fixed = [line for line in done.stdout.splitlines() if line.startswith("fixed     wrong answers (")]
    assert ("linear_attention_captured" in fixed[0]) is (release != NEWEST)
    assert "next: bcg-fixes doctor --model FOLDER" in done.stdout.splitlines()[-1]


def test_without_a_launch_nothing_is_gated_and_doctor_says_so(release_root: Root) -> None:
    root = str(release_root(NEWEST))
    lines = run("doctor", "--root", root).stdout.splitlines()
    left = sum(line.startswith("NOT FIXED ") for line in lines)
    assert left and lines[-2] == f"exit status 0 leaves out the {left} NOT FIXED: give your launch command for those"
    refused = run("doctor", "--root", root, "--gate", "wrong")
    assert (refused.returncode, refused.stdout) == (
        2,
        "",
    ) and "--gate judges a launch: put your launch " in refused.stderr


def test_doctor_says_first_where_it_looked_and_what_it_found(release_root: Root) -> None:
    root = release_root(NEWEST)
    first, second, *_ = run("doctor", "--root", str(root)).stdout.splitlines()
    assert first.startswith(f"SGLang {NEWEST} in {root}: ") and "affected" in second and "would be fixed" in second
    said = json.loads(run("doctor", "--root", str(root), "--json").stdout)
    assert (said["format"], said["status"], said["path"], said["others"]) == (2, 0, str(root), []) and said["package"]


def test_doctor_names_another_sglang_on_the_path(release_root: Root) -> None:
    first, second = release_root(NEWEST), release_root("0.5.11")
    done = processes.python("-m", "sglang_bcg_fixes", "doctor", paths=[first, second])
    assert f"SGLang {NEWEST} in {first}: " in done.stdout
    assert f"another SGLang is in {second}; Python imports the first" in done.stdout


def test_doctor_says_everything_about_an_affected_defect(release_root: Root) -> None:
    done = run("doctor", "--all", "--root", str(release_root("0.5.12.post1")))
    block = done.stdout.partition("affected  linear_attention_captured")[2].split("\n")[1:8]
    text = "\n".join(block)
    for words in (
        "sglang/srt/layers/radix_linear_attention.py:71 RadixLinearAttention.forward [ee8bb62e5f13]",
        "the fix would be applied",
        "SGLANG_BCG_FIX_LINEAR_ATTENTION_CAPTURED=off",
        "--enable-breakable-cuda-graph",
    ):
        assert words in text, text


def test_doctor_tells_of_harmless_spots_when_asked_for_all(release_root: Root) -> None:
    root = str(release_root(NEWEST))
    everything, usual = run("doctor", "--root", root, "--all").stdout, run("doctor", "--root", root).stdout
    for spot in HARMLESS:
        assert f"harmless  {spot.id}: {spot.title}" in everything and spot.test in everything
        assert spot.id not in usual


@pytest.mark.parametrize("spot", HARMLESS, ids=lambda spot: spot.id)
def test_a_harmless_spot_names_the_test_that_shows_it(spot: Harmless) -> None:
    file, _, function = spot.test.partition("::")
    tree = ast.parse((processes.REPOSITORY / file).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert registry.discover().fix(spot.id) is None, "a defect and harmless at once"


def test_doctor_json_has_the_same_and_more(release_root: Root) -> None:
    done = run("doctor", "--json", "--root", str(release_root("0.5.12.post1")))
    answer = json.loads(done.stdout)
    row = next(row for row in answer["defects"] if row["id"] == "linear_attention_captured")
    assert answer["sglang"] == "0.5.12.post1" and row["verdict"] == "affected" and row["action"] == "apply"
    assert [set(item) for item in row["evidence"]] == [{"where", "file", "line", "form"}] * 3
    assert {row["id"] for row in answer["defects"]} == {fix.id for fix in registry.discover().fixes}


def test_doctor_on_a_wheel_says_what_it_says_on_its_folder(release_root: Root) -> None:
    from tests import wheels

    folder = json.loads(run("doctor", "--json", "--root", str(release_root("0.5.20"))).stdout)
    wheel = json.loads(run("doctor", "--json", "--wheel", str(wheels.wheel("0.5.20"))).stdout)
    assert folder["defects"] == wheel["defects"]


def test_doctor_without_sglang_says_so() -> None:
    done = on_bare_machine("without_sglang", "doctor")
    assert done.returncode == 2 and "no SGLang is installed here" in done.stderr and "--release" in done.stderr


def test_doctor_exits_3_where_nobody_has_read_what_a_fix_would_change(drifted_root: pathlib.Path) -> None:
    done = run("doctor", "--root", str(drifted_root))
    assert done.returncode == 3, done.stdout + done.stderr
    # both read the function that drifted
    both = ("linear_attention_captured", "linear_tail_uninitialised")
    assert f"NOT READ  (2): {', '.join(both)}\n" in done.stdout
    off = run("doctor", "--root", str(drifted_root), **{f"SGLANG_BCG_FIX_{fix.upper()}": "off" for fix in both})
    assert off.returncode == 0, "what is switched off is not wanted"


def test_a_fetch_that_is_interrupted_leaves_no_half_wheel(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(command: list[str], **_: object) -> None:
        (pathlib.Path(command[command.index("--dest") + 1]) / "sglang-0.5.15-cp311-cp311-x.whl").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        releases.fetch("0.5.15", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_doctor_fetches_a_release(tmp_path: pathlib.Path) -> None:
    done = run("doctor", "--release", "0.5.12", SGLANG_BCG_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0 and "SGLang 0.5.12 in " in done.stdout, done.stderr
    assert len(list((tmp_path / "wheels").glob("sglang-0.5.12-*.whl"))) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor", "--root", "/nowhere"], "no sglang/srt in it"),
        (["doctor", "--wheel", "/nowhere.whl"], "no such file"),
        (["explain", "linear_atention_captured"], "did you mean linear_attention_captured?"),
        (
            ["explain", "SGLANG_BCG_FIXE"],
            "no flag 'SGLANG_BCG_FIXE'; did you mean SGLANG_BCG_FIXES?; `bcg-fixes list --fl",
        ),
        (["explain", "bcg_fixe"], "did you mean SGLANG_BCG_FIXES?; `bcg-fixes list` shows all"),
        (["explain", "sglang_bcg_fix_kda_raw_bet"], "did you mean SGLANG_BCG_FIX_KDA_RAW_BETA?; "),
        (["explain", "kernel_unbounded"], "did you mean kernels_unbounded?; "),
        (["explain", "states_after_warmup"], "did you mean states_after_warm_up?; "),
        (["explain", "xyzzy"], "no defect, kernel or flag 'xyzzy'; `bcg-fixes list` shows all"),
        (["bench", "--layer"], "call `python -m benchmarks.bench` in a checkout instead"),
    ],
)
def test_what_cannot_be_answered_exits_2_with_a_reason(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_a_release_that_does_not_exist_exits_2(tmp_path: pathlib.Path) -> None:
    done = run("doctor", "--release", "0.5.999", SGLANG_BCG_CACHE_DIR=str(tmp_path))
    words = "pip cannot fetch sglang==0.5.999: its index has no such release for this platform, the newest there is 0."
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_a_network_that_is_not_there_is_not_taken_for_a_release_that_is_not(tmp_path: pathlib.Path) -> None:
    nowhere = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    done = run("doctor", "--release", "0.5.23", SGLANG_BCG_CACHE_DIR=str(tmp_path), **nowhere)
    words = "pip cannot fetch sglang==0.5.23: it reaches no package index (Connection refused); check the network"
    assert done.returncode == 2 and words in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "x: [Errno -3] Temporary failure in name resolution\n(from versions: none)",
            "no package index (Temporary fail",
        ),
        ("connection broken by 'ReadTimeoutError'\n(from versions: none)", "no package index (connection broken)"),
        (
            "Retrying after connection broken\nERROR: (from versions: 0.5.9, 0.5.23)",
            "the newest there is 0.5.23; check",
        ),
        (
            "ERROR: (from versions: none)\nERROR: No matching distribution",
            "its index offers no SGLang, or does not answer; check",
        ),
        ("ERROR: No space left", "ERROR: No space left; run `pip download --no-deps sglang`"),
        ("", "it printed nothing; run"),
    ],
)
def test_what_pip_prints_says_whether_network_or_release_is_missing(log: str, words: str) -> None:
    assert words in releases.why_not_fetched(log)


def test_doctor_does_not_say_that_a_server_starts_without_a_kernel_that_was_asked_for(release_root: Root) -> None:
    known, source = registry.discover(), releases.in_folder(release_root("0.5.12.post1"))
    made = plan.make(known, flags.read(known.fixes, known.kernels, {}), source)
    blocked = dataclasses.replace(made.kernels[0], action=Action.BLOCKED, state="cuda", impl=None)
    examined = doctor.Examination(source, dataclasses.replace(made, fixes=(), kernels=(blocked,)), [], None)
    assert f"no server starts with {blocked.subject.flag}=cuda" in examined.text(False) and examined.status == 1
    text = examined.text(True)
    assert f"would run  nothing, {blocked.subject.flag}=cuda lets no server start here" in text


def test_doctor_and_list_tell_of_the_switch_for_all_kernels(release_root: Root) -> None:
    root = str(release_root("0.5.12.post1"))
    text = run("doctor", "--all", "--root", root, SGLANG_BCG_KERNELS="off").stdout
    for kernel in registry.discover().kernels:
        block = text.partition(f"kernel    {kernel.op}: ")[2].split("\nkernel ")[0]
        assert "would run  SGLang, its own code" in block and "SGLANG_BCG_KERNELS=off" in block, block
    setting = {"SGLANG_BCG_KERNELS": "off", "SGLANG_BCG_KERNEL_FA_METADATA": "reference"}
    named = run("doctor", "--all", "--root", root, **setting).stdout
    assert "would run  reference" in named.partition("kernel    fa_metadata: ")[2].split("\nkernel ")[0]
    assert "SGLANG_BCG_KERNELS=auto|off" in run("list", "--flags").stdout


@pytest.mark.parametrize("name", ["SGLANG_BCG_FIX_KDA_RAW_BETA", "sglang_bcg_fix_kda_raw_beta", "KDA_RAW_BETA"])
def test_explain_takes_the_name_of_a_flag_and_says_where_and_whom(name: str) -> None:
    done = run("explain", name)
    assert done.stdout == run("explain", "kda_raw_beta").stdout
    assert "0.5.11 to 0.5.21: absent\n  0.5.22 to 0.5.23: affected" in done.stdout
    assert "wrong answers with Kimi delta attention layers; breakable CUDA graphs for prefill" in done.stdout


def test_explain_tells_of_a_kernel_who_runs_and_where() -> None:
    done = run("explain", "fa_metadata")
    assert done.returncode == 0, done.stderr
    for words in (
        "init_forward_metadata (around)",
        "reference: only by name, ",
        "SGLANG_BCG_KERNEL_FA_METADATA=auto|off",
    ):
        assert words in done.stdout, done.stdout


def explained_names(known: registry.Registry) -> list[str]:
    return [
        *(name for name, _ in catalogue.pages(known)),
        *(row.name for row in flags.table(known.fixes, known.kernels)),
    ]


@pytest.fixture(scope="module")
def explained() -> dict[str, tuple[int, str]]:
    """The exit status and the text of `explain` for each name, all from one process."""
    found: dict[str, tuple[int, str]]
    found = processes.result(on_bare_machine("explain_each", *explained_names(registry.discover())))
    return found


def test_explain_takes_every_name_that_list_shows(explained: dict[str, tuple[int, str]]) -> None:
    known = registry.discover()
    names = re.findall(r"^  (\w+): ", list_without_sglang().stdout, re.MULTILINE)
    names += re.findall(r"\b(SGLANG_BCG\w*)(?:=|: )", list_without_sglang("--flags").stdout)
    assert {*names} >= {*explained_names(known)}
    assert [name for name in names if explained[name][0] != 0] == []
    for spot in HARMLESS:
        assert spot.reason in explained[spot.id][1] and spot.releases in explained[spot.id][1]
    assert 'pip install "kernels<0.13"' in explained["kernels_unbounded"][1]
    assert "refuse to serve" in explained["SGLANG_BCG_SELFCHECK"][1]


def test_explain_begins_with_the_releases_and_says_where_a_workaround_works(
    explained: dict[str, tuple[int, str]],
) -> None:
    text = explained["break_input_lifetime"][1]
    order = ["Releases", "Whom it concerns", "Workarounds", *SECTIONS, "Upstream", "Patched places", "Flag"]
    assert re.findall(r"^(\w.*)$", text, re.MULTILINE)[1:] == order
    assert "\n  0.5.11 to 0.5.13.post1  (leave out) --enable-breakable-cuda-graph (" in text
    assert f"\n  0.5.14 to {NEWEST}  --cuda-graph-backend-prefill disabled (" in text
    watched = next(fix for fix in registry.discover().fixes if not fix.patches)
    assert explained[watched.id][1].endswith("Flag\n  none: it has no fix yet\n")


@pytest.mark.parametrize("fix", registry.discover().fixes, ids=lambda fix: fix.id)
def test_an_affected_release_has_one_workaround_or_is_said_to_have_none(fix: Fix) -> None:
    ways, without = catalogue.workarounds(fix)
    said = ", ".join(filter(None, [*(span for _, span in ways), without]))
    one_by_one = [release for release, row in verdicts.recorded().items() if row[fix.id] == "affected"]
    assert all(span for _, span in ways) and (said or not one_by_one)
    for release in one_by_one:
        named = [way for way in fix.workarounds if offered.has_option(release, way.option)]
        assert bool(named) is (release not in spelt(without)), release


def spelt(spans: str) -> list[str]:
    """Every release of spans in words."""
    every, found = list(verdicts.recorded()), list[str]()
    for span in filter(None, spans.split(", ")):
        first, _, last = span.partition(" to ")
        found += every[every.index(first) : every.index(last or first) + 1]
    return found


@pytest.mark.parametrize(
    ("name", "kind", "fields"),
    [
        ("kda_raw_beta", "defect", {"harm", "releases", "workarounds", "symptom", "remove_when", "patches", "flag"}),
        ("SGLANG_BCG_FIX_KDA_RAW_BETA", "defect", {"harm", "upstream"}),
        ("fa_metadata", "kernel", {"text", "implementations", "patches", "flag"}),
        ("states_after_warm_up", "harmless", {"releases", "reason", "test"}),
        ("kernels_unbounded", "installation", {"cause", "remedy"}),
        ("sglang_bcg_fixes", "flag", {"name", "values", "default", "doc"}),
    ],
)
def test_explain_has_the_same_for_machines(name: str, kind: str, fields: set[str]) -> None:
    done = run("explain", name, "--json")
    found = json.loads(done.stdout)
    assert found["format"] == 1 and found["kind"] == kind and found.keys() >= fields, found


@pytest.mark.parametrize("fix", registry.discover().fixes, ids=lambda fix: fix.id)
def test_explain_tells_all_sections(explained: dict[str, tuple[int, str]], fix: Fix) -> None:
    status, text = explained[fix.id]
    assert status == 0, text
    for words in (*SECTIONS, fix.title, *fix.upstream):
        assert words in text


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m sglang_bcg_fixes list --flags | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=processes.REPOSITORY)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def list_without_sglang(*arguments: str) -> subprocess.CompletedProcess[str]:
    return on_bare_machine("without_sglang", "list", *arguments)


def test_list_of_flags_has_each_in_a_line_and_says_once_what_a_value_does() -> None:
    done = run("list", "--flags")
    known = registry.discover()
    rows = flags.table(known.fixes, known.kernels)
    assert done.returncode == 0 and all(done.stdout.count(f"{row.name}=") <= 2 for row in rows), done.stderr
    for fix in known.fixes:
        assert done.stdout.count(f" {fix.flag}: {fix.title}\n") == bool(fix.patches)
    assert "SGLANG_BCG_FIXES=auto|off|strict" in done.stdout and done.stdout.count("cannot be applied") == 2
    found = json.loads(run("list", "--flags", "--json").stdout)
    assert found == {"format": 1, "flags": [vars(row) for row in rows]}


def test_list_has_defects_by_harm_with_their_releases_where_no_sglang_is_installed() -> None:
    done = list_without_sglang()
    lines, known = done.stdout.splitlines(), registry.discover()
    assert done.returncode == 0 and lines[0].startswith("No SGLang is installed here. "), done.stderr
    assert "SGLANG_BCG_FIX_" not in done.stdout
    harms = [line.partition(": ")[0] for line in lines if line.partition(": ")[0] in set(Harm)]
    assert harms == [harm for harm in Harm if harm in harms] and harms[0] == "wrong answers"
    for fix in known.fixes:
        [line] = [line for line in lines if line.startswith(f"  {fix.id}: {fix.title} (")]
        assert "affected" in verdicts_of(fix.id) or line.endswith(" (no release)")
    [line] = [line for line in lines if line.startswith("  kda_raw_beta: ")]
    assert line.endswith(" (0.5.22 to 0.5.23)")
    assert all(f"  {kernel.op}: {kernel.title}" in lines for kernel in known.kernels)
    found = json.loads(list_without_sglang("--json").stdout)
    assert found["format"] == 1 and found["sglang"] is None and len(found["defects"]) == len(known.fixes)


def verdicts_of(fix_id: str) -> set[str]:
    return {row[fix_id] for row in verdicts.recorded().values()}


@pytest.mark.parametrize("environ", [{}, {"SGLANG_BCG_FIX_KDA_RAW_BETA": "off"}, {"SGLANG_BCG_FIXES": "offf"}])
def test_list_has_each_state_in_the_installed_sglang(release_root: Root, environ: dict[str, str]) -> None:
    root = release_root(NEWEST)
    command = ("-m", "sglang_bcg_fixes", "list")
    done = processes.python(*command, paths=[root], environment=environ)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].endswith(f"in SGLang {NEWEST}, {root}"), done.stderr
    found = json.loads(processes.python(*command, "--json", paths=[root], environment=environ).stdout)
    assert found["sglang"] == NEWEST and found["path"] == str(root)
    states = {row["id"]: row["state"] for row in found["defects"]}
    for row in found["defects"]:
        assert f"  {row['state']:11} {row['id']}: {row['title']}" in lines
    expected = {"latent": {"latent"}, "fixed": {"not here"}, "absent": {"not here"}}
    for name, verdict in verdicts.recorded()[NEWEST].items():
        assert states[name] in expected.get(verdict, {"fixed", "off", "NOT FIXED"}) or states[name] == "fixed", name
    assert states["memory_saver_refused"] == "NOT FIXED" and states["mamba2_checkpoint_grid"] == "not here"
    assert states["kda_raw_beta"] == environ.get("SGLANG_BCG_FIX_KDA_RAW_BETA", "fixed")
    # within a harm, the state to act on first
    for harm in Harm:
        order = [list(catalogue.State).index(row["state"]) for row in found["defects"] if row["harm"] == harm]
        assert order == sorted(order)
    assert {kernel["op"] for kernel in found["kernels"] if kernel["runs"]} == {
        k.op for k in registry.discover().kernels
    }


def test_list_does_not_call_a_source_that_nobody_has_read_fixed(drifted_root: pathlib.Path) -> None:
    done = processes.python("-m", "sglang_bcg_fixes", "list", paths=[drifted_root])
    assert done.returncode == 0 and "\n  not read    linear_attention_captured: " in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage: bcg-fixes [-h]"),
        (["help"], "usage: bcg-fixes [-h]"),
        (["help", "list"], "usage: bcg-fixes list [-h]"),
        (["version"], "sglang-bcg-fixes "),
    ],
)
def test_alone_it_helps_and_help_and_version_are_commands_too(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 0 and done.stdout.startswith(words) and done.stderr == "", done.stderr


def test_every_suggestion_ends_with_a_question_mark_or_goes_on_behind_a_semicolon(tmp_path: pathlib.Path) -> None:
    for name, value in (("SGLANG_BCG_FIXES", "offf"), ("SGLANG_BCG_FIXE", "off"), ("SGLANG_BCG_SELFCHEK", "off")):
        said = run("doctor", "--root", str(tmp_path), **{name: value}).stderr
        assert re.search(r"did you mean \w+\?(;|$)", said) and "?." not in said, said


def test_status_without_processes_says_where_it_looked(tmp_path: pathlib.Path) -> None:
    done = run("status", SGLANG_BCG_REPORT_DIR=str(tmp_path))
    assert done.returncode == 0 and f"no running process reports in {tmp_path}: " in done.stdout


@pytest.mark.parametrize(
    "arguments", [["list", "--flags"], ["explain", "fa_metadata"], ["status"]], ids=lambda given: given[0]
)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SGLANG_BCG_FIX_LINEAR_ATENTION_CAPTURED", "did you mean SGLANG_BCG_FIX_LINEAR_ATTENTION_CAPTURED?"),
        ("SGLANG_BCG_SELFCHECK", "SGLANG_BCG_SELFCHECK=offf is none of off, warn, strict; did you mean off?"),
        ("BCG_FIXES", "BCG_FIXES is set, and nobody reads it; did you mean SGLANG_BCG_FIXES?"),
    ],
)
def test_other_commands_warn_of_a_flag_that_is_none(
    tmp_path: pathlib.Path, arguments: list[str], name: str, words: str
) -> None:
    done = run(*arguments, **{name: "offf", "SGLANG_BCG_REPORT_DIR": str(tmp_path)})
    assert done.returncode == 0 and done.stdout, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith(f"bcg-fixes {arguments[0]}: warning: ") and words in line, line


def test_doctor_tells_of_settings_that_nobody_reads(release_root: Root) -> None:
    root = str(release_root("0.5.12.post1"))
    words = "SGLANG_BCGFIXES is set, and nobody reads it; did you mean SGLANG_BCG_FIXES?"
    assert words in run("doctor", "--root", root, SGLANG_BCGFIXES="off").stdout.splitlines()
    assert json.loads(run("doctor", "--json", "--root", root, SGLANG_BCGFIXES="off").stdout)["look_alikes"] == [words]


@pytest.mark.parametrize(
    ("plugins", "code"),
    [
        ("bcg_fix", 1),
        ("bcg-fixes", 1),
        ("BCG_FIXES", 1),
        ("sglang-bcg-fixes", 1),
        ("other", 1),
        ("__none__", 1),
        ("bcg_fixes", 0),
        ("other, bcg_fixes", 0),
        ("", 0),
    ],
)
def test_doctor_exits_1_where_sglang_would_not_load_the_plugin(tmp_path: pathlib.Path, plugins: str, code: int) -> None:
    environ = {"SGLANG_PLUGINS": plugins, "FAKE_FORM": "enable", "SGLANG_BCG_REPORT_DIR": str(tmp_path), **OTHERS_OFF}
    command = ("-m", "sglang_bcg_fixes", "doctor")
    done = processes.python(*command, paths=[processes.FAKE_SGLANG], environment=environ)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("SGLang will NOT load the plugin" in done.stdout) is bool(code)
    machine = processes.python(*command, "--json", paths=[processes.FAKE_SGLANG], environment=environ)
    assert machine.returncode == code and bool(json.loads(machine.stdout)["loading"]) is bool(code)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SGLANG_PLUGINS": "bcg-fixes"}, "SGLANG_PLUGINS=bcg-fixes does not name bcg_fixes"),
        ({"SGLANG_PLUGINS": "other,bcg_fixes"}, None),
        ({}, None),
    ],
)
def test_doctor_sees_whether_sglang_will_load_the_plugin(environ: dict[str, str], words: str | None) -> None:
    program = "from sglang_bcg_fixes.cli.doctor import loading_problem; print(loading_problem())"
    done = processes.python("-c", program, environment=environ)
    assert done.returncode == 0, done.stderr
    assert (words or "None") in done.stdout
