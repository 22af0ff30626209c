# SPDX-License-Identifier: Apache-2.0
"""Workarounds by SGLang's own flags, shared by the fixes that need the same one."""

from __future__ import annotations

from sglang_bcg_fixes.model import Workaround

# newer name first: a release that knows both has deprecated the older
PREFILL_GRAPHS_OFF = (
    Workaround(
        flags="--cuda-graph-backend-prefill disabled",
        option="--cuda-graph-backend-prefill",
        effect="prefill runs eagerly: correct, slower on short prompts",
    ),
    Workaround(
        flags="(leave out) --enable-breakable-cuda-graph",
        option="--enable-breakable-cuda-graph",
        effect="releases without --cuda-graph-backend-prefill make breakable graphs only when asked to",
    ),
)

# for graphs without breaks, which releases without this flag do not have
BREAKABLE_PREFILL_GRAPHS = (
    Workaround(
        flags="--cuda-graph-backend-prefill breakable",
        option="--cuda-graph-backend-prefill",
        effect="each layer's attention runs between the segments of a graph",
    ),
    PREFILL_GRAPHS_OFF[0],
)

DECODE_GRAPHS_OFF = (
    Workaround(
        flags="--cuda-graph-backend-decode disabled",
        option="--cuda-graph-backend-decode",
        effect="decode and target verification run eagerly: correct, slower",
    ),
    Workaround(
        flags="--disable-cuda-graph",
        option="--disable-cuda-graph",
        effect="decode and target verification run eagerly: correct, slower",
    ),
)

DECODE_PADDING_OFF = (
    Workaround(
        flags="--disable-cuda-graph-padding",
        option="--disable-cuda-graph-padding",
        effect="decode uses a graph only if one of exactly that batch size was captured, else it is eager",
    ),
)

NO_BREAKABLE_GRAPHS_AND_NO_PADDING = (
    Workaround(
        flags="--disable-cuda-graph-padding, and (leave out) --enable-breakable-cuda-graph",
        option="--disable-cuda-graph-padding",
        effect="no decode graph has padded rows and no prefill runner has a buffer of the wrong type",
    ),
)

DRAFT_WITHOUT_TRITON = (
    Workaround(
        flags="--speculative-draft-attention-backend fa3 (or flashinfer), or, with topk 1, --disable-cuda-graph",
        option="--speculative-draft-attention-backend",
        effect="the draft model's extend step leaves the Triton backend's graph path",
    ),
    Workaround(
        flags="--attention-backend fa3 (or flashinfer), or, with topk 1, --disable-cuda-graph",
        option="--attention-backend",
        effect="the Triton backend's graph path is not used",
    ),
)

FEWER_PREFILL_GRAPHS = (
    Workaround(
        flags="--piecewise-cuda-graph-tokens 512 1024 2048 (few sizes), or (leave out) --enable-breakable-cuda-graph",
        option="--piecewise-cuda-graph-tokens",
        effect="one hidden-state tensor is kept per size, so few sizes use little memory",
    ),
)

PAGES_OF_ONE_TOKEN = (
    Workaround(
        flags="--page-size 1",
        option="--page-size",
        effect="slots and pages are the same thing",
    ),
)

NO_OVERLAPPING_HALVES = (
    Workaround(
        flags="(leave out) --enable-two-batch-overlap",
        option="--enable-two-batch-overlap",
        effect="batches are not split",
    ),
)

ONE_BRANCH_OF_DRAFTS = (
    Workaround(
        flags="--speculative-eagle-topk 1",
        option="--speculative-eagle-topk",
        effect="drafts form one chain, which needs no separate table",
    ),
)

MIXED_CHUNKS_OFF = (
    Workaround(
        flags="(leave out) --enable-mixed-chunk",
        option="--enable-mixed-chunk",
        effect="running requests wait while a prompt is computed",
    ),
)

NO_OVERLAP = (
    Workaround(
        flags="--disable-overlap-schedule",
        option="--disable-overlap-schedule",
        effect="the scheduler waits for each step before it plans the next one: correct, slower",
    ),
)

PREFIX_CACHE_OFF = (
    Workaround(
        flags="--disable-radix-cache",
        option="--disable-radix-cache",
        effect="every prompt is computed from its beginning: correct, slower",
    ),
)

CHECKPOINTS_OFF = (
    Workaround(
        flags="--mamba-radix-cache-strategy no_buffer",
        option="--mamba-radix-cache-strategy",
        effect="only states at the end of a request are cached, and batches do not overlap: correct, slower",
    ),
    Workaround(
        flags="--mamba-scheduler-strategy no_buffer",
        option="--mamba-scheduler-strategy",
        effect="only states at the end of a request are cached, and batches do not overlap: correct, slower",
    ),
)

THINKING_KEPT = (
    Workaround(
        flags="(leave out) --strip-thinking-cache",
        option="--strip-thinking-cache",
        effect="thinking and answers stay in the prefix cache, and take room there",
    ),
)

HOST_CACHE_OFF = (
    Workaround(
        flags="(leave out) --enable-hierarchical-cache",
        option="--enable-hierarchical-cache",
        effect="a prefix that has left the GPU is computed anew: correct, slower",
    ),
)
