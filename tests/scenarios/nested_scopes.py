# SPDX-License-Identifier: Apache-2.0
"""The scope of a breakable graph inside another one, on a release's own context manager."""

from __future__ import annotations

from cpu_sglang import stand_ins
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.engine.ledger import Ledger
from sglang_bcg_fixes.fixes import bcg_flag_not_restored
from sglang_bcg_fixes.planning.registry import declared_in
from tests.scenarios import telling

FIX = declared_in(bcg_flag_not_restored)


def nested() -> list[bool]:
    context = graph_break.load("context")
    scope, flag = context.enable_breakable_cuda_graph, context.is_in_breakable_cuda_graph
    seen = []
    with scope():
        with scope():
            seen.append(flag())
        seen.append(flag())
    seen.append(flag())
    try:
        with scope():
            try:
                with scope():
                    raise ValueError("inner")
            except ValueError:
                seen.append(flag())
            raise KeyError("outer")
    except KeyError:
        seen.append(flag())
    return seen


def main() -> None:
    stand_ins.install()
    ledger, found = Ledger(), {"stock": nested()}
    ledger.apply(FIX)
    found["mended"] = nested()
    ledger.undo(FIX.id)
    found["undone"] = nested()
    telling.result(found)


if __name__ == "__main__":
    main()
