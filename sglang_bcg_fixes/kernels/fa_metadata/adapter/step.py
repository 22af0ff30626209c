# SPDX-License-Identifier: Apache-2.0
"""The base of both kinds of step: the known backend, the checks, the launch."""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from typing import Any

import torch

from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.fa_metadata import jobs
from sglang_bcg_fixes.kernels.fa_metadata.declaration import KERNEL, MODULE, TRANSLATE

Tensor = torch.Tensor

DRAFT_EXTENDS = ("DRAFT_EXTEND", "DRAFT_EXTEND_V2")


class FallBack(Exception):
    """Raised when SGLang's own method must prepare this batch; the message is the reason."""


class KnownBackend:
    """Constants of one backend, and the modes whose arguments have been checked."""

    def __init__(self, backend: Any) -> None:
        module = importlib.import_module(MODULE)
        self.why_not = why_unsupported(backend, module)
        self.metadata_class = module.FlashAttentionMetadata
        nested = getattr(module.FlashAttentionMetadata, "LocalAttentionMetadata", None)
        self.local_class = nested or module.LocalAttentionMetadata
        self.checked: set[tuple[str, str]] = set()
        self.eager_rules, self.replay_rules = active.selected(KERNEL.op).rules


def why_unsupported(backend: Any, module: Any) -> str:
    """Return the reason every step of this backend falls back, or an empty string."""
    page_size = backend.page_size
    reasons = {
        f"the backend is a {type(backend).__name__}": type(backend) is not module.FlashAttentionBackend,
        f"pages of {page_size} tokens": page_size > jobs.LARGEST_PAGE or page_size & (page_size - 1) != 0,
        "context parallelism": getattr(backend, "attn_cp_size", 1) > 1,
        "unified memory": getattr(backend, "_unified_dense", False)
        or getattr(getattr(backend, "kv_index_translator", None), "is_translating", False),
        "a sharded cache": getattr(backend, "_kv_shard_pool", None) is not None,
        "prefill-aware window attention": getattr(backend, "is_prefill_aware_swa", False),
        "an encoder beside pages": backend.is_encoder_decoder and page_size > 1,
        "chunks that are not whole pages": backend.has_local_attention
        and backend.attention_chunk_size % page_size != 0,
        "slots are translated in another way": backend.use_sliding_window_kv_pool and not has_known_pool(backend),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def has_known_pool(backend: Any) -> bool:
    module, _, name = TRANSLATE.partition(":")
    kind, _, method = name.partition(".")
    known = vars(getattr(importlib.import_module(module), kind))[method]
    return inspect.getattr_static(backend.token_to_kv_pool, method) is known


_known: weakref.WeakKeyDictionary[Any, KnownBackend] = weakref.WeakKeyDictionary()


def known_backend(backend: Any) -> KnownBackend:
    known = _known.get(backend)
    if known is None:
        known = _known[backend] = KnownBackend(backend)
    if known.why_not:
        raise FallBack(known.why_not)
    return known


class Step:
    """One step of one backend."""

    def __init__(self, backend: Any, seq_lens: Tensor) -> None:
        self.backend = backend
        self.known = known_backend(backend)
        self.seq_lens = seq_lens
        self.page_size: int = backend.page_size
        device = seq_lens.device
        if device.type != "cuda" and not is_interpreted():
            raise FallBack(f"tensors on {device.type}")
        self.implementation = active.selected(KERNEL.op).module(device.index)

    def launch(self, mode: str, job: jobs.Job) -> None:
        """Launch the job; the first step of each mode checks its arguments."""
        if (job.operation, mode) not in self.known.checked:
            try:
                job.check()
            except ValueError as error:
                raise FallBack(str(error)) from error
            self.known.checked.add((job.operation, mode))
        getattr(self.implementation, job.operation)(job)

    bs: int

    def integers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.seq_lens.device)

    def fits_encoder(self, encoder_lens: Tensor | None, is_plain: bool) -> Tensor | None:
        """Return the encoder's lengths, which must be as many as requests."""
        if encoder_lens is not None and (not is_plain or len(encoder_lens) != self.bs):
            raise FallBack("an encoder beside drafts, or with other rows than requests")
        return encoder_lens

    def longest_in_chunk(self, lengths: Tensor) -> int:
        """Return the most tokens that any of these lengths has in its last chunk."""
        return int(((lengths - 1) % self.backend.attention_chunk_size + 1).max())

    @property
    def mapping(self) -> Tensor | None:
        if not self.backend.use_sliding_window_kv_pool:
            return None
        mapping: Tensor | None = self.backend.token_to_kv_pool.full_to_swa_index_mapping
        if mapping is None:
            raise FallBack("the pool has no mapping of slots")
        return mapping


@functools.cache
def is_interpreted() -> bool:
    """Return true under Triton's interpreter, which runs on host tensors; the reference runs anywhere."""
    import triton

    return bool(triton.knobs.runtime.interpret)
