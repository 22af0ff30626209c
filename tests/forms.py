# SPDX-License-Identifier: Apache-2.0
"""Releases that differ in what a test is about: a behaviour is tried once for each set of forms.

source/forms.json says in which form each release has each definition that a fix or a kernel was read against. Where two
releases have all of them in the same forms, the second one is for `make test-all` (`pytest --everything`).
"""

from __future__ import annotations

import functools

from sglang_bcg_fixes.source import forms
from tests.wheels import NEWEST, RELEASES


@functools.cache
def releases_that_differ(*about: str, among: tuple[str, ...] = RELEASES) -> tuple[str, ...]:
    """The first release with each set of forms, and the newest.

    The forms are those of these definitions ("package.module:Class.method", as in forms.json), or of all definitions
    that these fixes and kernels read.
    """
    named: set[str] = set()
    sets: dict[str, set[tuple[str, str]]] = {release: set() for release in among}
    for where, known in forms.load().items():
        for form, entry in known.items():
            names = {where, *entry["read_for"]}.intersection(about)
            named |= names
            for release in sets.keys() & entry["releases"] if names else ():
                sets[release].add((where, form))
    unknown = ", ".join(sorted(set(about) - named))
    assert about and not unknown, f"source/forms.json has no definition, fix or kernel {unknown}"
    first: dict[frozenset[tuple[str, str]], str] = {}
    for release in among:
        first.setdefault(frozenset(sets[release]), release)
    return tuple(release for release in among if release == NEWEST or release in first.values())
