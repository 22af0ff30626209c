# SPDX-License-Identifier: Apache-2.0
"""A draft beside Qwen3-Next on the states of its target, run eagerly and replayed.

Argument: the folder of its model.
"""

from __future__ import annotations

import pathlib
import sys

from cpu_sglang import one_batch
from cpu_sglang.draft_prefill import Draft
from tests.scenarios import telling

LENGTHS = [6, 5], [11], [5, 4]


def main(folder: str) -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    draft = Draft("qwen3next", pathlib.Path(folder))
    eager = [draft.prefill(lengths)[0] for lengths in LENGTHS]

    def replayed() -> list[list[bool | int]]:
        draft.capture()
        answers = [draft.prefill(lengths) for lengths in LENGTHS]
        pairs = zip(answers, eager, strict=True)
        return [[bool((answer == other).all()), segments] for (answer, segments), other in pairs]

    telling.with_and_without(replayed)


if __name__ == "__main__":
    main(*sys.argv[1:])
