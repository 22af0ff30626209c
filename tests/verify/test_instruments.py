"""The counters and the refusals on the modules of every real release."""

from __future__ import annotations

import json
import pathlib
import types
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.lab.verify import cases, command, instruments
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import processes
from tests.wheels import RELEASES

PHASES = ("prefill", "decode", "draft_extend")
EVERY = [f"{what}_{phase}" for what in ("refuse", "count") for phase in PHASES] + ["count_graphs"]

# the modules that a server imports, and then what each runner says when SGLang's own answer is "yes"
PROGRAM = """
import json, sys, types
from cpu_sglang import stand_ins
stand_ins.install()
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.engine.wrappers import MARK
from sglang_bcg_fixes.engine.slots import core, locate
from sglang_bcg_fixes.lab.verify import instruments
import sglang.srt.managers.scheduler, sglang.srt.speculative.eagle_worker_v2
import sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner

process = plugin.load()
states = {name: process.report.state(name) for name in sys.argv[1].split(",")}
wrong = [name for name in process.ledger.applied() if process.ledger.read_back(name)]
class Runner:
    capture_num_tokens, capture_bs = [4, 8], [1, 2, 4]
    __module__ = "sglang"
batch = types.SimpleNamespace(input_ids=[1, 2, 3], batch_size=2, input_embeds=None)
layers = {}
for phase in instruments.PHASES:
    asked = locate(instruments.methods(phase, instruments.QUESTIONS))
    # the counter is outermost, the refusal next, SGLang's own innermost
    wrapper = core(asked.own())
    inner = wrapper.__wrapped__
    layers[phase] = [getattr(each, MARK, None) for each in (wrapper, inner, inner.__wrapped__)]
    getattr(instruments, f"note_{phase}_refused")(False, Runner(), batch)
instruments.note_replay_of_graph(None)
instruments.note_prefill(lambda *_: instruments.note_replay_of_graph(None), Runner(), batch)
instruments.note_prefill(lambda *_: None, Runner(), batch)
instruments.note_decode(None, Runner(), batch)
from sglang.srt.server_args import ServerArgs
fields = getattr(ServerArgs, "__struct_fields__", None) or list(ServerArgs.__dataclass_fields__)
print("RESULT", json.dumps({"states": states, "wrong": wrong, "layers": layers, "fields": list(fields)}))
"""


@pytest.mark.parametrize("release", RELEASES)
def test_every_instrument_is_applied_and_notes_what_it_sees(
    release: str, release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    root = release_root(release)
    every = [*EVERY, *([instruments.PADDED] if instruments.can_run_padded(Source(Folder(root))) else [])]
    found, _ = processes.beside(
        root,
        *("-c", PROGRAM, ",".join(every)),
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
    for case in cases.CASES:
        arguments = command.engine_arguments(case.flags(source, cases.BUCKETS), case, tmp_path)
        assert set(arguments) <= {*found["fields"]}, f"{case.name}: no such field of ServerArgs"


def test_the_code_can_be_run_on_the_padded_batch_since_prefill_has_a_backend(
    release_root: Callable[[str], pathlib.Path],
) -> None:
    have = [release for release in RELEASES if instruments.can_run_padded(Source(Folder(release_root(release))))]
    assert have == list(RELEASES[RELEASES.index("0.5.14") :])


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
