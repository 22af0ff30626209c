# SPDX-License-Identifier: Apache-2.0
"""The layer bench of Mamba2 on the real wheels: SGLang's own mixer and our kernels, and how far each is from fp64."""

from __future__ import annotations

import collections
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.bench import command, mamba2_layer, rows
from sglang_bcg_fixes.lab.verify import environment
from sglang_bcg_fixes.source import releases
from tests import processes, wheels
from tests.bench import forked

Root = Callable[[str], pathlib.Path]
# one of each form of mixer, metadata and scan
FORMS = ("0.5.12.post1", "0.5.15.post1", "0.5.20", wheels.NEWEST)
# without a GPU the CUDA implementation is the Triton implementation: such small heads are not its own
OURS, CUDA = "bcg_fixes triton", "bcg_fixes cuda"


@pytest.mark.parametrize("version", wheels.RELEASES)
def test_every_release_has_what_the_layer_is_built_of(release_root: Root, version: str) -> None:
    source = releases.in_folder(release_root(version))
    assert mamba2_layer.missing(source) == []
    mixer = source.need(f"{mamba2_layer.MIXER}.forward")
    assert {"hidden_states", "output", "layer_cache", "metadata", "use_triton_causal_conv"} <= set(mixer.parameters)


@pytest.mark.parametrize("version", FORMS)
def test_the_command_on_a_real_layer(
    release_root: Root,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
) -> None:
    root = release_root(version)
    here = {"root": str(root), "sglang": version, "has_entry_point": True, "gpu": "none", "free_gib": 8}
    monkeypatch.setattr(environment, "look", lambda python: here)
    monkeypatch.setitem(command.LAYER_MODULES, mamba2_layer, "tests.bench.cpu_mamba2_layer")
    monkeypatch.setattr(command, "FEW_TOKENS", (10,))
    monkeypatch.setattr(command, "FEW_SEQUENCES", (2,))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [root, processes.REPOSITORY])))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if version != FORMS[0]:
        monkeypatch.setattr(command, "subprocess", forked.SUBPROCESS)
    file = tmp_path / "found.jsonl"
    status = command.main(["--quick", "--shapes", "nemotron_h_8b", "--jsonl", str(file)])
    assert status == 0, capsys.readouterr().out
    _, found = rows.read(file)
    assert [row.arm.split(", ")[0] for row in found] == [arm for arm in ("sglang", OURS, CUDA) for _ in range(6)]
    assert all(0 < row.details["errors"]["output"] < 0.001 and row.median is not None for row in found)


@pytest.mark.parametrize("version", ["0.5.12.post1", wheels.NEWEST])
def test_our_error_is_at_most_that_of_sglang(release_root: Root, version: str) -> None:
    found, _ = processes.beside(release_root(version), "-m", "tests.bench.cpu_mamba2_layer", "errors", timeout=600)
    squares: dict[tuple[int, str, str], list[float]] = collections.defaultdict(list)
    for row in found:
        for arm in ("sglang", OURS):
            for name, error in row[arm].items():
                squares[row["shape"], arm, name].append(error**2)
    # a step has too few numbers to tell a tenth more from chance; those of a shape together have enough
    for (shape, arm, name), values in squares.items():
        ours, theirs = (math.sqrt(sum(squares[shape, each, name])) for each in (OURS, "sglang"))
        assert ours <= mamba2_layer.TIMES * theirs, (shape, arm, name, values)
        assert arm != OURS or math.sqrt(sum(values) / len(values)) <= (0.0 if name == "conv" else 0.003)


def test_a_shape_is_measured_by_the_layer_it_is_of() -> None:
    seen: list[Any] = [name for layers in command.LAYERS for name in layers.SHAPES]
    assert len(seen) == len(set(seen))
