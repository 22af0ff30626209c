# SPDX-License-Identifier: Apache-2.0
"""The launches that a defect concerns: a model's configuration and the flags of a server, as far as they decide it."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sglang_bcg_fixes.source import graph_settings
from sglang_bcg_fixes.source.syntax import Drifted
from sglang_bcg_fixes.source.tree import Source


class Harm(str, enum.Enum):
    """The harm that a defect does to a user, the worst first."""

    WRONG = "wrong answers"
    ENDS = "crash or no start"
    SLOWER = "slower"
    # with code of your own, after a reload of weights, or never seen
    POSSIBLE = "possible"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One server that somebody wants to start: nothing in it is guessed, and what is not given is not known.

    `config` is the model's config.json, `options` the words after each flag, `chip` one of CHIPS or empty. `graphs`
    says when SGLang makes prefill graphs of the model, in a word of source/served.py, or is empty. `environ` has those
    of the server's variables that are known.
    """

    source: Source
    config: Mapping[str, Any]
    options: Mapping[str, Sequence[str]]
    chip: str = ""
    graphs: str = ""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def architectures(self) -> list[str]:
        named = self.config.get("architectures")
        return [str(name) for name in named] if isinstance(named, list) else [named] if isinstance(named, str) else []

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """Every key of the configuration that has a value, at any depth."""
        return frozenset(key for key, _ in settings_in(self.config))

    def values(self, key: str) -> list[Any]:
        """The values of a key, at any depth."""
        return [value for found, value in settings_in(self.config) if found == key]

    @functools.cached_property
    def flags(self) -> Mapping[str, Sequence[str]]:
        """The options, with those in the JSON of another one."""
        return graph_settings.apart(self.source, self.options)

    def given(self, *names: str) -> bool:
        return any(name in self.flags for name in names)

    def word(self, *names: str) -> str | None:
        """The word after the first of these flags that is given with one."""
        return next((self.flags[name][0] for name in names if self.flags.get(name)), None)

    def number(self, *names: str) -> int | None:
        word = self.word(*names)
        return int(word) if word is not None and word.isdecimal() else None

    def is_set(self, variable: str) -> bool | None:
        """Tell whether SGLang reads a variable as true."""
        if variable in self.environ:
            return self.environ[variable].strip().lower() in ("1", "true", "yes", "y")
        return None


def settings_in(value: Any) -> Iterator[tuple[str, Any]]:
    for part in parts_in(value):
        yield from settings_of(part)


def settings_of(part: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The keys of one part that have a value."""
    return ((str(key), value) for key, value in part.items() if value not in (None, False, 0, [], {}, ""))


def parts_in(value: Any) -> Iterator[Mapping[Any, Any]]:
    """A configuration, and the configurations in it of its text, its images and so on."""
    if isinstance(value, Mapping):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from parts_in(inner)


@dataclasses.dataclass(frozen=True)
class Condition:
    """A sentence about a launch that is true, false, or not decided by what is known of it: None.

    One that has `either` is true where one of those is.
    """

    says: str
    holds: Callable[[Launch], bool | None]
    either: tuple[Condition, ...] = ()

    def __or__(self, other: Condition) -> Condition:
        both = (*(self.either or (self,)), *(other.either or (other,)))

        def holds(launch: Launch) -> bool | None:
            found = {condition.holds(launch) for condition in both}
            return True if True in found else None if None in found else False

        return Condition(" or ".join(condition.says for condition in both), holds, both)

    def where(self, asked: Callable[[Source], bool]) -> Condition:
        """The condition, on sources of which this is true; one that nobody has read leaves it open."""

        def holds(launch: Launch) -> bool | None:
            try:
                return self.holds(launch) if asked(launch.source) else False
            except Drifted:
                return None

        return Condition(self.says, holds)

    def left_open(self, launch: Launch) -> str:
        """Say what would have to be, where that is not decided; otherwise nothing."""
        if self.holds(launch) is not None:
            return ""
        open_ones = [condition.says for condition in self.either if condition.holds(launch) is None]
        return " or ".join(open_ones) or self.says


@dataclasses.dataclass(frozen=True)
class Concern:
    """The harm of a defect, and the conditions under which there is any: all of them."""

    harm: Harm
    conditions: tuple[Condition, ...] = ()

    @property
    def says(self) -> str:
        return f"{self.harm.value} with {'; '.join(condition.says for condition in self.conditions)}"

    def touches(self, launch: Launch) -> bool:
        """False only where a condition is known not to hold."""
        return all(condition.holds(launch) is not False for condition in self.conditions)

    def undecided(self, launch: Launch) -> list[str]:
        return [told for condition in self.conditions if (told := condition.left_open(launch))]


def wrong(*conditions: Condition) -> tuple[Concern, ...]:
    return (Concern(Harm.WRONG, conditions),)


def ends(*conditions: Condition) -> tuple[Concern, ...]:
    return (Concern(Harm.ENDS, conditions),)


def slower(*conditions: Condition) -> tuple[Concern, ...]:
    return (Concern(Harm.SLOWER, conditions),)


def possible(*conditions: Condition) -> tuple[Concern, ...]:
    return (Concern(Harm.POSSIBLE, conditions),)
