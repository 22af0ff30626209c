# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes` and its commands; none imports SGLang or torch here."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from sglang_bcg_fixes import __version__, flags
from sglang_bcg_fixes.cli import (
    bisect,
    catalogue,
    doctor,
    for_launch,
    ranks,
    report_file,
    run_module,
    server_command,
    status,
    terminal,
    verify_launch,
)
from sglang_bcg_fixes.lab.verify import command as verify
from sglang_bcg_fixes.lab.verify import page
from sglang_bcg_fixes.lab.verify.environment import EnvironmentMissing
from sglang_bcg_fixes.lab.verify.own import command as own
from sglang_bcg_fixes.planning import plan, registry
from sglang_bcg_fixes.process import report_folders
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.tree import Source, Unreadable

GOOD, MISSING, FAILED = 0, 1, 2
# what the parser sets beside a command's options: its name, its function and its words
NO_OPTIONS = ("command", "run", "launch", "words", "id")
# how much of an option has to be that of another
ALIKE = 0.7
# commands that are none any more, and what to call instead
ELSEWHERE = {"bench": "call `python -m benchmarks.bench` in a checkout instead"}
ERRORS = (
    bisect.BisectError,
    catalogue.CatalogueError,
    flags.FlagError,
    *for_launch.ERRORS,
    report_file.ReportFileError,
    registry.RegistryError,
    plan.PlanError,
    releases.ReleaseError,
    Unreadable,
    verify.VerifyError,
    *verify_launch.ERRORS,
    page.PageError,
    EnvironmentMissing,
    OSError,
    SyntaxError,
)


class CommandError(Exception):
    """The command cannot be carried out, and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["--"]:
        return run_module.run(given[1:])
    if given and given[0] in ELSEWHERE:
        print(f"bcg-fixes {given[0]}: {ELSEWHERE[given[0]]}", file=sys.stderr)
        return FAILED
    options, strange = parser().parse_known_args(in_dashes(given))
    try:
        if strange:
            behind = "; put the server's own flags behind `--`" if options.command == "doctor" else ""
            raise CommandError(f"unrecognized arguments: {' '.join(strange)}{meant(strange, options)}{behind}")
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # the reader, such as `head`, has seen enough; python would complain once more at exit
        sys.stdout = None
        return GOOD
    except (*ERRORS, CommandError) as error:
        print(f"bcg-fixes {options.command}: {error}", file=sys.stderr)
        return FAILED


def meant(strange: Sequence[str], options: argparse.Namespace) -> str:
    """Name the option that looks like the first strange one, where one does."""
    own = [f"--{name.replace('_', '-')}" for name in vars(options) if name not in NO_OPTIONS]
    word = next((word.partition("=")[0] for word in strange if word.startswith("--")), "")
    return flags.nearest(word, own, ALIKE)


def in_dashes(words: Sequence[str]) -> Sequence[str]:
    """Words for the parser, which knows help and the version as options only."""
    if words[:1] == ["help"] or not words:
        return [*words[1:], "--help"]
    return ["--version"] if words == ["version"] else words


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="bcg-fixes",
        description="Fixes for breakable CUDA graphs in released SGLang.",
        epilog="`bcg-fixes -- MODULE ARGUMENTS...` loads the plugin and runs a module as `python -m` does.",
    )
    top.add_argument("--version", action="version", version=f"sglang-bcg-fixes {__version__}")
    commands = top.add_subparsers(dest="command", required=True)

    command = commands.add_parser(
        "doctor",
        help="which known defects an SGLang has, and what would be done",
        description="Exit status for a launch: 0 nothing to act on, 1 wrong answers or no start and not fixed, or the "
        "plugin is needed and not active, 2 no answer (nothing installed, a bad flag, a command that SGLang refuses), "
        "3 source that nobody has read. What is off by default never counts. Without a launch nothing is gated: 1 if "
        "the plugin is not active or no server starts, 3 for unread source.",
    )
    where = command.add_mutually_exclusive_group()
    where.add_argument("--root", type=pathlib.Path, metavar="DIR", help="a folder that contains sglang/")
    where.add_argument("--wheel", type=pathlib.Path, metavar="FILE", help="a wheel of SGLang")
    where.add_argument("--release", metavar="V", help="a release such as 0.5.12.post1, fetched with pip")
    command.add_argument(
        "--all", action="store_true", help="every defect with evidence, also those it does not have, and harmless code"
    )
    command.add_argument(
        "--model",
        metavar="MODEL",
        help="only for this one: its folder, its config.json, or its name in the cache",
    )
    command.add_argument("--gpu", metavar="GPU", help=f"only for this one: {', '.join(for_launch.GPUS)}")
    command.add_argument(
        "--gate",
        choices=list(for_launch.GATES),
        help="for a launch: what makes its exit status 1: wrong answers; these and a crash or no start (default); any "
        "harm",
    )
    command.add_argument("-v", "--verbose", action="store_true", help="for a launch: every defect, with evidence")
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.add_argument(
        "launch", nargs="*", metavar="-- FLAG", help="only for a server with these flags, or with this whole command"
    )
    command.set_defaults(run=run_doctor)

    command = commands.add_parser("explain", help="one defect, kernel or flag: releases, symptom, cause, workarounds")
    command.add_argument("id", metavar="ID_OR_FLAG", help="one that `bcg-fixes list` or `bcg-fixes list --flags` shows")
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.set_defaults(run=run_explain)

    command = commands.add_parser("list", help="every defect by its harm, with its state in the SGLang installed here")
    command.add_argument("--flags", action="store_true", help="every flag instead, with its values and its default")
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.set_defaults(run=run_list)

    command = commands.add_parser(
        "status",
        help="what the running servers of this user, for root of all, really have",
        description="Exit status: 0 the ranks of each server have the same, 1 they differ, or --require finds none.",
    )
    command.add_argument("-v", "--verbose", action="store_true", help="every process, and a line for every fix")
    command.add_argument("--pid", type=int, metavar="PID", help="only the server that this process belongs to")
    command.add_argument("--require", action="store_true", help="exit with 1 where no server reports")
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.set_defaults(run=run_status)

    command = commands.add_parser(
        "report",
        help="one page to send with a report, without what is yours, and the details beside it",
        description="The details are JSON, in a file of the same name that ends with .json.",
    )
    command.add_argument("--log", action="append", type=pathlib.Path, default=[], help="a server's; repeat for more")
    command.add_argument("--file", default="bcg-fixes-report.txt", help="by default %(default)s; - prints the page")
    command.set_defaults(run=run_report)

    command = commands.add_parser(
        "bisect",
        usage="%(prog)s [--among IDS] [--limit SECONDS] [--folder DIR] -- COMMAND ARGUMENTS...",
        help="which fix changes the answer of a command, by switching fixes off",
        description="Exit status: 0 found, 1 the answer is the same with all of them off, 2 no result, such as where "
        "nothing was answered. An answer is the command's exit status and what it prints to its standard output.",
    )
    command.add_argument("--among", metavar="IDS", help="only these fixes and kernels, separated by commas")
    command.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="for each run; by default 1800")
    command.add_argument(
        "--folder", type=pathlib.Path, metavar="DIR", help="for the output of each run; by default a new one"
    )
    command.add_argument("words", nargs="+", metavar="-- COMMAND", help="starts a server, asks it, prints the answer")
    command.set_defaults(run=run_bisect)

    command = commands.add_parser(
        "verify",
        help="your server with the fixes, without, and without replays; or tiny models on a GPU",
        description="With a command: your server's answers. Exit status: 0 no request is worse than in stock, 1 some "
        "are, 2 no result. Without one: real servers on tiny models. 0 all green, 1 something is not, 2 it could not "
        "be run.",
    )
    verify.add_arguments(command)
    own.add_arguments(command)
    command.add_argument("launch", nargs="*", metavar="-- COMMAND", help="starts your server, as you start it")
    command.set_defaults(run=verify_launch.run)
    return top


def run_doctor(options: argparse.Namespace) -> int:
    is_for_launch = options.model is not None or bool(options.launch) or options.gpu is not None
    gpu = (options.gpu or "").lower()
    typed = server_command.read(options.launch)
    chosen = [options.root, options.wheel, options.release] != [None] * 3
    # of another machine only what the command says is known
    environ = typed.environ if chosen else flags.environment_with(typed.environ)
    if is_for_launch:
        for_launch.check_early(options.model, gpu)
    elif options.gate:
        raise CommandError(
            "--gate judges a launch: put your launch command behind `--`, or name the model with --model"
        )
    known = registry.collect()
    try:
        # what is off altogether is judged as it would be
        settings = known.settings(flags.without_the_switch(flags.environment_with(typed.environ)))
    except flags.FlagError as error:
        # the flag of a fix that was refused is none, and this is why
        raise flags.FlagError("; ".join([str(error), *known.problems])) from error
    source = chosen_source(options) if chosen else releases.installed()
    if source is None:
        raise CommandError("no SGLang is installed here; name one with --root, --wheel or --release")
    result = doctor.examine(known, settings, source, installed=not chosen, environ=environ)
    if not is_for_launch:
        say(result.as_dict(), result.text(options.all), options.json)
        return result.status
    launch, typed = for_launch.read(source, options.model, typed, gpu, environ, is_here=not chosen)
    answer = for_launch.answer(result, launch, gpu, typed, environ, settings, options.gate or "crash")
    say(answer.as_dict(), answer.text(options.verbose), options.json)
    return answer.status


def say(content: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(content, indent=1))
    else:
        terminal.show(text)


def chosen_source(options: argparse.Namespace) -> Source:
    if options.root is not None:
        return releases.in_folder(options.root)
    if options.wheel is not None:
        return releases.in_wheel(options.wheel)
    cache = flags.cache_dir() / "wheels"
    if releases.kept(options.release, cache) is None:
        print(f"fetching sglang=={options.release} with pip, once ...", file=sys.stderr)
    return releases.in_wheel(releases.fetch(options.release, cache))


def all_known(options: argparse.Namespace) -> registry.Registry:
    """For an answer that does not depend on the settings: what is wrong with them is said all the same."""
    known = registry.collect()
    mistakes = [f"no server starts with the plugin: {problem}" for problem in known.problems]
    mistakes += known.warnings()
    try:
        known.settings()
    except flags.FlagError as error:
        mistakes.append(f"no server starts with these flags: {error}")
    for mistake in mistakes:
        print(f"bcg-fixes {options.command}: warning: {mistake}", file=sys.stderr)
    return known


def run_explain(options: argparse.Namespace) -> int:
    say(*catalogue.explain(all_known(options), options.id), options.json)
    return GOOD


def run_list(options: argparse.Namespace) -> int:
    known = all_known(options)
    if options.flags:
        say(*catalogue.listed_flags(known), options.json)
    else:
        say(*catalogue.listed(known, releases.installed()), options.json)
    return GOOD


def run_report(options: argparse.Namespace) -> int:
    print(report_file.command(registry.collect(), options.file, options.log))
    return GOOD


def run_bisect(options: argparse.Namespace) -> int:
    found = bisect.command(all_known(options), options.words, options.among, options.limit, options.folder)
    return GOOD if found else MISSING


def run_status(options: argparse.Namespace) -> int:
    all_known(options)
    folders = report_folders.chosen()
    live = ranks.with_ranks([status.with_calls(each) for each in report_folders.live(folders)])
    notes = [] if live else [report_folders.nobody(folders)]
    if options.pid is not None:
        wanted = {content["server"] for content in live if options.pid in (content["pid"], content["server"])}
        notes += [] if wanted or not live else [f"process {options.pid} belongs to none of the servers that report"]
        live = [content for content in live if content["server"] in wanted]
    notes += [text for folder in folders if (text := report_folders.problem(folder))]
    if options.json:
        print(json.dumps(status.as_dict(live), indent=1))
    for server in status.servers(live) if not options.json else ():
        for line in status.lines_of(server, options.verbose):
            terminal.show(line)
    for note in notes:
        print(note, file=sys.stderr if options.json else sys.stdout)
    return MISSING if ranks.differences(live) or (options.require and not live) else GOOD
