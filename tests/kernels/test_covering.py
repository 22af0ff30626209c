# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.kernels import covering


def test_every_two_values_meet_in_few_rows() -> None:
    table = covering.table(layer=("one", "other"), capability=(90, 100), track=(False, True))
    chosen = covering.rows(table)
    assert len(table) == 8 and len(chosen) == 4
    met = {meeting for row in chosen for meeting in covering.meetings(row)}
    assert met == {meeting for row in table for meeting in covering.meetings(row)}


def test_only_rows_of_the_table_are_chosen() -> None:
    """Values that never meet there cannot be asked to."""
    table = [{"part": 16, "warps": 4}, {"part": 64, "warps": 8}, {"part": 64, "warps": 4}, {"part": 64, "warps": 8}]
    assert covering.rows(table) == table[:3]


def test_a_value_alone_is_only_there() -> None:
    table = covering.table(layer=range(4), capability=(90, 100), track=(False, True))
    assert len(covering.rows(table)) == 8
    chosen = covering.rows(table, alone=["layer"])
    assert len(chosen) == 4 and {row["layer"] for row in chosen} == set(range(4))
    assert {(row["capability"], row["track"]) for row in chosen} == {(90, False), (90, True), (100, False), (100, True)}
