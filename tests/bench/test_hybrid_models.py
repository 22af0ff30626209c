# SPDX-License-Identifier: Apache-2.0
"""Models of servers with other linear layers: published sizes, and small ones of the same builders on real wheels."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable

import pytest

from benchmarks.bench import hybrid_models, mamba2_layer, model_cases
from benchmarks.bench.hybrid_models import GRANITE, KIMI, LFM2, Experts
from benchmarks.bench.mamba2_model import Sizes
from sglang_bcg_fixes.lab.verify import models
from sglang_bcg_fixes.source.releases import in_folder
from tests import processes
from tests.bench.test_mamba2_model import parameters
from tests.wheels import NEWEST

Root = Callable[[str], pathlib.Path]
RELEASES = ("0.5.12.post1", "0.5.17", NEWEST)
MIXERS, SIZES = mamba2_layer.Shape(2, heads=4, groups=1, head=32, states=32, chunk=64), Sizes(64, 96, 4, 2, 16)
FEW = Experts(3, 2, 32)
SMALL = {
    GRANITE: hybrid_models.granite_hybrid(MIXERS, SIZES, "m*m"),
    LFM2: hybrid_models.lfm2(SIZES, "c*c"),
    KIMI: hybrid_models.kimi_linear(dataclasses.replace(SIZES, head=32, key_heads=4), FEW, (0, 1, 2)),
}


def billions(of: models.Model, words: int, *, tied: bool) -> float:
    """Count the parameters of a model that reads so many words; tied, its head is its embedding."""
    hidden: int = of.config["hidden_size"]
    in_layers = parameters(dataclasses.replace(of, ends={}), words)
    return (in_layers + words * hidden * (1 if tied else 2) + hidden) / 1e9


def test_with_all_layers_and_words_they_have_the_published_numbers_of_parameters() -> None:
    granite, lfm2 = hybrid_models.MODELS[GRANITE], hybrid_models.MODELS[LFM2]
    granite = dataclasses.replace(granite, order=granite.order * 4)
    assert len(granite.order) == 40 and round(billions(granite, 100_352, tied=True), 2) == 3.19
    assert len(lfm2.order) == 16 and round(billions(lfm2, 65_536, tied=True), 2) == 1.17
    order = (0, *(2 if number % 4 == 0 else 1 for number in range(2, 27)), 2)
    kimi = hybrid_models.kimi_linear(Sizes(2304, 9216, 32, 32), Experts(256, 8, 1024), order)
    assert (order.count(2), len(order)) == (7, 27) and round(billions(kimi, 163_840, tied=False)) == 49


def test_the_servers_have_few_gigabytes() -> None:
    # each is a copy of what is on the disk
    assert all(2 * parameters(each, models.VOCABULARY) < 6.5e9 for each in hybrid_models.MODELS.values())


@pytest.mark.parametrize("release", RELEASES)
def test_every_weight_is_loaded(release: str, release_root: Root, tmp_path: pathlib.Path) -> None:
    wanted = {}
    for name in SMALL:
        assert model_cases.CASES[name].applies_to(in_folder(release_root(release)))
        models.make(name, tmp_path / name, SMALL)
        wanted[name] = str(tmp_path / name)
    found, _ = processes.beside(
        release_root(release),
        *("-m", "tests.scenarios.weights_taken", json.dumps(wanted)),
        timeout=600,
        SGLANG_PLUGINS="__none__",
    )
    for name, report in found.items():
        assert report["taken"] == parameters(SMALL[name], models.VOCABULARY), f"{name}: {report}"
        assert report["missing"] == [], f"{name}: {report}"
