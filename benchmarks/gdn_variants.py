# SPDX-License-Identifier: Apache-2.0
"""Several sources of the CUDA form beside one another on a GPU: times, errors, and whether they have the same bits.

    git worktree add ../before main; SOURCE=csrc/gdn_extend/gdn_extend.cuh
    python benchmarks/gdn_variants.py before=../before/$SOURCE now=$SOURCE --json gdn_variants.json
    python benchmarks/gdn_variants.py now=$SOURCE --uneven --json gdn_variants-uneven.json

Every source runs under this checkout's Python, so its structs must be the same; how `prepare` is launched is read from
the source. Needs no SGLang. A variant that is off from the fp32 reference, whose replay differs from its eager run, or
that the compiler has made slow, is red. Bits that differ from the first variant's are told, and not red.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from sglang_bcg_fixes.kernels.cuda import driver, nvrtc, program
from sglang_bcg_fixes.kernels.gdn_extend import cuda
from sglang_bcg_fixes.kernels.gdn_extend.program import PROGRAM
from sglang_bcg_fixes.lab.verify import environment

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import gdn_tuning
from benchmarks.bench import gdn_layer, timing
from benchmarks.bench.rows import GREEN, RED
from tests.kernels import accuracy, gdn_reference

ON_ONE_GPU = ((256, 1), (1024, 1), (4096, 1), (8192, 1), (16384, 1), (8192, 8), (16384, 16), (256, 64), (4096, 16))
CASES = [("qwen3_next", *case) for case in ON_ONE_GPU]
CASES += [(name, 8192, 1) for name in gdn_layer.BY_NAME if "_tp" in name]
# with 32 heads on 132 multiprocessors, the last blocks of those between have little to do
BALANCED, BETWEEN = (4, 8, 16), (5, 9, 10, 11, 12)
UNEVEN = [("qwen3_next", 1024 * sequences, sequences) for sequences in sorted(BALANCED + BETWEEN)]
ROUNDS, WARM_UP = 9, 2


@dataclasses.dataclass(frozen=True)
class Variant:
    """The kernels of one source, and what the compiler says against them."""

    digest: str
    kernels: cuda.Kernels
    slow: list[str]
    blocks_of_multiprocessor: int = cuda.BLOCKS_OF_MULTIPROCESSOR


def constants(header: str) -> dict[str, int]:
    """Evaluate a header's integers, each of which may name those before it."""
    found: dict[str, int] = {}
    for name, expression in re.findall(r"^constexpr int (k\w+) = ([^;]*);", header, re.MULTILINE):
        found[name] = eval(expression.replace("/", "//"), {"__builtins__": {}}, found)
    return found


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A header as one text, its kernels on the first device, and what the compiler says of their speed."""

    text: str
    loaded: program.Loaded
    slow: list[str]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def taken_by(self, form: Any) -> Any:
        """Let a form's module take the kernels for its own."""
        with mock.patch.object(program, "load", lambda *_: self.loaded):
            return form.on_device.__wrapped__(0)


def compiled(header: pathlib.Path, of: program.Program) -> Compiled:
    text = program.text_of(header)
    options = ["--gpu-architecture=sm_90a", *nvrtc.OPTIONS, nvrtc.WARN_OF_SPILLS]
    compiler = nvrtc.compiler(int(str(torch.version.cuda).split(".")[0]))
    cubin, log = compiler.cubin(text.encode(), of.header, options)
    # makes torch's context current
    torch.cuda.synchronize()
    functions = driver.load(cubin, of.kernels)
    loaded = program.Loaded(functions, str(header), lambda: torch.cuda.current_stream().cuda_stream)
    return Compiled(text, loaded, nvrtc.slow_code(log))


def variant_of(header: pathlib.Path) -> Variant:
    found = compiled(header, PROGRAM)
    numbers = constants(found.text)
    with mock.patch.object(cuda, "PREPARE_SHARED_BYTES", numbers["kPrepareSharedBytes"]):
        kernels = found.taken_by(cuda)
    return Variant(found.digest, kernels, found.slow, numbers["kBlocksOfMultiprocessor"])


@dataclasses.dataclass
class Judged:
    """A variant on one problem: its results, what is wrong with them, and its graphs."""

    results: list[torch.Tensor]
    errors: dict[str, float]
    why: str
    arm: gdn_tuning.Arm


def judged(
    call_of: Callable[[int], Any], slow: Sequence[str], problem: Any, wanted: accuracy.Results, device: gdn_layer.Device
) -> Judged:
    """Judge the calls of every layer of a problem, which may also be Mamba2's; `slow` is what the compiler says."""
    arm = gdn_tuning.build("", call_of, problem, device)
    replayed = gdn_tuning.results(arm, problem, device)
    errors = problem.errors(wanted)
    problem.restore()
    for call in arm.calls:
        call.launch()
    device.synchronize()
    eager = [problem.output, problem.conv[-1, 1:], problem.state[-1, 1:]]
    # the reference is no kernel of SGLang's: the narrower tolerance counts
    why = accuracy.why_wrong(errors, dict.fromkeys(errors, accuracy.TOLERANCE))
    if not why and not same(replayed, eager):
        why = "the replay differs from its own eager run"
    return Judged(replayed, errors, why or "; ".join(slow), arm)


def judged_variant(
    variant: Variant, problem: gdn_layer.Problem, wanted: accuracy.Results, device: gdn_layer.Device
) -> Judged:
    with (
        mock.patch.object(cuda, "on_device", lambda device: variant.kernels),
        mock.patch.object(cuda, "BLOCKS_OF_MULTIPROCESSOR", variant.blocks_of_multiprocessor),
    ):
        return judged(gdn_layer.calls_of_ours(problem, gdn_layer.CUDA), variant.slow, problem, wanted, device)


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def case_of(
    variants: dict[str, Variant],
    name: str,
    shape: gdn_layer.Shape,
    lengths: list[int],
    device: gdn_layer.Device,
    rounds: int,
) -> list[dict[str, Any]]:
    problem = gdn_layer.Problem(shape, lengths, device.name)
    wanted = gdn_reference.recurrent(problem.inputs)
    found = {each: judged_variant(variant, problem, wanted, device) for each, variant in variants.items()}
    first = next(iter(found.values()))
    right = {
        each: functools.partial(one.arm.timed, device, problem.layers) for each, one in found.items() if not one.why
    }
    samples = timing.in_turn(right, rounds, WARM_UP)
    rows = []
    for each, one in found.items():
        row: dict[str, Any] = {"shape": name, "tokens": sum(lengths), "sequences": len(lengths), "variant": each}
        row |= {"verdict": RED if one.why else GREEN, "why": one.why}
        row |= {"bits of the first": same(one.results, first.results)}
        row["errors"] = {what: round(error, 5) for what, error in one.errors.items()}
        if each in samples:
            row |= {what: spread.median for what, spread in timing.spreads(samples[each]).items()}
        rows.append(row)
        gdn_tuning.say(" ".join(f"{what} {value}" for what, value in row.items() if value != ""))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", nargs="+", metavar="NAME=HEADER")
    parser.add_argument("--uneven", action="store_true", help="4 to 16 sequences of 1024 tokens, instead of the usual")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"at least {timing.LEAST_ROUNDS}")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("gdn_variants.json"))
    options = parser.parse_args()
    named = [each.partition("=") for each in options.sources]
    if not all(header for _, _, header in named):
        parser.error("each source is NAME=HEADER")
    variants = {name: variant_of(pathlib.Path(header)) for name, _, header in named}
    device, rows = gdn_layer.Cuda(), list[dict[str, Any]]()
    content: dict[str, Any] = {**environment.header(environment.here()), "rounds": options.rounds}
    content["variants"] = {name: {"sha256": each.digest, "slow code": each.slow} for name, each in variants.items()}
    content["rows"] = rows
    with torch.no_grad():
        for name, tokens, sequences in UNEVEN if options.uneven else CASES:
            lengths = [tokens // sequences] * sequences
            rows += case_of(variants, name, gdn_layer.SHAPES[name], lengths, device, options.rounds)
            device.release()
            # write early, so an interrupted run leaves results
            options.json.write_text(gdn_tuning.with_a_line_for_each_row(content))
    return 0 if all(row["verdict"] == GREEN for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
