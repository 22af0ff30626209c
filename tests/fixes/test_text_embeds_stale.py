# SPDX-License-Identifier: Apache-2.0
"""A model with a slot for embeddings that hands its layers token ids: the real runner, capture and replay."""

from __future__ import annotations

import pytest

from tests.fixes import alone


@pytest.mark.parametrize("release", ["0.5.14", "0.5.20"])
def test_a_replay_has_the_embeddings_of_its_own_text(release: str) -> None:
    found = alone.found("text_embeds_stale", release, "tests.scenarios.text_embeddings")
    assert found["applied"] == ["text_embeds_stale"]
    assert found["with"] == [True, True, True]
    # the buffer keeps what the last replay before left there: the embeddings of the second batch
    assert found["without"] == [True, False, True]


# by way and batch: the answer, whether a graph was replayed, and how often the table of embeddings was asked
RIGHT, WRONG = ["right", True, 1], ["wrong", True, 1]
WITHOUT = {
    "by SGLang's routine, an image": RIGHT,
    "by SGLang's routine, a text": RIGHT,
    "by SGLang's routine, another": RIGHT,
    "in other words, an image": WRONG,
    "in other words, a text": WRONG,
    "in other words, another": WRONG,
    "in the buffer, an image": RIGHT,
    "in the buffer, a text": ["wrong", True, 0],
    "in the buffer, another": ["wrong", True, 0],
}


@pytest.mark.parametrize("release", ["0.5.14", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20"])
def test_every_batch_is_embedded_once(release: str) -> None:
    found = alone.found("text_embeds_stale", release, "tests.scenarios.multimodal_llama")
    assert found["applied"] == ["text_embeds_stale"]
    assert found["without"] == WITHOUT
    # a table that is asked twice is one more all-reduce, and the ids of images are no rows of it
    assert found["with"] == dict.fromkeys(WITHOUT, RIGHT)
