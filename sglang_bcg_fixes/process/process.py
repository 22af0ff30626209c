# SPDX-License-Identifier: Apache-2.0
"""The plugin in this process: the plan, what is applied, and what is pending."""

from __future__ import annotations

import dataclasses
import functools
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.engine import call_counts
from sglang_bcg_fixes.engine.import_hook import ImportWatcher
from sglang_bcg_fixes.engine.ledger import Ledger
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.model import Action, Decision, Patch, modules_of
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.process import procfs, report, this_server, watch
from sglang_bcg_fixes.process.log import logger, refuse, say
from sglang_bcg_fixes.process.metrics import Metrics
from sglang_bcg_fixes.process.selfcheck import at_start, canary
from sglang_bcg_fixes.source.tree import Source

# a source that nobody has read
STATES = {Action.UNKNOWN: report.UNREAD}


class Process:
    """The plugin in this process: the plan, what is applied, and what is pending."""

    def __init__(self, settings: flags.Settings, source: Source, made: plan.Plan) -> None:
        self.settings = settings
        self.source = source
        self.plan = made
        self.ledger = Ledger()
        self.watches = Ledger()
        self.watcher = ImportWatcher()
        self.report = report.Report(made, settings.strict, settings.selfcheck != "off")
        # by the module that each awaits
        self.pending: dict[str, list[Decision[Any]]] = {}
        # patched and not yet settled, and why some could not be
        self.is_patching = False
        self.patched: dict[str, Decision[Any]] = {}
        self.failed: dict[str, Exception] = {}
        # hooks whose module came while something was patched, and what is lost without each
        self.unwatched: list[tuple[Patch, str]] = []
        # missing, and not yet said: it is not known yet if that concerns the model
        self.unsaid: dict[str, Exception | None] = {}
        # a scheduler says its line when it is complete
        self.is_said = self.is_starting = False
        self.last_line = ""
        self.has_met_draft = self.has_warned_of_report = False
        self.metrics = Metrics()

    def start(self, started: float) -> None:
        self.compare_with_parent()
        for choice in self.plan.kernels:
            if choice.impl:
                active.use(choice)
        active.call_after_note(self.write)
        self.carry_out(self.plan.decisions)
        # behind the fixes, so that it stands around what they make of a runner
        hooks = list(watch.hooks(self)) if self.patches or self.lacks else []
        hooks += at_start.hooks(self) if not self.leaves_alone else ()
        hooks += canary.hooks(self) if self.settings.canary else ()
        self.watch(hooks)
        if not hooks:
            # nothing will ever show the model
            self.warn_of_missing(whatever_the_model=True)
        self.report.seconds = time.perf_counter() - started
        self.log_line()

    @property
    def patches(self) -> bool:
        """Tell whether any fix or kernel is to be applied here."""
        return bool(self.plan.applied)

    @property
    def lacks(self) -> bool:
        """Tell whether any fix is wanted that cannot be had."""
        return any(each.mends and each.action in (Action.UNKNOWN, Action.BLOCKED) for each in self.plan.decisions)

    @property
    def leaves_alone(self) -> bool:
        """Tell whether nothing is applied or checked, so that nothing needs counters or cleaning up."""
        return not (self.patches or self.lacks) and self.settings.selfcheck == "off" and not self.settings.canary

    def compare_with_parent(self) -> None:
        """Warn, or refuse under strict, if the parent plans differently: such ranks can hang a collective."""
        if self.settings.parent_digest not in (None, self.plan.digest):
            message = (
                f"bcg-fixes: this process plans {self.plan.digest}, its parent planned {self.settings.parent_digest}: "
                f"they see different flags or another SGLang source; compare SGLANG_BCG_* and sys.path of both"
            )
            if self.settings.strict:
                refuse(message)
            say(logging.WARNING, message)
        flags.export_digest(self.plan.digest)

    def carry_out(self, decisions: Iterable[Decision[Any]]) -> None:
        """Patch what SGLang has imported, and the rest when it does: some processes never do.

        To patch imports modules that other decisions wait for. They are carried out within, though they may be among
        those that are next here, and the outermost call searches for stale holders and settles all of them.
        """
        is_outermost = not self.is_patching
        self.is_patching = True
        for decision in decisions:
            if decision.id in self.patched:
                continue
            if decision.action is not Action.APPLY:
                self.settle(decision, STATES.get(decision.action, decision.action.value), decision.reason)
            elif self.is_ready(decision):
                self.patch(decision)
            else:
                self.wait(decision)
        if is_outermost:
            try:
                self.conclude()
            finally:
                self.is_patching = False
            # behind the fixes: one that is undone would take a hook around it along
            hooks, self.unwatched = self.unwatched, []
            for hook, loss in hooks:
                self.watch([hook], loss)

    def is_ready(self, decision: Decision[Any]) -> bool:
        """Tell whether SGLang has imported it, and whether importing its other modules now is safe."""
        if not decision.modules:
            return True
        if not any(map(self.watcher.is_complete, decision.modules)):
            return False
        # where its modules import one another, it is ready when the outermost one is complete
        return all(map(self.watcher.is_complete, decision.places)) or self.watcher.is_idle()

    def patch(self, decision: Decision[Any]) -> None:
        self.patched[decision.id] = decision
        try:
            self.ledger.change(decision.subject)
        except Exception as error:
            self.failed[decision.id] = error

    def conclude(self) -> None:
        # to log it may import something, and so patch more
        while self.patched:
            self.failed |= self.ledger.check()
            for decision in list(self.patched.values()):
                problem = self.failed.pop(decision.id, None)
                if problem is None:
                    self.settle(decision, report.APPLIED, decision.reason)
                else:
                    self.settle(decision, report.FAILED, f"{type(problem).__name__}: {problem}", problem)
                del self.patched[decision.id]

    def wait(self, decision: Decision[Any]) -> None:
        modules = decision.modules
        self.settle(decision, report.PENDING, f"SGLang has not imported {' or '.join(modules)} in this process")
        for name in modules:
            if name not in self.pending:
                self.watcher.call_after(name, functools.partial(self.carry_out_late, name))
            self.pending.setdefault(name, []).append(decision)
            if name in sys.modules:
                self.watcher.call_when_idle(functools.partial(self.carry_out_late, name))

    def carry_out_late(self, module: str) -> None:
        left = [
            decision
            for decision in self.pending[module]
            if self.report.state(decision.id) == report.PENDING and decision.id not in self.patched
        ]
        ready = list(filter(self.is_ready, left))
        if len(ready) < len(left):
            # SGLang may never import their other modules in this process
            self.watcher.call_when_idle(functools.partial(self.carry_out_late, module))
        is_outermost = not self.is_patching
        self.carry_out(ready)
        if ready and is_outermost:
            # a server imports two dozen modules one after the other, and one line says it all
            if self.report.ids(report.PENDING):
                self.write()
            else:
                self.log_line()

    def watch(self, hooks: Iterable[Patch], loss: str = "fixes may get lost unseen") -> None:
        """Apply the hooks that look again, each as soon as SGLang has imported its module."""
        failed: dict[str, Exception] = {}
        for hook in hooks:
            [module] = modules_of(hook)
            if module not in sys.modules:
                self.watcher.call_after(module, functools.partial(self.watch, [hook], loss))
                continue
            if self.is_patching:
                self.unwatched.append((hook, loss))
                continue
            try:
                self.watches.change(hook)
            except Exception as error:
                failed[hook.id] = error
        for name, problem in {**failed, **self.watches.check()}.items():
            say(logging.WARNING, f"bcg-fixes: {name} are not watched, so {loss}: {problem}")
            self.warn_of_missing(whatever_the_model=True)

    def read_back(self, occasion: str) -> None:
        """Look up every applied fix again where SGLang finds it now; warn of a lost one, or end the process."""
        self.watcher.catch_up()
        before = self.report.read_back
        try:
            found = watch.look(occasion, self.ledger, self.plan)
        except Exception as error:
            logger.exception("bcg-fixes: the fixes could not be verified when %s", occasion)
            if self.settings.strict:
                refuse(f"bcg-fixes refuses to serve with fixes that it cannot verify: {error}", error)
            # what was verified before may be true no longer
            self.report.read_back = None
            self.write()
            say(logging.WARNING, f"bcg-fixes: fixes may get lost unseen, they cannot be verified: {error}")
            return
        self.report.read_back = found
        newly_lost = [name for name in found.lost if self.report.state(name) != report.LOST]
        for name in (*found.live, *found.lost):
            self.report.note(name, report.LOST if name in found.lost else report.APPLIED, found.lost.get(name))
        if before is None or not found.agrees_with(before):
            logger.debug("bcg-fixes %s: %s", report.process_name(), found.line())
        self.log_line()
        for name in newly_lost:
            self.lose(self.report.outcomes[name])

    def show_metrics(self) -> None:
        """Show metrics from now on: SGLang does, and prometheus_client knows the folder by now."""
        self.metrics.start(procfs.title(os.getpid()) or multiprocessing.current_process().name)

    def meet(self, model_runner: Any) -> None:
        """Learn from a model runner which fixes concern this server, and warn of those that are missing.

        What concerns the model of its drafts, which comes after the one that is served, concerns the server too.
        """
        known, is_draft = self.report.served, bool(getattr(model_runner, "is_draft_worker", False))
        if model_runner is None or is_draft is (known is None) or self.has_met_draft:
            return
        found = this_server.seen(model_runner, self.source, self.plan.decisions)
        if known is not None:
            self.has_met_draft = True
            found = dataclasses.replace(known, concerned=known.concerned | found.concerned)
        self.report.served = found
        self.warn_of_missing()

    def say_once(self) -> None:
        """Log the one line of a scheduler, unless that is done or not all in it is known."""
        if not (self.is_said or self.is_starting) and self.report.served is not None:
            self.is_said = True
            say(logging.INFO, self.report.summary())

    def lose(self, outcome: report.Outcome) -> None:
        decision, problem = outcome.decision, outcome.detail
        flag = decision.subject.flag
        way_out = (
            f"Switch off the plugin that put that there, or have it call what it found there, as SGLang's "
            f"HookType.AROUND does; {flag}=off serves without it and is silent"
        )
        if decision.is_needed(self.settings.strict):
            refuse(f"bcg-fixes refuses to serve without {flag} (lost): {problem}. {way_out}")
        say(logging.WARNING, f"bcg-fixes: {decision.whose} was applied and is LOST: {problem}. {way_out}")

    def settle(self, decision: Decision[Any], state: str, detail: str, error: Exception | None = None) -> None:
        """Record the state of a decision; end where a needed fix is missing, or keep it for a warning."""
        self.report.outcomes[decision.id] = report.Outcome(decision, state, detail)
        if state not in report.MISSING:
            return
        rolled_back = "bcg-fixes: %s could not be applied and was rolled back"
        is_needed = decision.is_needed(self.settings.strict)
        if error is not None:
            logger.log(logging.ERROR if is_needed else logging.DEBUG, rolled_back, decision.whose, exc_info=error)
        if is_needed:
            refuse(f"bcg-fixes refuses to start without {decision.asked_for} ({state}): {detail}. {decision.remedy}")
        if decision.mends or error is not None:
            self.unsaid[decision.id] = error
            self.warn_of_missing()

    def warn_of_missing(self, whatever_the_model: bool = False) -> None:
        """Warn of each missing fix that concerns the model, once that is known, or where it never will be."""
        while self.unsaid and (whatever_the_model or self.report.served is not None):
            name, error = self.unsaid.popitem()
            outcome = self.report.outcomes[name]
            decision = outcome.decision
            message = (
                f"bcg-fixes: {decision.whose} is not applied ({outcome.state}): {outcome.detail}. `bcg-fixes doctor` "
                f"shows a workaround; {decision.subject.flag}=off silences this; please report it to {decision.owner} "
                f"with the output of `bcg-fixes report`"
            )
            say(logging.DEBUG if self.report.concerns(decision) is False else logging.WARNING, message, error)

    def log_line(self) -> None:
        """Log the states for debugging if they have changed."""
        line = self.report.line()
        # SGLang sets up logging only after it has loaded its plugins
        if line != self.last_line and logger.isEnabledFor(logging.DEBUG):
            logger.debug(line)
            self.last_line = line
        self.write()

    def write(self) -> None:
        """Write the report for `bcg-fixes status`; best effort, with one warning if it cannot be written."""
        self.metrics.show(self.report.states())
        try:
            if not self.leaves_alone:
                call_counts.TALLY.publish()
            report.write(self.report, flags.report_dir(), is_taken_along=not self.leaves_alone)
        except (OSError, report.ReportError) as error:
            if not self.has_warned_of_report:
                say(logging.WARNING, f"bcg-fixes: `bcg-fixes status` will not see this process: {error}")
            self.has_warned_of_report = True
