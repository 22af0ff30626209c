# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels, each by one line, and whether the random cases notice; run with the names of some of them."""

from __future__ import annotations

import functools
import pathlib
import random
import sys

from sglang_bcg_fixes.kernels.fa_metadata import reference
from sglang_bcg_fixes.kernels.fa_metadata import triton as implementation
from tests.kernels import fa_metadata_cases as cases
from tests.kernels import mutants

# blocks so small that short rows have several, and several programs
SMALL = {
    "COLUMNS_OF_SLOTS": 32,
    "COLUMNS_OF_PAGES": 8,
    "LENGTHS": 4,
    "LOCATIONS": 16,
    "FLAGS": 32,
    "FLAGS_OF_ONE_PROGRAM": 256,
}

# one line of the kernel each, and the operation in which it has to be noticed
MUTANTS = {
    "counts pages down": ("fa_metadata", "live = (kept + (PAGE - 1)) >> SHIFT", "live = kept >> SHIFT"),
    "passes the table's width": ("fa_metadata", "tl.minimum(tl.minimum(live, within), width)", "live"),
    "reads past the pool's row": ("fa_metadata", "tl.minimum(tl.minimum(live, within), width)", "min(live, width)"),
    "forgets the first sum": ("fa_metadata", "tl.store(cu_seqlens_k, 0)", "pass"),
    "forgets what came before": ("fa_metadata", "sum_k += tl.sum(length, 0)", "pass"),
    "forgets new tokens before": ("fa_metadata", "sum_q += tl.sum(new, 0)", "pass"),
    "sums what is kept": ("fa_metadata", "sum_k + tl.cumsum(length, 0)", "sum_k + tl.cumsum(kept, 0)"),
    "maps missing slots": ("fa_metadata", "mask=is_live & (slot >= 0), other=-1", "mask=is_live, other=-1"),
    "leaves the end of a row": ("fa_metadata", "end = width if ZERO_TAIL else live", "end = live"),
    "clears the end of a row": ("fa_metadata", "end = width if ZERO_TAIL else live", "end = width"),
    "starts at the first token": ("fa_metadata", "start = tl.load(row_start + row).to(tl.int32)", "pass"),
    "writes before it reads": ("fa_metadata", "launches = [(1, others), (0, 1)]", "launches = [(0, 1), (1, others)]"),
    "takes another row": ("fa_metadata", "row = program // share", "row = program % bs"),
    "leaves locations behind": ("fa_metadata", "mask=place < room", "mask=place < new"),
    "lists a page twice": ("draft_expand", "(step == 0) | (page != earlier) | (SHIFT == 0)", "step >= 0"),
    "joins equal slots": ("draft_expand", " | (SHIFT == 0)", ""),
    "forgets the last page": ("draft_expand", "length + before - ((before >> SHIFT) << SHIFT)", "length"),
    "stops before the last sum": (
        "draft_expand",
        "tl.store(cu_seqlens_k + row, row * length, mask=row <= rows)",
        "pass",
    ),
    "sees padded rows": ("verify_expand", "(row < live_rows)[:, None]", "(row < rows)[:, None]"),
    "forgets earlier requests": ("verify_expand", "+ request.to(tl.int64) * draft_tokens", ""),
    "hides the others in front": (
        "verify_expand",
        "seen_up_to - 1, count[:, None]",
        "seen_up_to - 1, 0 * count[:, None]",
    ),
    "reads past the row": ("verify_expand", "mask=is_token & (position < tokens)", "mask=is_token"),
    "counts from the chunk's end": ("local_attention", "tl.maximum(length - 1, 0) // chunk", "length // chunk"),
    "keeps an old length": ("local_attention", "tl.store(seqused + row, used)", "pass"),
    "stops at the requests": ("local_attention", "tl.store(cu_seqlens_q + bs, bs)", "pass"),
}


def noticed(name: str, folder: pathlib.Path) -> bool:
    operation, old, new = MUTANTS[name]
    module = mutants.changed(implementation, old, new, folder)
    vars(module).update(SMALL)

    def differences(seed: int) -> list[str]:
        return cases.differences_in(cases.draw(operation, random.Random(seed)), module, reference)

    return any(mutants.is_noticed(functools.partial(differences, seed)) for seed in range(300))


if __name__ == "__main__":
    mutants.tell(sys.argv[1:], noticed)
