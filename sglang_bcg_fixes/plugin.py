"""The door that SGLang calls: `SGLANG_PLUGINS=bcg_fixes` runs `load()` in every process that loads plugins.

SGLang logs and swallows every Exception that comes out of a plugin, so a refusal to start is a SystemExit.
"""

from __future__ import annotations

import logging
import sys
import time

from sglang_bcg_fixes import flags, plan, registry, release, report
from sglang_bcg_fixes.model import Action, Decision
from sglang_bcg_fixes.patching import Ledger

logger = logging.getLogger("sglang_bcg_fixes")
ledger = Ledger()
_loaded: list[report.Report] = []


def load() -> report.Report:
    """Probe the installed SGLang, mend what it needs, read it back, say so; once per process."""
    if _loaded:
        return _loaded[0]
    started = time.perf_counter()
    try:
        known = registry.discover()
        settings = flags.read(known.fixes, known.kernels)
        source = release.installed()
        if source is None:
            raise release.ReleaseError("no SGLang can be imported here; install it beside this package")
        made = plan.make(known, settings, source)
    except (flags.FlagError, registry.RegistryError, plan.PlanError, release.ReleaseError) as error:
        raise SystemExit(f"bcg-fixes refuses to start: {error}") from error
    compare_with_parent(made, settings)
    outcomes = tuple(carry_out(decision) for decision in made.decisions)
    result = report.Report(made, outcomes, time.perf_counter() - started)
    tell(result, settings)
    refuse_what_is_missing(result, settings)
    _loaded.append(result)
    return result


def compare_with_parent(made: plan.Plan, settings: flags.Settings) -> None:
    """Ranks that run different code can hang a collective, so a difference is said, and refused under strict."""
    if settings.parent_digest not in (None, made.digest):
        message = (
            f"bcg-fixes: this process plans {made.digest}, its parent planned {settings.parent_digest}: they see "
            f"different flags or another SGLang source; compare SGLANG_BCG_* and sys.path of both"
        )
        if settings.strict:
            raise SystemExit(message)
        say(logging.WARNING, message)
    flags.export_digest(made.digest)


def carry_out(decision: Decision) -> report.Outcome:
    if decision.action is not Action.APPLY:
        return report.Outcome(decision, decision.action.value, decision.reason)
    try:
        ledger.apply(decision.fix)
    except Exception as error:
        logger.exception("bcg-fixes: %s could not be applied and was rolled back", decision.id)
        return report.Outcome(decision, report.FAILED, f"{type(error).__name__}: {error}")
    return report.Outcome(decision, report.APPLIED, decision.reason)


def tell(result: report.Report, settings: flags.Settings) -> None:
    say(logging.INFO, result.line())
    logger.debug("bcg-fixes in detail:\n%s", result.table())
    for outcome in result.outcomes:
        if outcome.state in (report.FAILED, Action.UNKNOWN.value, Action.BLOCKED.value):
            fix = outcome.decision.fix
            say(
                logging.WARNING,
                f"bcg-fixes: {fix.id} is not applied ({outcome.state}): {outcome.detail}. `bcg-fixes doctor` shows "
                f"a way round; {fix.flag}=off silences this; please report it with the output of "
                f"`bcg-fixes doctor --json`",
            )
    try:
        report.write(result, settings.report_dir)
    except (OSError, report.ReportError) as error:
        say(logging.WARNING, f"bcg-fixes: `bcg-fixes status` will not see this process: {error}")


def refuse_what_is_missing(result: report.Report, settings: flags.Settings) -> None:
    bad = (report.FAILED, Action.UNKNOWN.value, Action.BLOCKED.value)
    missing = [o for o in result.outcomes if o.state in bad and (settings.strict or o.decision.required)]
    if missing:
        reasons = "; ".join(f"{o.decision.fix.flag} ({o.state}): {o.detail}" for o in missing)
        raise SystemExit(
            f"bcg-fixes refuses to start without {reasons}. Set SGLANG_BCG_FIXES=auto, or the named flag to off, to "
            f"serve without it; `bcg-fixes doctor` shows a way round"
        )


def say(level: int, message: str) -> None:
    """Log, and make sure that it is seen: SGLang sets up logging only after it has loaded its plugins."""
    if logger.hasHandlers() and logger.isEnabledFor(level):
        logger.log(level, message)
    else:
        print(message, file=sys.stderr, flush=True)
