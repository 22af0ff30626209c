# SPDX-License-Identifier: Apache-2.0
"""Random steps of a lightning layer: the form that captures SGLang's kernels, beside those kernels run eagerly.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m tests.releases.lightning_steps [MUTANT]

The last line is RESULT and JSON: of each step the names of results that differ by a bit, of which there should be none.
Rows behind the last token are NaN, and so are states that no sequence may read.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
import types
from typing import Any

from cpu_sglang import one_batch

HEADS, HEAD, SLOTS = 2, 128, 9
MOST_TOKENS, MOST_SEQUENCES, UNIT = 160, 4, 64
# of each sequence: tokens, tokens of its prefix, and its mamba_track_seqlen, below 0 where no checkpoint is wanted
STEPS = {
    "one, alone": (96, [(70, 0, 70)]),
    "none is kept, where one was": (96, [(70, 0, -70)]),
    "one that fills its rows": (64, [(64, 0, 64)]),
    "one behind a prefix": (160, [(150, 64, 140)]),
    "several": (160, [(3, 0, -3), (66, 64, 130), (1, 7, -8), (64, 128, 192)]),
    "several, of which one is not kept": (160, [(66, 64, -130), (64, 128, 192)]),
    "as many as there may be, no row too many": (8, [(5, 0, -5), (1, 1, -2), (1, 0, -1), (1, 9, -10)]),
    "fewer rows than sequences": (3, [(2, 0, -2)]),
    "one has no tokens": (40, [(33, 0, -33), (0, 0, -1), (2, 0, -2)]),
}
MUTANTS = {
    "none": ("", ""),
    "as many sequences as rows": ("if rows <= sequences:", "if rows < 0:"),
    "one sequence alone": ("LEAST_SEQUENCES = 2", "LEAST_SEQUENCES = 1"),
    "leaves the tail": ("self.padding)", "self.padding).fill_(False)"),
    "keeps old slots": ("        self.slots.fill_(-1)\n", ""),
    "reads fresh slots": ("prefixes > 0", "prefixes >= 0"),
    "writes states of nobody": ("torch.where(lengths > 0, slots, -1)", "slots"),
    "keeps old checkpoints": ("        self.track_slots.fill_(-1)\n", ""),
    "checkpoints at any token": ("covered // tracking.unit * tracking.unit", "covered"),
    "checkpoints for everybody": ("torch.where(tracking.mask, tracking.slots, -1)", "tracking.slots"),
    "counts the prefix": ("(tracking.lengths - prefixes)", "tracking.lengths"),
}


def run(form: Any, kind: Any, kept: Any, most_sequences: int) -> dict[str, list[str]]:
    import torch
    from sglang.srt.layers.attention.linear import lightning_backend

    from sglang_bcg_fixes.kernels.linear_extend.metadata import Tracking

    tracks = form.can_keep_checkpoints()
    tables = form.Tables(MOST_TOKENS, most_sequences, torch.device("cpu"))
    decay = torch.tensor([0.5, 0.01])
    wrong = {}
    for seed, (name, (rows, sequences)) in enumerate(STEPS.items()):
        if len(sequences) > most_sequences:
            continue
        generator = torch.Generator().manual_seed(seed)

        def random(*sizes: int) -> Any:
            return torch.randn(*sizes, generator=generator)  # noqa: B023

        lengths, prefixes, ends = (torch.tensor(each) for each in zip(*sequences, strict=True))
        slots = torch.randperm(4, generator=generator)[: len(sequences)] + 1
        kept_in = slots + 4
        tokens = int(lengths.sum())
        projected = random(rows, 3 * HEADS * HEAD).to(kind)
        projected[tokens:] = float("nan")
        q, k, v = (each.view(rows, HEADS, HEAD) for each in projected.chunk(3, 1))
        state = random(SLOTS, HEADS, HEAD, HEAD).to(kept)
        state[[0, 5, 6, 7, 8]] = float("nan")
        state[slots[prefixes == 0]] = float("nan")
        wanted_state = state.clone()
        wanted = torch.zeros(rows, HEADS, HEAD, dtype=kind)

        def eagerly(start: int, length: int, prefix: int, slot: int, pool: Any) -> Any:
            """One sequence beside an empty one, as in a batch: alone, another launch is chosen."""
            bounds = torch.tensor([0, length, length], dtype=torch.int32)
            metadata = lightning_backend.SegLaMeta(
                batch_size=2,
                max_q_length=None,
                q_offsets=bounds,
                s_offsets=torch.tensor([slot, -1]),
                q_lengths=bounds.diff(),
                s_scales=torch.tensor([prefix > 0, False]),
            )
            # with so few rows it would be taken for a step of decode
            given = (torch.nn.functional.pad(each[start : start + length], (0, 0, 0, 0, 0, 3)) for each in (q, k, v))  # noqa: B023
            return lightning_backend.seg_la_fwd(*given, pool, decay, metadata, softmax_scale=0.1)[:length]

        start = 0
        for (length, prefix, end), slot, into in zip(sequences, slots.tolist(), kept_in.tolist(), strict=True):
            inside = (end - prefix) // UNIT * UNIT
            if tracks and inside > 0:
                copy = wanted_state.clone()
                eagerly(start, inside, prefix, slot, copy)
                wanted_state[into] = copy[slot]
            if length:
                wanted[start : start + length] = eagerly(start, length, prefix, slot, wanted_state)
            start += length
        tracking = Tracking(ends > 0, kept_in, ends.abs(), UNIT) if tracks and (ends > 0).any() else None
        tables.fill(lengths.int(), slots.int(), prefixes.int(), tracking)
        found = form.extend(q, k, v, decay=decay, scale=0.1, state=state, tables=tables, tracking=tracks)
        differing = {"output": (found, wanted.flatten(1)), "states": (state, wanted_state)}
        wrong[name] = [what for what, (one, other) in differing.items() if not same(one, other)]
    return wrong


def same(one: Any, other: Any) -> bool:
    import torch

    return bool(torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num()))


def main(mutant: str = "none") -> None:
    import torch

    one_batch.import_sglang()
    from sglang_bcg_fixes.kernels.lightning_extend import seg_la

    old, new = MUTANTS[mutant]
    text = pathlib.Path(str(seg_la.__file__)).read_text()
    assert old in text
    form = types.ModuleType("form")
    exec(compile(text.replace(old, new), "form", "exec"), vars(form))
    kinds = (torch.float32, torch.float16), (torch.float32, torch.bfloat16)
    found: dict[str, Any] = {}
    for kind, kept in itertools.product(*kinds) if mutant == "none" else [(torch.float32, torch.float32)]:
        for most in (MOST_SEQUENCES, 1):
            try:
                found[f"{kind}, {kept}, {most}"] = run(form, kind, kept, most)
            except Exception as error:
                found[f"{kind}, {kept}, {most}"] = {"error": [f"{type(error).__name__}: {error}"]}
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
