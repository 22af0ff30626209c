# SPDX-License-Identifier: Apache-2.0
"""`doctor` beside the harm matrix: no wrong answers where a stock server answered right, and a fix where it did not.

A row has prefills that are replayed, alone and together, padded and not. Defects of schedulers, caches, drafts and
other ranks are not of that kind, and cells without a row are not judged here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cpu_sglang import architectures
from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, BACKEND, ENABLE, PREFILL_GRAPHS
from sglang_bcg_fixes.cli import doctor, for_launch, server_command
from sglang_bcg_fixes.concern import Harm, Launch
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source import releases, served
from tests import processes, wheels
from tests.harm import matrix

sys.path.insert(0, str(processes.REPOSITORY / "tools"))

import harm_page
import served_table

# each has a red test of its own with what no row has
SHOWN_ELSEWHERE = {
    # prompts that are longer than what a sparse layer selects
    "sparse_attention_captured": "tests/fixes/test_sparse_attention_captured.py",
    # the vector that a client of an embedding model gets
    "single_request_capture": "tests/fixes/test_single_request_capture.py",
}
Row = dict[str, Any]


@pytest.fixture(scope="module")
def recorded() -> harm_page.Table:
    return harm_page.recorded()


def asked_of(source: Any, name: str) -> Launch:
    """The launch that a row of the matrix is: breakable graphs by flag."""
    words = [BACKEND, "breakable"] if source.has_option(BACKEND) else [ENABLE]
    configuration = architectures.CONFIGURATIONS[name]
    for setting, value in configuration.server_args.items():
        words += [f"--{setting.replace('_', '-')}", str(value)]
    config = {**configuration.config, "architectures": [name]}
    return Launch(
        source, config, server_command.options_in(source, words), graphs=served.graphs(source.version, [name])
    )


def answers(release: str, rows: dict[str, Row]) -> Iterator[tuple[str, Row, for_launch.Answer]]:
    source = releases.in_folder(wheels.unpacked(release))
    known = registry.collect()
    examined = doctor.examine(known, known.settings({}), source, installed=False)
    for name, arms in rows.items():
        if name in architectures.CONFIGURATIONS and {matrix.STOCK, matrix.PATCHED} <= set(arms):
            yield name, arms, for_launch.answer(examined, asked_of(source, name), "")


def is_of_replays(item: for_launch.Item) -> bool:
    """Tell whether a row shows such a defect: nothing but the model and its prefill graphs is needed for it."""
    conditions = {each for concern in item.decision.subject.concerns for each in concern.conditions}
    return not item.conditions and bool(conditions & {PREFILL_GRAPHS, ASKED_FOR})


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_no_wrong_answers_are_called_where_stock_answered_right(release: str, recorded: harm_page.Table) -> None:
    seen = 0
    for name, arms, answer in answers(release, recorded[release]):
        stock = served_table.answered(arms[matrix.STOCK])
        wrong = [item.id for item in answer.items if item.harm is Harm.WRONG and is_of_replays(item)]
        if stock == served.RIGHT:
            seen += 1
            assert set(wrong) <= set(SHOWN_ELSEWHERE), (name, wrong)
    assert seen > 15


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_where_stock_is_wrong_and_the_plugin_right_a_fix_of_it_is_named(
    release: str, recorded: harm_page.Table
) -> None:
    mended = 0
    for name, arms, answer in answers(release, recorded[release]):
        stock, patched = (served_table.answered(arms[arm]) for arm in (matrix.STOCK, matrix.PATCHED))
        if stock in (served.WRONG, served.ENDS) and patched == served.RIGHT:
            mended += 1
            assert [item.id for item in answer.fixed if item.harm in (Harm.WRONG, Harm.ENDS)], name
    assert mended > 0


def test_a_model_without_prefill_graphs_has_none_of_their_defects() -> None:
    source = releases.in_folder(wheels.unpacked(wheels.NEWEST))
    known = registry.collect()
    examined = doctor.examine(known, known.settings({}), source, installed=False)

    def items(architecture: str) -> set[str]:
        options = {BACKEND: ["breakable"]}
        launch = Launch(source, {"architectures": [architecture], "mamba_d_ssm": 64}, options)
        return {item.id for item in for_launch.answer(examined, launch, "").items if is_of_replays(item)}

    assert items("GPT2LMHeadModel") == set() and "ssm_mixer_captured" in items("FalconH1ForCausalLM")
