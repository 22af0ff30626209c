# SPDX-License-Identifier: Apache-2.0
"""Does the self-check cry wolf, what does it notice, and what does it cost a start? Servers are started, not asked.

    python benchmarks/selfcheck_starts.py --starts 50 --json selfcheck_starts.json      # a GPU, and some minutes
    TRITON_CACHE_DIR=$(mktemp -d) python benchmarks/selfcheck_starts.py --case NAME --starts 3 --jobs 1     # cold first

Each prefill case of `bcg-fixes verify` starts `patched`, in turn, until there were so many starts: not one of these may
be called anything but right. Then each starts once as `checked`, with every fix off: what is called wrong there, or
dies, is what this SGLang has.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.lab.verify import cases, command, environment
from sglang_bcg_fixes.lab.verify.arms import CHECKED, PATCHED
from sglang_bcg_fixes.lab.verify.compare import FOR_INFORMATION, GREEN, RED, Judged
from sglang_bcg_fixes.lab.verify.servers import Outcome
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.process.selfcheck import check
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.tree import Source

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.bench import model_cases
from benchmarks.bench.rows import number


def runs_of(
    chosen: Sequence[cases.Case], starts: int, known: registry.Registry, source: Source, folder: pathlib.Path
) -> Iterator[command.Run]:
    for place, case in enumerate(chosen):
        often = starts // len(chosen) + (place < starts % len(chosen))
        for run in command.runs_of(case, [*[PATCHED] * often, CHECKED], known, source, cases.BUCKETS, folder):
            job, environment = {**run.server.job, "calls": []}, dict(run.server.environment)
            if run.arm == PATCHED and case.name in model_cases.CASES and model_cases.is_admitted_by_a_fix(case, source):
                environment[registry.declared_in(hybrids_without_graphs).flag] = "on"
            server = dataclasses.replace(run.server, job=job, environment=environment)
            yield dataclasses.replace(run, calls=(), server=server)


def chosen_of(names: Sequence[str], known: registry.Registry, source: Source) -> list[cases.Case]:
    if not names:
        return [case for case in command.run_by_default(known, source) if case.wants_prefill_graphs]
    of_sizes = [dataclasses.replace(case, name=name) for name, case in model_cases.CASES.items()]
    served = {
        case.name: case for case in (*cases.CASES, *of_sizes) if case.wants_prefill_graphs and case.applies_to(source)
    }
    for name in names:
        if name not in served:
            raise SystemExit(
                f"--case {name}: none of {source.version} with prefill graphs{flags.nearest(name, served)}"
            )
    return [served[name] for name in names]


def judged(run: command.Run, outcome: Outcome) -> Judged:
    found = outcome.selfcheck
    said = f"{found['verdict']}: {found['reason']}" if found else f"no self-check: {outcome.ending}"
    if run.arm == CHECKED:
        return Judged(FOR_INFORMATION, said, ())
    is_right = outcome.finished and found is not None and found["verdict"] == check.RIGHT
    return Judged(GREEN if is_right else RED, "" if is_right else said, ())


def report(found: Sequence[command.Row]) -> Iterator[str]:
    for arm in (PATCHED, CHECKED):
        mine = [(run, outcome) for run, outcome, _ in found if run.arm == arm]
        verdicts = collections.Counter((o.selfcheck or {"verdict": "no self-check"})["verdict"] for _, o in mine)
        yield f"{arm}: {len(mine)} starts; " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        checked = [outcome.selfcheck for _, outcome in mine if outcome.selfcheck]
        for what, unit in (("seconds", "s"), ("kept_bytes", "bytes kept")):
            values = [each[what] for each in checked if what in each]
            if values:
                yield f"  median {number(statistics.median(values), '.1f')}, most {number(max(values), '.1f')} {unit}"
    for run, _, verdict in found:
        if verdict.why:
            yield f"{run.server.name}: {verdict.state}, {verdict.why}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=50, help="of servers with fixes (default: %(default)s)")
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="of verify, or a model of benchmarks/bench"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="servers at a time (default: by free memory, at most 4)")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("selfcheck_starts.json"))
    options = parser.parse_args(arguments)
    here: dict[str, Any] = environment.look(sys.executable)
    source, known, began = releases.installed(), registry.discover(), time.monotonic()
    if source is None or not here["gpu"]:
        raise SystemExit(f"{sys.executable} has no SGLang with a GPU: {here.get('why', 'no SGLang')}")
    chosen = chosen_of(options.case, known, source)
    jobs = options.jobs or command.jobs_that_fit(here)
    with tempfile.TemporaryDirectory(prefix="bcg-starts-") as made:
        folder = pathlib.Path(made)
        for module in {model_cases.MODELS if case.name in model_cases.CASES else command.MODELS for case in chosen}:
            of_it = [case for case in chosen if (case.name in model_cases.CASES) == (module == model_cases.MODELS)]
            command.make_models(sys.executable, of_it, folder, module)
        found = command.serve(list(runs_of(chosen, options.starts, known, source, folder)), sys.executable, jobs)
    rows = [(run, outcome, judged(run, outcome)) for run, outcome in found]
    print("\n".join(report(rows)))
    content = command.as_dict(rows, here, {"starts": options.starts, "jobs": jobs}, time.monotonic() - began)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(command.with_a_line_for_each_server(content))
    return 0 if all(verdict.state != RED for _, _, verdict in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
