# SPDX-License-Identifier: Apache-2.0
"""The layer bench: what is not right has no time; and the installed SGLang's own layer, on the real wheels."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.bench import command, gdn_layer, plots, rows, timing
from benchmarks.bench.rows import COLD, HOT
from sglang_bcg_fixes.kernels.linear_extend import serving
from sglang_bcg_fixes.lab.verify import environment
from sglang_bcg_fixes.source import releases
from tests import processes, wheels
from tests.bench import forked
from tests.bench.cpu_device import Cpu
from tests.kernels import accuracy, gdn_reference

SHAPE = gdn_layer.Shape(layers=2, key_heads=1, value_heads=2, head=16)
CASE = ("tiny", 24, 3)
Table = Callable[..., tuple[list[rows.Row], str]]
RELEASES = (processes.REPOSITORY / "tools" / "releases.txt").read_text().split()


def plain(problem: gdn_layer.Problem, wrong: str = "") -> gdn_layer.Layer:
    """A layer in plain torch; `wrong` says what it gets wrong."""
    calls = [0]

    def layer(number: int) -> None:
        calls[0] += 1
        inputs = dataclasses.replace(problem.inputs, conv=problem.conv[number, 1:], state=problem.state[number, 1:])
        if wrong == "forgets the state":
            inputs = dataclasses.replace(inputs, state=torch.zeros_like(inputs.state))
        if wrong == "raises":
            raise RuntimeError("no such kernel")
        found = gdn_reference.recurrent(inputs)
        problem.output.copy_(found.output)
        problem.conv[number, 1:] = found.conv
        if wrong == "reads another's slot":
            problem.output += problem.state[number, 0, 0, 0, 0]
        if wrong == "leaves the state of the last layer" and number == problem.layers - 1:
            return
        problem.state[number, 1:] = found.state
        if wrong == "differs when replayed" and calls[0] > 2 * problem.layers:
            problem.output[0, 0, 0, 0] *= 1 + 2**-7

    return layer


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(gdn_layer, "SHAPES", {"tiny": SHAPE})

    def table(**kernels: str) -> tuple[list[rows.Row], str]:
        made = {name: lambda problem, wrong=wrong: plain(problem, wrong) for name, wrong in kernels.items()}
        monkeypatch.setattr(gdn_layer, "KERNELS", made)
        found = gdn_layer.case_of(*CASE, 5, Cpu(), "NVIDIA H200")
        return found, "\n".join(command.report(found))

    return table


def test_tables_are_those_of_a_server() -> None:
    assert gdn_layer.CAPTURED_SEQUENCES == serving.MOST_SEQUENCES


def test_what_is_right_is_timed(table: Table) -> None:
    found, printed = table(sglang="", ours="")
    assert all(
        row.verdict == "green" and row.rounds == 5 and row.median is not None and row.median >= 0 for row in found
    )
    for name in ("sglang", "ours"):
        eager, captured = f"{name}, eager", f"{name}, captured"
        measured = [(row.arm, row.measured, row.l2) for row in found if row.arm.startswith(name)]
        assert measured == [
            (eager, gdn_layer.WALL, HOT),
            (eager, gdn_layer.HOST, HOT),
            (captured, gdn_layer.WALL, HOT),
            (captured, gdn_layer.HOST, HOT),
            (captured, gdn_layer.DEVICE, HOT),
            (captured, gdn_layer.DEVICE, COLD),
        ]
    base, row = (rows.find(found, f"sglang, {kind}", gdn_layer.WALL, CASE, HOT) for kind in ("eager", "captured"))
    assert rows.speed_up(base, row) is not None and "red, and so" not in printed


@pytest.mark.parametrize(
    "wrong", ["forgets the state", "raises", "reads another's slot", "leaves the state of the last layer"]
)
def test_a_wrong_arm_has_no_time_and_no_speed_up(table: Table, wrong: str) -> None:
    found, printed = table(sglang="", ours=wrong)
    ours = [row for row in found if row.arm.startswith("ours")]
    assert ours and all(row.verdict == "red" and row.why for row in ours)
    assert all(row.median is row.p20 is row.p80 is None and row.rounds == 0 for row in ours)
    lines = [line.split() for line in printed.splitlines() if line.split()[:4] == ["tiny", "24", "3", "ours"]]
    assert [line[4:] for line in lines] == [["-"] * 5 + [lines[0][9], "-"]]
    assert f"red, and so without times: {ours[0].arm}" in printed and ours[0].why in printed
    assert all(row.verdict == "green" and row.median for row in found if row.arm.startswith("sglang"))


def test_flashinfer_is_asked_only_where_it_is_wanted_and_held_against_the_reference_alone(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gdn_layer, "ON_FLASHINFER", {gdn_layer.FLASHINFER: lambda problem: plain(problem)})
    assert {row.arm for row in table(sglang="")[0]} == {"sglang, eager", "sglang, captured"}
    limits: list[dict[str, float] | None] = []
    why_wrong = accuracy.why_wrong

    def noted(found: Any, other: dict[str, float] | None, times: float) -> str:
        limits.append(other)
        return why_wrong(found, other, times)

    monkeypatch.setattr(accuracy, "why_wrong", noted)
    found = gdn_layer.case_of(*CASE, 5, Cpu(), "NVIDIA H200", flashinfer=True)
    assert [row.verdict for row in found if row.arm.startswith(f"{gdn_layer.FLASHINFER}, ")] == ["green"] * 6
    assert limits == [None] * 4


def test_a_replay_that_differs_from_its_own_eager_run_is_red(table: Table) -> None:
    found, printed = table(sglang="", ours="differs when replayed")
    captured = [row for row in found if row.arm == "ours, captured"]
    assert [(row.verdict, row.why, row.median) for row in captured] == [
        ("red", "the replay differs from its own eager run", None)
    ]
    assert printed.splitlines()[2].split()[-1] == "-"


def test_numbers_of_a_red_row_cannot_be_set() -> None:
    row = rows.Row("layer", "x", "us", "arm", "tiny", 1, 1, "red", "wrong")
    good = dataclasses.replace(row, verdict="green", median=2.0)
    assert row.with_times(timing.spread([1.0] * 5)) is row
    assert rows.speed_up(good, dataclasses.replace(row, median=1.0)) is None
    assert rows.speed_up(dataclasses.replace(row, median=1.0), good) is None
    assert rows.speed_up(good, dataclasses.replace(good, median=1.0)) == 2
    assert rows.speed_up(*(dataclasses.replace(good, unit="tokens/s", median=each) for each in (2.0, 3.0))) == 1.5


def test_floor_is_the_one_that_was_published() -> None:
    shape = gdn_layer.SHAPES["qwen3_next"]
    published = {(256, 1): 2.5, (1024, 1): 6.9, (4096, 1): 24.5, (4096, 16): 40, (16384, 1): 98, (16384, 16): 110}
    for (tokens, sequences), floor in published.items():
        assert gdn_layer.floor_us(shape, tokens, sequences, "NVIDIA H200") == pytest.approx(floor, rel=0.02)
    assert gdn_layer.floor_us(shape, 256, 1, "NVIDIA A100") is None


@pytest.mark.parametrize("version", RELEASES)
def test_every_release_has_what_the_layer_is_built_of(
    release_root: Callable[[str], pathlib.Path], version: str
) -> None:
    source = releases.in_folder(release_root(version))
    assert gdn_layer.missing(source) == []
    extend = source.need(f"{gdn_layer.GDN}.forward_extend")
    assert {"layer", "forward_batch", "mixed_qkv", "a", "b"} <= set(extend.parameters)
    layer = source.need(f"{gdn_layer.LAYER}.__init__")
    wanted = {"layer_id", "num_q_heads", "num_k_heads", "num_v_heads", "head_q_dim", "head_k_dim", "head_v_dim"}
    assert wanted | {"conv_weights", "bias", "activation", "A_log", "dt_bias"} <= set(layer.parameters)


# one release is enough to see that a wrong layer is seen, and that a process is started as on a user's machine
@pytest.mark.parametrize(
    ("version", "wrong"),
    [
        ("0.5.11", ""),
        ("0.5.12.post1", ""),
        ("0.5.12.post1", "1"),
        ("0.5.15.post1", ""),
        *((version, "") for version in wheels.since("0.5.16")),
    ],
)
def test_the_command_on_a_real_layer(
    release_root: Callable[[str], pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
    wrong: str,
) -> None:
    root = release_root(version)
    here = {"root": str(root), "sglang": version, "has_entry_point": True, "gpu": "none", "free_gib": 8}
    monkeypatch.setattr(environment, "look", lambda python: here)
    monkeypatch.setitem(command.LAYER_MODULES, gdn_layer, "tests.bench.cpu_layer")
    monkeypatch.setattr(command, "FEW_TOKENS", (10,))
    monkeypatch.setattr(command, "FEW_SEQUENCES", (2,))
    paths = [root, processes.REPOSITORY]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if wrong:
        monkeypatch.setenv("WRONG_KERNEL", wrong)
    if version != "0.5.12.post1":
        monkeypatch.setattr(command, "subprocess", forked.SUBPROCESS)
    file = tmp_path / "made" / "found.jsonl"
    status = command.main(["--quick", "--shapes", "qwen3_next", "--jsonl", str(file)])
    printed = capsys.readouterr().out
    header, found = rows.read(file)
    assert header["sglang"] == version and header["rounds"] == 5 and header["date"]
    if wrong:
        of_sglang = [row for row in found if row.arm.startswith("sglang, ")]
        assert status == 1 and [row.verdict for row in of_sglang] == ["red", "red"]
        assert not any(row.median for row in of_sglang)
        assert "off from the fp32 reference: output by" in printed
        return
    assert status == 0, printed
    # without a GPU the CUDA implementation is the Triton implementation: such small heads are not its own
    arms = ("sglang", "bcg_fixes triton", "bcg_fixes cuda")
    assert [row.arm.split(", ")[0] for row in found] == [arm for arm in arms for _ in range(6)]
    # float16 has eight times the precision of bfloat16
    assert all(0 < row.details["errors"]["output"] < 0.001 and row.median is not None for row in found)
    assert str(file) in printed


def test_without_matplotlib_the_rows_are_there_and_the_message_says_what_to_do(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], table: Table
) -> None:
    file = rows.File(tmp_path / "bench.jsonl", {"format": 1})
    file.add(table(sglang="")[0])

    def draw(*_: object) -> list[pathlib.Path]:
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(plots, "draw", draw)
    assert command.main(["--plot-only", str(file.path)]) == 0
    printed = capsys.readouterr().out
    assert "pip install matplotlib" in printed and f"--plot-only {file.path}" in printed
    assert "captured is faster" in printed


def test_plots_show_what_is_green(tmp_path: pathlib.Path, table: Table) -> None:
    pytest.importorskip("matplotlib")
    (written,) = plots.draw(table(sglang="", ours="forgets the state")[0], tmp_path, "b")
    assert written.name == "b-layer-tiny.png" and written.stat().st_size > 5000


def test_a_shape_that_fails_leaves_the_others_alone(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, table: Table
) -> None:
    here = {"root": str(release_root("0.5.12.post1")), "sglang": "0.5.12.post1", "has_entry_point": True}
    monkeypatch.setattr(environment, "look", lambda python: {**here, "gpu": "none"})
    monkeypatch.setitem(command.LAYER_MODULES, gdn_layer, "tests.bench.no_such_module")
    found, layer_rows = table(sglang="")[0], command.layer_rows

    def rows_of(python: str, source: Any, job: dict[str, Any]) -> Iterator[list[rows.Row]]:
        return iter([found]) if job["shape"] == "nemotron_h_8b" else layer_rows(python, source, job)

    monkeypatch.setattr(command, "layer_rows", rows_of)
    file = tmp_path / "found.jsonl"
    assert command.main(["--shapes", "tiny,nemotron_h_8b", "--jsonl", str(file)]) == 1
    assert rows.read(file)[1] == found


def test_rows_of_servers_in_an_older_file_are_passed_over(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], table: Table
) -> None:
    monkeypatch.setattr(plots, "draw", lambda *_: [])
    file = rows.File(tmp_path / "bench.jsonl", {"format": 1})
    file.add([*table(sglang="")[0], rows.Row("server", "time to first token", "ms", "stock", "tiny", 8, 1, "red", "x")])
    assert command.main(["--plot-only", str(file.path)]) == 0
    printed = capsys.readouterr().out
    assert "captured is faster" in printed and "stock" not in printed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--shapes", "qwen3_nxt"], "no shape 'qwen3_nxt'; did you mean qwen3_next?; there are qwen3_next, "),
        (["--rounds", "3"], "--rounds 3: at least 5"),
    ],
)
def test_what_cannot_be_run_exits_2_and_says_why(
    capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert command.main(words) == 2
    assert capsys.readouterr().err.startswith(f"bench: {why}")
