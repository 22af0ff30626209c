# SPDX-License-Identifier: Apache-2.0
"""The command of a user's server, and its environment in each arm."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.lab.verify import instruments
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source

STOCK, FIXES, EAGER, AGAIN = "stock", "fixes", "eager", "stock-again"
# stock first and last, so that drift between them is seen
ARMS = (STOCK, FIXES, EAGER, AGAIN)
WITH_PLUGIN, STOCKS = (FIXES, EAGER), (STOCK, AGAIN)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A command that starts a server, where that listens, and the size of its model's vocabulary."""

    words: tuple[str, ...]
    variables: Mapping[str, str]
    host: str
    port: int
    api_key: str | None
    vocabulary: int


def environment_of(launch: Launch, arm: str, source: Source, reports: pathlib.Path) -> dict[str, str]:
    found = {**flags.environment_with(launch.variables), flags.REPORT_DIR: str(reports)}
    found.pop(flags.INSTRUMENTS, None)
    if arm not in WITH_PLUGIN:
        return {**found, flags.EVERYTHING: "off"}
    wanted = [*instruments.COUNTERS]
    if arm == EAGER:
        wanted += [f"refuse_{phase}" for phase in instruments.PHASES]
        # which compares replays, and in `strict` ends a server that makes none
        found[flags.SELFCHECK] = "off"
    known = instruments.every_instrument()
    # a server that cannot have one does not start
    there = [name for name in wanted if known[name].probe(source).verdict is Verdict.AFFECTED]
    return {**found, flags.INSTRUMENTS: ",".join(there)}
