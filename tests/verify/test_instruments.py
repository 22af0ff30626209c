# SPDX-License-Identifier: Apache-2.0
"""The counters and the refusals on the modules of every real release."""

from __future__ import annotations

import json
import pathlib
import types
from collections.abc import Callable
from typing import Any

import pytest

from sglang_bcg_fixes.lab.verify import cases, command, instruments
from sglang_bcg_fixes.process.selfcheck import check
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import processes
from tests.wheels import RELEASES

PHASES = ("prefill", "decode", "draft_extend")
EVERY = [f"{what}_{phase}" for what in ("refuse", "count") for phase in PHASES] + ["count_graphs"]


@pytest.mark.parametrize("release", RELEASES)
def test_every_instrument_is_applied_and_notes_what_it_sees(
    release: str, release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    root = release_root(release)
    # since prefill has a backend
    more = [instruments.PADDED, instruments.UNBROKEN] if instruments.can_run_padded(Source(Folder(root))) else []
    every = [*EVERY, *more]
    found, _ = processes.beside(
        root,
        *("-m", "tests.scenarios.verify_instruments", ",".join(every)),
        SGLANG_BCG_FIXES="off",
        SGLANG_BCG_INSTRUMENTS=",".join(every),
        SGLANG_BCG_REPORT_DIR=str(tmp_path / "reports"),
    )
    assert found["states"] == dict.fromkeys(every, "applied")
    assert found["layers"] == {phase: [f"count_{phase}", f"refuse_{phase}", None] for phase in PHASES}
    assert not found["wrong"]
    (file,) = (tmp_path / "reports").glob("*.passes")
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        ["prefill", "refused", 3, 2, "for the reference"],
        ["decode", "refused", 3, 2, "by the runner"],
        ["draft_extend", "refused", 3, 2, "by the runner"],
        ["prefill", "replayed", 3, 2, 4],
        ["prefill", "admitted, not replayed", 3, 2, 4],
        ["decode", "replayed", 3, 2, 2],
    ]
    source = Source(Folder(root))
    for case in (case for case in cases.CASES if case.applies_to(source)):
        arguments = command.engine_arguments(case.flags(source, cases.BUCKETS), case, tmp_path)
        assert set(arguments) <= {*found["fields"]}, f"{case.name}: no such field of ServerArgs"


def test_the_code_can_be_run_on_the_padded_batch_since_prefill_has_a_backend(
    release_root: Callable[[str], pathlib.Path],
) -> None:
    have = [release for release in RELEASES if instruments.can_run_padded(Source(Folder(release_root(release))))]
    assert have == list(RELEASES[RELEASES.index("0.5.14") :])


@pytest.mark.parametrize(
    "inside", [None, types.SimpleNamespace(took_twin=False), types.SimpleNamespace(took_twin=True)]
)
def test_a_prefill_with_attention_inside_is_noted_under_both(monkeypatch: pytest.MonkeyPatch, inside: Any) -> None:
    noted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(instruments, "note", lambda *words: noted.append(words))
    monkeypatch.setattr(check, "attention_inside", lambda: inside)
    runner, batch = (
        types.SimpleNamespace(capture_num_tokens=[4, 8]),
        types.SimpleNamespace(input_ids=[0] * 3, batch_size=2),
    )
    instruments.note_prefill(lambda *_: instruments.note_replay_of_graph(None), runner, batch)
    assert noted[0] == ("prefill", "replayed", 3, 2, 4)
    assert noted[1:] == ([("attention inside", "replayed", 3, 2, 4)] if inside and inside.took_twin else [])
    noted.clear()
    # what is not replayed says nothing of the replay before it
    instruments.note_prefill(lambda *_: None, runner, batch)
    assert noted == [("prefill", "admitted, not replayed", 3, 2, 4)]


def test_only_padded_rows_become_another_token() -> None:
    torch = pytest.importorskip("torch")
    batch, runner = types.SimpleNamespace(input_ids=torch.tensor([3, 4, 5])), types.SimpleNamespace(layer_model=None)
    padded = types.SimpleNamespace(input_ids=torch.tensor([3, 4, 5, 0, 0]))
    assert instruments.change_the_padding(padded, runner, batch) is padded
    assert padded.input_ids.tolist() == [3, 4, 5, instruments.PADDING, instruments.PADDING]
    padded.input_ids.zero_()
    # 0.5.23 returns more
    instruments.change_the_padding((padded, None), runner, batch)
    assert padded.input_ids.tolist() == [0, 0, 0, instruments.PADDING, instruments.PADDING]
