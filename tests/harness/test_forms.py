# SPDX-License-Identifier: Apache-2.0
"""A behaviour is tried on every set of forms that there is, and on all releases where everything is asked for."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source import forms as known
from tests import forms, processes
from tests.wheels import NEWEST, RELEASES

FIX = "bcg_flag_not_restored"
FILE = "tests/fixes/test_bcg_flag_not_restored.py"


def forms_in(release: str, name: str) -> dict[str, set[str]]:
    return {
        where: {form for form, entry in of.items() if release in entry["releases"]}
        for where, of in known.load().items()
        if where == name or any(name in entry["read_for"] for entry in of.values())
    }


@pytest.mark.parametrize("name", ["gdn_extend", FIX, "hybrid_layer_misrouted", "swa_stale_padding"])
def test_what_is_left_out_has_the_forms_of_one_before_it(name: str) -> None:
    tried = forms.releases_that_differ(name)
    assert tried[0] == RELEASES[0] and tried[-1] == NEWEST and len(set(tried)) == len(tried) < len(RELEASES)
    for release in RELEASES:
        before = [forms_in(other, name) for other in tried if RELEASES.index(other) <= RELEASES.index(release)]
        assert forms_in(release, name) in before, release
    kept = [forms_in(release, name) for release in tried if release != NEWEST]
    assert all(kept.count(one) == 1 for one in kept)


def test_several_names_differ_where_one_of_them_does() -> None:
    names = (FIX, "swa_stale_padding")
    each = {release for name in names for release in forms.releases_that_differ(name)}
    assert each <= set(forms.releases_that_differ(*names))


def test_a_definition_can_be_named() -> None:
    where, of = next((where, of) for where, of in known.load().items() if len(of) > 2)
    assert {entry["releases"][0] for entry in of.values()} <= set(forms.releases_that_differ(where))


def test_only_the_tests_own_releases_are_looked_at() -> None:
    # in the form of 0.5.11 until 0.5.14, and in that of 0.5.15 since
    assert forms.releases_that_differ(FIX) == ("0.5.11", "0.5.14", "0.5.15", NEWEST)
    assert forms.releases_that_differ(FIX, among=("0.5.12", "0.5.13", "0.5.16", "0.5.17")) == ("0.5.12", "0.5.16")


@pytest.mark.parametrize("about", [(), ("no_such_fix",), (FIX, "sglang.srt:nothing")])
def test_a_name_that_nothing_was_read_for_is_an_error(about: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="has no definition, fix or kernel"):
        forms.releases_that_differ(*about)


MARKED = "tests/releases/test_server_imports.py"


@pytest.mark.parametrize(
    ("options", "file", "wanted"),
    [((), FILE, (RELEASES[0], NEWEST)), (("--everything",), FILE, RELEASES), ((), MARKED, RELEASES)],
    ids=["test", "test-all", "test, where it is marked"],
)
def test_the_ends_are_tried_and_every_release_where_everything_is(
    options: tuple[str, ...], file: str, wanted: tuple[str, ...]
) -> None:
    words = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options, file)
    done = processes.python(*words, environment={"PYTEST_ADDOPTS": ""})
    collected = [line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "[" in line]
    assert collected == list(wanted), done.stdout + done.stderr
