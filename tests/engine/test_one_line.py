# SPDX-License-Identifier: Apache-2.0
"""One line in the log of each server process that runs a model, and warnings of what concerns that model."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from sglang_bcg_fixes.model import Action, Decision
from sglang_bcg_fixes.process import log, report
from sglang_bcg_fixes.source.finding import Finding, Verdict
from tests import processes
from tests.engine import bodies, test_plugin
from tests.engine.test_plugin import AFFECTED, UNKNOWN, Extra

extra = test_plugin.extra
LLAMA, LONG = "LlamaForCausalLM", f"A{'n' * 150}ForCausalLM"
FIXES = """
from sglang_bcg_fixes.anatomy.launches import named
from sglang_bcg_fixes.concern import Condition, wrong
"""
# for every model
KERNEL = FIXES + test_plugin.with_kernel().replace("points, True)]", "points, True, concerns=wrong())]")
END = "more: bcg-fixes status; off: SGLANG_BCG=off"


def concerning(architecture: str, text: str = test_plugin.EXTRA) -> str:
    """The extra fix, for models of this name alone."""
    return FIXES + text.replace("known={},", f"known={{}}, concerns=wrong(named({architecture!r})),", 1)


def told(extra: Extra, *arguments: str, **environ: Any) -> tuple[list[str], list[str], str]:
    """The lines that are a warning or worse, the others of ours, and the answer of the process."""
    done = extra.scenario("one_line", *arguments, **environ)
    ours = [line for line in done.stderr.splitlines() if "bcg-fixes" in line]
    warnings = [line for line in ours if line.startswith(("WARNING", "ERROR"))]
    return warnings, [line for line in ours if line not in warnings], str(processes.result(done))


def test_a_model_has_one_line_of_at_most_200_characters(extra: Extra) -> None:
    warnings, lines, status = told(extra(), "a_model")
    words = "LlamaForCausalLM MainProcess: 1 fix live, 0 unread, 0 lost; kernel none; self-check none; "
    assert warnings == [] and lines == [f"INFO bcg-fixes 0.1.0: sglang unknown {words}{END}"]
    [told_of_it] = status.splitlines()
    assert told_of_it.startswith("OK     LlamaForCausalLM :30000  1 of 1 fixes live, "), told_of_it
    assert told_of_it.endswith(" live, no self-check, 0 replays, 0 fallbacks"), told_of_it


@pytest.mark.parametrize(
    ("verdict", "default", "is_switched_off"),
    [(Verdict.AFFECTED, "auto", True), (Verdict.FIXED, "auto", False), (Verdict.AFFECTED, "off", False)],
)
def test_a_needed_fix_that_is_switched_off_is_told_from_one_that_nobody_needs(
    verdict: Verdict, default: str, is_switched_off: bool
) -> None:
    subject = dataclasses.replace(bodies.fix("stale", bodies.point("function")), default=default)
    decision = Decision(subject, Action.OFF, "SGLANG_BCG_OFF=stale", Finding(verdict, "why", ()))
    assert report.Outcome(decision, Action.OFF.value, "off").is_switched_off is is_switched_off


def test_warnings_are_seen_where_a_logging_configuration_disables_our_logger(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.logger, "disabled", True)
    log.say(logging.WARNING, "a fix is LOST")
    assert capsys.readouterr().err == "a fix is LOST\n"


def test_a_long_name_is_cut_and_nothing_else(extra: Extra) -> None:
    _, [line], _ = told(extra(text=KERNEL), "a_model", LONG)
    message = line.removeprefix("INFO ")
    assert len(message) == 200 and f"{LONG[:20]}" in message and message.endswith(END), message
    assert "... MainProcess: 1 fix live, 0 unread, 0 lost; 1 kernels; " in message, message


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("DP attention: ranks replay batches of their own", "DP attention"),
        ("it is a draft model", "it is a draft model"),
        ("0 of 7 compared, 7 left out: time; 3.0 s", "0 of 7 compared, 7 left out"),
        ("TypeError: no model", "TypeError"),
        ("no bucket fits into the memory for keys and values", "no bucket fits into the memory for..."),
    ],
)
def test_a_self_check_that_was_not_made_says_why_in_either_line(extra: Extra, reason: str, shown: str) -> None:
    _, [line], status = told(extra(text=KERNEL), "unchecked", LONG, reason)
    assert line.endswith(f"; self-check not made: {shown}; {END}") and len(line.removeprefix("INFO ")) <= 200, line
    [told_of_it] = status.splitlines()
    assert told_of_it.startswith("OK ") and f", self-check not made: {shown}, " in told_of_it, told_of_it


def test_a_kernel_that_runs_is_named(extra: Extra) -> None:
    _, [line], _ = told(extra(text=KERNEL), "a_model")
    assert "; kernel extra_op=triton; " in line


@pytest.mark.parametrize(
    ("architecture", "reason", "shown"),
    [
        (LLAMA, "too little GPU memory, during the capture", "no extra_op: too little GPU memory"),
        (LLAMA, "b" * 100, "kernel none"),
        (LONG, "several ranks", "kernel none"),
    ],
)
def test_a_kernel_that_is_left_alone_is_named_with_the_reason_where_that_fits(
    extra: Extra, architecture: str, reason: str, shown: str
) -> None:
    text = FIXES + test_plugin.with_kernel()
    _, [line], _ = told(extra(text=text), "left_alone", architecture, reason)
    assert f"; {shown}; self-check" in line and len(line.removeprefix("INFO ")) <= 200, line


def test_a_process_without_a_model_says_nothing(extra: Extra) -> None:
    for probe, second in ((AFFECTED, "Thing.method"), (UNKNOWN, "Thing.method"), (AFFECTED, "Thing.gone")):
        assert told(extra(probe, second), "no_model")[:2] == ([], [])


def test_a_draft_is_not_the_model_that_is_served(extra: Extra) -> None:
    assert told(extra(UNKNOWN), "a_draft")[:2] == ([], [])


@pytest.mark.parametrize(("drafts", "count"), [("PhiForCausalLM", "1 fix live"), (LLAMA, "none of its fixes needed")])
def test_what_concerns_the_model_of_drafts_concerns_its_server(extra: Extra, drafts: str, count: str) -> None:
    _, [line], status = told(extra(text=concerning("Phi*")), "a_model_with_drafts", LLAMA, drafts)
    assert f" {LLAMA} MainProcess: {count}, 0 unread, 0 lost; " in line and f"OK     {LLAMA} :30000  " in status, line


@pytest.mark.parametrize(
    ("probe", "second", "state", "count"),
    [
        (UNKNOWN, "Thing.method", "unread", "0 fixes live, 1 unread, 0 lost"),
        (AFFECTED, "Thing.gone", "failed", "1 failed"),
    ],
)
def test_what_is_missing_is_a_warning_where_it_concerns_the_model(
    extra: Extra, probe: str, second: str, state: str, count: str
) -> None:
    site = extra(probe, second, concerning("Llama*"))
    [warning], [line], status = told(site, "a_model", LLAMA)
    for words in (f"extra_fix of extra-fixes is not applied ({state}): ", "bcg-fixes doctor", "_EXTRA_FIX=off"):
        assert words in warning, warning
    assert count in line, line
    verdict = "CHECK" if state == "unread" else "WRONG"
    assert (
        status.startswith(f"{verdict}  {LLAMA} :30000  0 of 1 fixes live, ") and f"    {state:11} extra_fix: " in status
    )
    warnings, [line], status = told(site, "a_model", "PhiForCausalLM")
    assert warnings == [] and "none of its fixes needed, 0 unread, 0 lost; " in line, (warnings, line)
    assert (
        status.startswith("OK     PhiForCausalLM :30000  none of the fixes needed, ") and "extra_fix" not in status
    ), status


def test_what_is_not_known_of_a_model_hides_nothing(extra: Extra) -> None:
    broken = concerning("Phi*").replace("wrong(named('Phi*'))", "wrong(Condition('odd', lambda launch: 1 / 0))")
    [warning], [line], _ = told(extra(UNKNOWN, text=broken), "a_model", LLAMA)
    assert "(unread)" in warning and "1 unread" in line


def test_what_is_lost_is_a_warning_whoever_it_concerns(extra: Extra) -> None:
    [warning], [line], status = told(extra(text=concerning("Phi*")), "lost", LLAMA)
    assert "extra_fix of extra-fixes was applied and is LOST: " in warning and "1 lost; " in line, line
    assert status.startswith(f"WRONG  {LLAMA} ") and "    lost        extra_fix: " in status, status


def test_a_server_that_logs_warnings_only_has_no_line(extra: Extra) -> None:
    assert told(extra(), "a_model", LLAMA, "WARNING")[:2] == ([], [])
