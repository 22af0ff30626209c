# SPDX-License-Identifier: Apache-2.0
"""The plugin in a process, with a fix that another package contributes and the fake SGLang as its patient."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
from typing import Any

import pytest

from sglang_bcg_fixes.planning import registry
from tests import processes

# the fake SGLang is too small for most fixes of this package to know it
NOT_NEEDED = (
    "compressor_loads_unawaited",
    "decode_read_done_early",
    "deepseek_v4_tail_uninitialised",
    "dots3_attention_captured",
    "draft_read_done_early",
    "expanded_form_captured",
    "experts_of_another_rank",
    "fa4_form_captured",
    "fused_mla_tail_uninitialised",
    "gathering_graph_unequal",
    "heads_not_joined",
    "host_states_left_behind",
    "hybrids_without_graphs",
    "idle_rank_unrecognised",
    "kda_raw_beta",
    "latent_prefix_captured",
    "layer_loads_unawaited",
    "linear_attention_captured",
    "linear_tail_uninitialised",
    "local_attention_captured",
    "mla_replay_prepared_as_mha",
    "ngram_gather_unpadded",
    "no_bucket_fits",
    "pooled_indexer_padded",
    "prefill_track_tail",
    "refused_after_vote",
    "shared_layers_refused",
    "short_conv_prefix_ignored",
    "sparse_attention_captured",
    "sparse_read_done_early",
    "ssm_mixer_captured",
    "unequal_token_shares",
)
OTHERS = [fix for fix in registry.discover().fixes if fix.patches and fix.id not in NOT_NEEDED]
OTHERS_OFF = {fix.flag: "off" for fix in OTHERS}
REST = f"off {', '.join(fix.id for fix in OTHERS)}; unread none"
ALL_NOT_NEEDED = f"{len(NOT_NEEDED)} not needed"
EXTRA = """
from sglang_bcg_fixes.api import hookimpl
from sglang_bcg_fixes.model import Fix, How, PatchPoint
from sglang_bcg_fixes.source.finding import Finding, Verdict

@hookimpl
def bcg_fixes():
    return [Fix(
        id="extra_fix",
        doc="Something is extra.",
        upstream=("https://example.org",),
        probe=lambda source: PROBE,
        known={},
        patches=(PatchPoint(("sglang.srt.target:function",), How.AROUND, "tests.engine.bodies:around"),
                 PatchPoint(("sglang.srt.target:SECOND",), How.AROUND, "tests.engine.bodies:around")),
    )]
"""
# to patch the first imports something, and the second has waited for a moment between two imports
TOGETHER = """
from sglang_bcg_fixes.api import hookimpl
from sglang_bcg_fixes.model import Fix, How, PatchPoint
from sglang_bcg_fixes.source.finding import Finding, Verdict

TARGET, METHOD, OUTER = "sglang.srt.target:function", "sglang.srt.target:Thing.method", "sglang.srt.outer:outer"
FORWARD = "sglang.srt.model_executor.model_runner:ModelRunner.forward"
AROUND, OUTSIDE, MISNAMED = ((How.AROUND, f"tests.engine.bodies:{name}") for name in ("around", "outer", "misnamed"))
PLACES = {"early_fix": EARLY, "late_fix": LATE}

@hookimpl
def bcg_fixes():
    return [
        Fix(
            id=name,
            doc="It waits.",
            probe=lambda source: PROBE,
            patches=tuple(PatchPoint((at,), *how) for at, how in places),
        )
        for name, places in PLACES.items()
    ]
"""
AFFECTED = "Finding(Verdict.AFFECTED, 'it is extra')"
UNKNOWN = "Finding(Verdict.UNKNOWN, 'nobody has read it')"
# everything but one line and warnings is for debugging
DEBUGGED = "from tests.scenarios import debugged; debugged.show()\n"


Done = subprocess.CompletedProcess[str]


class Extra:
    """A package that contributes one fix, and processes beside it and the fake SGLang."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.site, self.reports = folder / "site", folder / "reports"

    def __call__(self, probe: str = AFFECTED, second: str = "Thing.method", text: str = EXTRA) -> Extra:
        """Install it, in the place of one that was there."""
        shutil.rmtree(self.site, ignore_errors=True)
        info = self.site / "extra_fixes-1.0.dist-info"
        info.mkdir(parents=True)
        (self.site / "extra_fixes.py").write_text(text.replace("PROBE", probe).replace("SECOND", second))
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-fixes\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[sglang_bcg_fixes]\nextra = extra_fixes\n")
        return self

    def together(self, early: str, late: str) -> Extra:
        return self(text=TOGETHER.replace("EARLY", early).replace("LATE", late))

    def python(self, *arguments: str, status: int = 0, **environ: str) -> Done:
        """A process that must end with this status."""
        given = {"FAKE_FORM": "enable", "SGLANG_BCG_REPORT_DIR": str(self.reports), **OTHERS_OFF, **environ}
        done = processes.python(*arguments, paths=[processes.FAKE_SGLANG, self.site], environment=given)
        assert done.returncode == status, done.stderr
        return done

    def load(self, code: str = "", status: int = 0, **environ: str) -> Done:
        """`plugin.load()` and then the code."""
        return self.later(code, "from sglang.srt import target\n", status, **environ)

    def later(self, code: str, before: str = "", status: int = 0, **environ: str) -> Done:
        """The same before SGLang has imported what is to be patched."""
        program = f"{DEBUGGED}{before}from sglang_bcg_fixes import plugin\nresult = plugin.load()\n"
        return self.python("-c", program + processes.code(code), status=status, **environ)

    def scenario(self, module: str, *arguments: str, status: int = 0, **environ: str) -> Done:
        """A module of `tests/scenarios`, with the function in it and what that takes."""
        return self.python("-m", f"tests.scenarios.{module}", *arguments, status=status, **environ)


@pytest.fixture
def extra(tmp_path: pathlib.Path) -> Extra:
    return Extra(tmp_path)


def line_part(text: str, state: str) -> str:
    """The part of the log line that follows one state."""
    return next(part for part in text.split("; ") if part.startswith(f"{state} "))


PATCHED = "assert target.function(1) == ['around', 'function', 1, 1]; assert target.Thing().method(1)[0] == 'around'"
PLAIN = "assert target.function(1) == ['function', 1, 1]; assert target.Thing().method(1)[0] == 'method'"


def test_one_line_says_what_was_done(extra: Extra) -> None:
    done = extra().load(f"{PATCHED}\nassert plugin.load() is result")
    [line] = done.stderr.splitlines()
    assert line.startswith("bcg-fixes ") and line.endswith(f": applied extra_fix; {REST}; {ALL_NOT_NEEDED}"), line


def test_the_line_says_that_it_is_strict(extra: Extra) -> None:
    site = extra()
    done = site.load(SGLANG_BCG_FIXES="strict")
    assert ", strict: applied extra_fix" in done.stderr, done.stderr
    assert ", strict" not in site.load().stderr


@pytest.mark.parametrize("before", ["enabled", "disabled"])
def test_the_collector_rests_while_syntax_trees_live_and_is_left_as_it_was(extra: Extra, before: str) -> None:
    probe = AFFECTED.replace("(", "(not __import__('gc').isenabled() and ", 1)
    extra(probe).scenario("plugin_process", "collector_rests", before)


@pytest.mark.parametrize(
    ("environ", "state"), [({"SGLANG_BCG_FIXES": "off"}, "off"), ({"SGLANG_BCG_FIX_EXTRA_FIX": "off"}, "off")]
)
def test_off_changes_nothing_and_says_so(extra: Extra, environ: dict[str, Any], state: str) -> None:
    done = extra().load(PLAIN, **environ)
    assert "applied none; " in done.stderr and "extra_fix" in line_part(done.stderr, state)


def test_nothing_is_imported_for_a_patch_and_it_comes_with_the_import(extra: Extra) -> None:
    done = extra().scenario("plugin_process", "comes_with_the_import")
    first, second = done.stderr.splitlines()
    assert ": applied none; " in first and "; pending extra_fix" in first, first
    assert ": applied extra_fix; " in second and "pending" not in second, second


def test_a_module_that_imports_another_of_the_same_fix_is_complete_first(extra: Extra) -> None:
    text = EXTRA.replace("sglang.srt.target:SECOND", "sglang.srt.outer:outer")
    done = extra(text=text).scenario("plugin_process", "outer_first")
    assert "failed" not in done.stderr and "pending extra_fix" in done.stderr.splitlines()[0]


def test_a_module_that_only_the_fix_imports_does_not_apply_it_twice(extra: Extra) -> None:
    text = EXTRA.replace("sglang.srt.target:SECOND", "sglang.srt.outer:outer")
    done = extra(text=text).scenario("plugin_process", "outer_by_the_fix_alone")
    assert "failed" not in done.stderr and len(done.stderr.splitlines()) == 2, done.stderr


@pytest.mark.parametrize(
    ("how", "called"),
    [
        ("AROUND", ["around", "around", "outer"]),
        # it is in no graph; its body has been imported, but not what a break is made by
        ("(How.GRAPH_BREAK, lambda original, x: ['break', *original(x)])", ["around", "outer"]),
    ],
)
def test_what_is_patched_while_another_is_stays_and_is_not_patched_again(
    extra: Extra, how: str, called: list[str]
) -> None:
    site = extra.together(f"[(OUTER, {how})]", "[(TARGET, AROUND), (OUTER, AROUND)]")
    done = site.scenario("plugin_process", "two_together", *called, SGLANG_BCG_FIXES="strict")
    assert "applied early_fix, late_fix; " in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("way", "early", "late"),
    [
        (
            "one_fails_around_and_beneath_the_other",
            "[(TARGET, AROUND), (OUTER, AROUND), (METHOD, AROUND), (FORWARD, MISNAMED)]",
            "[(OUTER, OUTSIDE), (TARGET, OUTSIDE), (METHOD, OUTSIDE)]",
        ),
        ("an_import_while_one_is_told", "[(OUTER, MISNAMED)]", "[(TARGET, OUTSIDE), (OUTER, OUTSIDE)]"),
        ("an_import_while_one_is_told", "[(OUTER, MISNAMED)]", "[('sglang.srt.circle:begin', OUTSIDE)]"),
        (
            "a_hook_around_one_that_fails",
            *("[(FORWARD, OUTSIDE), (TARGET, OUTSIDE)]", "[(METHOD, AROUND), (FORWARD, AROUND)]"),
        ),
    ],
)
def test_one_that_fails_takes_no_other_along(extra: Extra, way: str, early: str, late: str) -> None:
    done = extra.together(early, late).scenario("plugin_process", way)
    assert "failed early_fix" in done.stderr and "applied late_fix" in done.stderr, done.stderr
    assert "applied already" not in done.stderr, done.stderr


@pytest.mark.parametrize("way", ["inside_a_circle", "inside_a_chain"])
def test_no_import_is_begun_in_the_middle_of_another(extra: Extra, way: str) -> None:
    text = EXTRA.replace("sglang.srt.target:SECOND", "sglang.srt.circle_end:end")
    extra(text=text).scenario("plugin_process", way, SGLANG_BCG_FIXES="strict")


def test_a_process_that_never_imports_it_keeps_saying_that_it_waits(extra: Extra) -> None:
    done = extra().later("import sglang")
    assert len(done.stderr.splitlines()) == 1 and "pending extra_fix" in done.stderr


def test_what_comes_with_one_import_after_the_other_is_told_when_a_runner_stands(extra: Extra) -> None:
    rare = """, Fix(
        id="rare_fix",
        doc="Its module is not imported.",
        upstream=(),
        probe=lambda source: PROBE,
        known={},
        patches=(PatchPoint(("sglang.srt.outer:outer",), How.AROUND, "tests.engine.bodies:around"),),
    )]"""
    text = EXTRA.removesuffix("]\n") + rare
    done = extra(text=text).scenario("plugin_process", "one_import_after_the_other")
    start, found, told = (line for line in done.stderr.splitlines() if ", MainProcess" in line or "verified" in line)
    assert "applied none" in start and "verified when the first batch came: 1 live" in found, done.stderr
    assert "applied extra_fix; " in told and "pending rare_fix" in told, told


def test_a_late_failure_is_told_and_strict_ends_the_process(extra: Extra) -> None:
    site = extra(second="Thing.gone")
    code = f"from sglang.srt import target; {PLAIN}"
    done = site.later(code)
    assert "failed extra_fix" in done.stderr and "Traceback" in done.stderr, done.stderr
    refused = site.later(code, SGLANG_BCG_FIXES="strict", status=1)
    assert "bcg-fixes refuses to start without" in refused.stderr, refused.stderr


def test_an_awaited_module_that_cannot_be_imported_fails_as_without_us(extra: Extra, tmp_path: pathlib.Path) -> None:
    text = EXTRA.replace("sglang.srt.target:function", "sglang.srt.target_that_breaks:function")
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "target_that_breaks.py").write_text("raise RuntimeError('its own')")
    done = processes.python(
        *("-m", "tests.scenarios.plugin_process", "awaited_module_breaks"),
        paths=[tmp_path, extra(text=text).site],
        environment={"SGLANG_BCG_REPORT_DIR": str(extra.reports), **OTHERS_OFF},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("environ", [{"SGLANG_BCG_FIXES": "strict"}, {"SGLANG_BCG_FIX_EXTRA_FIX": "on"}])
@pytest.mark.parametrize(
    ("probe", "second", "words"),
    [
        (UNKNOWN, "Thing.method", "SGLANG_BCG_FIX_EXTRA_FIX (unread): nobody has read it"),
        (AFFECTED, "Thing.gone", "SGLANG_BCG_FIX_EXTRA_FIX (failed): PatchError: no sglang.srt.target:Thing.gone"),
        ("1 / 0", "Thing.method", "SGLANG_BCG_FIX_EXTRA_FIX (unread): its probe failed: ZeroDivisionError"),
    ],
)
def test_strict_and_on_refuse_to_start(
    extra: Extra, environ: dict[str, str], probe: str, second: str, words: str
) -> None:
    done = extra(probe, second).scenario("plugin_process", "caught", **environ, status=1)
    assert "swallowed" not in done.stdout, done.stderr
    assert "bcg-fixes refuses to start without" in done.stderr and words in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("probe=lambda source: PROBE", "probe=lambda source: 1 / 0", "its probe failed: ZeroDivisionError"),
        (
            '"tests.engine.bodies:around"),',
            '"tests.engine.bodies:around", needed=lambda source: 1 / 0),',
            "its patch points cannot be chosen: ZeroDivisionError",
        ),
    ],
    ids=["probe", "patch points"],
)
def test_a_fix_that_cannot_be_asked_takes_no_other_along(extra: Extra, old: str, new: str, words: str) -> None:
    good = """, Fix(id="good_fix", doc="Good.", upstream=(), probe=lambda source: PROBE, known={}, patches=(
        PatchPoint(("sglang.srt.target:Thing.static",), How.AROUND, "tests.engine.bodies:around"),))]"""
    text = EXTRA.replace(old, new, 1)
    done = extra(text=text.removesuffix("]\n") + good).load(PLAIN)
    assert "applied good_fix" in done.stderr and "unread extra_fix" in done.stderr, done.stderr
    told = extra(text=text.removesuffix("]\n") + good).scenario("one_line", "a_model")
    assert f"extra_fix of extra-fixes is not applied (unread): {words}" in told.stderr, told.stderr


def test_a_kernel_that_cannot_be_asked_is_passed_over(extra: Extra) -> None:
    text = with_kernel().replace('Rejected("no driver")', "1 / 0")
    done = extra(text=text).load("assert target.function(1)[1] == 'triton'")
    assert "kernels extra_op triton (applied)" in done.stderr, done.stderr
    named = extra(text=text).load(SGLANG_BCG_KERNEL_EXTRA_OP="cuda", status=1)
    assert "cuda: it cannot be asked: ZeroDivisionError" in named.stderr, named.stderr


def test_a_kernel_whose_points_cannot_be_chosen_takes_no_other_along(extra: Extra) -> None:
    old = '"tests.engine.bodies:through_kernel"),'
    text = with_kernel().replace(old, old.replace("),", ", needed=lambda source: 1 / 0),"))
    said = """
        why = next(choice.reason for choice in result.plan.kernels if choice.op == "extra_op")
        assert why == "its patch points cannot be chosen: ZeroDivisionError: division by zero", why
    """
    done = extra(text=text).load(PATCHED + processes.code(said))
    assert "applied extra_fix" in done.stderr, done.stderr
    named = extra(text=text).load(SGLANG_BCG_KERNEL_EXTRA_OP="triton", status=1)
    assert "SGLANG_BCG_KERNEL_EXTRA_OP=triton (unread): its patch points" in named.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_of_ours_is_not_left_to_sglang_to_swallow(extra: Extra, when: str) -> None:
    done = extra().scenario("plugin_process", "failure_caught", when, status=1)
    assert "swallowed" not in done.stdout, done.stderr
    assert "bcg-fixes refuses to start, because it has failed: " in done.stderr and "Traceback" in done.stderr


def test_a_contribution_that_is_no_list_of_fixes_ends_the_process(extra: Extra) -> None:
    text = EXTRA.replace("return [Fix(", "return (Fix(").replace(")]\n", "))\n")
    done = extra(text=text).load(status=1)
    assert "bcg-fixes refuses to start: extra-fixes: its bcg_fixes() gives " in done.stderr
    assert "which is not a list; mend or uninstall extra-fixes" in done.stderr and "Traceback" not in done.stderr


def test_a_failure_is_shown_rolled_back_and_not_called_applied(extra: Extra) -> None:
    done = extra(second="Thing.gone").load(PLAIN + "\nassert result.ledger.applied() == []")
    assert f"applied none; {REST}; failed extra_fix; {ALL_NOT_NEEDED}" in done.stderr and "Thing.gone" in done.stderr
    assert "Traceback" in done.stderr, "the whole exception is logged"


def test_a_misspelt_flag_refuses_to_start(extra: Extra) -> None:
    done = extra().load(SGLANG_BCG_FIX_EXTRA_FX="off", status=1)
    assert "SGLANG_BCG_FIX_EXTRA_FX is not a flag; did you mean SGLANG_BCG_FIX_EXTRA_FIX?" in done.stderr


def test_a_setting_that_only_looks_like_ours_is_said(extra: Extra) -> None:
    done = extra().load(PATCHED, SGLANG_BCGFIXES="off")
    assert "SGLANG_BCGFIXES is set, and nobody reads it; did you mean SGLANG_BCG_FIXES?" in done.stderr


def test_a_package_that_cannot_be_loaded_is_named(extra: Extra) -> None:
    done = extra(text="import nothing_of_that_name").load(status=1)
    assert "extra = extra_fixes" in done.stderr and "nothing_of_that_name" in done.stderr


def test_two_packages_with_one_id_are_refused(extra: Extra) -> None:
    done = extra(text=EXTRA.replace("extra_fix", "linear_attention_captured")).load(status=1)
    assert "more than one package declares the fix id linear_attention_captured" in done.stderr


def test_a_child_with_the_same_plan_says_nothing_more(extra: Extra) -> None:
    done = extra().scenario("plugin_process", "parent", "{}")
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_child_with_another_plan_says_so_and_is_refused_under_strict(extra: Extra) -> None:
    site = extra()
    changed = ("plugin_process", "parent", json.dumps({"SGLANG_BCG_FIX_EXTRA_FIX": "off"}))
    done = site.scenario(*changed)
    assert "its parent planned" in done.stderr, done.stderr
    refused = site.scenario(*changed, SGLANG_BCG_FIXES="strict", status=1)
    assert "its parent planned" in refused.stderr, refused.stderr


KERNEL = (
    EXTRA
    + """
from sglang_bcg_fixes.model import Accepted, Impl, Kernel, Rejected

@hookimpl
def bcg_kernels():
    impls = (
        Impl("cuda", lambda: Rejected("no driver"), "tests.engine.bodies"),
        Impl("triton", Accepted, "tests.engine.bodies"),
    )
    points = (PatchPoint(("sglang.srt.target:KERNEL_POINT",), How.AROUND, "tests.engine.bodies:through_kernel"),)
    return [Kernel("extra_op", "Something is quicker.", impls, lambda source: KERNEL_PROBE, {}, points, True)]
"""
)


def with_kernel(probe: str = AFFECTED, point: str = "function") -> str:
    return KERNEL.replace("KERNEL_PROBE", probe).replace("KERNEL_POINT", point)


def test_a_kernel_is_called_inside_the_fixes_and_told_of_with_what_was_rejected(extra: Extra) -> None:
    site = extra(text=with_kernel())
    inside = "assert target.function(1) == ['around', 'triton', 'function', 1, 1]\n"
    done = site.load(inside + processes.code(STATUS.replace("--json", "-v")))
    assert "; kernels extra_op triton (applied)" in done.stderr.splitlines()[0]
    assert "extra_op, triton (not reached yet): it is extra" in done.stdout and "not cuda: no driver" in done.stdout, (
        done.stdout
    )
    late = f"from sglang.srt import target\n{inside}assert result.report.state('extra_op') == 'applied'"
    done = site.later(late)
    assert "kernels extra_op triton (pending)" in done.stderr, done.stderr


def test_a_kernel_waits_for_the_module_that_it_names(extra: Extra) -> None:
    site = extra(text=with_kernel().replace("points, True)]", "points, True, ('sglang.srt.outer',))]"))
    code = (
        "from sglang.srt import target\n"
        "assert target.function(1) == ['around', 'function', 1, 1], 'it waits'\n"
        "from sglang.srt import outer\n"
        "assert target.function(1) == ['triton', 'around', 'function', 1, 1], 'it is there'\n"
        "assert result.report.state('extra_op') == 'applied'"
    )
    done = site.later(code)
    assert done.stderr.count("kernels extra_op triton (pending)") == 2, done.stderr


def test_what_auto_cannot_have_leaves_sglangs_own_code_even_under_strict(extra: Extra) -> None:
    for text in (with_kernel(UNKNOWN), with_kernel(point="gone")):
        extra(text=text).load(PATCHED, SGLANG_BCG_FIXES="strict")


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        (with_kernel(UNKNOWN), "triton", "(unread): nobody has read it"),
        (with_kernel(), "cuda", "(blocked): cuda: no driver"),
        (with_kernel(point="gone"), "triton", "(failed): PatchError: no sglang.srt.target:gone"),
    ],
)
def test_a_kernel_that_was_named_is_needed(extra: Extra, text: str, state: str, words: str) -> None:
    done = extra(text=text).load(SGLANG_BCG_KERNEL_EXTRA_OP=state, status=1)
    assert f"bcg-fixes refuses to start without SGLANG_BCG_KERNEL_EXTRA_OP={state} {words}" in done.stderr, done.stderr


def test_a_kernel_that_is_off_is_not_there(extra: Extra) -> None:
    site = extra(text=with_kernel())
    settings: list[dict[str, Any]] = [{"SGLANG_BCG_KERNEL_EXTRA_OP": "off"}, {"SGLANG_BCG_KERNELS": "off"}]
    for environ in (*settings, {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_EXTRA_FIX": "on"}):
        done = site.load(PATCHED, **environ)
        assert "kernels" not in done.stderr, done.stderr


def test_status_says_which_setting_keeps_sglangs_own_code(extra: Extra) -> None:
    site, words = extra(text=with_kernel()), processes.code(STATUS.replace("--json", "-v"))
    done = site.load(words, SGLANG_BCG_KERNELS="off")
    assert "off         extra_op, sglang: SGLANG_BCG_KERNELS=off" in done.stdout, done.stdout + done.stderr
    assert "not triton: SGLANG_BCG_KERNELS=off" not in done.stdout, "nothing is said twice"
    done = site.load(words, SGLANG_BCG_KERNELS="off", SGLANG_BCG_KERNEL_EXTRA_OP="triton")
    assert "extra_op, triton (not reached yet): it is extra" in done.stdout, done.stdout + done.stderr


def test_status_says_where_a_kernel_did_not_run(extra: Extra) -> None:
    happens = (
        "import dataclasses\n"
        "from sglang_bcg_fixes.kernels import active\n"
        "chosen = active.selected('extra_op')\n"
        "chosen.fall_back('it is odd')\n"
        "chosen.impl = dataclasses.replace(chosen.impl, name='other')\n"
        "result.log_line()\n"
    )
    words = processes.code(STATUS.replace("--json", "-v"))
    done = extra(text=with_kernel()).load(happens + words)
    assert "extra_op, other (not reached yet): it is extra" in done.stdout, done.stdout + done.stderr
    assert "left to SGLang's own code: it is odd" in done.stdout, done.stdout


STATUS = """
    import subprocess, sys
    out = subprocess.run([sys.executable, "-m", "sglang_bcg_fixes", "status", "--json"], stdout=subprocess.PIPE)
    sys.stdout.write(out.stdout.decode())
"""


def test_status_shows_live_processes_and_only_those(extra: Extra) -> None:
    site, reports = extra(), extra.reports
    done = site.load(STATUS)
    [process] = json.loads(done.stdout)["processes"]
    states = {row["id"]: row["state"] for row in process["fixes"]}
    assert states["extra_fix"] == "applied" and states["linear_attention_captured"] == "not needed"
    assert list(reports.iterdir()) == [], "a process that ends in order takes its report along"
    assert reports.stat().st_mode & 0o777 == 0o700
    site.load("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", status=-9)
    assert len(list(reports.iterdir())) == 1
    done = site.load(STATUS)
    assert len(json.loads(done.stdout)["processes"]) == 1 and list(reports.iterdir()) == [], (
        "what was killed is cleaned up"
    )


def test_a_process_that_is_left_alone_is_shown_and_cleaned_up_by_the_next(extra: Extra) -> None:
    site, reports = extra(), extra.reports
    done = site.load(STATUS, SGLANG_BCG_FIXES="off")
    [process] = json.loads(done.stdout)["processes"]
    assert {row["state"] for row in process["fixes"]} == {"off", "not needed"}
    assert len(list(reports.iterdir())) == 1, "it has no handler that would remove the report"
    site.load()
    assert list(reports.iterdir()) == []


def test_a_killed_process_that_nobody_has_waited_for_is_not_shown(extra: Extra) -> None:
    done = extra().scenario("plugin_process", "parent_of_a_zombie")
    assert len(processes.result(done)) == 1, done.stdout


@pytest.mark.parametrize("content", [b"", b'{"pid": 1', b"\xff\xfe"])
def test_a_report_that_a_crash_has_left_broken_hides_nobody(extra: Extra, content: bytes) -> None:
    site, reports = extra(), extra.reports
    reports.mkdir(mode=0o700)
    (reports / "4194305.json").write_bytes(content)
    alone = f"import os; assert os.listdir({str(reports)!r}) == [f'{{os.getpid()}}.json']"
    done = site.load(f"{alone}\n{processes.code(STATUS)}")
    assert "will not see" not in done.stderr, done.stderr
    assert len(json.loads(done.stdout)["processes"]) == 1


def test_a_forked_child_leaves_its_parents_report_alone(extra: Extra) -> None:
    extra().scenario("plugin_process", "forks")


def test_a_report_folder_that_others_can_read_is_not_used_and_the_server_starts(
    extra: Extra, tmp_path: pathlib.Path
) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    reports.chmod(0o755)
    done = extra().load(PATCHED)
    assert "is not a private folder" in done.stderr, done.stderr
    assert list(reports.iterdir()) == []


def test_a_report_folder_that_cannot_be_made_is_a_warning(extra: Extra, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    done = extra().load(PATCHED, SGLANG_BCG_REPORT_DIR=str(tmp_path / "file" / "reports"))
    assert "`bcg-fixes status` will not see this process" in done.stderr, done.stderr


def test_the_line_goes_through_logging_once_that_is_set_up(extra: Extra) -> None:
    done = extra().scenario("plugin_process", "logs")
    assert done.stderr.startswith("LOGGED DEBUG bcg-fixes ") and len(done.stderr.splitlines()) == 1, done.stderr


def test_os_environ_is_read_in_one_module_only() -> None:
    package = processes.REPOSITORY / "sglang_bcg_fixes"
    readers = [p.name for p in package.rglob("*.py") if "os.environ" in p.read_text() or "getenv" in p.read_text()]
    assert readers == ["flags.py"], os.linesep.join(readers)
