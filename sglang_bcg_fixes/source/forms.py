# SPDX-License-Identifier: Apache-2.0
"""The forms of SGLang's definitions that somebody has read, from forms.json.

By definition and form: the releases that have it, and the fixes and kernels it was read for. In any other form a
definition makes their verdict unknown. `make release` adds what a new release brings; no other file names a form.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterable
from typing import TypedDict

FILE = pathlib.Path(__file__).with_name("forms.json")


class Form(TypedDict):
    """One form of one definition."""

    releases: list[str]
    read_for: list[str]


# "package.module:Class.method" -> form -> what is known of it
Table = dict[str, dict[str, Form]]


def load(file: pathlib.Path = FILE) -> Table:
    table: Table = json.loads(file.read_text())
    return table


@functools.cache
def _by_reader() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for forms in load().values():
        for form, known in forms.items():
            for name in known["read_for"]:
                found.setdefault(name, set()).add(form)
    return {name: frozenset(forms) for name, forms in found.items()}


def read_for(name: str) -> frozenset[str]:
    """The forms that this fix or kernel was read against."""
    return _by_reader().get(name, frozenset())


@functools.cache
def _by_form() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for forms in load().values():
        for form, known in forms.items():
            # one that has moved is in this form in both places
            found.setdefault(form, set()).update(known["releases"])
    return {form: frozenset(releases) for form, releases in found.items()}


def releases_with(form: str) -> frozenset[str]:
    """The releases that have a definition in this form."""
    return _by_form().get(form, frozenset())


def with_all(releases: Iterable[str], found: Iterable[str]) -> list[str]:
    """Choose the releases, in their order, that have each of these forms."""
    having = [releases_with(form) for form in found]
    return [release for release in releases if all(release in known for known in having)]
