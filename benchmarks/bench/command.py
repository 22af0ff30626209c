# SPDX-License-Identifier: Apache-2.0
"""Choose the measurements, write each one as soon as it is made, and print tables."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.bench import gdn_layer, mamba2_layer, model, plots, rows, servers, timing
from benchmarks.bench.rows import COLD, GREEN, HOT, Row, find, number
from sglang_bcg_fixes import flags
from sglang_bcg_fixes.lab.verify import command as verify
from sglang_bcg_fixes.lab.verify import environment
from sglang_bcg_fixes.lab.verify.arms import EAGER, REFERENCE, STOCK
from sglang_bcg_fixes.lab.verify.servers import ended_by_signals
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source.tree import Source

PROGRAM = "python -m benchmarks.bench"
TOKENS, SEQUENCES, ROUNDS = (256, 1024, 4096, 8192, 16384), (1, 4, 16, 64), 9
FEW_TOKENS, FEW_SEQUENCES = (256, 4096), (1, 16)
# by kind of layer: its shapes, and what measures them
LAYERS = (gdn_layer, mamba2_layer)
LAYER_MODULES = {layers: layers.__name__ for layers in LAYERS}


class BenchError(Exception):
    """Nothing could be measured; the message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except (BenchError, verify.VerifyError, environment.EnvironmentMissing, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog=PROGRAM,
        description="On a GPU: what breaks and graphs cost, in a layer and in a server. Exit status: 0 all that counts "
        "is right and measured, 1 something is not, 2 it could not be run.",
    )
    command.add_argument("--layer", action="store_true", help="only the linear attention layers")
    command.add_argument("--servers", action="store_true", help="only the servers")
    command.add_argument(
        "--flashinfer",
        action="store_true",
        help="layers on FlashInfer's kernel too; it may compile for ten minutes",
    )
    command.add_argument("--quick", action="store_true", help="few sizes and few rounds")
    shapes = f"default: %(default)s; also {', '.join((*gdn_layer.BY_NAME, *mamba2_layer.SHAPES))}"
    command.add_argument("--shapes", default=",".join(gdn_layer.BY_DEFAULT), metavar="A,B", help=shapes)
    models = "of the servers (default: %(default)s)"
    command.add_argument("--model", default=model.NAME, choices=list(servers.CASES), help=models)
    arms = f"of the servers (default: %(default)s; also {servers.KERNEL_TRITON})"
    command.add_argument("--arms", default=",".join(servers.BY_DEFAULT), metavar="A,B", help=arms)
    command.add_argument("--rounds", type=int, metavar="N", help=f"default: {ROUNDS}; at least {timing.LEAST_ROUNDS}")
    command.add_argument(
        "--jsonl",
        type=pathlib.Path,
        default=pathlib.Path("bench.jsonl"),
        metavar="FILE",
        help="write everything there (default: %(default)s)",
    )
    command.add_argument("--plots", type=pathlib.Path, metavar="DIR", help="default: where the JSONL is")
    command.add_argument("--plot-only", type=pathlib.Path, metavar="FILE", help="print and plot an earlier JSONL")
    command.add_argument("--python", default=sys.executable, metavar="PATH", help="of an environment with SGLang")
    command.add_argument("--release", metavar="V", help="refuse unless the installed SGLang is this release")
    return command


def run(options: argparse.Namespace) -> int:
    """Run the benchmark; exit status 0: everything that counts is right and measured, 1: something is not."""
    if options.plot_only:
        show(options.plot_only, options.plots)
        return 0
    shapes, arms, rounds = choose(options)
    here = environment.look(options.python)
    source = verify.installed_source(options, here, PROGRAM)
    if not here["gpu"]:
        raise BenchError(f"there is nothing to measure without a GPU: {here['why']}. Run this where SGLang serves")
    file = rows.File(options.jsonl, {**environment.header(here), "rounds": rounds})
    complete = True
    with ended_by_signals():
        for name, part in parts(options, here, source, shapes, arms, rounds):
            say(f"== {name}")
            try:
                for found in part():
                    file.add(found)
            except KeyboardInterrupt:
                say("interrupted; this is what there is so far")
                complete = False
                break
            except Exception as error:
                # the other parts do not depend on this one
                say(f"{name} failed: {type(error).__name__}: {error}")
                complete = False
    every = show(options.jsonl, options.plots)
    wrong = [row for row in every if row.verdict != GREEN and row.arm != servers.ARMS[STOCK]]
    return 0 if complete and every and not wrong else 1


def choose(options: argparse.Namespace) -> tuple[list[str], list[str], int]:
    shapes, arms = (
        names_of(kind, words, known)
        for kind, words, known in (
            ("shape", options.shapes, [name for layers in LAYERS for name in layers.SHAPES]),
            ("arm", options.arms, list(servers.ARMS)),
        )
    )
    kernel, forms = servers.INSIDE[options.model]
    if servers.KERNEL_TRITON in arms and servers.KERNEL_TRITON not in forms:
        others = [name for name, (_, each) in servers.INSIDE.items() if servers.KERNEL_TRITON in each]
        raise BenchError(
            f"--arms {servers.KERNEL_TRITON}: {kernel.op}, which --model {options.model} has, is measured in one form, "
            f"that of {servers.KERNEL}; leave that arm out, or choose one of {', '.join(others)} with --model"
        )
    rounds = options.rounds or (timing.LEAST_ROUNDS if options.quick else ROUNDS)
    if rounds < timing.LEAST_ROUNDS:
        raise BenchError(f"--rounds {rounds}: at least {timing.LEAST_ROUNDS}, or the spread says nothing")
    return shapes, arms, rounds


def names_of(kind: str, words: str, known: Sequence[str]) -> list[str]:
    chosen = words.split(",")
    for name in chosen:
        if name not in known:
            raise BenchError(f"no {kind} '{name}'{flags.nearest(name, known)}; there are {', '.join(known)}")
    return chosen


Part = Callable[[], Iterator[list[Row]]]


def parts(
    options: argparse.Namespace,
    here: dict[str, Any],
    source: Source,
    shapes: Sequence[str],
    arms: Sequence[str],
    rounds: int,
) -> Iterator[tuple[str, Part]]:
    both = options.layer == options.servers
    if options.layer or both:
        for name in shapes:
            tokens, sequences = (FEW_TOKENS, FEW_SEQUENCES) if options.quick else (TOKENS, SEQUENCES)
            job = {"shape": name, "tokens": tokens, "sequences": sequences, "rounds": rounds}
            job["flashinfer"] = options.flashinfer
            yield f"layer, {name}", lambda job=job: layer_rows(options.python, source, job)  # type: ignore[misc]
    if options.servers or both:
        yield "servers", lambda: server_rows(options, source, here["free_gib"], rounds, arms)


def layer_rows(python: str, source: Source, job: dict[str, Any]) -> Iterator[list[Row]]:
    """Measure layers in a process of their own, which a broken kernel may take down."""
    layers = next(layers for layers in LAYERS if job["shape"] in layers.SHAPES)
    absent = layers.missing(source)
    if absent:
        raise gdn_layer.LayerBenchError(f"SGLang {source.version} has no {', '.join(absent)}")
    command = [python, "-m", LAYER_MODULES[layers], json.dumps(job)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=flags.environment_without_ours()) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                yield [Row(**row) for row in json.loads(line)]
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise gdn_layer.LayerBenchError(f"its process ended with exit status {process.returncode}")


def server_rows(
    options: argparse.Namespace, source: Source, free_gib: float, rounds: int, arms: Sequence[str]
) -> Iterator[list[Row]]:
    needed = servers.gib_of(options.model) * len({*arms, REFERENCE})
    if free_gib < needed:
        raise BenchError(
            f"{free_gib} GiB are free on the GPU, and the servers need {needed} together: stop what runs "
            f"there, or choose fewer with --arms"
        )
    with tempfile.TemporaryDirectory(prefix="bcg-bench-") as made:
        folder, case = pathlib.Path(made), servers.CASES[options.model]
        if not case.applies_to(source):
            raise BenchError(
                f"--model {options.model}: SGLang {source.version} does not serve it with prefill graphs; name "
                f"another, or leave the option out"
            )
        servers.make_model(options.python, folder, case)
        yield from servers.measure(options.python, registry.discover(), source, folder, rounds, say, case, arms)


def show(file: pathlib.Path, plots_folder: pathlib.Path | None) -> list[Row]:
    found = rows.read(file)[1]
    print("\n".join(report(found)))
    try:
        drawn = plots.draw(found, plots_folder or file.parent, file.stem)
        print("\n".join(str(each) for each in (file, *drawn)))
    except ImportError:
        print(f"{file}\n{plots.HOW_TO_GET_THEM} {file}")
    return found


def report(found: Sequence[Row]) -> Iterator[str]:
    layers = [row for row in found if row.part == gdn_layer.PART]
    if layers:
        yield from layer_table(layers)
    asked = [row for row in found if row.part == servers.PART]
    if asked:
        yield ""
        yield from server_table(asked)
    red = {(row.arm, row.why): row for row in found if row.verdict != GREEN}
    for (arm, why), row in red.items():
        yield f"red, and so without times: {arm}, {row.shape}, {row.tokens} tokens in {row.sequences}: {why}"


def layer_table(layers: Sequence[Row]) -> Iterator[str]:
    """Table of microseconds per layer; "faster" is the eager wall time over the captured one."""
    head = (
        *(
            "shape",
            "tokens",
            "sequences",
            "kernels",
            "eager wall",
            "host",
            "captured wall",
            "device",
            "device, cold L2",
        ),
        *("floor", "captured is faster"),
    )
    lines = []
    for case in rows.cases(layers):
        names = dict.fromkeys(row.arm.rpartition(", ")[0] for row in layers)
        for name in names:
            mine = [row for row in layers if row.arm.startswith(f"{name}, ")]
            eager, captured = f"{name}, {gdn_layer.EAGER}", f"{name}, {gdn_layer.CAPTURED}"
            wall, replay = (find(mine, arm, gdn_layer.WALL, case, HOT) for arm in (eager, captured))
            times = [
                wall,
                find(mine, eager, gdn_layer.HOST, case, HOT),
                replay,
                find(mine, captured, gdn_layer.DEVICE, case, HOT),
                find(mine, captured, gdn_layer.DEVICE, case, COLD),
            ]
            floor = next(each.details["floor_us"] for each in layers if each.case == case)
            shown = [number(row.median if row else None) for row in times]
            lines.append(
                [*map(str, case), name, *shown, number(floor, ".1f"), number(rows.speed_up(wall, replay), ".1f")]
            )
    yield from rows.table(head, lines)


def server_table(asked: Sequence[Row]) -> Iterator[str]:
    head = ("measured", "tokens", "sequences", "server", "median", "p20", "p80", "unit", "faster than without")
    lines = []
    for row in asked:
        base = find(asked, servers.ARMS[EAGER], row.measured, row.case)
        faster = None if row is base else rows.speed_up(base, row)
        times = [number(each, ".2f") for each in (row.median, row.p20, row.p80)]
        lines.append(
            [row.measured, str(row.tokens), str(row.sequences), row.arm, *times, row.unit, number(faster, ".2f")]
        )
    yield from rows.table(head, lines)
    captures = {row.arm: row.details["capture"] for row in asked if row.details.get("capture")}
    for arm, capture in captures.items():
        yield f"{arm}: prefill graphs captured in {capture['seconds']:.1f} s"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
