# SPDX-License-Identifier: Apache-2.0
"""Cosmos3-Edge on prompts whose tokens have three positions, run eagerly and replayed."""

from __future__ import annotations

import functools
import importlib
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from cpu_sglang import architectures, graphs, one_batch, prefill
from tests.releases import kinds_of_request
from tests.scenarios import released, telling

MODEL = "Cosmos3EdgeForConditionalGeneration"
Positions = Callable[[Any], list[Any]]


def load() -> one_batch.LoadedModel:
    declared = architectures.CONFIGURATIONS[MODEL]
    folder = tempfile.mkdtemp()
    pathlib.Path(folder, "config.json").write_text(json.dumps({**declared.config, "architectures": [MODEL]}))
    return released.load(folder, **declared.server_args)


def of_an_image(places: Any) -> list[Any]:
    return [places, places // 2, places // 3]


def of_text(places: Any) -> list[Any]:
    return [places] * 3


def behind_an_image(places: Any) -> list[Any]:
    # a text and what comes after an image have equal rows, and the image takes fewer positions than tokens
    return [places - 2 * (places > 3)] * 3


def with_image(positions: Positions, batch: Any, model: Any) -> None:
    """Give the first request an image, and these positions to its tokens."""
    import torch
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs

    first, *others = (torch.arange(int(length)) for length in batch.extend_seq_lens_cpu)
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(1, 4)], feature=torch.zeros(2, 2))
    item.set_pad_value()
    batch.mm_inputs = [MultimodalInputs(mm_items=[item])] + [None] * len(others)
    rows = [torch.stack(positions(first)), *(torch.stack(of_text(places)) for places in others)]
    batch.mrope_positions = torch.cat(rows, dim=1)


IMAGE, FLAT, BEHIND = (functools.partial(with_image, rows) for rows in (of_an_image, of_text, behind_an_image))
CASES: dict[str, tuple[list[int], kinds_of_request.Change]] = {
    "an image": ([7], IMAGE),
    "an image beside a text": ([7, 5], IMAGE),
    "a text behind an image": ([7], BEHIND),
    "a text": ([7], kinds_of_request.as_it_is),
}


def main() -> None:
    loaded = load()
    model = loaded.model_runner.model
    of_the_model: Any = importlib.import_module(type(model).__module__)
    # the tower is no part of this
    of_the_model.embed_mm_inputs = lambda input_ids, **_: (2 * model.model.embed_tokens(input_ids.clamp(max=127)), {})
    answers = functools.partial(kinds_of_request.run, loaded)
    eager = {name: answers(*case) for name, case in CASES.items()}
    flat = {name: answers(lengths, FLAT) for name, (lengths, change) in CASES.items() if change in (IMAGE, BEHIND)}
    differ = {name: logits_differ(eager[name], answer) for name, answer in flat.items()}

    def replayed() -> dict[str, list[Any]]:
        prefill.capture_prefill(loaded.model_runner, (8, 16))
        found = {}
        for name, case in CASES.items():
            before = graphs.counters.replays
            answer = answers(*case)
            of = {"right": eager[name], "flat": flat.get(name, {})}
            same = [word for word, other in of.items() if other and not logits_differ(answer, other)]
            found[name] = [graphs.counters.replays > before, *same]
        return found

    telling.with_and_without(replayed, positions_matter=differ)


def logits_differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return not (one["next_token_logits"] == other["next_token_logits"]).all()


if __name__ == "__main__":
    main()
