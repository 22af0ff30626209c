# SPDX-License-Identifier: Apache-2.0
"""Metadata of Mamba2 layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

PREPARE = "sglang.srt.layers.attention.mamba.mamba2_metadata:Mamba2Metadata.prepare_mixed"


def prepare_without_mask(
    original: Callable[..., Any], cls: Any, forward_metadata: Any, chunk_size: int, forward_batch: Any
) -> Any:
    """Prepare it for a batch without the mask of checkpoints, which some releases take for that of hits."""
    # it is read for that alone: where to save is in forward_metadata
    batch = copy.copy(forward_batch)
    batch.mamba_track_mask = None
    return original(cls, forward_metadata, chunk_size, batch)
