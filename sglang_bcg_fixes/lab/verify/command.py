# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes verify`: plan the servers, run them, and judge and report their answers."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.kernels.attention_extend.declaration import KERNEL as ATTENTION_EXTEND
from sglang_bcg_fixes.lab.verify import cases, compare, environment, instruments, page, servers
from sglang_bcg_fixes.lab.verify.arms import ALONE, ARMS, CHECKED, EAGER, PADDED, PATCHED, REFERENCE, STOCK
from sglang_bcg_fixes.lab.verify.cases import Call, Case
from sglang_bcg_fixes.lab.verify.compare import FOR_INFORMATION, GREEN, INCONCLUSIVE, RED, Judged
from sglang_bcg_fixes.lab.verify.servers import Outcome, Server
from sglang_bcg_fixes.model import Action, Fix
from sglang_bcg_fixes.planning import plan, registry
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.tree import Source

GIB_PER_SERVER, MOST_JOBS = 8, 8
# two servers of each fit side by side, so the whole takes hardly longer than one start
QUICK_CASES = 3
# seconds of a start when four share a machine, and the first ones' extra for compiling kernels
SECONDS_PER_SERVER, SECONDS_ONCE = 50, 40
SAME_WHEN_RESUMED = ("bcg_fixes", "commit", "sglang", "versions", "gpu", "driver")
ENGINE = "sglang_bcg_fixes.lab.verify.server"
MODELS = "sglang_bcg_fixes.lab.verify.models"
CHUNK = "--chunked-prefill-size"


class VerifyError(Exception):
    """Nothing could be verified; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One server of a case: its arm, the only fix in it if any, its ordinal among runs of the same arm."""

    case: Case
    calls: tuple[Call, ...]
    flags: cases.Flags
    arm: str
    alone: str | None
    number: int
    server: Server


Found = tuple[Run, Outcome]
Row = tuple[Run, Outcome, Judged]


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--release", metavar="V", help="refuse unless the installed SGLang is this release")
    command.add_argument("--python", default=sys.executable, metavar="PATH", help="of an environment with SGLang")
    command.add_argument("--fix", metavar="ID", help="the cases that show this fix; adds the arm `alone`")
    command.add_argument("--case", action="append", default=[], metavar="NAME", help="one case; repeat")
    command.add_argument("--arms", metavar="A,B", help=f"of {', '.join(ARMS)} (default: {STOCK},{PATCHED})")
    command.add_argument(
        "--quick", action="store_true", help=f"the {QUICK_CASES} cases that show most of the needed fixes"
    )
    command.add_argument("--once", action="store_true", help="one server of each arm, not two of patched and reference")
    command.add_argument(
        "--jobs", type=int, metavar="N", help=f"servers at a time (default: by free memory, at most {MOST_JOBS})"
    )
    command.add_argument(
        "--flag", action="append", default=[], metavar="NAME=VALUE", help=f"of this package, for {PATCHED}; repeat"
    )
    command.add_argument("--tp-size", type=int, default=1, metavar="N", help="GPUs of each server, as SGLang's flag")
    command.add_argument(
        "--dp-attention", action="store_true", help="and attention is data parallel; with --case or --fix"
    )
    command.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write everything there")
    command.add_argument("--page", type=pathlib.Path, metavar="FILE", help="write a page with every request there")
    command.add_argument("--page-only", type=pathlib.Path, metavar="JSON", help="write --page of an earlier --json")
    command.add_argument("--resume", action="store_true", help="keep the cases that --json FILE has whole already")
    command.add_argument("--folder", type=pathlib.Path, metavar="DIR", help="keep models, logs and answers there")
    command.add_argument("--plan", action="store_true", help="print every server's command line and start none")


def run(options: argparse.Namespace) -> int:
    """Run the cases; exit status 0: all green, 1: something is not; everything else is an exception."""
    if options.page_only:
        if not options.page:
            raise VerifyError("--page-only needs --page FILE, the file to write")
        options.page.write_text(page.page(page.read(options.page_only)))
        return 0
    here = environment.look(options.python)
    source = installed_source(options, here)
    known = registry.discover()
    # what the plugin decides when no flag is set
    made = plan.make(known, flags.read(known.fixes, known.kernels, {}), source, watched_too=True)
    chosen = choose_cases(options, known, made, source)
    arms = choose_arms(options)
    buckets = cases.FEW_BUCKETS if options.quick else cases.BUCKETS
    ranks = flags_of_ranks(options)
    once_each = options.quick or options.once
    with folder_of(options) as folder:
        runs = []
        asked_for = could_be_alone(options.fix, known, source) if options.fix else []
        for case in chosen:
            alone = asked_for if options.fix else [fix.id for fix in needed_for(case, made)]
            if alone or arms != [ALONE]:
                order = order_of(case, arms, once_each)
                made_of_case = runs_of(case, order, known, source, buckets, folder, alone, ranks)
                runs += [with_flags(each, options.flag) for each in made_of_case]
        if not runs and arms == [ALONE]:
            raise VerifyError(f"SGLang {source.version} needs no fix that these cases show, so none can be alone")
        if not any(is_under_test(each.arm, arms) for each in runs):
            raise VerifyError(f"no server is under test with --arms {','.join(arms)} in these cases; add {PATCHED}")
        kept = whole_cases(options, here, runs) if options.resume else []
        runs = [each for each in runs if each.case.name not in {row["case"] for row in kept}]
        if options.plan:
            print_plan(runs)
            return 0
        check(here, options)
        began = time.monotonic()
        chosen = [case for case in chosen if any(each.case is case for each in runs)]
        if chosen:
            make_models(options.python, chosen, folder)
        jobs = options.jobs or jobs_that_fit(here)
        how = {"quick": options.quick, "once": options.once, "jobs": jobs}

        def needs_padded(case: Case, found: Sequence[Found]) -> bool:
            return instruments.can_run_padded(source) and has_unexplained_difference(case, found)

        def judge_and_write(found: Sequence[Found]) -> list[Row]:
            judged = [(each, outcome, judge(each, found, wanted_in(each, made))) for each, outcome in found]
            content = as_dict(judged, here, how, time.monotonic() - began)
            write(options, {**content, "servers": [*kept, *content["servers"]]})
            return judged

        def keep(ended: Sequence[Found]) -> None:
            whole = [case for case in cases_ended(runs, ended) if not needs_padded(case, ended)]
            if whole:
                judge_and_write([(each, outcome) for each, outcome in ended if each.case in whole])

        found = serve(runs, options.python, jobs, keep)
        padded = [case for case in chosen if needs_padded(case, found)]
        more = [
            each for case in padded for each in runs_of(case, [PADDED], known, source, buckets, folder, ranks=ranks)
        ]
        if more and not any(outcome.interrupted for _, outcome in found):
            found += serve(more, options.python, jobs)
        judged = judge_and_write(found)
    print(table(judged, made, source))
    states = [verdict.state for each, _, verdict in judged if is_under_test(each.arm, arms)]
    states += [row["verdict"] for row in kept if is_under_test(row["arm"], arms)]
    return 0 if all(state == GREEN for state in states) else 1


def flags_of_ranks(options: argparse.Namespace) -> cases.Flags:
    """SGLang's flags of several GPUs a server."""
    size: int = options.tp_size
    if not options.dp_attention:
        return {} if size == 1 else {"--tp-size": size}
    if not options.case and not options.fix:
        raise VerifyError("--dp-attention needs --case NAME or --fix ID: SGLang serves only some models so")
    if size == 1:
        raise VerifyError("--dp-attention needs --tp-size N: with one GPU there is nothing to share")
    return {"--tp-size": size, "--dp-size": size, "--enable-dp-attention": True}


def with_flags(run: Run, given: Sequence[str]) -> Run:
    """The run with these flags of ours, if it is one of the patched arm."""
    for each in given:
        if not each.startswith(flags.PREFIX) or "=" not in each:
            raise VerifyError(f"--flag {each}: name a flag and its value, as in `--flag {flags.SELFCHECK}=off`")
    return with_variables(run, dict(each.split("=", 1) for each in given)) if run.arm == PATCHED else run


def with_variables(run: Run, variables: Mapping[str, str]) -> Run:
    environment = {**run.server.environment, **variables}
    return dataclasses.replace(run, server=dataclasses.replace(run.server, environment=environment))


def write(options: argparse.Namespace, content: dict[str, Any]) -> None:
    for file, text in ((options.json, with_a_line_for_each_server), (options.page, page.page)):
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            # the machine may go while this is written
            unfinished = file.with_name(f"{file.name}.unfinished")
            unfinished.write_text(text(content))
            unfinished.replace(file)


def cases_ended(runs: Sequence[Run], ended: Sequence[Found]) -> list[Case]:
    """Cases all of whose servers have come to their end."""
    done = {each.server.name for each, _ in ended}
    left = {each.case.name for each in runs if each.server.name not in done}
    return [case for name, case in {each.case.name: each.case for each in runs}.items() if name not in left]


def installed_source(options: argparse.Namespace, here: dict[str, Any], command: str = "bcg-fixes verify") -> Source:
    make = (
        "In a checkout of sglang-bcg-fixes: python3 -m venv sglang-env; sglang-env/bin/pip install sglang=={} . ; "
        f"{command} --python sglang-env/bin/python"
    )
    if here["root"] is None:
        raise VerifyError(f"{options.python} has no SGLang. {make.format('V')}")
    if options.release and here["sglang"] != options.release:
        raise VerifyError(
            f"{options.python} has SGLang {here['sglang']}, not {options.release}, and nothing is installed "
            f"unasked. {make.format(options.release)}"
        )
    if not here["has_entry_point"]:
        raise VerifyError(
            f"SGLang would not find this plugin in {options.python}: run `{options.python} -m pip install .` in a "
            f"checkout of sglang-bcg-fixes"
        )
    return releases.in_folder(pathlib.Path(here["root"]))


def choose_cases(options: argparse.Namespace, known: registry.Registry, made: plan.Plan, source: Source) -> list[Case]:
    fix = known.fix(options.fix) if options.fix else None
    if options.fix and not fix:
        ids = [each.id for each in known.fixes]
        raise VerifyError(f"no defect '{options.fix}'{flags.nearest(options.fix, ids)}; `bcg-fixes list` shows all")
    names = [case.name for case in cases.CASES]
    for name in options.case:
        if name not in names:
            raise VerifyError(f"no case '{name}'{flags.nearest(name, names)}; there are {', '.join(names)}")
    chosen = [case for case in cases.CASES if case.applies_to(source)]
    if fix or options.case:
        chosen = [case for case in chosen if not fix or case.name in fix.verify or fix.id in case.watches]
        chosen = [case for case in chosen if not options.case or case.name in options.case]
    else:
        chosen = run_by_default(known, source)
        if options.quick:
            chosen = few_that_show_most(needed_fixes(made), chosen) or chosen[:2]
    if not chosen:
        raise VerifyError(f"no case applies to SGLang {source.version} here; `bcg-fixes verify --plan` shows what does")
    return chosen


def run_by_default(known: registry.Registry, source: Source) -> list[Case]:
    """The cases of this source, except those of fixes that are off by default and of one kind of GPU."""
    on_request = {name for fix in known.fixes if fix.is_on_request for name in fix.verify}
    here = [case for case in cases.CASES if case.applies_to(source) and case.name not in on_request]
    return [case for case in here if not case.inside and not case.unbroken]


def needed_fixes(made: plan.Plan) -> list[Fix]:
    return [decision.subject for decision in made.fixes if decision.action is Action.APPLY]


def few_that_show_most(fixes: Sequence[Fix], chosen: Sequence[Case]) -> list[Case]:
    """Pick a few cases, each the one that shows most of the fixes that those before it do not show."""
    wanted: list[Case] = []
    missing = [fix for fix in fixes if any(case.name in fix.verify for case in chosen)]
    while missing and len(wanted) < QUICK_CASES:
        wanted.append(max(chosen, key=lambda case: sum(case.name in fix.verify for fix in missing)))
        missing = [fix for fix in missing if wanted[-1].name not in fix.verify]
    return wanted


def choose_arms(options: argparse.Namespace) -> list[str]:
    default = [PATCHED] if options.quick else [STOCK, PATCHED]
    arms = options.arms.split(",") if options.arms else [*default, *([ALONE] if options.fix else [])]
    wrong = [arm for arm in arms if arm not in ARMS]
    if wrong:
        raise VerifyError(f"no arm '{wrong[0]}'{flags.nearest(wrong[0], ARMS)}; there are {', '.join(ARMS)}")
    return arms


def is_under_test(arm: str, arms: Sequence[str]) -> bool:
    """Tell whether an arm counts: stock shows the defect, and counts only when no other arm is chosen."""
    if arm in (REFERENCE, EAGER, PADDED):
        return False
    return arm != STOCK or set(arms) <= {STOCK, EAGER}


def order_of(case: Case, arms: Sequence[str], once_each: bool) -> list[str]:
    """Order runs as tested, reference, reference, tested, so that drift affects both alike."""
    tested = [arm for arm in arms if arm == PATCHED]
    references = [REFERENCE] if case.standard.needs_reference else []
    about_prefill = (EAGER, CHECKED)
    once = [arm for arm in arms if arm != PATCHED and (arm not in about_prefill or case.wants_prefill_graphs)]
    return [*tested, *references, *once] if once_each else [*tested, *references * 2, *tested, *once]


def runs_of(
    case: Case,
    order: Sequence[str],
    known: registry.Registry,
    source: Source,
    buckets: Sequence[int],
    folder: pathlib.Path,
    alone: Sequence[str] = (),
    ranks: cases.Flags | None = None,
) -> list[Run]:
    calls = tuple(case.script(buckets))
    found: list[Run] = []
    kinds = [(each, fix) for each in order for fix in (alone if each == ALONE else (None,))]
    for arm, fix in kinds:
        number = 1 + sum((each.arm, each.alone) == (arm, fix) for each in found)
        started_with = of_ranks(case.flags(source, buckets, eager=arm == EAGER), ranks or {})
        name = f"{case.name}/{'-'.join([arm, *([fix] if fix else [str(number)])])}"
        job = {
            "engine": engine_arguments(started_with, case, folder),
            "logprobs": case.logprobs,
            "calls": [dataclasses.asdict(call) for call in calls],
        }
        server = Server(name, folder / name, job, environment_of(arm, case, known, fix))
        found.append(Run(case, calls, started_with, arm, fix, number, server))
    return found


def of_ranks(given: cases.Flags, ranks: cases.Flags) -> cases.Flags:
    """Add the flags of several ranks. Under DP attention SGLang divides a chunk among them."""
    chunk, parts = given.get(CHUNK), ranks.get("--dp-size")
    whole = {CHUNK: chunk * parts} if isinstance(chunk, int) and isinstance(parts, int) else {}
    return {**given, **whole, **ranks}


def environment_of(arm: str, case: Case, known: registry.Registry, alone: str | None) -> dict[str, str]:
    """Environment of a server of this arm, counters included; it reproduces the server by hand."""
    wanted = list(instruments.COUNTERS)
    found = {"SGLANG_PLUGINS": "bcg_fixes", flags.FIXES: "off" if arm in (STOCK, ALONE, CHECKED) else "auto"}
    for fix in known.fixes:
        asked_for = fix.id == alone if arm == ALONE else fix.is_on_request and case.name in fix.verify
        if fix.patches and asked_for and arm not in (STOCK, CHECKED):
            found[fix.flag] = "on"
    # answers are compared bit for bit, and these kernels round differently from SGLang's
    found |= {kernel.flag: "off" for kernel in known.kernels if not kernel.bit_exact}
    # to show a defect or a difference, graphs that fail the check must stay
    found[flags.SELFCHECK] = "warn" if arm in (PATCHED, CHECKED) else "off"
    if case.inside:
        found[ATTENTION_EXTEND.flag] = ATTENTION_EXTEND.impls[0].name if arm == PATCHED else "off"
    if arm == REFERENCE and case.standard is not cases.Standard.BREAKS:
        wanted.append(f"refuse_{case.phase}")
    if case.unbroken:
        wanted.append(instruments.UNBROKEN)
    if arm == PADDED:
        wanted.append(instruments.PADDED)
    return {**found, **case.environment, flags.INSTRUMENTS: ",".join(wanted)}


def engine_arguments(started_with: cases.Flags, case: Case, folder: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = {"model_path": str(folder / "models" / case.model), "log_level": "info"}
    if case.draft:
        found["speculative_draft_model_path"] = str(folder / "models" / case.draft)
    return {**found, **{name.removeprefix("--").replace("-", "_"): value for name, value in started_with.items()}}


def print_plan(runs: Sequence[Run]) -> None:
    for each in runs:
        words = ["python", "-m", "sglang.launch_server"]
        for name, value in each.server.job["engine"].items():
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
        settings = " ".join(f"{name}={value}" for name, value in each.server.environment.items())
        prompts = sum(len(call.prompts) for call in each.calls)
        print(f"# {each.server.name}: {len(each.calls)} calls, {prompts} prompts. {each.case.sentence}")
        print(f"{settings} {shlex.join(words)}\n")
    print(f"# {len(runs)} servers")


@contextlib.contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[pathlib.Path]:
    if options.plan:
        yield options.folder or pathlib.Path("DIR")
    elif options.folder:
        if options.folder.exists() and any(options.folder.iterdir()):
            raise VerifyError(f"{options.folder} is not empty; name an empty folder or a new one")
        options.folder.mkdir(parents=True, exist_ok=True)
        yield options.folder.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="bcg-verify-") as made:
            yield pathlib.Path(made)


def check(here: dict[str, Any], options: argparse.Namespace) -> None:
    if not here["gpu"]:
        raise VerifyError(
            f"replay can be verified only with a GPU: {here['why']}. Run this on the machine that serves, in the "
            f"environment of its SGLang, or name that with --python; `bcg-fixes doctor` needs no GPU"
        )
    if here["gpu_count"] < options.tp_size:
        raise VerifyError(f"--tp-size {options.tp_size}: {options.python} sees {here['gpu_count']} GPU")
    if here["free_gib"] < GIB_PER_SERVER and not options.jobs:
        raise VerifyError(
            f"{here['free_gib']} GiB are free on {here['gpu']}, and a server may take {GIB_PER_SERVER}: stop what runs "
            f"there, or try with --jobs 1"
        )


def whole_cases(options: argparse.Namespace, here: dict[str, Any], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows of an earlier run's file, of the cases whose servers had all come to their end."""
    if not options.json:
        raise VerifyError("--resume goes on with a file: name it with --json FILE")
    if not options.json.exists():
        return []
    try:
        found = json.loads(options.json.read_text())
    except ValueError as error:
        raise VerifyError(f"--resume: {options.json} cannot be read ({error}); remove it to begin anew") from error
    # a quick run asks less of a server of the same name
    now = {**{name: here.get(name) for name in SAME_WHEN_RESUMED}, "quick": options.quick}
    if different := [name for name in now if found.get(name) != now[name]]:
        raise VerifyError(
            f"{options.json} was recorded with another {' and '.join(different)}; without --resume it is replaced, "
            f"or name another --json FILE"
        )
    ended = [row for row in found["servers"] if not row["ending"].startswith(servers.INTERRUPTED)]
    there = {(row["case"], row["arm"], row.get("fix"), row.get("number", 1)): started_with(row) for row in ended}
    # an uncommitted change may have another server under the same name
    left = {
        each.case.name
        for each in runs
        if there.get((each.case.name, each.arm, each.alone, each.number))
        != started_with({"flags": each.flags, "environment": dict(each.server.environment)})
    }
    left |= {row["case"] for row in found["servers"] if row not in ended}
    return [row for row in ended if row["case"] not in left]


def started_with(row: dict[str, Any]) -> str:
    """The flags and the environment of a server, as they are written to a file."""
    return json.dumps([row["flags"], row["environment"]], sort_keys=True)


def make_models(python: str, chosen: Sequence[Case], folder: pathlib.Path, module: str = MODELS) -> None:
    names = sorted({name for case in chosen for name in (case.model, case.draft) if name})
    print(f"making {', '.join(names)} ...", file=sys.stderr, flush=True)
    done = subprocess.run([python, "-m", module, str(folder / "models"), *names], capture_output=True, text=True)
    if done.returncode:
        raise VerifyError(f"the models could not be made: {done.stderr.strip().rpartition(chr(10))[2]}")


def jobs_that_fit(here: dict[str, Any]) -> int:
    return max(1, min(MOST_JOBS, int(here["free_gib"] // GIB_PER_SERVER), (os.cpu_count() or 2) // 2))


def serve(
    runs: Sequence[Run], python: str, jobs: int, ended: Callable[[list[Found]], None] = lambda _: None
) -> list[Found]:
    """Run the servers; `ended` gets what there is whenever one has come to its end."""
    seconds = SECONDS_ONCE + SECONDS_PER_SERVER * -(-len(runs) // jobs)
    print(f"{len(runs)} servers, {jobs} at a time, about {seconds / 60:.0f} minutes", file=sys.stderr, flush=True)
    command = [python, "-m", ENGINE]
    with servers.ended_by_signals(), servers.Runner(command, jobs) as runner:
        futures: dict[concurrent.futures.Future[Outcome], Run] = {runner.start(each.server): each for each in runs}
        shown = servers.Progress(runner, len(runs), seconds)

        def told() -> None:
            ended([(each, future.result()) for future, each in futures.items() if future.done()])

        try:
            shown.follow({future: each.server for future, each in futures.items()}, told)
        except KeyboardInterrupt:
            print("interrupted; this is what there is so far", file=sys.stderr, flush=True)
    # by now every server has ended, on its own or not, and some were never started
    return [
        (each, servers.NEVER_STARTED if future.cancelled() else future.result()) for future, each in futures.items()
    ]


def needed_for(case: Case, made: plan.Plan) -> list[Fix]:
    """Needed fixes that this case shows."""
    return [fix for fix in needed_fixes(made) if case.name in fix.verify]


def could_be_alone(name: str, known: registry.Registry, source: Source) -> list[str]:
    """The fix of this name, unless this source would not get it even with its flag on."""
    on = {fix.flag: "on" for fix in known.fixes if fix.id == name and fix.patches}
    asked = plan.make(known, flags.read(known.fixes, known.kernels, on), source)
    return [fix.id for fix in needed_fixes(asked) if fix.id == name]


def wanted_in(each: Run, made: plan.Plan) -> set[str]:
    """Fixes that this server must have for its case to show them."""
    if each.alone:
        return {each.alone}
    return {fix.id for fix in needed_for(each.case, made)} if each.arm == PATCHED else set()


def has_unexplained_difference(case: Case, found: Sequence[Found]) -> bool:
    """Tell whether a server under test answered everything, but not as the reference did."""
    if case.unbroken or not (case.wants_prefill_graphs and case.standard.needs_reference):
        return False
    mine = [(each, outcome) for each, outcome in found if each.case is case and each.arm in (STOCK, PATCHED, ALONE)]
    return any(compare.is_only_different(case, judge(each, found), outcome) for each, outcome in mine)


def judge(each: Run, found: Sequence[Found], wanted: Collection[str] = ()) -> Judged:
    mine = next(outcome for other, outcome in found if other is each)
    references = [outcome for other, outcome in found if other.case is each.case and other.arm == REFERENCE]
    if each.arm in (REFERENCE, EAGER, PADDED):
        against = references[0] if references else None
        requests = compare.compare(each.case, each.calls, mine, against)
        doubt = compare.doubt_about(each.case, each.calls, [mine]) if each.arm == REFERENCE else ""
        return Judged(FOR_INFORMATION, doubt or ("" if mine.finished else mine.ending), requests)
    verdict = compare.judge(each.case, each.calls, mine, references)
    if each.arm == CHECKED and mine.selfcheck:
        return compare.with_selfcheck(verdict, mine.selfcheck)
    if each.arm == CHECKED and verdict.state == GREEN:
        return Judged(RED, "its self-check reported nothing", verdict.requests)
    padded = [outcome for other, outcome in found if other.case is each.case and other.arm == PADDED]
    if verdict.state == RED and compare.is_explained_by_padding(each.case, verdict, mine, padded):
        verdict = dataclasses.replace(verdict, state=GREEN, why=f"padding changes the rounding: {verdict.why}")
    stock = [outcome for other, outcome in found if other.case is each.case and other.arm == STOCK]
    if verdict.state == RED and each.arm != STOCK:
        # stock behaves the same: another defect, or a kernel that rounds padded rows differently
        if mine.finished and any(mine.answers == o.answers for o in stock):
            return dataclasses.replace(verdict, why=f"{verdict.why}; stock gives the same answers")
        if mine.error and any((mine.error, mine.answers) == (o.error, o.answers) for o in stock):
            return dataclasses.replace(verdict, why=f"{verdict.why}, as stock does: {mine.error}")
    if each.arm == PATCHED and verdict.state == GREEN and each.case.inside and not compare.replays_inside(mine):
        return Judged(RED, "proves nothing: no prefill was replayed with attention inside", verdict.requests)
    unseen = compare.never_replayed(each.calls, mine, cases.prefill_buckets(each.flags))
    if unseen and verdict.state == GREEN:
        sizes = ", ".join(map(str, unseen))
        return Judged(RED, f"proves nothing: no prefill pass was replayed in bucket {sizes}", verdict.requests)
    missing = sorted(set(wanted) - set(mine.applied))
    if each.arm == ALONE and missing and verdict.state != RED:
        state = INCONCLUSIVE if set(missing) <= set(mine.waiting) else RED
        return Judged(state, f"alone, and not reported as applied: {missing[0]}", verdict.requests)
    # such as a fix of a backend that this server does not use
    missing = [name for name in missing if name not in mine.waiting]
    if missing and verdict.state != RED:
        return Judged(RED, f"needed and not reported as applied: {', '.join(missing)}", verdict.requests)
    return verdict


def table(judged: Sequence[Row], made: plan.Plan, source: Source) -> str:
    """Table with a line for each server and, below it, why it is not green."""
    lines = [f"{'case':32} {'arm':12} {'equal':>9} {'replays':>8} {'fallbacks':>9}  verdict"]
    last = None
    for each, outcome, verdict in judged:
        kind = compare.counts(outcome).get(each.case.phase or "", {})
        missed, reasons = compare.fallbacks(each.case, outcome)
        equal = f"{verdict.equal}/{len(verdict.requests)}"
        name = each.case.name if each.case is not last else ""
        last = each.case
        arm = f"{each.arm} {each.number}"
        lines.append(f"{name:32} {arm:12} {equal:>9} {kind.get('replayed', 0):>8} {missed:>9}  {verdict.state}")
        alone = f"only {each.alone}" if each.alone else ""
        for note in (alone, verdict.why, f"fallbacks: {reasons}" if reasons and each.arm != REFERENCE else ""):
            if note:
                lines.append(f"{'':34}{note}")
        if verdict.state == RED:
            lines += [f"{'':34}known: {note}" for note in known_defects(each.case, made, source)]
    return "\n".join(lines)


def known_defects(case: Case, made: plan.Plan, source: Source) -> list[str]:
    """Defects that this case shows, that this source has, and that this version does not fix."""
    found = []
    for decision in made.fixes:
        if decision.action is Action.NO_FIX and decision.id in case.watches:
            ways = [way.flags for way in decision.subject.workarounds if source.has_option(way.option)]
            found.append(f"{decision.id} has no fix in this version; workaround: {(ways or ['none'])[0]}")
    return found


def as_dict(judged: Sequence[Row], here: dict[str, Any], how: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        **environment.header(here),
        **how,
        "seconds": round(seconds),
        "servers": [row_as_dict(*row) for row in judged],
    }


def with_a_line_for_each_server(content: dict[str, Any]) -> str:
    """Format JSON for reading, and for comparing line by line with another run's."""
    servers_lines = ",\n  ".join(json.dumps(server) for server in content["servers"])
    head = json.dumps({**content, "servers": []}, indent=1)
    return head.removesuffix("[]\n}") + f"[\n  {servers_lines}\n ]\n}}\n"


def row_as_dict(each: Run, outcome: Outcome, verdict: Judged) -> dict[str, Any]:
    odd = [dataclasses.asdict(request) for request in verdict.requests if request.outcome != compare.EQUAL]
    return {
        "case": each.case.name,
        "arm": each.arm,
        **({"fix": each.alone} if each.alone else {"number": each.number}),
        "verdict": verdict.state,
        "why": verdict.why,
        "standard": each.case.standard.value,
        "equal": verdict.equal,
        "requests": len(verdict.requests),
        "not_equal": odd,
        "counts": compare.counts(outcome),
        "ending": outcome.ending,
        "seconds": outcome.seconds,
        "start_seconds": outcome.start_seconds,
        "milliseconds": [call["milliseconds"] for call in outcome.calls],
        "applied": outcome.applied,
        "waiting": list(outcome.waiting),
        "kernels": outcome.kernels,
        **({"selfcheck": outcome.selfcheck} if outcome.selfcheck else {}),
        "flags": each.flags,
        "environment": dict(each.server.environment),
        "log_tail": [] if outcome.finished else outcome.tail,
    }
