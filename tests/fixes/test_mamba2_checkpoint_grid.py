# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Mamba2 in prefill batches, on a real scheduler: red, green, and releases that are right."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.fixes import mamba2_checkpoint_grid
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "mamba2_checkpoint_grid"
# 0.5.14 has another defect there, and tests/fixes/test_mamba2_hit_ignored.py both fixes
AFFECTED = ("0.5.13", "0.5.13.post1", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19")
SERVER = {"attention_backend": "triton", "model": {"mamba_chunk_size": 64}}
OTHERS: dict[str, dict[str, Any]] = {
    "chunks of 16, pages of 16": {"model": {"mamba_chunk_size": 16}, "page_size": 16},
    "chunks of 128": {"model": {"mamba_chunk_size": 128}, "mamba_track_interval": 128},
    "pages of 128, chunks of 64": {"page_size": 128, "mamba_track_interval": 128},
    "in pieces, overlapped": {"chunked_prefill_size": 128, "disable_overlap_schedule": False},
}
# wrong are the checkpoints of prefills that are not the first of their batch and do not end at a boundary; the first
# and the fourth of the five have theirs from decode
STOCK = {
    "one": [[[192, True]]],
    "two, each turn ends in another chunk": [[[128, True], [128, False]], [[192, True], [192, False]]],
    "three": [[[64, True], [192, True], [64, False]]],
    "five around a boundary": [[[64, True], [64, True], [64, False], [64, True], [128, False]]],
}
RIGHT = {name: [[[found, True] for found, _ in turn] for turn in turns] for name, turns in STOCK.items()}
# most of what is wrong, and what is not
TELLING = ("two, each turn ends in another chunk", "five around a boundary")
ARMS = ("with", "without")


def run(release: str, **server: Any) -> Any:
    return alone.found(FIX, release, "tests.scenarios.warm_answers", "falcon_h1", json.dumps(SERVER | server))


@pytest.mark.parametrize("release", AFFECTED)
def test_a_checkpoint_is_the_state_of_its_own_prompt(release: str, everything: bool) -> None:
    conversations = [*STOCK] if everything or release == AFFECTED[0] else [*TELLING]
    found = run(release, conversations=conversations)
    assert found["applied"] == [FIX]
    assert found["without"] == {name: STOCK[name] for name in conversations}
    assert found["with"] == {name: RIGHT[name] for name in conversations}


@pytest.mark.parametrize("server", OTHERS)
def test_pages_chunks_and_pieces_of_other_sizes(server: str) -> None:
    found = run("0.5.16", **OTHERS[server])
    with_it, without = ([each for turns in found[arm].values() for turn in turns for each in turn] for arm in ARMS)
    assert [length for length, _ in with_it] == [length for length, _ in without]
    assert max(length for length, _ in with_it) >= 128
    assert all(right for _, right in with_it)
    assert not all(right for _, right in without)


def test_a_release_that_looks_them_up_right_is_left_as_it_is() -> None:
    assert run(NEWEST) == {"applied": [], "without": RIGHT}


CHUNK, HEADS, HEAD, STATES = 16, 2, 3, 4
Tensor = torch.Tensor


def states_after(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, tokens: Sequence[int], state: Tensor) -> list[Tensor]:
    """Return the state before the first of these tokens, and after each."""
    found = [state]
    for token in tokens:
        step = dt[0, token][:, None, None]
        found.append((step * A[:, None, None]).exp() * found[-1] + step * x[0, token][:, :, None] * B[0, token][0])
    return found


def scanned(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    """Scan as SGLang does: the state at each boundary of the batch, and that at the end of each prompt."""
    bounds, initial = others["cu_seqlens"].tolist(), others["initial_states"]
    # nobody asks for a state where a prompt begins
    kept = torch.full((-(-x.shape[1] // CHUNK), HEADS, HEAD, STATES), torch.nan)
    ends = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        before = torch.zeros(HEADS, HEAD, STATES) if initial is None else initial[number]
        after = states_after(x, dt, A, B, range(start, end), before)
        for boundary in range(-(-(start + 1) // CHUNK) * CHUNK, end, CHUNK):
            kept[boundary // CHUNK] = after[boundary - start]
        ends.append(after[-1])
    return kept[None], torch.stack(ends)


@pytest.mark.parametrize("has_prefixes", [True, False], ids=["behind a prefix", "without one"])
@pytest.mark.parametrize("seed", range(8))
def test_states_between_boundaries_are_those_of_each_prompt(seed: int, has_prefixes: bool) -> None:
    source = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=source).tolist()

    lengths = numbers(1, 40, 6)
    first, total = [0, *itertools.accumulate(lengths[:-1])], sum(lengths)
    starts = torch.tensor([*first, total], dtype=torch.int32)
    # anywhere behind the first token, also before the first boundary that a prompt has, and at its end
    places = [
        start + 1 + chosen % length for start, length, chosen in zip(first, lengths, numbers(0, 999, 6), strict=True)
    ]
    places[-1] = total
    tracked = [number for number in range(6) if number != seed % 5]
    slots = torch.arange(20, 26)
    x, dt, B = (torch.randn(1, total, *of, generator=source) for of in ((HEADS, HEAD), (HEADS,), (1, STATES)))
    dt, A = dt.abs(), -torch.rand(HEADS, generator=source)
    initial = torch.randn(6, HEADS, HEAD, STATES, generator=source) if has_prefixes else None
    mixed = SimpleNamespace(chunk_size=CHUNK, seq_idx=torch.zeros(1, total, dtype=torch.int32))
    metadata = SimpleNamespace(
        track_ssm_h_src=torch.zeros(0),
        mixed_metadata=mixed,
        query_start_loc=starts,
        num_prefill_tokens=total,
        track_conv_indices=torch.tensor([[places[number] - 1] for number in tracked]),
        _query_start_loc_to_chunk_indices_offsets=lambda *_: (torch.zeros(1), torch.zeros(1)),
    )
    mask = torch.tensor([number in tracked for number in range(6)])
    batch = SimpleNamespace(mamba_track_mask=mask, mamba_track_indices=slots)
    mamba2_checkpoint_grid.look_up(None, SimpleNamespace(forward_metadata=metadata), batch)
    given = {"cu_seqlens": starts, "initial_states": initial, "seq_idx": mixed.seq_idx}
    (kept, ends), (stock, same_ends) = (call(x, dt, A, B, B, **given) for call in (with_pieces, scanned))
    assert torch.equal(ends, same_ends) and torch.equal(kept[:, : stock.shape[1]].nan_to_num(), stock.nan_to_num())
    inside = [number for number in tracked if places[number] < first[number] + lengths[number]]
    assert len(inside) >= 3 and metadata.track_ssm_h_dst.tolist() == slots[inside].tolist()
    for number, place in zip(inside, metadata.track_ssm_h_src.tolist(), strict=True):
        before = torch.zeros(HEADS, HEAD, STATES) if initial is None else initial[number]
        wanted = states_after(x, dt, A, B, range(first[number], places[number]), before)[-1]
        assert torch.allclose(kept[0, place], wanted, atol=1e-5)


def with_pieces(*given: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = mamba2_checkpoint_grid.scan(scanned, *given, **others)
    return found
