# SPDX-License-Identifier: Apache-2.0
"""SGLang's own kernels of lightning attention, captured with the launch of the largest batch.

Its host code chooses launches by the number of sequences. Here that is always the tables' own: sequences that a step
has not got have slot -1, and end at once. So a replay has the bits of SGLang's eager run.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch.nn import functional

from sglang_bcg_fixes.kernels.lightning_extend.declaration import BACKEND_MODULE
from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK, Tracking

# SGLang takes a batch of one for a sequence that fills its rows, and reads it without asking where it ends
LEAST_SEQUENCES = 2
# each launch is for the most sequences, and takes longer for every one that a step has not got
MOST_SEQUENCES = 128


class Tables:
    """Static buffers for batches of up to `max_tokens` tokens and `max_sequences` sequences, or MOST_SEQUENCES."""

    def __init__(self, max_tokens: int, max_sequences: int, device: Any, chunk: int = CHUNK) -> None:
        self.max_tokens, self.chunk = max_tokens, chunk
        self.max_sequences = min(max(max_sequences, LEAST_SEQUENCES), MOST_SEQUENCES)

        def buffer(size: int, value: int, kind: Any) -> Any:
            return torch.full((size,), value, dtype=kind, device=device)

        # a capture before the first step finds nothing to do
        self.bounds = buffer(self.max_sequences + 1, 0, torch.int32)
        self.slots = buffer(self.max_sequences, -1, torch.int64)
        self.continued = buffer(self.max_sequences, 0, torch.bool)
        self.track_after = buffer(self.max_sequences, 0, torch.int32)
        self.track_slots = buffer(self.max_sequences, -1, torch.int64)
        self.padding = buffer(max_tokens, 1, torch.bool)
        self._rows = torch.arange(max_tokens, device=device)

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Every buffer that a captured layer reads."""
        return self.bounds, self.slots, self.continued, self.track_after, self.track_slots, self.padding

    def fill(self, lengths: Any, slots: Any, prefixes: Any, tracking: Tracking | None = None) -> None:
        """Fill for one step. Arguments are [sequences] of any integer type, on the device, and stay there."""
        given = lengths.shape[0]
        if given > self.max_sequences:
            raise ValueError(f"{given} sequences, but the tables were made for {self.max_sequences}")
        lengths = lengths.clamp(min=0)
        # those that a step has not got are empty, behind its last token
        every = functional.pad(lengths, (0, self.max_sequences - given))
        self.bounds[0] = 0
        self.bounds[1:] = every.cumsum(0).clamp(max=self.max_tokens)
        # one without tokens would have its state written, and is left alone
        self.slots.fill_(-1)
        self.slots[:given] = torch.where(lengths > 0, slots, -1)
        self.continued[:given] = prefixes > 0
        self.track_slots.fill_(-1)
        if tracking is not None:
            covered = (tracking.lengths - prefixes).clamp(min=0).minimum(lengths)
            self.track_after[:given] = covered // tracking.unit * tracking.unit
            self.track_slots[:given] = torch.where(tracking.mask, tracking.slots, -1)
        torch.ge(self._rows, self.bounds[-1], out=self.padding)


def can_keep_checkpoints() -> bool:
    return "track_lens" in inspect.signature(sglang_module().seg_la_fwd).parameters


def extend(
    q: Any, k: Any, v: Any, *, decay: Any, scale: float, state: Any, tables: Tables, tracking: bool = False
) -> Any:
    """Run one layer, as the package's contract describes."""
    rows, sequences = q.shape[0], tables.max_sequences
    if rows > tables.max_tokens:
        raise ValueError(f"{rows} rows, but the tables were made for {tables.max_tokens} tokens")
    if rows <= sequences:
        # with no more rows than sequences SGLang takes them for a step of decode
        q, k, v = (functional.pad(each, (0, 0, 0, 0, 0, sequences + 1 - rows)) for each in (q, k, v))
    module = sglang_module()
    checkpoints = {"track_lens": tables.track_after, "track_state_indices": tables.track_slots} if tracking else {}
    metadata = module.SegLaMeta(
        batch_size=sequences,
        max_q_length=None,
        q_offsets=tables.bounds,
        s_offsets=tables.slots,
        q_lengths=tables.bounds.diff(),
        s_scales=tables.continued,
    )
    found = module.seg_la_fwd(q, k, v, state, decay, metadata, softmax_scale=scale, **checkpoints)[:rows]
    return found.masked_fill_(tables.padding[:rows, None, None], 0).flatten(1)


def sglang_module() -> Any:
    """Return the backend's module, which has the functions under one name in every release."""
    return importlib.import_module(BACKEND_MODULE)
