# SPDX-License-Identifier: Apache-2.0
"""The states of the fixes for Prometheus, and why prefills were not replayed, in servers that show metrics.

SGLang's schedulers write to files that its HTTP server reads. prometheus_client decides at its import whether it does
that, so it is imported when a runner is first seen: by then SGLang has set the folder, or shows no metrics.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_bcg_fixes.process import fallbacks

STATES = "sglang_bcg_fix_state"
FALLBACKS = "sglang_bcg_prefill_fallbacks_total"

logger = logging.getLogger("sglang_bcg_fixes")


class Metrics:
    """The metrics of this process, which is a label: a fix may be lost in one rank alone."""

    def __init__(self) -> None:
        self._process: str | None = None
        self._shown: dict[str, str] = {}
        self._states: Any = None
        self._fallbacks: Any = None

    def start(self, process: str) -> bool:
        """Start unless that was tried before; tell whether this call did it."""
        if self._process is not None:
            return False
        self._process = process
        with self._giving_up("_states", "_fallbacks"):
            from prometheus_client import Counter, Gauge

            text = "1 for the state that a fix or kernel of sglang-bcg-fixes has in a process, 0 for those that it had."
            self._states = Gauge(STATES, text, ["fix", "state", "process"], multiprocess_mode="mostrecent")
            text = "Prefills that the runner of prefill graphs was asked for and did not replay."
            self._fallbacks = Counter(FALLBACKS, text, ["reason", "process"])
        return self._fallbacks is not None

    def show(self, states: Mapping[str, str]) -> None:
        if self._states is None:
            return
        with self._giving_up("_states"):
            for name, state in states.items():
                before = self._shown.get(name, state)
                if before != state:
                    self._states.labels(name, before, self._process).set(0)
                self._states.labels(name, state, self._process).set(1)
                self._shown[name] = state

    def count_refusal(self, runner: Any, batch: Any) -> None:
        if self._fallbacks is None:
            return
        with self._giving_up("_fallbacks"):
            self.count(fallbacks.why(runner, batch))

    def count(self, reason: str) -> None:
        if self._fallbacks is None:
            return
        with self._giving_up("_fallbacks"):
            self._fallbacks.labels(reason, self._process).inc()

    @contextlib.contextmanager
    def _giving_up(self, *names: str) -> Iterator[None]:
        """Log an error and stop showing these metrics: no batch may fail because of them."""
        try:
            yield
        except Exception:
            for name in names:
                setattr(self, name, None)
            what = "the fixes" if "_states" in names else "the fallbacks"
            logger.exception("bcg-fixes: /metrics shows %s of this process no longer; `bcg-fixes status` does", what)
