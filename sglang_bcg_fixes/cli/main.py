# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes` and its commands; none imports SGLang or torch here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from typing import Any

from sglang_bcg_fixes import __version__, flags
from sglang_bcg_fixes.cli import (
    bisect,
    completion,
    doctor,
    for_launch,
    ranks,
    report_file,
    run_module,
    server_command,
    status,
    terminal,
)
from sglang_bcg_fixes.cli.harmless import HARMLESS
from sglang_bcg_fixes.lab.bench import command as bench
from sglang_bcg_fixes.lab.verify import command as verify
from sglang_bcg_fixes.lab.verify import page
from sglang_bcg_fixes.lab.verify.environment import EnvironmentMissing
from sglang_bcg_fixes.model import OURS, SECTIONS, Fix, Kernel
from sglang_bcg_fixes.planning import plan, registry
from sglang_bcg_fixes.process import report_folders
from sglang_bcg_fixes.source import releases, verdicts
from sglang_bcg_fixes.source.tree import Source, Unreadable

GOOD, MISSING, FAILED = 0, 1, 2
ERRORS = (
    bisect.BisectError,
    flags.FlagError,
    *for_launch.ERRORS,
    report_file.ReportFileError,
    registry.RegistryError,
    plan.PlanError,
    releases.ReleaseError,
    Unreadable,
    verify.VerifyError,
    page.PageError,
    bench.BenchError,
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
    options, strange = parser().parse_known_args(given)
    if strange:
        behind = "; put the server's own flags behind `--`" if options.command == "doctor" else ""
        print(f"bcg-fixes {options.command}: unrecognized arguments: {' '.join(strange)}{behind}", file=sys.stderr)
        return FAILED
    try:
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
        description="Exit status: 0 nothing to act on, 1 wrong answers or no start and not fixed, or the plugin is not "
        "active, 2 no answer (nothing installed, a bad flag, a command that SGLang refuses), 3 source that nobody has "
        "read. What is off by default never counts.",
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
        default="crash",
        help="what makes the exit status 1: wrong answers; these and a crash or no start (default); any harm",
    )
    command.add_argument("-v", "--verbose", action="store_true", help="for a launch: every defect, with evidence")
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.add_argument(
        "launch", nargs="*", metavar="-- FLAG", help="only for a server with these flags, or with this whole command"
    )
    command.set_defaults(run=run_doctor)

    command = commands.add_parser("explain", help="one defect: symptom, cause, change, when to remove the fix")
    command.add_argument("id", metavar="ID", help="or the name of its flag")
    command.set_defaults(run=run_explain)

    command = commands.add_parser("list", help="every defect, kernel and flag")
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.set_defaults(run=run_list)

    command = commands.add_parser(
        "status",
        help="what the running processes of this user, for root of all, really have",
        description="Exit status: 0 the ranks of each server have the same, 1 they differ.",
    )
    command.add_argument("-v", "--verbose", action="store_true", help="every rank, and a line for every fix")
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.set_defaults(run=run_status)

    command = commands.add_parser("report", help="one file to send with a report, without what is yours")
    command.add_argument("--log", action="append", type=pathlib.Path, default=[], help="a server's; repeat for more")
    command.add_argument(
        "--file", type=pathlib.Path, default=pathlib.Path("bcg-fixes-report.json"), help="by default %(default)s"
    )
    command.set_defaults(run=run_report)

    command = commands.add_parser(
        "bisect",
        usage="%(prog)s [--among IDS] [--limit SECONDS] [--folder DIR] -- COMMAND ARGUMENTS...",
        help="which fix changes the answer of a command, by switching fixes off",
        description="Exit status: 0 found, 1 the answer is the same with all of them off, 2 no result. An answer is "
        "the command's exit status and what it prints to its standard output.",
    )
    command.add_argument("--among", metavar="IDS", help="only these fixes and kernels, separated by commas")
    command.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="for each run; by default 1800")
    command.add_argument(
        "--folder", type=pathlib.Path, metavar="DIR", help="for the output of each run; by default a new one"
    )
    command.add_argument("words", nargs="+", metavar="-- COMMAND", help="starts a server, asks it, prints the answer")
    command.set_defaults(run=run_bisect)

    command = commands.add_parser(
        "completion",
        help='words for a shell: eval "$(bcg-fixes completion bash)"',
        description="Prints what the shell evaluates, at its start or now.",
    )
    command.add_argument("shell", choices=completion.SHELLS)
    command.set_defaults(run=run_completion)

    command = commands.add_parser(
        "verify",
        help="on a GPU: real servers on tiny models, replayed graphs against refused ones",
        description="Exit status: 0 all green, 1 something is not, 2 it could not be run.",
    )
    verify.add_arguments(command)
    command.set_defaults(run=verify.run)

    command = commands.add_parser(
        "bench",
        help="on a GPU: what breaks and graphs cost, in a layer and in a server",
        description="Exit status: 0 all that counts is right and measured, 1 something is not, 2 it could not be run.",
    )
    bench.add_arguments(command)
    command.set_defaults(run=bench.run)
    return top


def run_doctor(options: argparse.Namespace) -> int:
    is_for_launch = options.model is not None or bool(options.launch) or options.gpu is not None
    gpu = (options.gpu or "").lower()
    typed = server_command.read(options.launch)
    environ = flags.environment_with(typed.variables)
    if is_for_launch:
        for_launch.check_early(options.model, gpu)
    known = registry.collect()
    try:
        settings = known.settings(environ)
    except flags.FlagError as error:
        # the flag of a fix that was refused is none, and this is why
        raise flags.FlagError("; ".join([str(error), *known.problems])) from error
    chosen = [options.root, options.wheel, options.release] != [None] * 3
    source = chosen_source(options) if chosen else releases.installed()
    if source is None:
        raise CommandError("no SGLang is installed here; name one with --root, --wheel or --release")
    result = doctor.examine(known, settings, source, installed=not chosen, environ=environ)
    if not is_for_launch:
        say(result.as_dict(), result.text(options.all), options.json)
        return result.status
    seen = environ if not chosen else typed.variables
    launch, typed = for_launch.read(source, options.model, typed, gpu, seen, is_here=not chosen)
    answer = for_launch.answer(result, launch, gpu, not chosen, typed, environ, settings, options.gate)
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
    known = all_known(options)
    declared: list[Fix | Kernel] = [*known.fixes, *known.kernels]
    everything = {each.id: each for each in declared}
    by_flag = {each.flag: each.id for each in declared}
    name = by_flag.get(options.id.upper(), options.id.lower())
    if name not in everything:
        nearest = flags.nearest(name, everything)
        raise CommandError(f"no defect or kernel '{options.id}'{nearest}; `bcg-fixes list` shows all")
    asked = everything[name]
    try:
        print(explanation(asked) if isinstance(asked, Fix) else kernel_explanation(asked))
    except ValueError as error:
        raise CommandError(f"{error} in the package {known.owner(asked.id)}") from error
    if known.owner(asked.id) != OURS:
        print(f"\nPackage: {known.owner(asked.id)}")
    return GOOD


def explanation(fix: Fix) -> str:
    """The page of a fix as plain text."""
    lines = [f"{fix.id}: {fix.title}", ""]
    for section in SECTIONS:
        lines += [section, textwrap.indent(textwrap.fill(fix.section(section), 100), "  "), ""]
    if found := list(verdicts.spans(fix.id)):
        lines += ["Releases", *(f"  {span}: {verdict}" for span, verdict in found), ""]
    if fix.concerns:
        lines += ["Whom it concerns", *(f"  {concern.says}" for concern in fix.concerns), ""]
    if fix.upstream:
        lines += ["Upstream", *(f"  {link}" for link in fix.upstream), ""]
    lines += ["Workarounds, by the flags of the release", *(f"  {w.flags}  ({w.effect})" for w in fix.workarounds), ""]
    if fix.patches:
        points = [f"  {' or '.join(point.where)} ({point.how.value})" for point in fix.patches]
        lines += ["What is patched", *points, "", f"Switch: {fix.flag}=auto|off|on, by default {fix.default}"]
    else:
        lines += ["This version watches for it and has no fix."]
    return "\n".join(lines)


def kernel_explanation(kernel: Kernel) -> str:
    states = "|".join(["auto", "off", *(impl.name for impl in kernel.impls)])
    lines = [f"{kernel.op}: {kernel.title}", "", *kernel.doc.strip().splitlines()[2:], "", "Implementations"]
    for impl in kernel.impls:
        lines.append(f"  {impl.name}" + (f"  (only by name: {impl.only_by_name})" if impl.only_by_name else ""))
    points = [f"  {' or '.join(point.where)} ({point.how.value})" for point in kernel.patches]
    return "\n".join([*lines, "", "What is patched", *points, "", f"Switch: {kernel.flag}={states}"])


def run_list(options: argparse.Namespace) -> int:
    known = all_known(options)
    rows = flags.table(known.fixes, known.kernels)
    if options.json:
        defects = [
            {"id": fix.id, "title": fix.title, "fix": bool(fix.patches), "owner": known.owner(fix.id)}
            for fix in known.fixes
        ]
        harmless = [dataclasses.asdict(spot) for spot in HARMLESS]
        print(json.dumps({"defects": defects, "harmless": harmless, "flags": [vars(row) for row in rows]}, indent=1))
        return GOOD
    whose = {name: f" ({owner})" for name, owner in known.owners.items()}
    for fix in known.fixes:
        print(f"{fix.id:32} {'fix     ' if fix.patches else 'watch   '}  {fix.title}{whose.get(fix.id, '')}")
    for spot in HARMLESS:
        print(f"{spot.id:32} harmless  {spot.title}")
    for kernel in known.kernels:
        print(f"{kernel.op:32} kernel    {kernel.title}{whose.get(kernel.op, '')}")
    print()
    for row in rows:
        print(f"{row.name}={row.values}  (default {row.default})")
        print(textwrap.indent(textwrap.fill(row.doc, 100), "    "))
    return GOOD


def run_report(options: argparse.Namespace) -> int:
    known = registry.collect()
    folders = report_folders.chosen()
    live = ranks.with_ranks([status.with_calls(each) for each in report_folders.live(folders)])
    notes = [f"ranks differ: {each}" for each in ranks.differences(live)]
    notes += [text for folder in folders if (text := report_folders.problem(folder))]
    notes += known.problems
    examined, source = None, releases.installed()
    try:
        if source is not None:
            settings = known.settings()
            examined = doctor.examine(known, settings, source, installed=True)
    except flags.FlagError as error:
        # a report about a setting that is refused has to be possible
        notes.append(str(error))
    logs = [line for file in options.log for line in report_file.lines_of_ours(file)]
    report_file.write(options.file, report_file.made(examined, live, notes, logs))
    print(f"{options.file}: read it before you send it, and attach it to your report")
    return GOOD


def run_bisect(options: argparse.Namespace) -> int:
    known = all_known(options)
    source = releases.installed()
    if source is None:
        raise CommandError("no SGLang is installed here; run it in the environment of the server")
    on = bisect.candidates(plan.make(known, known.settings(), source), options.among)
    if problem := doctor.loading_problem():
        print(f"bcg-fixes bisect: warning: {problem}", file=sys.stderr)
    folder = options.folder or pathlib.Path(tempfile.mkdtemp(prefix="bcg-fixes-bisect-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(on)} fixes and kernels are on; the output of each run is kept in {folder}", flush=True)
    command = bisect.Command(options.words, folder, options.limit)
    search = bisect.Search(command.run, on, lambda line: print(line, flush=True))
    found = search.result()
    if not found:
        print("no fix changes the answer: it is the same with all of them off")
        return MISSING
    off = " ".join(f"{on[name]}=off" for name in found)
    alike = "varies, as with all of them off" if search.off_varies else "is as with all of them off"
    verb = "changes the answer" if len(found) == 1 else "change the answer together"
    print(f"{' and '.join(found)} {verb}: with {off} alone it {alike}")
    print("\n".join(f"`bcg-fixes explain {name}` says what it is for" for name in found))
    return GOOD


def run_completion(options: argparse.Namespace) -> int:
    known = registry.discover()
    ids = [*(fix.id for fix in known.fixes), *(kernel.op for kernel in known.kernels)]
    values = {"ID": ids, "IDS": ids, "GPU": list(for_launch.GPUS), "V": list(verdicts.recorded())}
    print(completion.script(options.shell, parser(), values), end="")
    return GOOD


def run_status(options: argparse.Namespace) -> int:
    all_known(options)
    folders = report_folders.chosen()
    live = ranks.with_ranks([status.with_calls(each) for each in report_folders.live(folders)])
    differences = ranks.differences(live)
    notes = [] if live else [report_folders.nobody(folders)]
    notes += [text for folder in folders if (text := report_folders.problem(folder))]
    for note in notes:
        print(note, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(live, indent=1))
        # not in the JSON, which is a list of processes
        for difference in differences:
            print(f"bcg-fixes status: ranks differ: {difference}", file=sys.stderr)
        return MISSING if differences else GOOD
    for content, others in ranks.folded(live) if not options.verbose else [(content, []) for content in live]:
        for line in status.lines(content, others, options.verbose):
            terminal.show(line)
    for difference in differences:
        terminal.show(f"RANKS DIFFER: {difference}")
    return MISSING if differences else GOOD
