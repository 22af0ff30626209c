# SPDX-License-Identifier: Apache-2.0
"""Tests of a linear layer that is captured with kernels of ours, which several layers have, against a real release.

A file of tests says what its layer's `OPERATION` is, runs the scenarios of tests.releases.gdn_prefill, and asserts what
they found with these.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.kernels.linear_extend import places
from sglang_bcg_fixes.model import Choice, Kernel
from sglang_bcg_fixes.planning import plan, registry
from sglang_bcg_fixes.source import tree
from tests import processes, wheels
from tests.mutated import rewritten

Root = Callable[[str], pathlib.Path]
Found = dict[str, Any]
Run = Callable[..., Found]
# as the model's own, which is in half precision here
WINDOWS = {"SGLANG_MAMBA_CONV_DTYPE": "float16"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """A layer's extend under test."""

    kernel: Kernel
    # the module with its scenarios
    process: str
    # by model: its layers of attention, and all that break
    breaks: Mapping[str, tuple[int, int]]
    # of each result: how far a replay may be off eager prefill
    limits: Mapping[str, float]
    # an error that is one of a mistake, not of rounding
    noticed: float = 0.2
    # later steps than a script's first one are replayed, too
    replays_every_step: bool = True
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # the last release whose layers SGLang does not capture itself
    last_release: str = wheels.NEWEST

    def run(
        self, root: pathlib.Path, scenario: str, model: str, implementation: str = "reference", **others: str
    ) -> Found:
        """Run a scenario; `others` are settings, and the module that has it where that is another one."""
        environment = {self.kernel.flag: implementation, **WINDOWS, **self.environment, **others}
        module = environment.pop("module", self.process)
        found: Found
        found, _ = processes.beside(root, "-m", module, scenario, model, environment=environment, timeout=600)
        return found

    def measured(self, script: Found) -> list[str]:
        """Name the results that a script has: not every step keeps a state for the prefix cache."""
        return [name for name in self.limits if name in script or "kept" not in name]

    def assert_right(self, script: Found, model: str) -> None:
        for name in self.measured(script):
            assert script[name] <= self.limits[name], script
        segments, (first, *later) = self.breaks[model][0] + 1, script["replays"]
        assert first == segments, script
        assert set(later) <= ({segments} if self.replays_every_step else {0, segments}), script
        assert script["nobody's"], script

    def assert_same(self, script: Found, logits: float = 0.0) -> None:
        """Compare bits; logits may be off by so much."""
        for name in self.measured(script):
            assert script[name] <= (logits if name == "logits" else 0.0), script
        assert script["nobody's"], script

    def assert_captured_and_right(self, report: Found, model: str) -> None:
        self.assert_breaks(report, self.breaks[model][0])
        assert report["scripts"] and len(report["scripts"]) == len(report["again"])
        for script in report["scripts"]:
            self.assert_right(script, model)
        # whatever the tables and the padding held before
        for script in report["again"]:
            self.assert_same(script)

    def assert_breaks(self, report: Found, breaks: int, left: Mapping[str, int] | None = None) -> None:
        """Look for so many breaks in every graph, and for what was left to them or to eager prefill."""
        assert set(report["breaks"].values()) == {breaks} and report["left"] == (left or {}), report

    def assert_checkpoints(self, report: Found, model: str) -> None:
        self.assert_captured_and_right(report, model)
        assert all("first kept state" in script for script in report["scripts"]), report

    def assert_refused_run_eagerly(self, report: Found, model: str) -> None:
        left = {"more than 2 sequences in a batch": 1, "states that are loaded layer by layer": 1}
        self.assert_breaks(report, self.breaks[model][0], left)
        self.assert_right(report["not too many"], model)
        for name in ("too many", "by layer"):
            self.assert_same(report[name])
            assert report[name]["replays"] == [0], report
        said = report["not filled"]
        assert "replayed with the states of an earlier batch" in said and f"{self.kernel.flag}=off" in said, said

    def assert_noticed(self, found: Found, mistakes: Mapping[str, Any]) -> None:
        assert set(found) == {"none", *mistakes}
        assert found.pop("none") < self.limits["logits"]
        missed = {name: seen for name, seen in found.items() if not isinstance(seen, str) and seen < self.noticed}
        assert missed == {}, missed

    def assert_checked(self, root: pathlib.Path, folder: str, model: str) -> None:
        """Start a server with a self-check, which calls its replays right."""
        found, log = processes.beside(
            root,
            *("-m", "tests.releases.selfcheck_run", folder, "--server", '{"dtype": "float16"}'),
            environment={
                **{self.kernel.flag: "reference", "SGLANG_BCG_SELFCHECK": "strict"},
                **{**WINDOWS, **self.environment},
            },
            timeout=300,
        )
        assert found["selfcheck"]["verdict"] == "right" and found["refused"] is None and found["touched"] == [], found
        assert found["prefills"][0]["replays"] == self.breaks[model][0] + 1, found
        assert "bcg-fixes self-check: right: 7 of 7 compared" in log

    def chosen(self, root: pathlib.Path, asked: str | None = None) -> Choice:
        """Return which implementation the plan chooses on a release, as the flag has it."""
        found = registry.discover()
        settings = flags.read(found.fixes, found.kernels, {} if asked is None else {self.kernel.flag: asked})
        made = plan.make(found, settings, tree.Source(tree.Folder(root)))
        (choice,) = (choice for choice in made.kernels if choice.op == self.kernel.op)
        return choice

    def assert_chosen(self, root: pathlib.Path, asked: str | None, by_default: str | None) -> None:
        choice = self.chosen(root, asked)
        assert (choice.impl and choice.impl.name) == (asked or by_default), choice
        assert asked or by_default or "unproven on this release" in choice.rejected["triton"], choice

    def assert_unknown(self, root: pathlib.Path, *change: str) -> tree.Source:
        """Change a file of the release, and return that source, of which the kernel says that it is unknown."""
        source = tree.Source(rewritten(root, *change))
        found = plan.ask(self.kernel, source)
        assert found.verdict.value == "unknown", found
        return source

    def assert_stands_back(self, root: pathlib.Path, backend: str) -> None:
        """Give this backend an answer of its own to the seam's question, which may be any."""
        module, _, name = backend.partition(":")
        start = f"class {name}(MambaAttnBackendBase):\n"
        own = f"{start}    def {places.SEAM}(self):\n        return is_asked(self)\n\n"
        source = self.assert_unknown(root, f"{module.replace('.', '/')}.py", start, own)
        found = plan.ask(self.kernel, source)
        assert found.reason == "SGLang may capture these layers itself in a way that no known release does", found
        assert f"{backend}.{places.SEAM}" in [item.where for item in found.evidence], found


def assert_warm_is_cold(found: Found) -> None:
    """Compare an answer from a state in the prefix cache with that of the whole prompt."""
    assert found["logits"] == 0.0 and found["first layer"] is True and found["left"] == {}, found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_drifted_source_is_unknown:
        metafunc.parametrize("drift", metafunc.module.DRIFTED)


@pytest.fixture
def operation(request: pytest.FixtureRequest) -> Operation:
    found: Operation = request.module.OPERATION
    return found


def test_the_source_is_known(operation: Operation, release_root: Root) -> None:
    for release in wheels.RELEASES:
        source = tree.Source(tree.Folder(release_root(release)))
        assert plan.ask(operation.kernel, source).verdict.value == "affected", release


def test_it_stands_back_where_a_backend_answers_for_itself(operation: Operation, release_root: Root) -> None:
    declaration = importlib.import_module(operation.kernel.probe.__module__)
    operation.assert_stands_back(release_root(operation.last_release), declaration.BACKEND)


def test_a_drifted_source_is_unknown(
    operation: Operation, release_root: Root, request: pytest.FixtureRequest, drift: str
) -> None:
    release, *change = request.module.DRIFTED[drift]
    operation.assert_unknown(release_root(release), *change)
