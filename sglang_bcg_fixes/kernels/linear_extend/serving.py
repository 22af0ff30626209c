# SPDX-License-Identifier: Apache-2.0
"""Capture linear layers in prefill graphs, on our kernels instead of SGLang's eager break.

While a runner captures its graphs, a layer that our kernels support is captured with them, without a break. Its tables
are filled before each replay, after SGLang's own backend has prepared the step: one launch for all layers, without
waiting for the device. An unsupported layer keeps its break; an unsupported batch is not replayed. The log gives each
reason once, and each case is counted.

`Operation` has the bodies of the patch points that all such layers share; what a layer is given, and how it calls the
kernels, is its own adapter's.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from sglang_bcg_fixes.anatomy import ranks
from sglang_bcg_fixes.anatomy.runners import makes_breakable_graphs
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK, Tracking
from sglang_bcg_fixes.model import Kernel, flag_of_kernel

logger = logging.getLogger("sglang_bcg_fixes")

Original = Callable[..., Any]
T = TypeVar("T")

# more sequences than this in one prefill are rare, and the tables cost what they could hold
MOST_SEQUENCES = 512
# forward modes that a captured extend may replay
MODES = ("EXTEND", "MIXED")
# attributes of a batch that belong to options or kinds of request which the kernels do not support
UNKNOWN_PARTS = (
    *("multi_item_delimiter_indices", "tbo_parent_token_range", "tbo_children"),
    # under DP attention it is the same on all ranks, so all of them decide alike
    "global_num_tokens_cpu",
)


class FallBack(Exception):
    """Raised when SGLang's own code must run; the message is the reason."""


class Served:
    """State shared by the captured graphs of one runner: the tables, and the layers that read them."""

    # set by the layer's own adapter
    kernel: Kernel
    # SGLang's backend of such layers, "module:Class"
    backend: str

    def __init__(self, runner: Any) -> None:
        model_runner = runner.model_runner
        refuse_configuration(model_runner, self.backend)
        self.refuse_model(model_runner)
        self.pool = backend_of(model_runner).req_to_token_pool
        device = torch.empty(0, device=model_runner.device).device
        if device.type != "cuda" and not runs_on_the_host(self.selected.impl.name):
            raise FallBack(f"tensors on {device.type}")
        self.implementation = self.selected.module(device.index)
        self.tables = self.implementation.Tables(runner.max_num_tokens, min(self.pool.size, MOST_SEQUENCES), device)
        # distance of checkpoints for the prefix cache, if it may want states from inside an extend
        self.unit = checkpoint_unit(model_runner.server_args)
        self.tracking = self.unit is not None
        # by layer: None if it is captured with our kernels, else the reason it is not
        self.layers: dict[int, str | None] = {}
        self.is_filled = False

    def refuse_model(self, model_runner: Any) -> None:
        """Raise FallBack for a model that has such layers, all of which must keep their break."""

    def refusal_of_mixer(self, mixer: Any, hidden_states: Any, layer_id: int) -> str | None:
        """Return the reason this mixer keeps its break, or None if it is captured; of layers captured as a whole."""
        raise NotImplementedError

    def refuse_unmeasured(self, model_runner: Any, measured: Iterable[str]) -> None:
        """Raise FallBack for a model that `auto` is not measured for on this release; its name begins otherwise."""
        architectures = model_runner.model_config.hf_config.architectures
        if not self.selected.required and not any(name.startswith(tuple(measured)) for name in architectures):
            raise FallBack(
                f"{', '.join(architectures)}, which was not measured on this release; "
                f"{self.kernel.flag}=triton takes it"
            )

    def unmeasured(self, state: Any, implementation: str) -> str | None:
        """Return the reason not to capture a layer with such states by default; `implementation` takes them by name."""
        if state.dtype == torch.float32 or self.selected.required:
            return None
        return f"states in {state.dtype}, which were not measured; {self.kernel.flag}={implementation} takes bfloat16"

    @property
    def selected(self) -> active.Selected:
        return active.selected(self.kernel.op)

    @property
    def off(self) -> str:
        return f"Set {self.kernel.flag}=off, and please report how this server is started"

    def decide(self, layer_id: int, why_not: Callable[[], str | None]) -> bool:
        """Decide whether a layer is captured with our kernels; the answer never changes for a layer."""
        if layer_id not in self.layers:
            reason = self.layers[layer_id] = why_not()
            if reason:
                self.selected.fall_back(reason)
        return self.layers[layer_id] is None

    def cache(self, layer_id: int) -> Any:
        return self.pool.mamba2_layer_cache(layer_id)

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
            raise RuntimeError(
                f"bcg-fixes {self.kernel.op}: replayed an unsupported prefill: {reason}. {self.off}"
            ) from None
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
                f"bcg-fixes {self.kernel.op}: a captured prefill is replayed with the states of an earlier batch. "
                f"{self.off}"
            )
        self.is_filled = False


class Operation:
    """The runners of one operation, and the bodies of its patch points."""

    def __init__(self, served: type[Served]) -> None:
        self.served: Callable[[Any], Served] = served
        self.op = served.kernel.op
        # the runner currently capturing, if any
        self.capturing: Served | None = None
        self.of_runner: weakref.WeakKeyDictionary[Any, Served] = weakref.WeakKeyDictionary()
        self.of_backend: weakref.WeakKeyDictionary[Any, Served] = weakref.WeakKeyDictionary()
        self.of_graph: weakref.WeakKeyDictionary[Any, Served] = weakref.WeakKeyDictionary()

    def capture(self, original: Original, runner: Any) -> None:
        backend = backend_of(runner.model_runner)
        self.of_runner.pop(runner, None)
        if backend is not None:
            self.of_backend.pop(backend, None)
        self.capturing = served = self.begin(runner)
        try:
            original(runner)
        finally:
            self.capturing = None
        if served is not None and None in served.layers.values():
            self.of_runner[runner] = self.of_backend[backend] = served
            for graph in graphs_of(runner):
                self.of_graph[graph] = served

    def why_not_all(self, model_runner: Any, mixers: Mapping[int, Any]) -> str | None:
        """Say why not each of these mixers, by layer, would be captured; None where all would. Nothing is counted."""
        try:
            served = self.served(types.SimpleNamespace(model_runner=model_runner, max_num_tokens=CHUNK))
        except (FallBack, active.CannotRun) as reason:
            return str(reason)
        except Exception as error:
            return without_it(self.op, "a server that it cannot read", error)
        hidden_states = torch.empty(0, 0, dtype=model_runner.dtype, device="meta")
        refusals = (served.refusal_of_mixer(mixer, hidden_states, number) for number, mixer in mixers.items())
        return next(filter(None, refusals), None)

    def captured(self, batch: Any) -> Any:
        """Return what captures a layer of this batch, if anything does: a runner also warms up without a graph."""
        return self.capturing if self.capturing is not None and is_for_graph(batch) else None

    def prepared(self, backend: Any, batch: Any) -> None:
        served = self.of_backend.get(backend)
        if served is not None and self.capturing is None and is_for_graph(batch):
            served.fill(backend, batch)

    def can_replay(self, original: Original, runner: Any, batch: Any) -> bool:
        if not original(runner, batch):
            return False
        served = self.of_runner.get(runner)
        if served is None:
            return True
        try:
            self.follow(served, backend_of(runner.model_runner))
            served.refuse(batch)
        except FallBack as reason:
            served.selected.fall_back(str(reason))
            return False
        return True

    def follow(self, served: Served, backend: Any) -> None:
        """Let the backend that prepares this batch fill the tables: adaptive speculation puts others in its place."""
        # after a second capture another backend may still fill the tables of the first
        if backend is None or self.of_backend.get(backend) is not served:
            require_kind(backend, served.backend)
            self.of_backend[backend] = served

    def before_replay(self, graph: Any) -> None:
        served = self.of_graph.get(graph)
        if served is not None:
            served.use_up()

    def begin(self, runner: Any) -> Served | None:
        if not makes_breakable_graphs(runner):
            return None
        return unless_refused(self.op, lambda: self.served(runner))


def unless_refused(op: str, make: Callable[[], T]) -> T | None:
    """Return what captures a runner's graphs; None where SGLang's own code must run, and the reason is counted."""
    selected = active.selected(op)
    try:
        return make()
    except FallBack as reason:
        selected.fall_back(str(reason))
    except active.CannotRun as unable:
        # an implementation that was named must run
        if selected.required:
            raise
        selected.fall_back(unable.reason)
    except Exception as error:
        selected.fall_back(without_it(op, "a server that it cannot read", error))
    return None


def without_it(op: str, what: str, error: Exception) -> str:
    """Warn that SGLang's own code serves, and return why; if the flag names an implementation, no server may start."""
    why = f"{what} ({type(error).__name__}: {error})"
    if active.selected(op).required:
        raise RuntimeError(f"bcg-fixes {op}: {why}. Set {flag_of_kernel(op)}=off to serve without it") from error
    logger.warning("bcg-fixes: %s: SGLang's own code serves: %s", op, why, exc_info=True)
    return why


# decisions


def backend_of(model_runner: Any) -> Any:
    """Return the linear layers' backend; None if another backend wraps it, or there is none."""
    return getattr(model_runner.attn_backend, "linear_attn_backend", None)


def graphs_of(runner: Any) -> list[Any]:
    backend = getattr(runner, "backend", None)
    return list((runner.graphs if backend is None else backend._graphs).values())


def refuse_configuration(model_runner: Any, wanted: str) -> None:
    """Raise FallBack if every layer of the runner must keep its break."""
    require_kind(backend_of(model_runner) or model_runner.attn_backend, wanted)
    refuse_server(model_runner)


def refuse_server(model_runner: Any) -> None:
    """Raise FallBack if its options let no captured layer be right, of whatever kind."""
    arguments = model_runner.server_args
    reasons = (
        ["deterministic inference"] * is_deterministic()
        or refused_options(arguments, model_runner, *ranks.resolved_sizes())
        or ["batches with counts of every rank's tokens"] * counts_ranks(arguments)
    )
    for reason in reasons:
        raise FallBack(reason)


def require_kind(backend: Any, wanted: str) -> None:
    module, _, name = wanted.partition(":")
    if type(backend) is not getattr(importlib.import_module(module), name):
        raise FallBack(f"the backend is a {type(backend).__name__}")


def counts_ranks(arguments: Any) -> bool:
    """Ask SGLang if its batches have the numbers of tokens of all ranks, of which `refuse` lets none pass."""
    asked = getattr(importlib.import_module("sglang.srt.utils.common"), "require_mlp_sync", None)
    if asked is None:
        raise FallBack("a SGLang that does not say whether batches have counts of every rank's tokens")
    # from 0.5.19 on it takes no argument
    return bool(asked(*(arguments,)[: len(inspect.signature(asked).parameters)]))


def refused_options(arguments: Any, *sized: Any) -> list[str]:
    """List the unsupported options in use. A release without an option does not have the feature.

    `sized` are objects that hold sizes which some releases derive from options.
    """

    def asked(*names: str) -> bool:
        return any(getattr(arguments, name, False) for name in names)

    def several(name: str) -> bool:
        return ranks.is_several(name, arguments, *sized)

    reasons = {
        "deterministic inference": asked("enable_deterministic_inference"),
        "two-batch overlap": asked("enable_two_batch_overlap"),
        # ranks that decide by their own batches would wait for each other
        "DP attention": asked("enable_dp_attention") or several("attn_dp_size"),
        "context parallelism": several("attn_cp_size"),
        "pipeline stages": several("pp_size"),
        "states that are loaded layer by layer": asked(
            "enable_hierarchical_cache", "enable_unified_cache_external_linker"
        ),
        "items that are scored side by side": asked("enable_mis"),
        "states that are kept as steps": asked("enable_linear_replayssm", "enable_linear_replayssm_spec"),
    }
    return [reason for reason, holds in reasons.items() if holds]


def checkpoint_unit(arguments: Any) -> int | None:
    """Return SGLang's mamba_cache_chunk_size; None without a buffer for states from inside an extend."""
    context = ranks.runtime_context()
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
    get_exec = getattr(ranks.runtime_context(), "get_exec", None)
    found = getattr(get_exec(), "deterministic", None) if get_exec else None
    return bool(getattr(found, "enable_deterministic_inference", False))


def is_for_graph(batch: Any) -> bool:
    """Return true for an extend that is being captured or replayed."""
    return graph_break.load("context").is_in_breakable_cuda_graph() and batch.forward_mode.name in MODES


def runs_on_the_host(implementation: str) -> bool:
    return implementation == "reference" or (implementation == "triton" and is_interpreted())


def is_interpreted() -> bool:
    """Triton's interpreter runs on the host's tensors."""
    import triton

    return bool(triton.knobs.runtime.interpret)
