# SPDX-License-Identifier: Apache-2.0
"""tools/suspects.py on a made-up SGLang: each question finds its line, and nothing beside it."""

from __future__ import annotations

import pathlib
import sys
import textwrap

import pytest

from sglang_bcg_fixes.planning import registry
from tests import processes, wheels
from tests.wheels import NEWEST

sys.path.insert(0, str(processes.REPOSITORY / "tools"))

import suspects

FILES = {
    "model_executor/forward_batch_info.py": """
        class ForwardBatch:
            forward_mode: object
            input_ids: object
            positions: object
            token_type_ids: object
            watched: object
        """,
    "layers/logits_processor.py": """
        class LogitsProcessorOutput:
            next_token_logits: object
            hidden_states: object
            customized_info: object
        """,
    "model_executor/runner/prefill_cuda_graph_runner.py": """
        class Runner:
            def load_batch(self, forward_batch):
                static = ForwardBatch(forward_mode=forward_batch.forward_mode, input_ids=self.ids)
                static.positions = self.positions
                return static

            def execute(self, output):
                return LogitsProcessorOutput(next_token_logits=output, hidden_states=None)
        """,
    "models/bert.py": """
        class Bert:
            def forward(self, input_ids, positions, forward_batch):
                if forward_batch.forward_mode.is_extend():
                    kinds = forward_batch.token_type_ids
                if forward_batch.watched:
                    count = positions.max().item()
                return forward_batch.positions
        """,
    "layers/attention/backend.py": """
        class Backend:
            def __init__(self):
                self.workspace = torch.empty(8)
                self.metadata = None

            def plan(self, forward_batch):
                self.metadata = torch.zeros(3)
                self.other = torch.zeros(3)
                self.workspace.fill_(0)
                if forward_batch.watched:
                    self.workspace = torch.empty(16)
        """,
    "dllm/denoise.py": """
        def step(out):
            return out.logits_output.customized_info
        """,
    "managers/output.py": """
        class Output:
            def process(self, logits_output):
                return logits_output.customized_info, logits_output.next_token_logits
        """,
}


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, text in FILES.items():
        file = tmp_path / "sglang" / "srt" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return tmp_path


def test_every_question_finds_its_line(root: pathlib.Path) -> None:
    found = suspects.suspects(suspects.source_of(str(root)))
    assert [(each.question, each.path.rpartition("/")[2], each.line, each.what) for each in found] == [
        ("dropped", "backend.py", 11, "reads forward_batch.watched"),
        ("dropped", "bert.py", 5, "reads forward_batch.token_type_ids"),
        ("dropped", "bert.py", 6, "reads forward_batch.watched"),
        ("lost", "denoise.py", 3, "reads logits_output.customized_info"),
        ("lost", "output.py", 4, "reads logits_output.customized_info"),
        ("replaced", "backend.py", 8, "replaces self.metadata"),
        ("replaced", "backend.py", 12, "replaces self.workspace"),
        ("frozen", "bert.py", 6, "decides by forward_batch.watched"),
        ("frozen", "bert.py", 7, "reads positions.max().item() on the host"),
    ]


def test_beside_another_release_only_what_is_new_is_shown(
    root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = tmp_path_factory.mktemp("newer")
    for name, text in FILES.items():
        file = newer / "sglang" / "srt" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        # every line is elsewhere, and one is new
        file.write_text("\n\n" + textwrap.dedent(text).replace("return forward_batch.positions", "positions.tolist()"))
    assert suspects.main([str(newer), "--beside", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(" ")] == [
        "  reads positions.tolist() on the host",
        "    models/bert.py:10 Bert.forward",
    ]
    assert [line.rpartition(": ")[2] for line in lines if not line.startswith(" ")] == [
        "0 of 3 are new",
        "0 of 2 are new",
        "0 of 2 are new",
        "1 of 3 are new",
    ]


def test_every_judgement_is_about_a_suspect_and_holds_in_the_newest_release() -> None:
    source = suspects.source_of(str(wheels.unpacked(NEWEST)))
    found = suspects.suspects(source)
    for judgement in suspects.judgements():
        assert judgement.holds(source), judgement
        assert not judgement.fix or f"sglang_bcg_fixes.fixes.{judgement.fix}" in registry.fix_modules(), judgement
        for pattern in judgement.suspects:
            alone = suspects.Judgement([pattern])
            assert any(alone.covers(suspect) for suspect in found), pattern


def test_a_judgement_counts_only_where_the_release_says_what_it_rests_on(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = suspects.source_of(str(root))
    found = suspects.suspects(source)
    where, patterns = "sglang.srt.models.bert:Bert.forward", ["dropped models/bert.py Bert.forward/*.watched"]
    for says, left in (("positions.max().item()", len(found) - 1), ("positions.min()", len(found))):
        judgement = suspects.Judgement(patterns, because="it is made up", where=where, says=says)
        monkeypatch.setattr(suspects, "judgements", lambda judgement=judgement: [judgement])
        assert len(suspects.unjudged(source, found)) == left


def test_a_folder_without_sglang_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suspects.main([str(tmp_path)]) == 2
    assert "no sglang/srt in it" in capsys.readouterr().err
