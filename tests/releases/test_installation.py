# SPDX-License-Identifier: Apache-2.0
"""Releases that a fresh `pip install` breaks, and installed versions that do."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.cli.pip_faults import check_all, release
from sglang_bcg_fixes.source.tree import Folder, Source
from tests.wheels import RELEASES

Root = Callable[[str], pathlib.Path]
UNBOUNDED = ("0.5.11", "0.5.12", "0.5.12.post1")


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize(
    ("kernels", "breaks"), [(None, True), ("0.17.2", True), ("0.15.1", True), ("0.14.1", False), ("0.12.3", False)]
)
def test_kernels_of_another_release(name: str, kernels: str | None, breaks: bool, release_root: Root) -> None:
    source = Source(Folder(release_root(name)), name)
    found = check_all(source, {"kernels": kernels}.get)
    assert bool(found) == (breaks and name in UNBOUNDED)


@pytest.mark.parametrize(
    ("kernels", "transformers", "breaks"),
    [("0.17.2", "5.6.0", True), ("0.17.2", "5.7.0", False), (None, "5.6.0", False)],
)
def test_what_is_installed_is_judged_by_itself(
    kernels: str | None, transformers: str, breaks: bool, release_root: Root
) -> None:
    source = Source(Folder(release_root(UNBOUNDED[0])), UNBOUNDED[0])
    assert bool(check_all(source, {"kernels": kernels, "transformers": transformers}.get)) == breaks


def test_a_source_without_metadata_has_no_known_fault(tmp_path: pathlib.Path) -> None:
    assert check_all(Source(Folder(tmp_path), "0.5.11"), lambda name: None) == []


def test_versions_are_compared_by_number() -> None:
    assert release("0.9.1") < release("0.15") <= release("0.15.1") < release("0.17.2rc1")
