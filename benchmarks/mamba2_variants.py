# SPDX-License-Identifier: Apache-2.0
"""Mamba2's Triton form and sources of the CUDA form beside one another on a GPU: times and errors.

    python benchmarks/mamba2_variants.py cuda=csrc/mamba2_extend/mamba2_extend.cuh --json mamba2_variants.json

Every source runs under this checkout's Python, so its structs must be the same. Needs no SGLang. A variant that is off
from the fp32 reference, whose replay differs from its eager run, or that the compiler has made slow, is red. Bits that
differ from the first source's are told, and not red.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import sys
from typing import Any
from unittest import mock

import torch

from sglang_bcg_fixes.kernels.mamba2_extend import cuda
from sglang_bcg_fixes.kernels.mamba2_extend.program import PROGRAM
from sglang_bcg_fixes.lab.verify import environment

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import gdn_tuning, gdn_variants
from benchmarks.bench import gdn_layer, mamba2_layer, timing
from benchmarks.bench.rows import GREEN, RED

SIZES = ((256, 1), (1024, 1), (4096, 1), (8192, 1), (16384, 1), (8192, 4), (8192, 8), (256, 8), (8192, 64))
ROUNDS = 9
# many layers have the times of a few
LAYERS = 8


@dataclasses.dataclass(frozen=True)
class Variant:
    """The kernels of a source, or none for the Triton form, and what the compiler says of their speed."""

    digest: str = ""
    kernels: cuda.Kernels | None = None
    slow: tuple[str, ...] = ()

    @property
    def form(self) -> str:
        return gdn_layer.CUDA if self.kernels else gdn_layer.TRITON

    def chosen(self) -> contextlib.AbstractContextManager[Any]:
        return mock.patch.object(cuda, "on_device", lambda device: self.kernels)


def variant_of(header: pathlib.Path) -> Variant:
    found = gdn_variants.compiled(header, PROGRAM)
    return Variant(found.digest, found.taken_by(cuda), tuple(found.slow))


def case_of(
    variants: dict[str, Variant],
    name: str,
    shape: mamba2_layer.Shape,
    lengths: list[int],
    device: gdn_layer.Device,
    rounds: int,
    kind: str = "bfloat16",
) -> list[dict[str, Any]]:
    problem = mamba2_layer.Problem(shape, lengths, device.name, kind)
    wanted = problem.wanted()
    arms, rows, first = dict[str, gdn_tuning.Arm](), list[dict[str, Any]](), dict[str, Any]()
    for each, variant in variants.items():
        with variant.chosen():
            calls = mamba2_layer.calls_of_ours(problem, variant.form)
            one = gdn_variants.judged(calls, variant.slow, problem, wanted, device)
        row: dict[str, Any] = {"shape": name, "tokens": sum(lengths), "sequences": len(lengths), "variant": each}
        row |= {"verdict": RED if one.why else GREEN, "why": one.why}
        row["bits of the first"] = gdn_variants.same(one.results, first.setdefault(variant.form, one.results))
        row["errors"] = {what: round(error, 5) for what, error in one.errors.items()}
        rows.append(row)
        if not one.why:
            arms[each] = one.arm
    samples = timing.in_turn(
        {each: functools.partial(arm.timed, device, problem.layers) for each, arm in arms.items()},
        rounds,
        gdn_variants.WARM_UP,
    )
    for row in rows:
        if row["variant"] in samples:
            row |= {what: spread.median for what, spread in timing.spreads(samples[row["variant"]]).items()}
        gdn_tuning.say(" ".join(f"{what} {value}" for what, value in row.items() if value != ""))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", nargs="+", metavar="NAME=HEADER")
    parser.add_argument("--shapes", default="nemotron_h_8b,falcon_h1_7b,granite_4_h_small", metavar="A,B")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="only the first so many of the sizes")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"at least {timing.LEAST_ROUNDS}")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("mamba2_variants.json"))
    options = parser.parse_args()
    named = [each.partition("=") for each in options.sources]
    if not all(header for _, _, header in named):
        parser.error("each source is NAME=HEADER")
    variants = {"triton": Variant()} | {name: variant_of(pathlib.Path(header)) for name, _, header in named}
    device, rows = gdn_layer.Cuda(), list[dict[str, Any]]()
    content: dict[str, Any] = {**environment.header(environment.here()), "rounds": options.rounds}
    content["variants"] = {name: {"sha256": each.digest, "slow code": each.slow} for name, each in variants.items()}
    content["rows"] = rows
    with torch.no_grad():
        for name in options.shapes.split(","):
            shape = dataclasses.replace(mamba2_layer.SHAPES[name], layers=LAYERS)
            for tokens, sequences in SIZES[: options.sizes]:
                rows += case_of(variants, name, shape, [tokens // sequences] * sequences, device, options.rounds)
                device.release()
                # write early, so an interrupted run leaves results
                options.json.write_text(gdn_tuning.with_a_line_for_each_row(content))
    return 0 if all(row["verdict"] == GREEN for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
