# SPDX-License-Identifier: Apache-2.0
"""Choose the measurements, write each one as soon as it is made, and print tables."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.bench import gdn_layer, mamba2_layer, plots, rows, timing
from benchmarks.bench.rows import COLD, GREEN, HOT, Row, find, number
from sglang_bcg_fixes import flags
from sglang_bcg_fixes.lab.verify import command as verify
from sglang_bcg_fixes.lab.verify import environment
from sglang_bcg_fixes.lab.verify.servers import ended_by_signals
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
        description="On a GPU: what breaks and graphs cost in a linear attention layer. Exit status: 0 all is right "
        "and measured, 1 something is not, 2 it could not be run.",
    )
    command.add_argument(
        "--flashinfer",
        action="store_true",
        help="FlashInfer's kernel too; it may compile for ten minutes",
    )
    command.add_argument("--quick", action="store_true", help="few sizes and few rounds")
    shapes = f"default: %(default)s; also {', '.join((*gdn_layer.BY_NAME, *mamba2_layer.SHAPES))}"
    command.add_argument("--shapes", default=",".join(gdn_layer.BY_DEFAULT), metavar="A,B", help=shapes)
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
    """Run the benchmark; exit status 0: everything is right and measured, 1: something is not."""
    if options.plot_only:
        show(options.plot_only, options.plots)
        return 0
    shapes, rounds = choose(options)
    here = environment.look(options.python)
    source = verify.installed_source(options, here, PROGRAM)
    if not here["gpu"]:
        raise BenchError(f"there is nothing to measure without a GPU: {here['why']}. Run this where SGLang serves")
    file = rows.File(options.jsonl, {**environment.header(here), "rounds": rounds})
    complete = True
    with ended_by_signals():
        for name in shapes:
            tokens, sequences = (FEW_TOKENS, FEW_SEQUENCES) if options.quick else (TOKENS, SEQUENCES)
            job = {"shape": name, "tokens": tokens, "sequences": sequences, "rounds": rounds}
            job["flashinfer"] = options.flashinfer
            say(f"== {name}")
            try:
                for found in layer_rows(options.python, source, job):
                    file.add(found)
            except KeyboardInterrupt:
                say("interrupted; this is what there is so far")
                complete = False
                break
            except Exception as error:
                # the other shapes do not depend on this one
                say(f"{name} failed: {type(error).__name__}: {error}")
                complete = False
    every = show(options.jsonl, options.plots)
    wrong = [row for row in every if row.verdict != GREEN]
    return 0 if complete and every and not wrong else 1


def choose(options: argparse.Namespace) -> tuple[list[str], int]:
    shapes, known = options.shapes.split(","), [name for layers in LAYERS for name in layers.SHAPES]
    for name in shapes:
        if name not in known:
            raise BenchError(f"no shape '{name}'{flags.nearest(name, known)}; there are {', '.join(known)}")
    rounds = options.rounds or (timing.LEAST_ROUNDS if options.quick else ROUNDS)
    if rounds < timing.LEAST_ROUNDS:
        raise BenchError(f"--rounds {rounds}: at least {timing.LEAST_ROUNDS}, or the spread says nothing")
    return shapes, rounds


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


def show(file: pathlib.Path, plots_folder: pathlib.Path | None) -> list[Row]:
    # older files have rows of servers, too
    found = [row for row in rows.read(file)[1] if row.part == gdn_layer.PART]
    print("\n".join(report(found)))
    try:
        drawn = plots.draw(found, plots_folder or file.parent, file.stem)
        print("\n".join(str(each) for each in (file, *drawn)))
    except ImportError:
        print(f"{file}\n{plots.HOW_TO_GET_THEM} {file}")
    return found


def report(found: Sequence[Row]) -> Iterator[str]:
    yield from layer_table(found)
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


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
