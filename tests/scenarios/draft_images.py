# SPDX-License-Identifier: Apache-2.0
"""An EAGLE3 draft on prompts with and without an image, run eagerly and replayed.

Argument: the folder of its model.
"""

from __future__ import annotations

import pathlib
import sys

from cpu_sglang import one_batch
from cpu_sglang.draft_prefill import Draft
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.process import watch
from tests.scenarios import telling

KINDS = [([6, 5], False), ([6, 5], True), ([11], True), ([11], False)]


def main(folder: str) -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    draft = Draft("llama", pathlib.Path(folder), "EAGLE3")
    eager = [draft.prefill(*kind)[0] for kind in KINDS]
    draft.capture()

    def again() -> list[list[bool | int]]:
        answers = [draft.prefill(*kind) for kind in KINDS]
        pairs = zip(answers, eager, strict=True)
        return [[bool((answer == other).all()), segments] for (answer, segments), other in pairs]

    watches = plugin.load().watches
    if watch.ASKED in watches.applied():
        # the counter of replays stands round what is undone
        watches.undo(watch.ASKED)
    telling.with_and_without(again)


if __name__ == "__main__":
    main(*sys.argv[1:])
