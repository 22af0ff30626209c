# SPDX-License-Identifier: Apache-2.0
"""The draft model's extend step on the real attention backends of a released SGLang: eager, and through a CUDA graph.

A real ModelRunner supplies settings, memory pools and layers. Requests are laid out in its pools by hand, so that the
slots a backend has to list and the attention over them are known for each request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import math
import multiprocessing
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import graphs, one_batch

PAGE_SIZE = 16
PAGES_OF_A_REQUEST = 6
REQUESTS = 4
STEPS = 3
# with topk 1 each row of the step has this many new tokens
NEW_TOKENS = STEPS + 1


@dataclass(frozen=True)
class Step:
    """Input of a step: per request the prefix length, the number of new tokens, and the length as passed."""

    prefix: tuple[int, ...]
    new: tuple[int, ...]
    seq_lens: tuple[int, ...]
    # rows and width that a graph was captured with
    captured: int = REQUESTS
    width: int = NEW_TOKENS
    mode: str = "DRAFT_EXTEND_V2"
    # from 0.5.16 a worker may have no lengths on the host
    on_host: bool = True


@functools.cache
def load(model: str, windowed: bool = False) -> Requests:
    """Load once per process, after one_batch.import_sglang(); see `in_child`. The layer looked at may have a window."""
    loaded = one_batch.load(
        model,
        dtype="float32",
        attention_backend="triton",
        page_size=PAGE_SIZE,
        max_running_requests=2 * REQUESTS,
        swa_full_tokens_ratio=1.0,
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(one_batch.MODELS / model),
        speculative_num_steps=STEPS,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=NEW_TOKENS,
    )
    return Requests(loaded.model_runner, windowed)


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of `__main__` in a fork with the imports done: SGLang allows one model per process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def int32(values: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def accepted_by(cls: type, values: dict[str, Any]) -> Any:
    """Make an instance from the values whose fields this release has."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in names})


class Requests:
    """Requests in rows 3, 1, 4 and 2 of the table, each on its own pages in shuffled order."""

    rows = (3, 1, 4, 2)

    def __init__(self, runner: Any, windowed: bool = False) -> None:
        self.runner = runner
        self.pool = runner.token_to_kv_pool
        self.table = runner.req_to_token_pool.req_to_token
        self.random = torch.Generator().manual_seed(0)
        self.table.zero_()
        pages = torch.randperm(REQUESTS * PAGES_OF_A_REQUEST, generator=self.random) + 1
        for row, own in zip(self.rows, pages.view(REQUESTS, -1), strict=True):
            self.table[row, : PAGES_OF_A_REQUEST * PAGE_SIZE] = slots_of(own).to(self.table.dtype)
        # slots of sliding window layers, if the model has any; slot 0 stays unused
        self.to_window: Any = getattr(self.pool, "full_to_swa_index_mapping", None)
        if self.to_window is not None:
            order = padded(torch.randperm(len(pages), generator=self.random) + 1, len(pages) + 1).roll(1)
            self.to_window[: len(order) * PAGE_SIZE] = slots_of(order)
        layers = [module for module in runner.model.modules() if type(module).__name__ == "RadixAttention"]
        # the second of two layers has no window
        self.layer = layers[0 if windowed else 1]
        self.window = self.layer.sliding_window_size if windowed else None
        self.caches = [
            buffer
            for layer in range(len(layers))
            for buffer in (self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer))
        ]

    def refill(self) -> None:
        """Write the same random keys and values before every step, whatever the previous one stored."""
        self.random.manual_seed(0)
        for cache in self.caches:
            cache.copy_(self.noise(*cache.shape))

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def rows_of(self, step: Step, count: int) -> tuple[int, ...]:
        """Table rows of the requests; padded rows use row 0, which no request owns."""
        rows = self.rows[: len(step.new)]
        return (*rows, *[0] * (count - len(rows)))

    def attention(self, row: int, first: int, queries: torch.Tensor) -> torch.Tensor:
        """Attention of a request's new tokens over the cache up to themselves, in fp32 and without a kernel."""
        slots = self.table[row, : first + len(queries)].long()
        if self.window is not None:
            slots = self.to_window[slots].long()
        keys, values = (
            buffer[slots].float().repeat_interleave(queries.shape[1] // buffer.shape[1], dim=1)
            for buffer in (
                self.pool.get_key_buffer(self.layer.layer_id),
                self.pool.get_value_buffer(self.layer.layer_id),
            )
        )
        scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * self.layer.scaling
        behind = first + torch.arange(len(queries))[:, None] - torch.arange(len(slots))
        hidden = (behind < 0) | (behind > (len(slots) if self.window is None else self.window))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)

    def batch(self, step: Step) -> Any:
        """Build the batch that SGLang's worker would pass, with the step's lengths."""
        from sglang.srt.model_executor import forward_batch_info
        from sglang.srt.speculative import eagle_info

        count, rows = sum(step.new), self.rows[: len(step.new)]
        new_tokens = list(zip(rows, step.prefix, step.new, strict=True))
        accepted = int32(step.new)
        inputs = getattr(eagle_info, "EagleDraftExtendInput", eagle_info.EagleDraftInput)
        spec_info = accepted_by(
            inputs,
            {
                "hidden_states": torch.zeros(count, 1),
                "num_accept_tokens": accepted,
                "num_accepted_tokens": accepted,
                "num_correct_drafts": accepted - 1,
                "num_accepted_drafts": accepted - 1,
            },
        )
        spec_info.num_tokens_per_req = step.width
        on_host = step.on_host
        batch = accepted_by(
            forward_batch_info.ForwardBatch,
            {
                "forward_mode": forward_batch_info.ForwardMode[step.mode],
                "batch_size": len(rows),
                "input_ids": torch.zeros(count, dtype=torch.int64),
                "positions": torch.cat([torch.arange(first, first + new) for _, first, new in new_tokens]),
                "req_pool_indices": torch.tensor(rows),
                "seq_lens": int32(step.seq_lens),
                "seq_lens_cpu": int32(step.seq_lens) if on_host else None,
                "seq_lens_sum": sum(step.seq_lens) if on_host else None,
                "out_cache_loc": torch.cat(
                    [self.table[row, first : first + new] for row, first, new in new_tokens]
                ).long(),
                "extend_prefix_lens": int32(step.prefix),
                "extend_prefix_lens_cpu": list(step.prefix) if on_host else None,
                "extend_seq_lens": int32(step.new),
                "extend_seq_lens_cpu": list(step.new) if on_host else None,
                "extend_num_tokens": count,
                "extend_start_loc": int32(step.new).cumsum(0) - int32(step.new),
                "spec_info": spec_info,
                "req_to_token_pool": self.runner.req_to_token_pool,
                "token_to_kv_pool": self.pool,
            },
        )
        self.plan(batch)
        return batch

    def plan(self, batch: Any, of_a_runner: bool = False) -> None:
        """Prepare the plan, bound to the batch, by which later releases translate slots."""
        translator = getattr(self.runner, "kv_index_translator", None)
        bind = getattr(translator, "bind_runner_slots" if of_a_runner else "bind_own_plan", None)
        if bind is not None:
            bind(batch)

    def graph_batch(self, step: Step, batch: Any) -> Any:
        """Put the batch into a captured graph's buffers; padded rows have length 1 and are full of new tokens."""
        rows, tokens = step.captured, step.captured * step.width
        pads = rows - len(step.new)
        whole = types.SimpleNamespace(**vars(batch))
        whole.batch_size = rows
        whole.input_ids, whole.positions = padded(batch.input_ids, tokens), padded(batch.positions, tokens)
        whole.out_cache_loc = padded(batch.out_cache_loc, tokens)
        whole.req_pool_indices = padded(batch.req_pool_indices, rows)
        whole.seq_lens = torch.cat([batch.seq_lens, int32([1] * pads)])
        if batch.seq_lens_cpu is not None:
            whole.seq_lens_cpu = graphs.host(torch.cat([batch.seq_lens_cpu, int32([1] * pads)]))
            whole.seq_lens_sum = batch.seq_lens_sum + pads
        whole.extend_seq_lens = torch.cat([batch.extend_seq_lens, int32([step.width] * pads)])
        whole.extend_seq_lens_cpu = [*step.new, *[step.width] * pads] if step.on_host else None
        whole.spec_info.extend_seq_lens_tensor = whole.extend_seq_lens
        whole.spec_info.extend_seq_lens_cpu = whole.extend_seq_lens_cpu
        whole.encoder_lens = None
        self.plan(whole)
        return whole

    def capture_batch(self, step: Step) -> Any:
        """Build the batch that SGLang's runners capture with: unowned rows of length 1, full of new tokens."""
        nobody = dataclasses.replace(
            step,
            prefix=(0,) * step.captured,
            new=(step.width,) * step.captured,
            seq_lens=(1,) * step.captured,
        )
        batch = self.batch(nobody)
        batch.req_pool_indices.zero_()
        batch.out_cache_loc.zero_()
        # a runner knows no prefix
        batch.extend_prefix_lens = batch.extend_prefix_lens_cpu = None
        self.plan(batch, of_a_runner=True)
        return batch


def slots_of(pages: torch.Tensor) -> torch.Tensor:
    return (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()


class Backend:
    """One of SGLang's attention backends on those requests; every path returns the slots it lists."""

    def __init__(self, requests: Requests, backend: Any) -> None:
        self.requests = requests
        self.backend = backend
        self.is_handed_batches = hasattr(backend, "init_forward_metadata_out_graph")

    def listed(self, step: Step) -> dict[str, Any]:
        raise NotImplementedError

    def eager(self, step: Step) -> dict[str, Any]:
        with self.in_use():
            self.backend.init_forward_metadata(self.requests.batch(step))
        return self.listed(step)

    def captured(self, step: Step) -> dict[str, Any]:
        """Capture with the step's own lengths, which SGLang's runners do not know yet at capture."""
        batch = self.requests.graph_batch(step, self.requests.batch(step))
        if not self.is_handed_batches:
            # only a replay gets the number of new tokens of each row
            del batch.spec_info.extend_seq_lens_tensor
        with self.in_use():
            self.capture(step, batch)
        return self.listed(step)

    def replayed(self, step: Step) -> dict[str, Any]:
        with self.in_use():
            self.capture(step, self.requests.capture_batch(step))
            self.replay(step, self.requests.graph_batch(step, self.requests.batch(step)))
        return self.listed(step)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Enter the context through which later releases reach the backend and the pool."""
        try:
            from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        except ImportError:
            yield
            return
        with forward_context(ForwardContext(attn_backend=self.backend)):
            yield

    def capture(self, step: Step, batch: Any) -> None:
        tokens = step.captured * step.width
        self.backend.init_cuda_graph_state(step.captured, tokens)
        if self.is_handed_batches:
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            return
        self.backend.init_forward_metadata_capture_cuda_graph(
            bs=step.captured,
            num_tokens=tokens,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            encoder_lens=None,
            forward_mode=batch.forward_mode,
            spec_info=batch.spec_info,
        )

    def replay(self, step: Step, batch: Any) -> None:
        # a capture refuses anything that waits for the device
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            self.fill(step, batch)

    def fill(self, step: Step, batch: Any) -> None:
        if self.is_handed_batches:
            self.backend.init_forward_metadata_out_graph(batch)
            return
        self.backend.init_forward_metadata_replay_cuda_graph(
            bs=step.captured,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_sum=batch.seq_lens_sum,
            encoder_lens=None,
            forward_mode=batch.forward_mode,
            spec_info=batch.spec_info,
            seq_lens_cpu=batch.seq_lens_cpu,
        )


class Triton(Backend):
    """Triton backend: lists the prefix's slots one by one and gets the new tokens separately."""

    def __init__(self, requests: Requests) -> None:
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        super().__init__(requests, TritonAttnBackend(requests.runner))

    def listed(self, step: Step) -> dict[str, Any]:
        found = self.backend.forward_metadata
        begins, slots = found.kv_indptr.tolist(), found.kv_indices.tolist()
        listed = [slots[begin:end] for begin, end in itertools.pairwise(begins)]
        rows = self.requests.rows_of(step, len(listed))
        return {
            "extent": found.kv_indptr.diff().tolist(),
            "slots": all(
                own == self.requests.table[row, : len(own)].tolist() for row, own in zip(rows, listed, strict=True)
            ),
            "new": found.qo_indptr.diff().tolist(),
        }

    def attended(self, step: Step) -> dict[str, Any]:
        """Run the eager step and measure how far its attention is off."""
        self.requests.refill()
        batch, tokens = self.requests.batch(step), self.new_tokens(sum(step.new))
        with self.in_use():
            self.backend.init_forward_metadata(batch)
            return self.compared(step, self.forward(tokens, batch), tokens[0])

    def attended_in_graph(self, step: Step) -> dict[str, Any]:
        self.requests.refill()
        buffers, static = self.requests.capture_batch(step), self.new_tokens(step.captured * step.width)
        with self.in_use():
            self.capture(step, buffers)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = self.forward(static, buffers)
            batch, tokens = self.requests.graph_batch(step, self.requests.batch(step)), self.new_tokens(sum(step.new))
            for buffer, values in zip(static, tokens, strict=True):
                buffer[: len(values)] = values
            buffers.out_cache_loc.copy_(batch.out_cache_loc)
            self.replay(step, batch)
            graph.replay()
            return self.compared(step, output, tokens[0])

    def new_tokens(self, count: int) -> tuple[torch.Tensor, ...]:
        layer = self.requests.layer
        heads = layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num
        return tuple(self.requests.noise(count, number, layer.head_dim) for number in heads)

    def forward(self, tokens: tuple[torch.Tensor, ...], batch: Any) -> torch.Tensor:
        queries, keys, values = tokens
        output = self.backend.forward_extend(queries.flatten(1), keys, values, self.requests.layer, batch)
        shaped: torch.Tensor = output.view(queries.shape)
        return shaped

    def compared(self, step: Step, output: torch.Tensor, queries: torch.Tensor) -> dict[str, Any]:
        errors, at = [], 0
        for row, first, new in zip(self.requests.rows, step.prefix, step.new, strict=False):
            expected = self.requests.attention(row, first, queries[at : at + new])
            errors.append(float((output[at : at + new] - expected).abs().nan_to_num(nan=math.inf).max()))
            at += new
        return self.listed(step) | {
            "error": max(errors),
            "digest": hashlib.sha256(output[:at].numpy().tobytes()).hexdigest(),
            "rest_is_finite": bool(output[at:].isfinite().all()),
        }


class Flash(Backend):
    """FlashAttention backend: lists the pages of prefix and new tokens together."""

    def __init__(self, requests: Requests, page_size: int) -> None:
        from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

        # pools are laid out in pages of 16, which a backend may also read slot by slot
        requests.runner.page_size = page_size
        super().__init__(requests, FlashAttentionBackend(requests.runner))
        requests.runner.page_size = PAGE_SIZE

    def listed(self, step: Step) -> dict[str, Any]:
        found = self.backend.forward_metadata
        size, extent = self.backend.page_size, found.cache_seqlens_int32.tolist()
        rows = self.requests.rows_of(step, len(extent))
        firsts = [self.requests.table[row, :length:size].long() for row, length in zip(rows, extent, strict=True)]
        tables = [(found.page_table, firsts)]
        if self.backend.use_sliding_window_kv_pool:
            tables.append((found.swa_page_table, [self.requests.to_window[slots] for slots in firsts]))
        return {
            "extent": extent,
            "slots": all(
                table[row, : len(slots)].tolist() == (slots // size).tolist()
                for table, expected in tables
                for row, slots in enumerate(expected)
            ),
            "new": found.cu_seqlens_q.diff().tolist(),
            "sums": found.cu_seqlens_k.diff().tolist(),
        }

    def computed_in_graph(self, step: Step) -> dict[str, Any]:
        """Recompute inside the graph, as from 0.5.16, from the buffers that a runner fills."""
        buffers = self.requests.capture_batch(step)
        buffers.extend_prefix_lens = torch.zeros_like(buffers.seq_lens)
        batch = self.requests.graph_batch(step, self.requests.batch(step))
        with self.in_use():
            self.capture(step, buffers)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.backend.init_forward_metadata_in_graph(buffers)
            for name in ("seq_lens", "req_pool_indices", "extend_seq_lens", "out_cache_loc"):
                getattr(buffers, name).copy_(getattr(batch, name))
            buffers.extend_prefix_lens[: len(step.prefix)] = batch.extend_prefix_lens
            graph.replay()
        return self.listed(step)


def positions_after_decode(step: Step) -> list[int]:
    """Positions that SGLang's kernel gives the accepted tokens with topk above 1; only before 0.5.13."""
    from sglang.srt.speculative.spec_utils import create_extend_after_decode_spec_info

    count, requests = sum(step.new), len(step.new)
    positions, last = torch.zeros(count, dtype=torch.int64), torch.zeros(requests, dtype=torch.int64)
    create_extend_after_decode_spec_info[(requests,)](
        torch.zeros(count, dtype=torch.int64), int32(step.seq_lens), int32(step.new), positions, last, 4
    )
    return positions.tolist()


class _Filled(Exception):
    """Raised to leave a runner where it would replay its graph."""


def _stop(*_: Any, **__: Any) -> None:
    raise _Filled


def runner_of(backend: Backend, captured: Any, step: Step, multi_layer: bool) -> Any:
    """Make SGLang's own runner of the step, with a captured batch for buffers; it leaves where it would replay."""
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as single
    from sglang.srt.speculative import multi_layer_eagle_draft_extend_cuda_graph_runner as multi

    requests = backend.requests
    rows, tokens = step.captured, step.captured * step.width
    whole = {name: getattr(captured, name) for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices")}
    whole |= {name: torch.ones(rows, dtype=torch.int32) for name in ("num_correct_drafts", "num_accept_tokens")}
    whole |= {name: torch.ones(rows, dtype=torch.int32) for name in ("num_accepted_drafts", "num_accepted_tokens")}
    buffers = types.SimpleNamespace(
        **whole,
        seq_lens=captured.seq_lens,
        seq_lens_cpu=graphs.host(int32([1] * rows)),
        extend_seq_lens=int32([step.width] * rows),
        extend_start_loc=torch.zeros(rows, dtype=torch.int32),
        hidden_states=torch.zeros(tokens, 1),
        select_index=torch.zeros(rows, dtype=torch.int64),
        mrope_positions=None,
        mamba_track_indices=None,
        temperatures=None,
        sampling_seed=None,
        global_num_tokens_gpu=None,
        global_num_tokens_for_logprob_gpu=None,
    )
    composite = multi.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner
    if not multi_layer:
        kind = single.EAGLEDraftExtendCudaGraphRunner
    else:
        kind = composite if hasattr(composite, "prepare") else multi.MultiLayerEagleDraftExtendCudaGraphRunner
    runner = kind.__new__(kind)
    vars(runner).update(
        buffers=buffers,
        forward_mode=captured.forward_mode,
        model_runner=requests.runner,
        draft_extend_attn_backend=backend.backend,
        eagle_worker=types.SimpleNamespace(draft_extend_attn_backend_list=[backend.backend]),
        step=0,
        device=requests.runner.device,
        device_module=torch.cuda,
        deepep_adapter=types.SimpleNamespace(replay=lambda: None),
        capture_bs=[rows],
        num_tokens_per_bs=step.width,
        captured_req_width=step.width,
        num_front_tokens=0,
        seq_len_fill_value=1,
        extend_seq_lens_cpu=[step.width] * rows,
        require_mlp_tp_gather=False,
        require_gathered_buffer=False,
        get_runner=lambda _: types.SimpleNamespace(_pad_to_bucket=lambda *_: rows),
        _pad_to_bucket=lambda *_: rows,
        _make_graph_key=_stop,
        _replay=_stop,
        _prepare_extra=_stop,
        _stage_metadata=_stop,
    )
    return runner


def fill(runner: Any, step: Step, batch: Any) -> None:
    """Have the runner fill its buffers with the batch, and replay unless it leaves before."""
    select_index = torch.zeros(len(step.new), dtype=torch.int64)
    way = next(getattr(runner, name) for name in ("prepare", "execute", "replay") if hasattr(runner, name))
    takes_index = "select_index" in inspect.signature(way).parameters
    with contextlib.suppress(_Filled):
        way(batch, select_index) if takes_index else way(batch)


def filled_by_runner(backend: Backend, step: Step, multi_layer: bool) -> dict[str, Any]:
    """Fill the graph's buffers by SGLang's own runner, and return what its backend makes of them."""
    captured = backend.requests.capture_batch(step)
    runner = runner_of(backend, captured, step, multi_layer)
    buffers, batch = runner.buffers, backend.requests.batch(step)
    with backend.in_use():
        backend.capture(step, captured)
        fill(runner, step, batch)
    found = {"seq_lens": buffers.seq_lens.tolist(), "passed": batch.seq_lens.tolist()}
    if step.on_host:
        found["seq_lens_cpu"] = buffers.seq_lens_cpu.tolist()
    # later releases' multi-layer runners leave the metadata to the graph
    return found if hasattr(runner, "prepare") else found | backend.listed(step)
