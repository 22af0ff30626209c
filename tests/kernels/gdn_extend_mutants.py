"""Wrong kernels, each by one line, and whether the cases notice; run with the names of some of them."""

from __future__ import annotations

import functools
import pathlib
import sys
import tempfile
import types
from typing import Any

import torch

from sglang_bcg_fixes.kernels.gdn_extend import Shape, cases, metadata
from sglang_bcg_fixes.kernels.gdn_extend import triton as form

SHAPE = Shape(key_heads=1, value_heads=2, keys=16, values=16, width=4)
# few programs, so that each has several items of work
TUNING = form.Tuning(prepare_programs=3, advance_programs=2)
CHUNK = 16
AROUND = cases.Surroundings(padding=5, more_tokens=9, max_sequences=8, columns_between=3)
EXACT = 0.001


def step(lengths: list[int], **options: Any) -> cases.Step:
    return cases.draw(SHAPE, lengths, device="cpu", **{"dtype": torch.float16, **options})


MIXED = functools.partial(step, [5, 0, 18, 2], fresh=[2], gone=[0])
LONG = functools.partial(step, [40])
TRACKED = functools.partial(step, [20, 16, 16], tracked={0: 19, 1: 16})
BIASED = functools.partial(step, [17], bias=True)
FAR = functools.partial(step, [20], gates="far below")

# one line each, the case that has to notice, and its chunk
MUTANTS = {
    "reads a window without a prefix": (MIXED, 16, "mask=exists & has_window", "mask=exists"),
    "forgets the window": (
        MIXED,
        16,
        "if number < WIDTH - 1 and first_row == start:",
        "if number < 0 and first_row == start:",
    ),
    "looks at a neighbour": (
        MIXED,
        16,
        "mask=((position >= start) & (position < end))",
        "mask=((position >= 0) & (position < end))",
    ),
    "leaves the window as it was": (
        MIXED,
        16,
        "tl.store(conv + slot * conv_slot + in_slot, window, mask=exists)",
        "pass",
    ),
    "takes the window's old end": (MIXED, 16, "moved = WIDTH - 1 + position - start", "moved = past"),
    "keeps lengths of the keys": (
        LONG,
        16,
        "(scale / tl.sqrt(tl.sum(mixed[number] * mixed[number], 1) + NORM_EPSILON))",
        "(scale + 0 * tl.sum(mixed[number], 1))",
    ),
    "forgets the bias": (BIASED, 16, "mixed += tl.load(bias + channels).to(tl.float32)[None, :]", "pass"),
    "divides by what is later": (
        FAR,
        16,
        'tl.where(not_earlier, gate[:, None] - gate[None, :], -float("inf"))',
        "gate[:, None] - gate[None, :]",
    ),
    "lets gates run away": (
        FAR,
        16,
        "gate = tl.maximum(gate, LEAST_GATE, propagate_nan=tl.PropagateNan.ALL)",
        "gate = gate * 1e37",
    ),
    "stops the substitution early": (LONG, 16, "tl.static_range(row):", "tl.static_range(min(row, 3)):"),
    "merges half of the blocks": (LONG, 64, "if CHUNK >= 64:", "if CHUNK >= 128:"),
    "merges with the wrong sign": (LONG, 64, "return inverse - tl.dot", "return inverse + tl.dot"),
    "forgets the gain of columns": (
        LONG,
        16,
        "inverse *= tl.load(own_gates + (member * 2 + 1) * CHUNK + in_chunk)[None, :]",
        "pass",
    ),
    "leaves the tail": (MIXED, 16, "(real_chunks + tail_chunks) * VALUE_HEADS", "real_chunks * VALUE_HEADS"),
    "writes where there is no slot": (MIXED, 16, "slot = tl.full([], -1, tl.int64)", "slot = tl.full([], 0, tl.int64)"),
    "counts chunks past the end": (
        MIXED,
        16,
        "to_end = tl.where(real, tl.exp2(last - gate), 0.0)",
        "to_end = tl.exp2(last - gate)",
    ),
    "forgets to forget": (LONG, 16, "acc=S * tl.exp2(last)", "acc=S"),
    "leaves the state as it was": (LONG, 16, "        tl.store(of_state, S)\n", "        pass\n"),
    "adds instead of correcting": (LONG, 16, "* -from_start[None, :]", "* from_start[None, :]"),
    "forgets decays in the output": (
        LONG,
        16,
        "o = tl.dot(rounded, tl.trans(q)) * from_start[None, :]",
        "o = tl.dot(rounded, tl.trans(q))",
    ),
    "leaves no checkpoint": (
        TRACKED,
        16,
        "if TRACK and (piece == 0) & (track_slot >= 0):",
        "if TRACK and (piece == 2):",
    ),
    "leaves the checkpoint at the end": (
        TRACKED,
        16,
        "if TRACK and (piece == 0) & (track_slot >= 0):",
        "if TRACK and (piece == 1) & (track_slot >= 0):",
    ),
    "leaves no window with the checkpoint": (
        TRACKED,
        16,
        "tl.store(conv + track_slot * conv_slot + in_slot, window, mask=exists)",
        "pass",
    ),
    "tables: forgets the rest of a chunk": (MIXED, 16, "tl.cdiv(length, CHUNK)", "(length // CHUNK)"),
    "tables: takes slots for sequences": (
        MIXED,
        16,
        "tl.where(of_row, slot[None, :], 0)",
        "tl.where(of_row, number[None, :], 0)",
    ),
    "tables: has a window always": (MIXED, 16, "of_row & (prefix > 0)[None, :]", "of_row"),
    "tables: advances what has no slot": (MIXED, 16, "work = tl.where(slot >= 0, length, 0)", "work = length"),
    "tables: counts a tie twice": (TRACKED, 16, "(number[None, :] < number[:, None])", "(number[None, :] > 99)"),
    "tables: counts tokens of some": (
        MIXED,
        16,
        "tl.store(counts + 1, tl.sum(length, 0))",
        "tl.store(counts + 1, tl.max(length, 0))",
    ),
    "tables: forgets the checkpoint's unit": (TRACKED, 16, "// track_unit * track_unit", ""),
}


def mutant(name: str, folder: pathlib.Path) -> tuple[Any, Any]:
    _, _, old, new = MUTANTS[name]
    changes_tables = name.startswith("tables: ")
    original = metadata if changes_tables else form
    text = pathlib.Path(str(original.__file__)).read_text()
    assert old in text, name
    # triton reads the source of its kernels from a file
    file = folder / "mutant.py"
    file.write_text(text.replace(old, new))
    # dataclasses look their module up
    module = sys.modules["mutant"] = types.ModuleType("mutant")
    exec(compile(file.read_text(), str(file), "exec"), vars(module))
    return (form, module) if changes_tables else (module, metadata)


def is_noticed(name: str, modules: tuple[Any, Any]) -> bool:
    case, chunk, _, _ = MUTANTS[name]
    drawn = case()
    try:
        launched = cases.Launched(drawn, TUNING, AROUND, chunk, modules)
        return cases.faults(drawn, launched.run(), chunk, EXACT) != []
    except Exception:
        # the interpreter refuses what is not Triton any more
        return True


def main() -> None:
    from sglang_on_cpu import interpreter

    interpreter.install()
    for name in sys.argv[1:]:
        # a file for each: python keeps the lines of one that it has read
        with tempfile.TemporaryDirectory() as folder:
            found = is_noticed(name, mutant(name, pathlib.Path(folder)))
        print(name, found, sep="\t", flush=True)


if __name__ == "__main__":
    main()
