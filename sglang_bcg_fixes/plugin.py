# SPDX-License-Identifier: Apache-2.0
"""The door that SGLang calls: `SGLANG_PLUGINS=bcg_fixes` runs `load()` in every process that loads plugins.

SGLang logs and swallows every Exception that comes out of a plugin, so a refusal to start is a SystemExit.
"""

from __future__ import annotations

import logging
import time

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.planning import plan, registry
from sglang_bcg_fixes.process.log import logger, say
from sglang_bcg_fixes.process.process import Process
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.syntax import collector_paused

# SGLang may load its plugins more than once in a process
_loaded: list[Process] = []


@collector_paused()
def load() -> Process:
    """Probe the installed SGLang, apply what it needs, read it back and log it; once per process."""
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
            raise SystemExit(f"bcg-fixes refuses to start: {error}") from error
        except Exception as error:
            # such as a broken contribution; SGLang would go on with no fix or with half of them
            logger.exception("bcg-fixes has failed")
            raise SystemExit(
                f"bcg-fixes refuses to start, because it has failed: {type(error).__name__}: {error}. Please report "
                f"the traceback; without bcg_fixes in SGLANG_PLUGINS the server starts, without any fix"
            ) from error
    return _loaded[0]
