# SPDX-License-Identifier: Apache-2.0
"""LFM2's short convolutions: their modules, and what runs one layer of each."""

from __future__ import annotations

LFM2, LFM2_MOE = "sglang.srt.models.lfm2", "sglang.srt.models.lfm2_moe"
LAYER, MOE_LAYER = f"{LFM2}:Lfm2ShortConv.forward", f"{LFM2_MOE}:Lfm2MoeShortConv.forward"
