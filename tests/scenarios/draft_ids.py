# SPDX-License-Identifier: Apache-2.0
"""A draft on prompts whose batch has ids outside the vocabulary in the place of an image, run eagerly and replayed.

Arguments: the target's name, the folder of the draft's model, and the algorithm.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from cpu_sglang import one_batch
from cpu_sglang.draft_prefill import Draft
from tests.scenarios import telling

OUTSIDE = 1_000_000
KINDS = [([6, 5], False), ([6, 5], True), ([11], True), ([11], False)]


class Images(Draft):
    """A draft whose batches have ids for their images, as those of a server."""

    has_images = False

    def scheduled(self, lengths: Any) -> Any:
        batch = super().scheduled(lengths)
        if self.has_images:
            batch.input_ids = batch.input_ids.clone()
            batch.input_ids[1:3] = OUTSIDE
        return batch

    def prefill(self, lengths: Any, has_images: bool = False) -> tuple[Any, int]:
        self.has_images = has_images
        return super().prefill(lengths, has_images)


def main(target: str, folder: str, algorithm: str) -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    draft = Images(target, pathlib.Path(folder), algorithm)
    eager = [draft.prefill(*kind)[0] for kind in KINDS]
    draft.capture()

    def attempt(lengths: list[int], has_images: bool, expected: Any) -> list[Any]:
        try:
            answer, segments = draft.prefill(lengths, has_images)
        except IndexError as error:
            return [str(error)]
        return [bool((answer == expected).all()), segments, bool(answer.isfinite().all())]

    telling.with_and_without(lambda: [attempt(*kind, other) for kind, other in zip(KINDS, eager, strict=True)])


if __name__ == "__main__":
    main(*sys.argv[1:])
