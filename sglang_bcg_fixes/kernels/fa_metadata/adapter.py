"""The methods we install over FlashAttentionBackend's metadata methods: the same fields, filled by a launch or two.

Nothing here allocates what SGLang preallocates, and nothing waits for the device. Batches that are not known to give
equal results fall back to SGLang's own method; the log gives each reason once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.fa_metadata import jobs
from sglang_bcg_fixes.kernels.fa_metadata.declaration import EAGER, KERNEL, MODULE, REPLAYS, TRANSLATE

Tensor = torch.Tensor
Original = Callable[..., Any]

DRAFT_EXTENDS = ("DRAFT_EXTEND", "DRAFT_EXTEND_V2")


@dataclasses.dataclass(frozen=True)
class EagerForm:
    """Fields that differ between releases of init_forward_metadata."""

    # source of the slots that sliding-window layers write to: the pool, translated here, or made by this method
    window_locations: str = "translated"


@dataclasses.dataclass(frozen=True)
class ReplayForm:
    """Fields that differ between releases of the method that runs before a replay."""

    # attribute that receives window locations, if this method fills them
    window_locations: str = ""
    # set max_seq_len_k also for drafts with topk 1, where later releases no longer read it
    tells_bound: bool = False
    # with topk above 1, and for draft extend: use the context length when the host does not know the bound
    context_for_bound: bool = False
    # with topk above 1 verify never reads the host's lengths
    verify_bound_is_context: bool = False
    # spec_info attribute with the new tokens in version 1 of draft extend, if it exists
    accepted: str = ""


EAGER_FORMS = {
    "5a19856dae3d": EagerForm(window_locations="pool"),
    "79a922a5fb86": EagerForm(),
    "099edda70396": EagerForm(),
    "cf54eaeb69cd": EagerForm(),
    "c3cac1f7d2fd": EagerForm(),
    "239bbd08b241": EagerForm(),
    "b3983820819f": EagerForm(),
    "49993970c966": EagerForm(),
    "98e384b52bb3": EagerForm(window_locations="step's, translated"),
    "7a930b2b84d6": EagerForm(window_locations="step's"),
}
LATE = ReplayForm(context_for_bound=True, verify_bound_is_context=True)
REPLAY_FORMS = {
    "5d549a8d9ac9": ReplayForm(tells_bound=True, accepted="num_accepted_tokens"),
    "ea1beb34fbf6": ReplayForm(tells_bound=True, accepted="num_accept_tokens"),
    "ae8827d92958": ReplayForm("swa_out_cache_loc_buf", tells_bound=True, accepted="num_accept_tokens"),
    "80d23d660c6f": ReplayForm("swa_out_cache_loc_buf", tells_bound=True),
    "2df20bdc65e8": ReplayForm("swa_out_cache_loc_buf"),
    "dd2219cbb79d": dataclasses.replace(LATE, window_locations="swa_out_cache_loc_buf"),
    "cc9fb3a43d70": dataclasses.replace(LATE, window_locations="swa_out_cache_loc_buf"),
    "f97575dee6f4": dataclasses.replace(LATE, window_locations="cuda_graph_swa_out_cache_loc"),
    "c4331e951e58": LATE,
    "2186d2cc3756": LATE,
    "5860847f2465": LATE,
}


class FallBack(Exception):
    """Raised when SGLang's own method must prepare this batch; the message is the reason."""


# the bodies of the patch points


def eager(original: Original, self: Any, forward_batch: Any) -> Any:
    try:
        return EagerStep(self, forward_batch).fill()
    except FallBack as reason:
        active.selected(KERNEL.op).fall_back(str(reason))
    return original(self, forward_batch)


def replay(original: Original, self: Any, *positional: Any, **named: Any) -> Any:
    given = dict(zip(parameters(original), positional, strict=False)) | named
    try:
        return ReplayStep(self, given).fill()
    except FallBack as reason:
        active.selected(KERNEL.op).fall_back(str(reason))
    return original(self, *positional, **named)


@functools.cache
def parameters(original: Original) -> tuple[str, ...]:
    """List the parameters after `self`; releases have them in different orders."""
    return tuple(inspect.signature(original).parameters)[1:]


# what is constant for a backend


class KnownBackend:
    """Constants of one backend, and the modes whose arguments have been checked."""

    def __init__(self, backend: Any) -> None:
        module = importlib.import_module(MODULE)
        self.why_not = why_unsupported(backend, module)
        self.metadata_class = module.FlashAttentionMetadata
        nested = getattr(module.FlashAttentionMetadata, "LocalAttentionMetadata", None)
        self.local_class = nested or module.LocalAttentionMetadata
        self.checked: set[tuple[str, str]] = set()
        used = active.selected(KERNEL.op)
        self.eager_form = EAGER_FORMS[used.forms[EAGER]]
        self.replay_form = REPLAY_FORMS[next(used.forms[where] for where in REPLAYS if where in used.forms)]


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
        self.form = active.selected(KERNEL.op).module(device.index)

    def launch(self, mode: str, job: jobs.Job) -> None:
        """Launch the job; the first step of each mode checks its arguments."""
        if (job.operation, mode) not in self.known.checked:
            try:
                job.check()
            except ValueError as error:
                raise FallBack(str(error)) from error
            self.known.checked.add((job.operation, mode))
        getattr(self.form, job.operation)(job)

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


# eager steps


class EagerStep(Step):
    """A step of init_forward_metadata: every tensor is new, and as wide as the batch's longest request."""

    def __init__(self, backend: Any, batch: Any) -> None:
        super().__init__(backend, batch.seq_lens)
        self.batch = batch
        self.mode = batch.forward_mode
        self.bs = len(self.seq_lens)
        if self.bs == 0 or self.bs != batch.batch_size:
            raise FallBack("a batch of no requests" if self.bs == 0 else "rows that are not requests")
        if batch.seq_lens_cpu is None:
            raise FallBack("lengths that the host does not know")
        self.encoder_lens = self.fits_encoder(batch.encoder_lens, is_plain=batch.spec_info is None)
        self.longest = int(batch.seq_lens_cpu.max())

    def fill(self) -> None:
        backend, mode, batch = self.backend, self.mode, self.batch
        drafts = batch.spec_info is not None
        if mode.is_decode_or_idle():
            if drafts and backend.topk > 1:
                metadata = self.branches()
            elif drafts:
                metadata = self.tables("draft decode", delta=backend.speculative_step_id + 1, q_stride=1)
                self.local(metadata, backend.speculative_step_id + 1)
            else:
                metadata = self.decode()
        elif mode.is_target_verify():
            metadata = self.verify() if backend.topk <= 1 else self.verify_tree()
        elif mode.is_extend_or_draft_extend_or_mixed(include_draft_extend_v2=True):
            metadata = self.extend()
        else:
            raise FallBack(f"mode {mode.name}")
        backend.forward_metadata = metadata

    def decode(self) -> Any:
        metadata = self.tables("decode", q_stride=1)
        metadata.scheduler_metadata = self.backend._compute_scheduler_metadata(
            self.bs, metadata.max_seq_len_k, metadata.cache_seqlens_int32, metadata.cu_seqlens_q
        )
        self.local(metadata)
        self.encoder(metadata)
        return metadata

    def local(self, metadata: Any, delta: int = 0) -> None:
        """Fill the metadata of the chunk that each request's only query is in."""
        backend = self.backend
        if not backend.has_local_attention:
            return
        chunk, bs = backend.attention_chunk_size, self.bs
        found = self.known.local_class(
            local_query_start_loc=self.integers(bs + 1),
            local_seqused_k=self.integers(bs),
            local_block_table=self.integers(bs, chunk // self.page_size),
            local_max_query_len=1,
            local_max_seq_len=self.longest_in_chunk(self.batch.seq_lens_cpu + delta),
        )
        job = jobs.LocalAttention(
            metadata.cache_seqlens_int32,
            self.batch.req_pool_indices,
            self.table,
            found.local_seqused_k,
            found.local_block_table,
            chunk,
            self.page_size,
            cu_seqlens_q=found.local_query_start_loc,
            mapping=self.mapping,
            zero_tail=True,
        )
        self.launch("eager", job)
        metadata.local_attn_metadata = found

    def encoder(self, metadata: Any) -> None:
        """Fill the encoder's metadata for cross attention; the text's own table begins after it."""
        lengths, on_host = self.encoder_lens, self.batch.encoder_lens_cpu
        if lengths is None:
            return
        longest = max(on_host) if on_host else int(lengths.max())
        metadata.encoder_max_seq_len_k = longest
        metadata.encoder_lens_int32, metadata.encoder_cu_seqlens_k = self.integers(self.bs), self.integers(self.bs + 1)
        metadata.encoder_page_table = self.integers(self.bs, min(longest, self.table.shape[1]))
        job = jobs.FaMetadata(
            lengths,
            self.batch.req_pool_indices,
            self.table,
            metadata.encoder_lens_int32,
            metadata.encoder_cu_seqlens_k,
            metadata.encoder_page_table,
            1,
            zero_tail=True,
        )
        self.launch("encoder", job)

    def verify(self) -> Any:
        self.refuse_many_queries()
        if getattr(self.batch.spec_info, "ragged_verify_layout", None) is not None:
            raise FallBack("ragged verify")
        new = self.backend.speculative_num_draft_tokens
        metadata = self.tables("verify", delta=new, q_stride=new)
        metadata.max_seq_len_q = new
        return metadata

    def extend(self) -> Any:
        batch, new = self.batch, self.batch.extend_seq_lens
        if self.mode.name == "EXTEND":
            self.refuse_many_queries()
        on_host = batch.extend_seq_lens_cpu
        if self.mode.name not in DRAFT_EXTENDS and not any(batch.extend_prefix_lens_cpu):
            metadata = self.tables("extend without prefix")
            metadata.cu_seqlens_q = metadata.cu_seqlens_k
        else:
            metadata = self.tables("extend", extend_lens=new)
        metadata.max_seq_len_q = self.backend.speculative_num_draft_tokens if on_host is None else max(on_host)
        self.encoder(metadata)
        return metadata

    def refuse_many_queries(self) -> None:
        if self.backend.has_local_attention:
            raise FallBack("local attention of more than one query")

    def branches(self) -> Any:
        """Draft decode with topk > 1: the prefix's whole pages, and for each branch the rest."""
        backend, batch = self.backend, self.batch
        topk, steps, length = backend.topk, backend.speculative_num_steps, backend.speculative_step_id + 1
        if steps == 0:
            raise FallBack("a draft without steps")
        rows = self.bs * topk
        metadata = self.tables("draft decode, prefix", q_stride=topk, drop_last=self.page_size > 1)
        metadata.max_seq_len_q = topk
        expand = self.known.metadata_class()
        expand.max_seq_len_q = 1
        expand.cache_seqlens_int32 = self.integers(rows)
        expand.cu_seqlens_q, expand.cu_seqlens_k = self.integers(rows + 1), self.integers(rows + 1)
        expand.page_table = self.integers(rows, length if self.page_size == 1 else steps)
        job = jobs.DraftExpand(
            self.seq_lens,
            batch.out_cache_loc,
            expand.cache_seqlens_int32,
            expand.page_table,
            self.page_size,
            topk,
            steps,
            length,
            cu_seqlens_q=expand.cu_seqlens_q,
            cu_seqlens_k=expand.cu_seqlens_k,
            zero_tail=True,
        )
        self.launch("eager", job)
        backend.forward_metadata_spec_decode_expand = expand
        return metadata

    def verify_tree(self) -> Any:
        """Target verify with topk > 1: the prefix, and for each draft token its ancestors."""
        backend, batch = self.backend, self.batch
        new = backend.speculative_num_draft_tokens
        rows = self.bs * new
        metadata = self.tables("verify, prefix", q_stride=new)
        metadata.max_seq_len_q = new
        expand = self.known.metadata_class()
        expand.max_seq_len_q = 1
        expand.cache_seqlens_int32 = self.integers(rows)
        expand.cu_seqlens_q, expand.cu_seqlens_k = self.integers(rows + 1), self.integers(rows + 1)
        expand.page_table = self.integers(rows, new)
        job = jobs.VerifyExpand(
            self.seq_lens,
            metadata.cu_seqlens_k,
            batch.req_pool_indices,
            self.table,
            batch.spec_info.custom_mask,
            expand.cache_seqlens_int32,
            expand.cu_seqlens_k,
            expand.page_table,
            new,
            cu_seqlens_q=expand.cu_seqlens_q,
        )
        self.launch("eager", job)
        backend.forward_metadata_spec_decode_expand = expand
        if backend.has_swa:
            backend._init_sliding_window_attn_spec_metadata(metadata, expand)
        return metadata

    @property
    def table(self) -> Tensor:
        pool = getattr(self.backend, "req_to_token_pool", None) or self.batch.req_to_token_pool
        table: Tensor = pool.req_to_token
        return table

    def tables(
        self, mode: str, delta: int = 0, extend_lens: Tensor | None = None, q_stride: int = 0, drop_last: bool = False
    ) -> Any:
        """Fill new tensors in one launch; table entries past a request's length become 0."""
        metadata, table, bs = self.known.metadata_class(), self.table, self.bs
        metadata.max_seq_len_k = self.longest + delta
        width = -(-min(metadata.max_seq_len_k, table.shape[1]) // self.page_size)
        metadata.cache_seqlens_int32, metadata.cu_seqlens_k = self.integers(bs), self.integers(bs + 1)
        metadata.page_table = self.integers(bs, width)
        if q_stride or extend_lens is not None:
            metadata.cu_seqlens_q = self.integers(bs + 1)
        job = jobs.FaMetadata(
            self.seq_lens,
            self.batch.req_pool_indices,
            table,
            metadata.cache_seqlens_int32,
            metadata.cu_seqlens_k,
            metadata.page_table,
            self.page_size,
            delta=delta,
            drop_last=drop_last,
            row_start=self.encoder_lens,
            cu_seqlens_q=metadata.cu_seqlens_q,
            extend_lens=extend_lens,
            q_stride=q_stride,
            zero_tail=True,
            **self.window(metadata),
        )
        self.launch(mode, job)
        return metadata

    def window(self, metadata: Any) -> dict[str, Any]:
        mapping = self.mapping
        if mapping is None:
            return {}
        metadata.swa_page_table = torch.empty_like(metadata.page_table)
        found: dict[str, Any] = {"swa_page_table": metadata.swa_page_table, "mapping": mapping}
        how, locations = self.known.eager_form.window_locations, self.batch.out_cache_loc
        if how.startswith("step's"):
            locations = self.backend._get_swa_write_locations(self.batch)
        if how == "step's, translated" and locations is not None:
            # a view of one step's locations, out of those of all steps
            locations = locations.contiguous()
        if how == "step's":
            metadata.swa_out_cache_loc = locations
        elif how != "pool" and locations is not None:
            metadata.swa_out_cache_loc = torch.empty(len(locations), dtype=torch.int64, device=locations.device)
            found |= {"out_cache_loc": locations, "swa_out_cache_loc": metadata.swa_out_cache_loc}
        return found


# before a replay


class ReplayStep(Step):
    """A step before a replay: fills the buffers of a graph that was captured for `bs` rows."""

    def __init__(self, backend: Any, given: dict[str, Any]) -> None:
        self.bs: int = given["bs"]
        super().__init__(backend, given["seq_lens"])
        self.rule = self.known.replay_form
        self.mode = given["forward_mode"]
        self.spec_info = given["spec_info"]
        self.req_pool_indices = given["req_pool_indices"]
        self.seq_lens_cpu = given["seq_lens_cpu"]
        self.out_cache_loc = given.get("out_cache_loc")
        self.encoder_lens = self.fits_encoder(given.get("encoder_lens"), is_plain=self.spec_info is None)
        if getattr(getattr(backend, "kv_index_translator", None), "reads_are_translated", False):
            raise FallBack("unified memory")

    def fill(self) -> None:
        backend, mode = self.backend, self.mode
        expand = None
        if mode.is_decode_or_idle():
            if self.spec_info is not None and backend.topk > 1:
                metadata, expand = self.branches()
            elif self.spec_info is not None:
                metadata = self.draft_decode()
            else:
                metadata = self.decode()
        elif mode.is_target_verify():
            metadata, expand = self.verify_tree() if backend.topk > 1 else (self.verify(), None)
        elif mode.name in DRAFT_EXTENDS:
            metadata = self.draft_extend()
        else:
            raise FallBack(f"mode {mode.name}")
        backend.forward_metadata = metadata
        backend.forward_metadata_spec_decode_expand = expand

    def bound(self, delta: int = 0) -> int:
        """Return the longest request's length plus delta, if the host knows it."""
        if self.seq_lens_cpu is not None:
            return int(self.seq_lens_cpu[: self.bs].max()) + delta
        if self.rule.context_for_bound:
            return int(self.backend.max_context_len)
        raise FallBack("lengths that the host does not know")

    def decode(self) -> Any:
        backend = self.backend
        metadata = backend.decode_cuda_graph_metadata[self.bs]
        known = self.seq_lens_cpu is not None
        metadata.max_seq_len_k = self.bound() if known else backend.max_context_len
        self.tables("decode", metadata, row_start=self.encoder_lens)
        self.local(metadata)
        self.encoder(metadata)
        plan_buffer = backend._sched_meta_buf
        if plan_buffer is not None and metadata.scheduler_metadata is not None:
            plan = backend._compute_scheduler_metadata(
                self.bs, metadata.max_seq_len_k, metadata.cache_seqlens_int32, metadata.cu_seqlens_q
            )
            if plan is not None:
                plan_buffer[: len(plan)] = plan
                plan_buffer[len(plan) :] = 0
        return metadata

    def local(self, metadata: Any) -> None:
        backend = self.backend
        if not backend.has_local_attention:
            return
        buffers = backend.decode_cuda_graph_local_attn_metadata
        job = jobs.LocalAttention(
            self.seq_lens,
            self.req_pool_indices,
            backend.req_to_token,
            buffers["local_seqused_k"][: self.bs],
            buffers["local_block_table"],
            backend.attention_chunk_size,
            self.page_size,
            cu_seqlens_q=buffers["local_query_start_loc"],
            mapping=self.mapping,
        )
        self.launch("replay", job)
        if metadata.local_attn_metadata is not None:
            known = self.seq_lens_cpu is not None
            longest = self.longest_in_chunk(self.seq_lens_cpu[: self.bs]) if known else backend.attention_chunk_size
            metadata.local_attn_metadata.local_max_query_len = 1
            metadata.local_attn_metadata.local_max_seq_len = longest

    def encoder(self, metadata: Any) -> None:
        if self.encoder_lens is None:
            return
        # the captured kernels have their own bound, so the host need not sync for this one
        metadata.encoder_max_seq_len_k = self.backend.max_context_len
        job = jobs.FaMetadata(
            self.encoder_lens,
            self.req_pool_indices,
            self.backend.req_to_token,
            metadata.encoder_lens_int32,
            metadata.encoder_cu_seqlens_k,
            metadata.encoder_page_table,
            1,
        )
        self.launch("encoder", job)

    def draft_decode(self) -> Any:
        metadata, delta = self.backend.decode_cuda_graph_metadata[self.bs], self.backend.speculative_step_id + 1
        if self.rule.tells_bound:
            metadata.max_seq_len_k = self.bound(delta)
        self.tables("draft decode", metadata, delta=delta)
        return metadata

    def verify(self) -> Any:
        if getattr(self.spec_info, "ragged_verify_layout", None) is not None:
            raise FallBack("ragged verify")
        metadata, delta = self.backend.target_verify_metadata[self.bs], self.backend.speculative_num_draft_tokens
        if self.rule.tells_bound:
            metadata.max_seq_len_k = self.bound(delta)
        self.tables("verify", metadata, delta=delta)
        return metadata

    def draft_extend(self) -> Any:
        metadata = self.backend.draft_extend_metadata[self.bs]
        version_1 = self.mode.name == "DRAFT_EXTEND"
        if version_1 and not self.rule.accepted:
            raise FallBack(f"mode {self.mode.name}")
        new, most = self.accepted() if version_1 else self.new_tokens()
        metadata.max_seq_len_k = self.bound()
        more = {"q_stride": new} if isinstance(new, int) else {"extend_lens": new}
        self.tables("draft extend", metadata, cu_seqlens_q=metadata.cu_seqlens_q, **more)
        metadata.max_seq_len_q = most
        return metadata

    def accepted(self) -> tuple[Tensor, int]:
        """Version 1: the tokens accepted of each request."""
        on_host = getattr(self.spec_info, f"{self.rule.accepted}_cpu")
        new: Tensor = getattr(self.spec_info, self.rule.accepted)
        return self.for_every_row(new), max(on_host) if on_host else 1

    def new_tokens(self) -> tuple[Tensor | int, int]:
        """Version 2: the worker's counts, on the device or on the host; else the same number for each."""
        spec_info = self.spec_info
        each = getattr(spec_info, "num_tokens_per_req", self.backend.speculative_num_steps + 1)
        on_host = getattr(spec_info, "extend_seq_lens_cpu", None)
        new: Tensor | None = getattr(spec_info, "extend_seq_lens_tensor", None)
        if new is None and on_host is not None:
            new = torch.as_tensor(on_host, dtype=torch.int32, device=self.seq_lens.device)
        if new is None:
            return each, each
        return self.for_every_row(new), int(max(on_host)) if on_host else each

    def for_every_row(self, new: Tensor) -> Tensor:
        if len(new) < self.bs:
            raise FallBack("fewer lengths of new tokens than rows")
        return new

    def branches(self) -> tuple[Any, Any]:
        backend = self.backend
        topk, steps, length = backend.topk, backend.speculative_num_steps, backend.speculative_step_id + 1
        rows = self.bs * topk
        if self.out_cache_loc is None or len(self.out_cache_loc) < rows * steps:
            raise FallBack("drafts without a location for each")
        metadata = backend.draft_decode_metadata_topk_normal[self.bs]
        expand = backend.draft_decode_metadata_topk_expand[self.bs]
        metadata.max_seq_len_k = self.bound()
        # the sums of the prefix are never read here, and SGLang does not fill them
        self.tables("draft decode, prefix", metadata, drop_last=self.page_size > 1, sums=False, window=False)
        job = jobs.DraftExpand(
            self.seq_lens,
            self.out_cache_loc,
            expand.cache_seqlens_int32,
            expand.page_table,
            self.page_size,
            topk,
            steps,
            length,
        )
        self.launch("replay", job)
        return metadata, expand

    def verify_tree(self) -> tuple[Any, Any]:
        backend = self.backend
        metadata = backend.target_verify_metadata_topk_normal[self.bs]
        expand = backend.target_verify_metadata_topk_expand[self.bs]
        metadata.max_seq_len_k = backend.max_context_len if self.rule.verify_bound_is_context else self.bound()
        self.tables("verify, prefix", metadata, window=False)
        job = jobs.VerifyExpand(
            self.seq_lens,
            metadata.cu_seqlens_k,
            self.req_pool_indices,
            backend.req_to_token,
            self.spec_info.custom_mask,
            expand.cache_seqlens_int32,
            expand.cu_seqlens_k,
            expand.page_table,
            backend.speculative_num_draft_tokens,
            live_rows=self.spec_info.positions.numel(),
        )
        self.launch("replay", job)
        if backend.has_swa:
            backend._init_sliding_window_attn_spec_metadata(
                metadata, expand, backend.target_verify_metadata_topk_swa[self.bs]
            )
        return metadata, expand

    def tables(self, mode: str, metadata: Any, sums: bool = True, window: bool = True, **more: Any) -> None:
        """Fill the graph's buffers in one launch; entries after the live pages stay stale."""
        job = jobs.FaMetadata(
            self.seq_lens,
            self.req_pool_indices,
            self.backend.req_to_token,
            metadata.cache_seqlens_int32,
            metadata.cu_seqlens_k if sums else None,
            metadata.page_table,
            self.page_size,
            **more,
            **self.window(metadata if window else None),
        )
        self.launch(mode, job)

    def window(self, metadata: Any) -> dict[str, Any]:
        mapping, found = self.mapping, dict[str, Any]()
        if mapping is None:
            return {}
        if metadata is not None and metadata.swa_page_table is not None:
            found["swa_page_table"] = metadata.swa_page_table
        if self.rule.window_locations and self.out_cache_loc is not None:
            found["out_cache_loc"] = self.out_cache_loc
            found["swa_out_cache_loc"] = getattr(self.backend, self.rule.window_locations)
        return found | {"mapping": mapping} if found else {}
