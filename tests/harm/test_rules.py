# SPDX-License-Identifier: Apache-2.0
"""A patched server that is worse off is told by its row."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest

from sglang_bcg_fixes import flags, plugin
from sglang_bcg_fixes.planning import registry
from tests import processes
from tests.harm import exceptions, matrix, rules

Row = dict[str, Any]
STOCK: Row = {
    "eager": "3027ef5600017dac",
    "eager values": [[0.2703, -0.2482], [0.3186, -0.223]],
    "graphs": {"16": [4, 3], "8": [4, 3]},
    "why no graphs": None,
    "batches": [[4, 0.0], [4, 0.001]],
    "calls": {},
}
# what c55edcc made of Qwen3.5 on 0.5.19 to 0.5.23
NO_GRAPHS = {"graphs": {}, "batches": [[0, 0.0], [0, 0.0]]}


def changed(**parts: Any) -> Row:
    return {**copy.deepcopy(STOCK), **parts}


@pytest.mark.parametrize(
    ("patched", "expected"),
    [
        (changed(), []),
        (changed(graphs={"16": [3, 2], "8": [3, 2], "4": [3, 2]}), []),
        (changed(batches=[[4, 0.0], [4, 0.0]]), []),
        (changed(**NO_GRAPHS), [rules.FEWER_BUCKETS, rules.FEWER_REPLAYS]),
        (changed(graphs={"16": [4, 3]}), [rules.FEWER_BUCKETS]),
        (changed(graphs={"16": [4, 3], "8": [5, 4]}), [rules.MORE_BREAKS]),
        (changed(batches=[[4, 0.0], [0, 0.0]]), [rules.FEWER_REPLAYS]),
        (changed(batches=[[4, 0.0], [4, 0.002]]), [rules.DIFFERS_MORE]),
        (changed(batches=[[4, 0.0], [4, "not a number"]]), [rules.DIFFERS_MORE]),
        (changed(batches=[[4, "RuntimeError"], [4, 0.0]]), [rules.DIFFERS_MORE]),
        (changed(eager="other", **{"eager values": [[0.2703, -0.2482], [0.3186, 0.223]]}), [rules.OTHER_EAGER]),
        (changed(eager="other"), []),
        ({"error": "ends while it captures"}, [rules.STARTS_NOT]),
    ],
)
def test_what_is_worse_is_named(patched: Row, expected: list[str]) -> None:
    assert rules.broken(STOCK, patched) == expected


def test_a_server_that_stock_cannot_start_cannot_be_worse() -> None:
    assert rules.broken({"error": "does not start"}, changed()) == []
    assert rules.broken({"error": "does not start"}, {"error": "another one"}) == []


def test_an_answer_may_round_otherwise_on_another_processor_alone() -> None:
    rounded = changed(batches=[[4, 0.0005], [4, 0.002]])
    assert rules.broken(STOCK, rounded, rules.OTHER_PROCESSOR) == []
    assert rules.broken(STOCK, rounded) == [rules.DIFFERS_MORE]
    for wrong in ([[4, 0.002], [4, 0.001]], [[4, 0.0], [4, 0.005]]):
        assert rules.broken(STOCK, changed(batches=wrong), rules.OTHER_PROCESSOR) == [rules.DIFFERS_MORE]


@pytest.mark.parametrize(
    "other", [changed(eager="other"), changed(graphs={}), changed(calls={"prefill": {"a_fix": 1}}), {"error": "it"}]
)
def test_whatever_differs_from_stock_is_a_change(other: Row) -> None:
    assert rules.same(STOCK, changed(seconds=3)) and not rules.same(STOCK, other)


@pytest.mark.parametrize("error", [ImportError("cannot import name 'FA4'"), flags.FlagError("no such flag")])
def test_a_row_is_not_of_the_server_where_the_plugin_failed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(registry, "discover", fail)
    monkeypatch.setattr(plugin, "_loaded", [])
    with pytest.raises(SystemExit) as refusal:
        plugin.load()
    assert not rules.is_of_the_server({"error": f"does not start: SystemExit: {refusal.value}"})
    assert rules.is_of_the_server(STOCK)
    assert rules.is_of_the_server({"error": "does not start: ImportError: cannot import name 'FA4'"})


def test_an_exception_is_for_its_rule_its_releases_and_its_architectures_alone() -> None:
    row = exceptions.Excused(rules.FEWER_BUCKETS, "a_fix", ("0.5.1[12]",), ("Lfm2*",), "NaN")
    assert row.covers("0.5.11", "Lfm2ForCausalLM", rules.FEWER_BUCKETS)
    assert not row.covers("0.5.13", "Lfm2ForCausalLM", rules.FEWER_BUCKETS)
    assert not row.covers("0.5.11", "LlamaForCausalLM", rules.FEWER_BUCKETS)
    assert not row.covers("0.5.11", "Lfm2ForCausalLM", rules.MORE_BREAKS)


def test_every_way_of_declaring_architectures_is_read(tmp_path: pathlib.Path) -> None:
    models = tmp_path / "sglang" / "srt" / "models" / "nested"
    models.mkdir(parents=True)
    (models / "one.py").write_text("\ufeffclass One: ...\nEntryClass = One\ndef later(): ...\n", encoding="utf-8")
    several = "EntryClass: list = [\n    Two,  # not Nobody\n    Three]\n__all__ = ['Four']\n"
    (models.parent / "more.py").write_text(several)
    (models.parent / "none.py").write_text("text = 'EntryClass = Five'\n")
    assert sorted(matrix.declared(tmp_path)) == ["One", "Three", "Two"]


def test_a_class_has_the_code_of_another_only_where_it_adds_nothing(tmp_path: pathlib.Path) -> None:
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    derived = 'class Same(Base):\n    """Text."""\n\n    pass\n\n\nclass More(Same):\n    size = 3\n'
    (models / "a.py").write_text(f"\n{derived}\n\nclass Again(Same):\n    pass\n")
    found = {name: matrix.code_of(tmp_path, name) for name in ("Same", "More", "Again", "Base")}
    assert found == {"Same": "Base", "More": "More", "Again": "Base", "Base": "Base"}


def test_only_code_makes_patched_rows_old(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    package = tmp_path / "sglang_bcg_fixes"
    package.mkdir()

    def code(text: str) -> str:
        (package / "fix.py").write_text(text)
        matrix.code_of_the_package.cache_clear()
        return matrix.code_of_the_package()

    monkeypatch.setattr(processes, "REPOSITORY", tmp_path)
    try:
        first = code('"""Text."""\ndef f():\n    """Text."""\n    return 1\n')
        assert first == code('"""Other."""\ndef f():\n    """Other."""\n    # why\n    return 1\n')
        assert first != code('"""Text."""\ndef f():\n    """Text."""\n    return 2\n')
    finally:
        matrix.code_of_the_package.cache_clear()
