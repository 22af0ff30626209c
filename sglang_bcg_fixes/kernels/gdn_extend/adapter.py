# SPDX-License-Identifier: Apache-2.0
"""Capture gated delta net layers in prefill graphs, on our kernels instead of SGLang's eager break.

While a runner captures its graphs, a layer that our kernels support is captured with them, without a break. Its tables
are filled before each replay, after SGLang's own backend has prepared the step: one launch for all layers, without
waiting for the device. An unsupported layer keeps its break; an unsupported batch is not replayed. The log gives each
reason once, and each case is counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import weakref
from collections.abc import Callable
from typing import Any

import torch

from sglang_bcg_fixes.anatomy.runners import makes_breakable_graphs
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.gdn_extend import Shape, refusal
from sglang_bcg_fixes.kernels.gdn_extend.declaration import KERNEL
from sglang_bcg_fixes.kernels.gdn_extend.metadata import CHUNK, Tracking

Tensor = torch.Tensor
Original = Callable[..., Any]

# more sequences than this in one prefill are rare, and the tables cost what they could hold
MOST_SEQUENCES = 128
# forward modes that a captured extend may replay
MODES = ("EXTEND", "MIXED")
# attributes of a batch that belong to options or kinds of request which the kernels do not support
UNKNOWN_PARTS = (
    *("multi_item_delimiter_indices", "tbo_parent_token_range", "tbo_children"),
    # under DP attention it is the same on all ranks, so all of them decide alike
    "global_num_tokens_cpu",
)


OFF = f"Set {KERNEL.flag}=off, and please report how this server is started"


class FallBack(Exception):
    """Raised when SGLang's own code must run; the message is the reason."""


class Served:
    """State shared by the captured graphs of one runner: the tables, and the layers that read them."""

    def __init__(self, runner: Any) -> None:
        model_runner = runner.model_runner
        refuse_configuration(model_runner)
        self.pool = backend_of(model_runner).req_to_token_pool
        device = torch.empty(0, device=model_runner.device).device
        if device.type != "cuda" and not runs_on_the_host(active.selected(KERNEL.op).impl.name):
            raise FallBack(f"tensors on {device.type}")
        self.form = active.selected(KERNEL.op).module(device.index)
        self.tables = self.form.Tables(runner.max_num_tokens, min(self.pool.size, MOST_SEQUENCES), device)
        # distance of checkpoints for the prefix cache, if it may want states from inside an extend
        self.unit = checkpoint_unit(model_runner.server_args)
        self.tracking = self.unit is not None
        # by layer: None if it is captured with our kernels, else the reason it is not
        self.layers: dict[int, str | None] = {}
        self.is_filled = False

    def takes(self, layer: Any, mixed_qkv: Any, a: Any, b: Any) -> bool:
        """Decide whether a layer is captured with our kernels; the answer never changes for a layer."""
        if layer.layer_id not in self.layers:
            reason = self.layers[layer.layer_id] = why_not(layer, mixed_qkv, a, b, self.cache(layer))
            if reason:
                active.selected(KERNEL.op).fall_back(reason)
        return self.layers[layer.layer_id] is None

    def cache(self, layer: Any) -> Any:
        return self.pool.mamba2_layer_cache(layer.layer_id)

    def extend(self, layer: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        cache, shape = self.cache(layer), shape_of(layer)
        rows = mixed_qkv.shape[0]
        tuning = self.form.tuning_for(rows)
        output = torch.empty(1, rows, shape.value_heads, shape.values, dtype=mixed_qkv.dtype, device=mixed_qkv.device)
        self.form.extend(
            mixed_qkv,
            a,
            b,
            shape=shape,
            conv_weights=layer.conv_weights,
            bias=layer.bias,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            conv=cache.conv[0],
            state=cache.temporal,
            tables=self.tables,
            # allocated from the graph's own pool, which reuses it after this layer
            scratch=self.form.Scratch.for_rows(rows, self.tables, shape, mixed_qkv.dtype, tuning),
            output=output[0],
            tracking=self.tracking,
            tuning=tuning,
        )
        return output

    def refuse(self, batch: Any) -> None:
        """Raise FallBack for a batch that the captured kernels do not support; never syncs the device."""
        mode = batch.forward_mode.name
        if mode not in MODES:
            raise FallBack(f"a batch of mode {mode}")
        # not batch_size: a fix of 0.5.11 asks SGLang about many requests as if they were one
        sequences = len(batch.req_pool_indices)
        if sequences > self.tables.max_sequences:
            raise FallBack(f"more than {self.tables.max_sequences} sequences in a batch")
        if batch.extend_seq_lens is None or len(batch.extend_seq_lens) != sequences:
            raise FallBack("other lengths than requests")
        if batch.mamba_track_mask is not None and not self.tracking:
            raise FallBack("checkpoints that were not captured")
        if batch.mamba_track_mask is not None and len(batch.mamba_track_mask) != sequences:
            raise FallBack("other checkpoints than requests")
        if getattr(self.pool, "layer_transfer_counter", None) is not None:
            raise FallBack("states that are loaded layer by layer")
        for name in UNKNOWN_PARTS:
            if getattr(batch, name, None) is not None:
                raise FallBack(f"a batch with {name}")

    def fill(self, backend: Any, batch: Any) -> None:
        """Fill the tables for the step that SGLang's backend has just prepared."""
        try:
            self.refuse(batch)
        except FallBack as reason:
            raise RuntimeError(f"bcg-fixes {KERNEL.op}: replayed an unsupported prefill: {reason}. {OFF}") from None
        tracking = None
        if self.unit is not None and batch.mamba_track_mask is not None and batch.mamba_track_seqlens is not None:
            tracking = Tracking(batch.mamba_track_mask, batch.mamba_track_indices, batch.mamba_track_seqlens, self.unit)
        slots = backend.forward_metadata.mamba_cache_indices
        self.tables.fill(batch.extend_seq_lens, slots, batch.extend_prefix_lens, tracking)
        self.is_filled = True

    def use_up(self) -> None:
        """Consume the tables before a replay: one step's tables serve one replay."""
        if not self.is_filled:
            raise RuntimeError(
                f"bcg-fixes {KERNEL.op}: a captured prefill is replayed with the states of an earlier batch. {OFF}"
            )
        self.is_filled = False


# the runner currently capturing, if any
_capturing: Served | None = None
_of_runner: weakref.WeakKeyDictionary[Any, Served] = weakref.WeakKeyDictionary()
_of_backend: weakref.WeakKeyDictionary[Any, Served] = weakref.WeakKeyDictionary()
_of_graph: weakref.WeakKeyDictionary[Any, Served] = weakref.WeakKeyDictionary()


# the bodies of the patch points


def capture(original: Original, self: Any) -> None:
    global _capturing
    backend = backend_of(self.model_runner)
    _of_runner.pop(self, None)
    if backend is not None:
        _of_backend.pop(backend, None)
    _capturing = served = begin(self)
    try:
        original(self)
    finally:
        _capturing = None
    if served is not None and None in served.layers.values():
        _of_runner[self] = _of_backend[backend] = served
        for graph in graphs_of(self):
            _of_graph[graph] = served


def forward(original: Original, self: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any) -> Any:
    served = _capturing
    # a runner also warms up without a graph, on batches of other sizes
    if served is not None and is_for_graph(forward_batch) and served.takes(self, mixed_qkv, a, b):
        return served.extend(self, mixed_qkv, a, b)
    return original(self, forward_batch, mixed_qkv, a, b)


def prepared(result: None, self: Any, forward_batch: Any) -> None:
    served = _of_backend.get(self)
    if served is not None and _capturing is None and is_for_graph(forward_batch):
        served.fill(self, forward_batch)


def can_replay(original: Original, self: Any, forward_batch: Any) -> bool:
    if not original(self, forward_batch):
        return False
    served = _of_runner.get(self)
    try:
        if served is not None:
            served.refuse(forward_batch)
    except FallBack as reason:
        active.selected(KERNEL.op).fall_back(str(reason))
        return False
    return True


def before_replay(self: Any) -> None:
    served = _of_graph.get(self)
    if served is not None:
        served.use_up()


# decisions


def begin(runner: Any) -> Served | None:
    if not makes_breakable_graphs(runner):
        return None
    operation = active.selected(KERNEL.op)
    try:
        return Served(runner)
    except FallBack as reason:
        operation.fall_back(str(reason))
    except active.CannotRun as unable:
        # a form that was named must run
        if operation.required:
            raise
        operation.fall_back(unable.reason)
    return None


def backend_of(model_runner: Any) -> Any:
    """Return the linear layers' backend; None if another backend wraps it, or there is none."""
    return getattr(model_runner.attn_backend, "linear_attn_backend", None)


def graphs_of(runner: Any) -> list[Any]:
    backend = getattr(runner, "backend", None)
    return list((runner.graphs if backend is None else backend._graphs).values())


def refuse_configuration(model_runner: Any) -> None:
    """Raise FallBack if every layer of the runner must keep its break."""
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    backend = backend_of(model_runner)
    if type(backend) is not GDNAttnBackend:
        raise FallBack(f"the backend is a {type(backend or model_runner.attn_backend).__name__}")
    get_parallel = getattr(runtime_context(), "get_parallel", None)
    sized = (model_runner, get_parallel()) if get_parallel else (model_runner,)
    reasons = refused_options(model_runner.server_args, *sized) or ["deterministic inference"] * is_deterministic()
    for reason in reasons:
        raise FallBack(reason)


def refused_options(arguments: Any, *sized: Any) -> list[str]:
    """List the unsupported options in use. A release without an option does not have the feature.

    `sized` are objects that hold sizes which some releases derive from options.
    """

    def asked(*names: str) -> bool:
        return any(getattr(arguments, name, False) for name in names)

    def several(name: str) -> bool:
        return any(int(getattr(each, name, 1) or 1) > 1 for each in (arguments, *sized))

    reasons = {
        "deterministic inference": asked("enable_deterministic_inference"),
        "two-batch overlap": asked("enable_two_batch_overlap"),
        # ranks that decide by their own batches would wait for each other
        "DP attention": asked("enable_dp_attention") or several("attn_dp_size"),
        "context parallelism": several("attn_cp_size"),
        "pipeline stages": several("pp_size"),
        "states that are loaded layer by layer": asked("enable_hierarchical_cache"),
        "items that are scored side by side": asked("enable_mis"),
        "states that are kept as steps": asked("enable_linear_replayssm", "enable_linear_replayssm_spec"),
    }
    return [reason for reason, holds in reasons.items() if holds]


def checkpoint_unit(arguments: Any) -> int | None:
    """Return SGLang's mamba_cache_chunk_size; None without a buffer for states from inside an extend."""
    context = runtime_context()
    if hasattr(arguments, "enable_mamba_extra_buffer"):
        wanted = arguments.enable_mamba_extra_buffer()
    else:
        wanted = context.get_exec().mamba.enable_mamba_extra_buffer
    if not wanted:
        return None
    of_context = getattr(context, "mamba_cache_chunk_size", None)
    unit = int(of_context() if of_context else arguments.mamba_cache_chunk_size)
    if unit % CHUNK:
        raise FallBack(f"checkpoints {unit} tokens apart")
    return unit


def is_deterministic() -> bool:
    """Read what later releases resolve; earlier ones only have the option."""
    get_exec = getattr(runtime_context(), "get_exec", None)
    found = getattr(get_exec(), "deterministic", None) if get_exec else None
    return bool(getattr(found, "enable_deterministic_inference", False))


def runtime_context() -> Any:
    """Import the module in which later releases keep resolved options; None before."""
    name = "sglang.srt.runtime_context"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def shape_of(layer: Any) -> Shape:
    return Shape(
        layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim, width=layer.conv_weights.shape[1]
    )


def why_not(layer: Any, mixed_qkv: Any, a: Any, b: Any, cache: Any) -> str | None:
    """Return the reason this layer keeps its break, or None if the kernels support it."""
    if not all(isinstance(each, Tensor) and each.ndim == 2 for each in (mixed_qkv, a, b, layer.conv_weights)):
        return "projections that are not two-dimensional tensors"
    (conv,), state = cache.conv, cache.temporal
    wrong = {
        f"{layer.num_q_heads} query heads on {layer.num_k_heads} key heads": layer.num_q_heads != layer.num_k_heads,
        "states that are kept as steps": getattr(cache, "replayssm_d", None) is not None,
        "strided state pools": not (conv.is_contiguous() and state.is_contiguous()),
        "projections whose rows are not contiguous": {mixed_qkv.stride(1), a.stride(1), b.stride(1)} != {1},
        "weights that are not contiguous": not (
            all(each.is_contiguous() for each in (layer.conv_weights, layer.A_log, layer.dt_bias))
        ),
    }
    found = next((what for what, applies in wrong.items() if applies), None)
    return found or refusal(shape_of(layer), kind=mixed_qkv.dtype, activation=layer.activation, conv=conv, state=state)


def is_for_graph(batch: Any) -> bool:
    """Return true for an extend that is being captured or replayed."""
    return graph_break.load("context").is_in_breakable_cuda_graph() and batch.forward_mode.name in MODES


def runs_on_the_host(form: str) -> bool:
    return form == "reference" or (form == "triton" and is_interpreted())


def is_interpreted() -> bool:
    """Triton's interpreter runs on the host's tensors."""
    import triton

    return bool(triton.knobs.runtime.interpret)
