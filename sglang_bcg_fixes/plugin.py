# SPDX-License-Identifier: Apache-2.0
"""The door that SGLang calls: it runs `load()` in every process that loads plugins.

SGLang loads every plugin that is installed, unless SGLANG_PLUGINS names those that it shall load.

SGLang logs and swallows every Exception that comes out of a plugin, so a refusal to start is a SystemExit.
"""

from __future__ import annotations

import logging
import os
import pathlib
import time

from sglang_bcg_fixes import __version__, flags
from sglang_bcg_fixes.planning import plan, registry
from sglang_bcg_fixes.process.log import logger, say
from sglang_bcg_fixes.process.process import Process
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.syntax import collector_paused
from sglang_bcg_fixes.source.tree import Folder, Source

WAY_OUT = f"{flags.EVERYTHING}=off starts the server without any fix"
# SGLang may load its plugins more than once in a process
_loaded: list[Process] = []


@collector_paused()
def load() -> Process:
    """Probe the installed SGLang, apply what it needs, verify and log it; once per process."""
    if flags.is_off():
        return left_alone()
    if not _loaded:
        started = time.perf_counter()
        try:
            known = registry.discover()
            settings = known.settings()
            for words in known.warnings():
                say(logging.WARNING, f"bcg-fixes: {words}")
            source = releases.installed()
            if source is None:
                raise releases.ReleaseError("no SGLang can be imported here; install it in this environment")
            made = plan.make(known, settings, source)
            source.forget()
            _loaded.append(Process(settings, source, made))
            _loaded[0].start(started)
        except (flags.FlagError, registry.RegistryError, plan.PlanError, releases.ReleaseError) as error:
            raise SystemExit(f"bcg-fixes refuses to start: {error}. {WAY_OUT}") from error
        except Exception as error:
            # such as a broken contribution; SGLang would go on with no fix or with half of them
            logger.exception("bcg-fixes has failed")
            raise SystemExit(
                f"bcg-fixes refuses to start, because it has failed: {type(error).__name__}: {error}. Please report "
                f"the traceback. {WAY_OUT}"
            ) from error
    return _loaded[0]


def left_alone() -> Process:
    """A process without a plan, which nothing starts: nothing else is read, so nothing can refuse."""
    say(logging.INFO, f"bcg-fixes {__version__}: off by {flags.EVERYTHING}=off, SGLang is as without it")
    nothing = Source(Folder(pathlib.Path(os.devnull)))
    return Process(flags.all_off((), ()), nothing, plan.Plan(nothing.version, (), ()))
