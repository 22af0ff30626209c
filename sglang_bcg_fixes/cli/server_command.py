# SPDX-License-Identifier: Apache-2.0
"""The command that starts somebody's server: its variables, its options as SGLang takes them, and changes to it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.model import Workaround
from sglang_bcg_fixes.source import command_line, graph_settings
from sglang_bcg_fixes.source.tree import Source

VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
MODULE = ("python", "-m", "sglang.launch_server")
SERVE, LAUNCH_SERVER = "serve", "sglang.launch_server"
# programs that run a module with the plugin: `python -m sglang_bcg_fixes -- MODULE`, `bcg-fixes -- MODULE`
OURS, OUR_SCRIPT = "sglang_bcg_fixes", "bcg-fixes"
# the benchmark that runs a model without a scheduler, by both of its names
ONE_BATCH = ("sglang.benchmark.one_batch", "sglang.bench_one_batch")
# modules whose servers or schedulers load plugins, beside that benchmark
OF_SGLANG = (
    LAUNCH_SERVER,
    *("sglang.benchmark.offline_throughput", "sglang.bench_offline_throughput"),
    *("sglang.benchmark.one_batch_server", "sglang.bench_one_batch_server"),
)
CONTAINERS = ("docker", "docker-compose", "podman", "nerdctl", "kubectl", "apptainer", "singularity")
# such as lmsysorg/sglang:v0.5.12.post1-cu130
IMAGE = re.compile(r"(?:.*/)?sglang:v?(\d+(?:\.\d+)+(?:\.?(?:post|rc|dev)\d+)?)(?:-.*)?")
OFFICIAL = re.compile(r"(?:[\w.-]+/)?lmsysorg/sglang(?:[:@].*)?")
# options of a container that may put the plugin there
BRINGS_MORE = ("-v", "--volume", "--mount", "PYTHONPATH=", "--env=PYTHONPATH=")
# a command inside one word, such as that of `bash -c`
QUOTED = re.compile(r"\bsglang\s+serve\b|\s-m\s+sglang\.\w")
PYTHON = re.compile(r"python[\d.]*")
WITH_A_WORD = ("-X", "-W")
MODEL_PATH, CONFIG = "--model-path", "--config"
MODEL_FLAGS = (MODEL_PATH, "--model")
# `sglang serve` takes it away before SGLang's parser sees the others
OF_SERVE_ALONE = "--model-type"
POSITIONAL = "sglang.cli.serve:_normalize_positional_model_path"
LEAVE_OUT = "(leave out) "
REMARK = re.compile(r"\s*\((?!leave out\)).*?\)")


class CommandLineError(Exception):
    """The command cannot be read, or SGLang would refuse it, and what to do."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A command as it was typed: variables, the words that name the program, and all words after those."""

    variables: Mapping[str, str]
    program: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def environ(self) -> dict[str, str]:
        """The variables that the server gets by this command, also those behind `env` or a container's `-e`."""
        found = (VARIABLE.fullmatch(word.removeprefix("--env=")) for word in self.program)
        return {**{each[1]: each[2] for each in found if each}, **self.variables}

    def with_variable(self, name: str, value: str | None) -> Command:
        """The command with another value of a variable where it has one, or, for None, without it."""
        own = {key: old for key, old in self.variables.items() if key != name}
        place = next(
            (at for at, word in enumerate(self.program) if word.removeprefix("--env=").startswith(f"{name}=")), None
        )
        if place is None:
            return dataclasses.replace(self, variables=own if value is None else {**own, name: value})
        before = "--env=" if self.program[place].startswith("--env=") else ""
        program = list(self.program)
        program[place] = f"{before}{name}={value or ''}"
        return dataclasses.replace(self, variables=own, program=tuple(program))

    @property
    def arguments(self) -> list[str]:
        """The words for SGLang's parser: `sglang serve MODEL` names the model without a flag."""
        words = list(self.words)
        if self.program[-1:] == (SERVE,) and words and not words[0].startswith("-"):
            words.insert(0, MODEL_PATH)
        return [word for place, word in enumerate(words) if not is_of_serve(words, place)]

    def options(self, source: Source) -> dict[str, list[str]]:
        """The options of the command and of its file, as SGLang takes them."""
        return options_in(source, merged(self.arguments))

    @property
    def text(self) -> str:
        """The line for a shell."""
        given = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*given, shlex.join([*(self.program or MODULE), *self.words])])

    @property
    def container(self) -> str | None:
        """The word that starts the program in a container, where one does."""
        return next((word for word in self.program if pathlib.PurePath(word).name in CONTAINERS), None)

    @property
    def official_image(self) -> str | None:
        """The image of SGLang's own project that a container starts, with nothing else on its paths."""
        if not self.container or any(word.startswith(BRINGS_MORE) for word in self.program):
            return None
        return next((word for word in self.program if OFFICIAL.fullmatch(word)), None)

    @property
    def module(self) -> str | None:
        """The module that a Python, or our own command, runs."""
        is_named = self.program[-2:-1] == ("-m",) or self.is_run_by_us
        return self.program[-1] if is_named else None

    @property
    def is_of_sglang(self) -> bool:
        is_served = bool(self.program) and is_serve(self.program, len(self.program) - 1)
        return is_served or self.program[-1:] == (LAUNCH_SERVER,) or self.module in (*OF_SGLANG, *ONE_BATCH)

    @property
    def is_one_batch(self) -> bool:
        return self.module in ONE_BATCH

    @property
    def is_run_by_us(self) -> bool:
        """Tell whether our own command runs the module, with the plugin in its process."""
        return bool(ends_of_ours(self.program))

    def run_by_us(self) -> Command:
        """The command `python -m MODULE` by our own, which loads the plugin first."""
        *before, module = self.program
        return self if self.is_run_by_us else dataclasses.replace(self, program=(*before, OURS, "--", module))

    def loading(self, plugin: str, environ: Mapping[str, str]) -> Command:
        """The command with which SGLang loads a plugin: where SGLANG_PLUGINS names some, it has to name this one."""
        chosen = flags.plugin_choice(environ)
        if not chosen or plugin in names_in(chosen):
            return self
        return self.with_variable(flags.PLUGINS, with_plugin(chosen, plugin))

    def without(self, source: Source, option: str) -> Command:
        return dataclasses.replace(self, words=tuple(without(source, self.words, option)))

    def with_model(self, name: str) -> Command:
        return dataclasses.replace(self, words=(MODEL_PATH, name, *self.words))

    def changed(self, source: Source, way: Workaround) -> Command:
        """The command with the flags of a workaround."""
        found = self
        for clause in clauses(way):
            first = clause.removeprefix(LEAVE_OUT)
            option, *values = shlex.split(first)
            words = without(source, found.without_setting(source, option).words, option)
            if first == clause:
                words += [option, *values]
                # such as `--disable-radix-cache --chunked-prefill-size -1`
                words = once(source, words)
            found = dataclasses.replace(self, words=tuple(words))
        return found

    def without_setting(self, source: Source, option: str) -> Command:
        """The command without the setting that wins over an option, in the JSON for all graphs."""
        given = self.options(source).get(graph_settings.OPTION)
        settings = graph_settings.read(source, given[0]) if given else {}
        left = graph_settings.without(source, settings, option)
        if left == settings:
            return self
        words = without(source, self.words, graph_settings.OPTION)
        # only another JSON wins over that of a file
        if left or config_in(self.arguments):
            words += [graph_settings.OPTION, json.dumps(left)]
        return dataclasses.replace(self, words=tuple(words))


def is_of_serve(words: Sequence[str], place: int) -> bool:
    word, before = words[place], words[place - 1] if place else ""
    return word.partition("=")[0] == OF_SERVE_ALONE or before == OF_SERVE_ALONE


def clauses(way: Workaround) -> list[str]:
    """The flags of its first alternative, each with what it takes or with a word that it has to go."""
    first = REMARK.sub("", way.flags.partition(", or")[0])
    return first.split(", and ")


def read(words: Sequence[str]) -> Command:
    """Take a command, or flags alone, apart."""
    left = [word for place, word in enumerate(words) if place or word != "env"]
    variables: dict[str, str] = {}
    while left and (found := VARIABLE.fullmatch(left[0])):
        variables[found[1]] = found[2]
        left.pop(0)
    ends = [place + 1 for place, word in enumerate(left) if word == LAUNCH_SERVER or is_serve(left, place)]
    ends = ends or ends_of_ours(left) or ends_of_python(left)
    first_flag = next((place for place, word in enumerate(left) if word.startswith("--")), len(left))
    # what stands before the program, such as `docker run --gpus all`, is not SGLang's
    end = ends[-1] if ends else first_flag
    return Command(variables, tuple(left[:end]), tuple(left[end:]))


def is_serve(words: Sequence[str], place: int) -> bool:
    return words[place] == SERVE and place > 0 and pathlib.PurePath(words[place - 1]).name == "sglang"


def ends_of_ours(words: Sequence[str]) -> list[int]:
    """Places behind the module that our own command runs."""
    pairs = enumerate(itertools.pairwise(words))
    names = (OURS, OUR_SCRIPT)
    found = [place + 3 for place, (word, dashes) in pairs if dashes == "--" and pathlib.PurePath(word).name in names]
    return [end for end in found if end <= len(words)]


def ends_of_python(words: Sequence[str]) -> list[int]:
    """Places behind the module or the file that a Python runs."""
    found = []
    for place in (place for place, word in enumerate(words) if PYTHON.fullmatch(pathlib.PurePath(word).name)):
        at = place + 1
        while at < len(words) and words[at].startswith("-") and words[at] != "-m":
            at += 2 if words[at] in WITH_A_WORD else 1
        is_module = words[at : at + 1] == ["-m"]
        if is_module or (at < len(words) and words[at].endswith(".py")):
            found.append(at + 1 + is_module)
    return [end for end in found if end <= len(words)]


def merged(arguments: Sequence[str]) -> list[str]:
    """The arguments with those of the file that --config names before them, as SGLang puts them."""
    if any(word.startswith(f"{CONFIG}=") for word in arguments):
        raise CommandLineError(f"SGLang reads {CONFIG} and its file only as two words: write `{CONFIG} FILE`")
    places = [place for place, word in enumerate(arguments) if word == CONFIG]
    if not places:
        return list(arguments)
    if len(places) > 1 or places[0] + 1 == len(arguments):
        raise CommandLineError(f"{CONFIG} takes one file, once")
    before, after = arguments[: places[0]], arguments[places[0] + 2 :]
    return [*of_file(pathlib.Path(arguments[places[0] + 1])), *before, *after]


def config_in(arguments: Sequence[str]) -> str | None:
    """The file that --config names, of arguments that can be merged with it."""
    return arguments[arguments.index(CONFIG) + 1] if CONFIG in arguments else None


@functools.cache
def of_file(file: pathlib.Path) -> tuple[str, ...]:
    try:
        import yaml
    except ImportError as error:
        raise CommandLineError(
            f"{CONFIG} {file} cannot be read: PyYAML comes with SGLang and is not in this environment; give the flags "
            f"themselves"
        ) from error
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise CommandLineError(f"{CONFIG} {file} cannot be read: {reason}; name the server's own file") from error
    if not isinstance(content, dict | None):
        raise CommandLineError(f"{CONFIG} {file} holds no settings by name; name the server's own file")
    return tuple(word for name, value in (content or {}).items() for word in words_of(f"--{name}", value))


def words_of(option: str, value: Any) -> Iterator[str]:
    if value is True:
        yield option
    elif isinstance(value, list):
        yield from [option, *map(str, value)] if value else ()
    elif value is not False:
        yield from (option, json.dumps(value) if isinstance(value, dict) else str(value))


def options_in(source: Source, arguments: Sequence[str]) -> dict[str, list[str]]:
    """The options of a command as SGLang takes them: of those that set the same value, the last one counts."""
    # by the value that they set
    found: dict[str, tuple[str, list[str]]] = {}
    last: list[str] = []
    for word in arguments:
        if word.startswith("--"):
            name, is_split, text = word.partition("=")
            option = source.option(name)
            last = [text] if is_split else []
            found[source.value_of(option)] = option, last
        else:
            last.append(word)
    return dict(found.values())


def check_program(typed: Command) -> None:
    """Refuse a module that is none of SGLang's, and what stands inside quotes.

    What is true of SGLang's server need not be true of another module.
    """
    quoted = next((word for word in (*typed.program, *typed.words) if QUOTED.search(word)), None)
    if quoted is not None and typed.program and not typed.is_of_sglang:
        raise CommandLineError(f"what stands inside quotes is not read; give the inner command: {quoted}")
    if typed.module is not None and not typed.is_of_sglang:
        raise CommandLineError(
            f"{typed.module} is not known to be SGLang's server; give the command that starts SGLang, such as "
            f"`python -m {LAUNCH_SERVER}`, or its flags alone"
        )


def check_image(typed: Command, version: str) -> None:
    """Refuse to judge one release for an image of another."""
    for found in filter(None, map(IMAGE.fullmatch, typed.program)):
        if found[1] != version.partition("+")[0]:
            raise CommandLineError(
                f"the image is {found[1]}, and {version} was judged: give --release {found[1]}, or leave out what "
                f"stands before SGLang's command"
            )


def check(source: Source, typed: Command, has_other_plugins: bool) -> None:
    """Refuse what SGLang's own parser refuses, in its words."""
    is_named = typed.program[-1:] == (SERVE,) and bool(typed.words) and not typed.words[0].startswith("-")
    if is_named and source.has_option(MODEL_PATH) and source.find(POSITIONAL) is None:
        raise CommandLineError(
            f"`sglang serve` of SGLang {source.version} takes the model only behind {MODEL_PATH}: write "
            f"`sglang serve {MODEL_PATH} {typed.words[0]}`"
        )
    arguments = [word for word in merged(typed.arguments) if word not in ("-h", "--help")]
    parts = [(arguments, "")]
    if file := config_in(typed.arguments):
        # before the rest, so that it is named if one of its settings is refused; the model may be named elsewhere
        parts.insert(0, ([*of_file(pathlib.Path(file)), MODEL_PATH, "a"], f" (from {file})"))
    for words, where in parts:
        try:
            command_line.check(source, words, with_choices=not has_other_plugins)
        except command_line.RefusedError as error:
            if typed.is_one_batch:
                raise CommandLineError(
                    f"SGLang {source.version} knows no such server: {error}{where}; leave out the benchmark's own "
                    f"flags, such as --batch-size"
                ) from error
            raise CommandLineError(f"SGLang {source.version} refuses this command: {error}{where}") from error


def without(source: Source, words: Iterable[str], option: str) -> list[str]:
    """The words without an option, by any spelling, and without what stands behind it."""
    kept: list[str] = []
    drops = False
    for word in words:
        if word.startswith("--"):
            name = source.option(word.partition("=")[0])
            drops = source.value_of(name) == source.value_of(option)
        kept += [] if drops else [word]
    return kept


def once(source: Source, words: Sequence[str]) -> list[str]:
    """Each value is set by the last of its options."""
    groups: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = source.value_of(source.option(word.partition("=")[0]))
            groups.pop(name, None)
        groups.setdefault(name, []).append(word)
    return [word for group in groups.values() for word in group]


def with_plugin(chosen: str, entry_point: str) -> str:
    """SGLANG_PLUGINS with this plugin beside those that are named there."""
    others = [name for name in names_in(chosen) if name not in (entry_point, flags.NO_PLUGIN)]
    return ",".join([*others, entry_point])


def names_in(chosen: str) -> list[str]:
    return [name.strip() for name in chosen.split(",") if name.strip()]
