# SPDX-License-Identifier: Apache-2.0
"""The meaning of an SGLang's defects for one model and the flags of one server."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.metadata
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_bcg_fixes import __version__, flags
from sglang_bcg_fixes.anatomy.launches import AMPERE, BLACKWELL, CHIPS, HOPPER, PREFILL_GRAPHS
from sglang_bcg_fixes.cli import doctor, model_config, promises, server_command
from sglang_bcg_fixes.concern import Concern, Harm, Launch
from sglang_bcg_fixes.model import Action, Choice, Decision, Fix, Workaround
from sglang_bcg_fixes.planning import proven
from sglang_bcg_fixes.source import served
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source

# of the JSON: it changes with the meaning of a field, not with a new one
FORMAT = 2
GPUS = {
    **dict.fromkeys(("h100", "h200", "h20", "h800", "gh200"), HOPPER),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300", "rtx6000pro"), BLACKWELL),
    **dict.fromkeys(("a100", "a800", "a10", "a40", "l4", "l40s", "rtx4090"), AMPERE),
}
OF_AMD = ("mi2", "mi3", "mi4", "gfx")
A_MODEL = "MODEL"
AUTO = "auto"
FIXED, NOT_FIXED, NOT_READ, OFF, OFF_BY_DEFAULT = "fixed", "NOT FIXED", "NOT READ", "OFF", "off by default"
# only slower, and only on some GPUs
UNDECIDED = "UNDECIDED"
# the harms that make the exit status 1, by what --gate names
GATES = {
    "wrong": (Harm.WRONG,),
    "crash": (Harm.WRONG, Harm.ENDS),
    "any": (Harm.WRONG, Harm.ENDS, Harm.SLOWER),
}
BY_RAY, RAY_SCHEDULER = "--use-ray", "sglang.srt.ray.scheduler_actor:SchedulerActor.__init__"
# the ranks of a benchmark are processes of their own
RANKS = ("--tp-size", "--tp", "--tensor-parallel-size")
DEPLOY = "examples/deploy/README.md"
IN_IMAGE = f"the image must contain sglang-bcg-fixes: {DEPLOY}"
ANSWERS = "docs/answers.md"
NOT_CHECKED = "not checked: what SGLang refuses later, when it looks at the model and all flags together"
# the columns of a line on a defect, and where it goes on
STATE_WIDTH, HARM_WIDTH = 9, 17
MARGIN = " " * (STATE_WIDTH + 1 + HARM_WIDTH + 1)


class LaunchError(Exception):
    """The model or a flag cannot be read, and what to do."""


ERRORS = (LaunchError, server_command.CommandLineError, model_config.ModelError)


@dataclasses.dataclass(frozen=True)
class Item:
    """A defect that this launch may meet; without `conditions` it will, as far as the source tells."""

    decision: Decision[Fix]
    harm: Harm
    conditions: tuple[str, ...]
    state: str
    # the flags that avoid it, and those of them that are in the command to run
    way: Workaround | None = None
    is_avoided: bool = False

    @property
    def id(self) -> str:
        return self.decision.id

    @property
    def rank(self) -> tuple[Any, ...]:
        """Put first what somebody has to act on."""
        states = (NOT_FIXED, OFF, NOT_READ, UNDECIDED, OFF_BY_DEFAULT, FIXED)
        return states.index(self.state), list(Harm).index(self.harm), self.id

    @property
    def is_shown(self) -> bool:
        """In full, without being asked for."""
        return self.state in (NOT_FIXED, OFF, NOT_READ, UNDECIDED) and self.harm is not Harm.POSSIBLE


@dataclasses.dataclass(frozen=True)
class Answer:
    """An examination, as far as it concerns one launch; `launch_to_run` is that with the workarounds."""

    examined: doctor.Examination
    launch: Launch
    launch_to_run: Launch
    gpu: str
    items: tuple[Item, ...]
    command: server_command.Command
    environ: Mapping[str, str]
    settings: flags.Settings
    gate: str = "crash"

    @property
    def shown(self) -> list[Item]:
        return [item for item in self.items if item.is_shown]

    @property
    def faults(self) -> list[str]:
        """The faults that keep the SGLang of this environment from starting, each with its remedy."""
        return [doctor.line_of(*found) for found in self.examined.faults] if self.examined.is_installed else []

    @property
    def fixed(self) -> list[Item]:
        return [item for item in self.items if item.state == FIXED and item.harm is not Harm.POSSIBLE]

    @property
    def status(self) -> int:
        """The exit status: 1 to act on something, 3 if all that is left is unread source."""
        gated = [item for item in self.items if item.harm in GATES[self.gate]]
        is_bad = self.is_worse or self.refusals or self.examined.problems or self.faults
        if is_bad or any(item.state in (NOT_FIXED, OFF, UNDECIDED) for item in gated):
            return doctor.TO_DO
        if self.loading and any(item.state == FIXED for item in gated):
            return doctor.TO_DO
        return doctor.UNREAD if any(item.state == NOT_READ for item in gated) else doctor.GOOD

    @functools.cached_property
    def loading(self) -> str | None:
        """Explain why this server would go without the plugin, or return None."""
        if problem := self.examined.loading or self.loading_of_one_batch:
            return problem
        if self.is_lost_by_ray:
            return f"SGLang will NOT load the plugin: its schedulers load none with {BY_RAY}; start without that flag"
        if image := self.command.official_image:
            return f"SGLang will NOT load the plugin: {image} comes without it; build one that has it: {DEPLOY}"
        return None

    @functools.cached_property
    def is_lost_by_ray(self) -> bool:
        actor = self.examined.source.find(RAY_SCHEDULER) if self.launch.given(BY_RAY) else None
        return actor is not None and not actor.mentions("load_plugins()")

    @functools.cached_property
    def loading_of_one_batch(self) -> str | None:
        """Explain why a benchmark would go without the plugin, or return None."""
        texts = (self.examined.source.text(f"{name.replace('.', '/')}.py") for name in server_command.ONE_BATCH)
        if not self.command.is_one_batch or any("load_plugins" in text for text in texts if text):
            return None
        if self.has_several_ranks:
            return "SGLang will NOT load the plugin: this benchmark loads none; try it with one rank"
        if self.command.is_run_by_us:
            return None
        return f"SGLang will NOT load the plugin: {self.command.program[-1]} loads none; `run:` does"

    @property
    def has_several_ranks(self) -> bool:
        return (self.launch.number(*RANKS) or 1) > 1

    @functools.cached_property
    def refusals(self) -> list[str]:
        """The fixes and kernels without which the settings let no server start."""
        kernels = self.examined.plan.kernels if self.examined.is_installed else ()
        wanted: list[Decision[Any]] = [*self.examined.plan.fixes, *kernels]
        return [
            f"{each.asked_for} ({'not read' if each.action is Action.UNKNOWN else each.action.value}): {each.reason}"
            for each in wanted
            if each.action in (Action.UNKNOWN, Action.BLOCKED) and each.is_needed(self.settings.strict)
        ]

    def text(self, everything: bool) -> str:
        return "\n".join(self.lines(everything))

    def lines(self, everything: bool) -> Iterator[str]:
        yield from self.beginning()
        for item in self.items if everything else self.shown:
            yield from self.describe(item, everything)
        if any(item.state == NOT_READ for item in self.shown):
            yield from age(self.examined.source.version)
        if self.fixed and not everything:
            who = "not fixed until the plugin is active" if self.loading else "fixed by the plugin"
            yield f"{who} ({len(self.fixed)}): {', '.join(item.id for item in self.fixed)}"
        for choice, implementation, conditions in self.kernels:
            yield line("faster", implementation, choice.whose, choice.subject.title + worth(choice), conditions)
        if left_out := self.kernels_left_out:
            reasons = dict.fromkeys(map(why_left_out, left_out))
            yield f"kernels that are off here: {', '.join(each.whose for each in left_out)}: {'; '.join(reasons)}"
        yield self.evidence
        if self.is_worse:
            yield f"{flags.EVERYTHING}=off leaves this model to stock; {ANSWERS} says what is known of it"
        yield from self.noticed
        yield from self.examined.problems
        if everything:
            yield NOT_CHECKED
        yield from self.end(everything)

    def beginning(self) -> Iterator[str]:
        source = self.examined.source
        model = ", ".join(self.launch.architectures)
        yield f"{model} on SGLang {source.version}{f', {self.gpu}' if self.gpu else ''}: {source.files}"
        yield self.verdict
        if self.command.program and not self.command.is_of_sglang:
            yield f"{self.command.program[-1]} is read as if it were SGLang's server"
        yield from (f"another SGLang is in {folder}; Python imports the first" for folder in self.examined.others)
        if self.examined.is_installed:
            yield f"active here: {'no' if self.loading else doctor.activity(self.environ)}"
        yield from self.faults
        if self.refusals:
            yield f"does not start: the plugin refuses to, without {'; '.join(self.refusals)}"

    @property
    def verdict(self) -> str:
        counts = collections.Counter(item.state for item in self.shown)
        left = [f"{count} {state}" for state, count in counts.items()]
        if self.refusals or self.faults:
            left.insert(0, "no server starts")
        if self.loading:
            left.append("the plugin is not active" if self.fixed else "nothing to do, and the plugin is not active")
        if self.is_worse:
            left.append("fewer right answers were seen with the plugin than in stock")
        if left:
            return ", ".join(left)
        return "nothing to do" if self.fixed else "nothing to do: no known defect there concerns this launch"

    def describe(self, item: Item, everything: bool) -> Iterator[str]:
        fix = item.decision.subject
        yield line(item.state, item.harm.value, item.decision.whose, fix.title, item.conditions)
        if everything:
            yield from doctor.describe(item.decision, self.examined.source, False)[1:]
        elif item.state == NOT_READ:
            yield f"{MARGIN}{item.decision.finding.reason}"
        elif item.state == OFF:
            yield f"{MARGIN}it is off: {item.decision.reason}"
        elif item.state == UNDECIDED:
            yield f"{MARGIN}answers are right, and the GPU decides if it is slower: give --gpu"
        if item.way and item.state != FIXED and not everything:
            where = "avoided in `run:` by" if item.is_avoided else "avoid it:"
            yield f"{MARGIN}{where} {item.way.flags}  ({item.way.effect})"

    @property
    def is_worse(self) -> bool:
        """Tell whether a GPU has seen fewer right answers with the plugin than without, for a launch like this."""
        answers = served.on_gpu(self.examined.source.version, self.launch.architectures)
        is_seen = answers is not None and answers[2] < answers[1]
        return is_seen and self.makes_graphs and not is_unread(self.examined)

    @property
    def makes_graphs(self) -> bool:
        """Tell whether the launch may make breakable prefill graphs, as it was typed or with the workarounds."""
        return any(PREFILL_GRAPHS.holds(each) is not False for each in (self.launch, self.launch_to_run))

    @property
    def evidence(self) -> str:
        """One line on the servers with this model that were run on this release."""
        release, names = self.examined.source.version, self.launch.architectures
        if is_unread(self.examined):
            return "tried: nothing, because nobody has read some of this source"
        if not self.makes_graphs:
            return f"tried on {release}: nothing without breakable prefill graphs, which this launch does not make"
        found = []
        if answers := served.on_gpu(release, names):
            of, stock, patched = answers
            where = f" (see {ANSWERS})" if patched < of else ""
            found.append(f"on a GPU, prefills right: stock {stock} of {of}, with the plugin {patched}{where}")
        if words := served.on_cpu(release, names):
            found.append(f"on a CPU: stock {words[0]}, with the plugin {words[1]}")
        return f"tried on {release} with prefill graphs: {'; '.join(found) or 'no server with this model'}"

    @property
    def noticed(self) -> list[str]:
        """A sentence on each setting of ours that does not count, or soon will not."""
        return [*self.examined.look_alikes, *self.examined.retired]

    def end(self, everything: bool) -> Iterator[str]:
        if self.loading:
            yield self.loading
        if self.command.container and self.fixed and not self.command.official_image:
            yield IN_IMAGE
        # what a file says stays there
        if not (self.refusals or (self.is_lost_by_ray and BY_RAY not in self.command.words)):
            is_there = self.examined.is_installed or self.command.container
            yield f"run: {self.command_to_run}{'' if is_there else '   # where sglang-bcg-fixes is installed'}"
        names = [item.id for item in (*self.shown, *self.fixed)]
        if names and not everything:
            yield f"more: -v, and bcg-fixes explain {names[0]}"

    @property
    def command_to_run(self) -> str:
        command = self.command.loading(doctor.ENTRY_POINT, self.environ)
        if self.loading_of_one_batch and not self.has_several_ranks:
            command = command.run_by_us()
        if self.is_lost_by_ray:
            command = command.without(self.examined.source, BY_RAY)
        if flags.is_off(self.environ):
            # a variable of the shell stays there, so the command needs another value
            command = command.with_variable(flags.EVERYTHING, None if flags.EVERYTHING in command.environ else "auto")
        return command.text

    @property
    def kernels(self) -> list[tuple[Choice, str, list[str]]]:
        """Kernels of ours that this launch may need: which implementation runs, and on which conditions it is needed.

        For a server of another machine, whose compilers are not known, it is what `auto` may choose there.
        """
        found = []
        for choice, concern in () if self.loading else self.kernels_that_concern:
            if choice.impl is not None if self.examined.is_installed else choice.state == AUTO and is_proven(choice):
                implementation = choice.name if self.examined.is_installed else AUTO
                found.append((choice, implementation, concern.undecided(self.launch_to_run)))
        on = {choice.op for choice, _, _ in found}
        # a graph that keeps another break has no attention inside
        is_kept = promises.has_no_other_break(self.launch_to_run, on)
        return [each for each in found if is_kept or each[0].op != promises.ATTENTION]

    @property
    def kernels_left_out(self) -> list[Choice]:
        """Kernels that this launch would be faster with, as it was measured somewhere, and that are not on."""
        on = {choice.op for choice, _, _ in self.kernels}
        return [
            choice
            for choice, concern in self.kernels_that_concern
            if choice.op not in on and choice.op in proven.times()
            if choice.finding.verdict is Verdict.AFFECTED and choice.action is not Action.BLOCKED
        ]

    @functools.cached_property
    def kernels_that_concern(self) -> list[tuple[Choice, Concern]]:
        pairs = ((each, worst(promises.concerns_of(each), self.launch_to_run)) for each in self.examined.plan.kernels)
        return [(choice, concern) for choice, concern in pairs if concern is not None]

    def as_dict(self) -> dict[str, Any]:
        source = self.examined.source
        return {
            "format": FORMAT,
            "package": __version__,
            "sglang": source.version,
            "path": str(source.files),
            "others": list(self.examined.others),
            "architectures": self.launch.architectures,
            "gpu": self.gpu or None,
            "flags": {name: list(words) for name, words in self.launch.options.items()},
            "active": doctor.activity(self.environ) if self.examined.is_installed else None,
            "concerns": [
                {
                    "id": item.id,
                    "owner": item.decision.owner,
                    "title": item.decision.subject.title,
                    "harm": item.harm.value,
                    "with": list(item.conditions),
                    "state": item.state,
                    "reason": item.decision.reason,
                    "flag": item.decision.subject.flag if item.decision.subject.patches else None,
                    "workaround": dataclasses.asdict(item.way) if item.way else None,
                    "avoided_in_run": item.is_avoided,
                }
                for item in self.items
            ],
            "kernels": {
                choice.op: {
                    "form": implementation,
                    "with": left_open,
                    "share_of_time": proven.share_of_time(choice.op, choice.finding),
                }
                for choice, implementation, left_open in self.kernels
            },
            "kernels_left_out": {choice.op: why_left_out(choice) for choice in self.kernels_left_out},
            "evidence": self.evidence,
            "refusals": self.refusals,
            "faults": self.faults,
            "loading": self.loading,
            "look_alikes": list(self.examined.look_alikes),
            "retired": list(self.examined.retired),
            "problems": list(self.examined.problems),
            "not_checked": NOT_CHECKED,
            "run": None if self.refusals else self.command_to_run,
            "gate": self.gate,
            "status": self.status,
        }


def line(first: str, second: str, name: str, title: str, conditions: Sequence[str]) -> str:
    among = f"; only with {' and '.join(conditions)}" if conditions else ""
    return f"{first:{STATE_WIDTH}} {second:{HARM_WIDTH}} {name}: {title}{among}"


def is_proven(choice: Choice) -> bool:
    return choice.finding.verdict is Verdict.AFFECTED and proven.is_proven(choice.op, choice.finding)


def worth(choice: Choice) -> str:
    """Tell what a GPU has measured, of the operation and not of a server."""
    found = proven.share_of_time(choice.op, choice.finding)
    if not found:
        return ""
    least, most = (round(100 * (1 - share)) for share in reversed(found))
    return f"; this operation alone takes {least} to {most} % less time, the server's first token less than that"


def why_left_out(choice: Choice) -> str:
    """The reason why a kernel that would help is not on, in a few words."""
    if choice.proven:
        return choice.reason
    return f"no recorded GPU result speaks for it on this source ({choice.subject.flag}=NAME runs one all the same)"


def is_unread(examined: doctor.Examination) -> bool:
    return any(decision.finding.verdict is Verdict.UNKNOWN for decision in examined.plan.fixes)


def age(version: str) -> Iterator[str]:
    """A line where the release is none that this package has been read against."""
    known = list(doctor.supported())
    if version not in known:
        older = doctor.series_of(version) < doctor.series_of(known[0])
        newest = doctor.series_of(version) > doctor.series_of(known[-1])
        words = "newer than this plugin knows" if newest else "older than it knows" if older else "none that it knows"
        yield f"{MARGIN}your SGLang is {words} ({known[0]} to {known[-1]}); a newer plugin may have read it"


def answer(
    examined: doctor.Examination,
    launch: Launch,
    gpu: str,
    typed: server_command.Command | None = None,
    environ: Mapping[str, str] | None = None,
    settings: flags.Settings | None = None,
    gate: str = "crash",
) -> Answer:
    source = examined.source
    if not is_unread(examined) and not gets_graphs_of_ours(examined, launch):
        launch = dataclasses.replace(launch, graphs=served.graphs(source.version, launch.architectures))
    typed = typed or server_command.read(())
    changed, to_run, items = typed, launch, list[Item]()
    # the changed command may meet defects that the typed one does not
    while found := new_items(examined, to_run, items):
        for item in found:
            # a workaround is slower too, where a condition that is left open does not hold
            if item.way and item.is_shown and item.state in (NOT_FIXED, OFF) and item.harm is not Harm.SLOWER:
                tried = changed.changed(source, item.way)
                avoiding = dataclasses.replace(launch, options=tried.options(source))
                if is_avoided(item, avoiding):
                    changed, to_run, item = tried, avoiding, dataclasses.replace(item, is_avoided=True)
            items.append(item)
    items.sort(key=lambda item: item.rank)
    environ = flags.environment_with(typed.environ) if environ is None else environ
    settings = settings or flags.Settings("auto", {}, {}, None)
    return Answer(examined, launch, to_run, gpu, tuple(items), changed, environ, settings, gate)


def gets_graphs_of_ours(examined: doctor.Examination, launch: Launch) -> bool:
    """Tell whether a fix of ours may give this model graphs that SGLang refuses it."""
    admits = (each for each in examined.plan.fixes if each.subject.measured and each.action is Action.APPLY)
    return any(worst(each.subject.concerns, launch) and not is_left(each, launch) for each in admits)


def new_items(examined: doctor.Examination, launch: Launch, items: Sequence[Item]) -> list[Item]:
    known = {item.id for item in items}
    return sorted((item for item in items_of(examined, launch) if item.id not in known), key=lambda item: item.rank)


def items_of(examined: doctor.Examination, launch: Launch) -> Iterator[Item]:
    for decision in examined.plan.fixes:
        if decision.finding.verdict not in (Verdict.AFFECTED, Verdict.UNKNOWN):
            continue
        # a fix of another package that does not say whom it concerns may concern everybody
        concern = worst(decision.subject.concerns or (Concern(Harm.WRONG),), launch)
        if concern is not None:
            state = state_of(decision, launch)
            if state == NOT_FIXED and concern.harm is Harm.SLOWER and needs_gpu(decision.subject, launch):
                state = UNDECIDED
            way = None if state in (FIXED, UNDECIDED) else doctor.workaround(decision.subject, examined.source)
            yield Item(decision, concern.harm, tuple(concern.undecided(launch)), state, way)


def needs_gpu(fix: Fix, launch: Launch) -> bool:
    """Tell whether there are GPUs on which a defect does not concern a launch of which none is named."""
    there = (dataclasses.replace(launch, chip=chip) for chip in CHIPS)
    return not launch.chip and any(worst(fix.concerns, each) is None for each in there)


def state_of(decision: Decision[Fix], launch: Launch) -> str:
    if decision.action is Action.APPLY:
        return OFF_BY_DEFAULT if is_left(decision, launch) else FIXED
    if decision.action is Action.OFF:
        by_default = decision.subject.is_on_request and not decision.reason.endswith("=off")
        return OFF_BY_DEFAULT if by_default else OFF
    return NOT_READ if decision.action is Action.UNKNOWN else NOT_FIXED


def is_left(decision: Decision[Fix], launch: Launch) -> bool:
    """Tell whether a fix that is applied with "auto" is known to leave this launch alone."""
    is_auto = decision.action is Action.APPLY and not decision.required
    return is_auto and any(condition.holds(launch) is False for condition in decision.subject.measured)


def is_avoided(item: Item, changed: Launch) -> bool:
    """Tell whether a defect is known not to concern the changed launch: only then may somebody say so."""
    return worst(item.decision.subject.concerns, changed) is None


def worst(concerns: Sequence[Concern], launch: Launch) -> Concern | None:
    order = list(Harm)
    found = [concern for concern in concerns if concern.touches(launch)]
    return min(found, key=lambda concern: order.index(concern.harm), default=None)


def chip_of(gpu: str) -> str:
    if not gpu:
        return ""
    if gpu.startswith(OF_AMD):
        raise LaunchError(f"--gpu {gpu}: AMD is not covered; nothing of this package was tried there")
    if gpu not in GPUS:
        raise LaunchError(f"--gpu {gpu} is not one of {', '.join(GPUS)}{flags.nearest(gpu, GPUS)}")
    return GPUS[gpu]


def check_early(model: str | None, gpu: str) -> None:
    """Refuse what needs no source, before one is fetched."""
    chip_of(gpu)
    if model is not None:
        model_config.config_of(model)


def read(
    source: Source,
    model: str | None,
    typed: server_command.Command,
    gpu: str,
    environ: Mapping[str, str],
    is_here: bool = False,
) -> tuple[Launch, server_command.Command]:
    """The launch, from a configuration and the words of a command, and the command with its model."""
    server_command.check_program(typed)
    server_command.check_image(typed, source.version)
    options = typed.options(source)
    given = next((options[name][0] for name in server_command.MODEL_FLAGS if options.get(name)), None)
    named = model if model is not None else given
    if named is None:
        raise LaunchError(
            "no model is named: give --model, or a command in which `sglang serve MODEL` or --model-path stands"
        )
    config = model_config.config_of(named)
    if given is None:
        path = pathlib.Path(named)
        folder = str(path.parent) if path.is_file() and path.name == "config.json" and path.parent.name else A_MODEL
        typed = typed.with_model(folder if path.is_file() else named)
        options = typed.options(source)
    elif model is not None:
        check_same(model, config, given)
    server_command.check(source, typed, is_here and has_other_plugins())
    config = model_config.overridden(config, next(iter(options.get(model_config.OVERRIDE, ())), "{}"))
    config = model_config.as_sglang_names_it(source, config)
    model_config.check_architectures(source, config, environ)
    launch = Launch(source, config, options, chip_of(gpu), environ=environ)
    return launch, typed


def check_same(model: str, config: Mapping[str, Any], given: str) -> None:
    """Refuse to judge one model for a server of another."""
    try:
        other = model_config.config_of(given)
    except model_config.ModelError:
        # it is on the machine of the server, and this is its configuration
        return
    if other.get("architectures") != config.get("architectures"):
        raise LaunchError(
            f"--model {model} is {joined(config)}, and the command serves {given}, which is {joined(other)}; leave one "
            f"of them out"
        )


def joined(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return ", ".join(map(str, names)) if isinstance(names, list) else str(names)


def has_other_plugins() -> bool:
    """Other plugins of SGLang may add choices to its options."""
    entries = importlib.metadata.entry_points(group=doctor.PLUGIN_GROUP)
    return any(entry.name != doctor.ENTRY_POINT for entry in entries)
