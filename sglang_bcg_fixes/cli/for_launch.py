# SPDX-License-Identifier: Apache-2.0
"""The meaning of an SGLang's defects for one model and the flags of one server."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.anatomy.launches import AMPERE, BLACKWELL, HOPPER
from sglang_bcg_fixes.cli import doctor
from sglang_bcg_fixes.concern import Concern, Harm, Launch
from sglang_bcg_fixes.model import Action, Choice, Decision, Fix
from sglang_bcg_fixes.planning import proven
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source

GPUS = {
    **dict.fromkeys(("h100", "h200", "h20", "h800", "gh200"), HOPPER),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300", "rtx6000pro"), BLACKWELL),
    **dict.fromkeys(("a100", "a800", "a10", "a40", "l4", "l40s", "rtx4090"), AMPERE),
}
MODEL_FLAGS = ("--model-path", "--model")
# of `sglang serve MODEL`
SERVE, A_MODEL = "serve", "MODEL"
# of a model on Hugging Face, and where its configuration is
NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB = "https://huggingface.co/{}/resolve/main/config.json"
OVERRIDE = "--json-model-override-args"
AUTO = "auto"
MENDED, NOT_MENDED, OFF = "mended", "NOT MENDED", "off"
STATES = {Action.APPLY: MENDED, Action.OFF: OFF}
# so that a screen holds the answer; -v has the others
LINES = 10
NOTICES = 3
LAUNCH = "python -m sglang.launch_server"


class LaunchError(Exception):
    """The model or a flag cannot be read, and what to do."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A defect that this launch may meet; without `conditions` it will, as far as the source tells."""

    decision: Decision[Fix]
    harm: Harm
    conditions: tuple[str, ...]
    # those that are known to hold
    certain: int
    # by default another launch would be changed, this one is not
    is_left: bool = False

    @property
    def state(self) -> str:
        return OFF if self.is_left else STATES.get(self.decision.action, NOT_MENDED)

    @property
    def rank(self) -> tuple[Any, ...]:
        """The worst first; of those what nobody mends, and what this model and these flags have more to do with."""
        worst = list(Harm).index(self.harm)
        return worst, self.state == MENDED, -self.certain, len(self.conditions), self.decision.id


@dataclasses.dataclass(frozen=True)
class Answer:
    """An examination, as far as it concerns one launch."""

    examined: doctor.Examination
    launch: Launch
    gpu: str
    # the SGLang of this environment
    is_here: bool
    items: tuple[Item, ...]
    strange: tuple[str, ...]

    @property
    def not_mended(self) -> list[Item]:
        return [item for item in self.items if item.state != MENDED]

    @property
    def is_good(self) -> bool:
        return not (self.not_mended or self.examined.loading or self.examined.problems)

    def text(self, everything: bool) -> str:
        return "\n".join(self.lines(everything))

    def lines(self, everything: bool) -> Iterator[str]:
        first, last = list(self.beginning()), list(self.end(everything))
        yield from first
        # one for the line that counts the others
        room = LINES - len(first) - len(last) - 1
        for place, item in enumerate(self.items):
            lines = list(self.describe(item, everything))
            room -= len(lines)
            if room < 0 and not everything:
                yield f"and {len(self.items) - place} more ({counted(self.items[place:])}): -v"
                break
            yield from lines
        yield from last

    def beginning(self) -> Iterator[str]:
        source = self.examined.source
        model = ", ".join(self.launch.architectures) or "a model without a name"
        known = sum(d.finding.verdict in (Verdict.AFFECTED, Verdict.UNKNOWN) for d in self.examined.plan.fixes)
        yield f"{model} on SGLang {source.version}{f', {self.gpu}' if self.gpu else ''}: {source.files}"
        told = f"{len(self.items)} of the {known} defects there concern this launch"
        yield f"{told}: {counted(self.items)}" if self.items else told

    def end(self, everything: bool) -> Iterator[str]:
        for choice, form, conditions in self.kernels:
            yield told("faster", form, choice.whose, choice.subject.title + worth(choice), conditions)
        noticed = self.noticed
        # one more would take no less room than the line that counts
        shown = len(noticed) if everything or len(noticed) <= NOTICES else NOTICES - 1
        yield from noticed[:shown]
        if noticed[shown:]:
            yield f"and {len(noticed) - shown} more options and settings that are not as they should be: -v"
        yield from self.examined.problems
        if self.examined.loading:
            yield self.examined.loading
        elif self.kernels or any(item.state == MENDED for item in self.items):
            yield f"run: SGLANG_PLUGINS={doctor.ENTRY_POINT} {LAUNCH} {shlex.join(words_of(self.launch))}".rstrip()

    def describe(self, item: Item, everything: bool) -> Iterator[str]:
        fix = item.decision.subject
        yield told(item.harm.value, item.state, item.decision.whose, fix.title, item.conditions)
        if everything:
            yield from doctor.describe(item.decision, self.examined.source, False)[1:]
        elif item.state == OFF and fix.patches:
            yield f"{'':16} {'':10} {fix.flag}=on mends it"
        elif item.state != MENDED and (way := doctor.workaround(fix, self.examined.source)):
            yield f"{'':16} {'':10} avoid it: {way.flags}"

    @property
    def noticed(self) -> list[str]:
        """A sentence on each option of the command and setting of ours that does not count, or soon will not."""
        options = [f"{word} is no option of this release; it was not taken into account" for word in self.strange]
        return [*options, *self.examined.look_alikes, *self.examined.retired]

    @property
    def kernels(self) -> list[tuple[Choice, str, list[str]]]:
        """Kernels of ours that this launch may need: which form runs, and under which conditions it is needed.

        For a server of another machine, whose compilers are not known, it is what `auto` may choose there.
        """
        found = []
        for choice in self.examined.plan.kernels:
            concern = worst(choice.subject.concerns, self.launch)
            may_run = choice.impl is not None if self.is_here else choice.state == AUTO and is_proven(choice)
            if may_run and concern is not None:
                form = choice.name if self.is_here else AUTO
                found.append((choice, form, concern.undecided(self.launch)))
        return found

    def as_dict(self) -> dict[str, Any]:
        source = self.examined.source
        return {
            "format": 1,
            "sglang": source.version,
            "path": str(source.files),
            "architectures": self.launch.architectures,
            "gpu": self.gpu or None,
            "flags": {name: list(words) for name, words in self.launch.options.items()},
            "not_options": list(self.strange),
            "concerns": [
                {
                    "id": item.decision.id,
                    "owner": item.decision.owner,
                    "title": item.decision.subject.title,
                    "harm": item.harm.value,
                    "with": list(item.conditions),
                    "state": item.state,
                    "action": item.decision.action.value,
                    "flag": item.decision.subject.flag if item.decision.subject.patches else None,
                    "workaround": dataclasses.asdict(way)
                    if (way := doctor.workaround(item.decision.subject, source))
                    else None,
                }
                for item in self.items
            ],
            "kernels": {
                choice.op: {
                    "form": form,
                    "with": left_open,
                    "share_of_time": proven.share_of_time(choice.op, choice.finding),
                }
                for choice, form, left_open in self.kernels
            },
            "loading": self.examined.loading,
            "look_alikes": list(self.examined.look_alikes),
            "retired": list(self.examined.retired),
            "problems": list(self.examined.problems),
            "good": self.is_good,
        }


def is_proven(choice: Choice) -> bool:
    return choice.finding.verdict is Verdict.AFFECTED and proven.is_proven(choice.op, choice.finding)


def worth(choice: Choice) -> str:
    """Tell what a GPU has measured, of the operation and not of a server."""
    found = proven.share_of_time(choice.op, choice.finding)
    return f": {found[0]} to {found[1]} of the time of SGLang's own" if found else ""


def counted(items: Sequence[Item]) -> str:
    states = [item.state for item in items]
    return ", ".join(f"{states.count(state)} {state}" for state in (NOT_MENDED, OFF, MENDED) if state in states)


def told(first: str, second: str, name: str, title: str, conditions: Sequence[str]) -> str:
    among = f" (with {'; '.join(conditions)})" if conditions else ""
    return f"{first:16} {second:10} {name}: {title}{among}"


def answer(examined: doctor.Examination, launch: Launch, gpu: str, is_here: bool) -> Answer:
    items = []
    for decision in examined.plan.fixes:
        if decision.finding.verdict not in (Verdict.AFFECTED, Verdict.UNKNOWN):
            continue
        # a fix of another package that does not say whom it concerns may concern everybody
        concern = worst(decision.subject.concerns or (Concern(Harm.WRONG),), launch)
        if concern is not None:
            left_open = tuple(concern.undecided(launch))
            certain = len(concern.conditions) - len(left_open)
            items.append(Item(decision, concern.harm, left_open, certain, is_left(decision, launch)))
    strange = tuple(name for name in launch.options if not examined.source.has_option(name))
    return Answer(examined, launch, gpu, is_here, tuple(sorted(items, key=lambda item: item.rank)), strange)


def is_left(decision: Decision[Fix], launch: Launch) -> bool:
    """Tell whether a fix that is applied with "auto" is known to leave this launch alone."""
    is_auto = decision.action is Action.APPLY and not decision.required
    return is_auto and any(condition.holds(launch) is False for condition in decision.subject.measured)


def worst(concerns: Sequence[Concern], launch: Launch) -> Concern | None:
    order = list(Harm)
    found = [concern for concern in concerns if concern.touches(launch)]
    return min(found, key=lambda concern: order.index(concern.harm), default=None)


def read(source: Source, model: str | None, words: Sequence[str], gpu: str | None) -> Launch:
    """The launch, from a configuration and the words of a command.

    Of those before the first flag only the model of `sglang serve MODEL` is looked at.
    """
    options = options_in(source, words)
    given = next((options[name][0] for name in MODEL_FLAGS if options.get(name)), None)
    named = model or given
    if named is None:
        raise LaunchError("name the model with --model, or give its server's flags with --model-path in them")
    if gpu and gpu not in GPUS:
        raise LaunchError(f"--gpu {gpu} is not one of {', '.join(GPUS)}")
    if given is None:
        # a configuration alone is no model that a server could load
        options = {MODEL_FLAGS[0]: [A_MODEL if pathlib.Path(named).is_file() else named], **options}
    config = overridden(config_of(named), next(iter(options.get(OVERRIDE, ())), "{}"))
    return Launch(source, config, options, GPUS[gpu] if gpu else "")


def options_in(source: Source, words: Sequence[str]) -> dict[str, list[str]]:
    """The options of a command as SGLang takes them: of those that set the same value, the last one counts."""
    # by the value that they set
    found: dict[str, tuple[str, list[str]]] = {}
    last = found.setdefault("", ("", []))[1]
    for word in words:
        if word.startswith("--"):
            name, is_split, text = word.partition("=")
            option = source.option(name)
            last = [text] if is_split else []
            found[source.value_of(option)] = option, last
        else:
            last.append(word)
    before = found.pop("")[1]
    options = dict(found.values())
    if SERVE in before[:-1] and not any(map(options.get, MODEL_FLAGS)):
        return {MODEL_FLAGS[0]: [before[before.index(SERVE) + 1]], **options}
    return options


def words_of(launch: Launch) -> Iterator[str]:
    for name, words in launch.options.items():
        yield from (name, *words)


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a folder, a file, or a model in the cache of Hugging Face; nothing is fetched."""
    path = pathlib.Path(model)
    files = [path / "config.json", path, *cached(model)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        fetch = (
            f"`curl -fLO {HUB.format(model)}`, then --model config.json" if NAME.fullmatch(model) else "name another"
        )
        raise LaunchError(
            f"{model} is no folder with a config.json, no file, and not in {flags.model_cache()}; {fetch}"
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise LaunchError(f"{file} is no JSON ({error}); name the model's config.json") from error
    if not isinstance(config, dict):
        raise LaunchError(f"{file} is no model's configuration; name its config.json")
    return config


def overridden(config: dict[str, Any], word: str) -> dict[str, Any]:
    """The configuration with what a flag puts in its place; what SGLang would only add to stays beside it."""
    try:
        given = json.loads(word)
    except ValueError as error:
        raise LaunchError(f"the word after {OVERRIDE} is no JSON ({error}); quote it for the shell") from error
    if not isinstance(given, dict):
        raise LaunchError(f"the word after {OVERRIDE} is no JSON object")
    merged = {}
    for key, value in given.items():
        before = config.get(key)
        merged[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return {**config, **merged}


def cached(model: str) -> list[pathlib.Path]:
    """The newest first."""
    if not NAME.fullmatch(model):
        return []
    found = flags.model_cache().glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json")
    return sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)
