"""The scope of a breakable graph inside another one, on every release's own context manager."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import bcg_flag_not_restored as fix
from tests import processes
from tests.wheels import RELEASES

CODE = """
import json
from cpu_sglang import stand_ins
stand_ins.install()
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.fixes.bcg_flag_not_restored import FIX
from sglang_bcg_fixes.engine.ledger import Ledger

def nested():
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

ledger, found = Ledger(), {"stock": nested()}
ledger.apply(FIX)
found["mended"] = nested()
ledger.undo(FIX.id)
found["undone"] = nested()
print("RESULT", json.dumps(found))
"""


@pytest.mark.forms_of("bcg_flag_not_restored")
@pytest.mark.parametrize("release", RELEASES)
def test_the_outer_scope_goes_on_after_the_inner_one(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found, _ = processes.beside(release_root(release), "-c", CODE)
    ended_by_the_inner_one = [True, False, False, False, False]
    assert found["stock"] == found["undone"] == ended_by_the_inner_one
    assert found["mended"] == [True, True, False, True, False]


def test_it_is_off_unless_asked_for() -> None:
    """No release nests these scopes, so none needs to be touched."""
    assert fix.FIX.default == "off"
