# SPDX-License-Identifier: Apache-2.0
"""Slower: batched prefill runs without graphs; embedding models return logits

Symptom: With breakable CUDA graphs on, a prefill batch of two or more requests never replays a graph; it is right, and
as slow as without graphs. `cuda graph: True` never appears in the log next to more than one new sequence. Embedding
models get logits instead of vectors; draft models get no hidden states.
Cause: The whole model is captured with one request, including its logits, so a replay produces one row of logits, and
can_run refuses a larger batch. Batches whose answer is not logits are not refused.
Change: Only the layers are captured, found in the model by structure. A replay runs the model itself on the real batch,
with the captured layers in place of its own, so logits, pooled vectors and hidden states are computed from every
request. All sizes share one output buffer. The layers are captured with what the model passes them for text. A
multimodal model passes its own positions, three for each token under M-RoPE, and embeddings, which it writes to a
buffer of SGLang's. Where SGLang has no such buffer, as with Step3-VL while images are not enabled, each replay copies
them to a buffer of this fix. Batches with images, audio or video run eagerly, and so do modes other than plain and
mixed prefill. Nothing is captured, and one warning says why, where the layers cannot be found or receive something that
lies in no buffer, with an encoder-decoder model, with MLA where mla_dispatch_unaware is not applied, and under LoRA, DP
attention and pipeline parallelism: the captured batch has no adapters, no token counts of other ranks and no stage
input. For these three SGLang itself captures only with --enforce-piecewise-cuda-graph.
Remove when: No release before 0.5.12 has to be served.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy import layer_stack
from sglang_bcg_fixes.anatomy.latent_attention import is_chosen_by
from sglang_bcg_fixes.anatomy.launches import EMBEDDINGS, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import MAY_REPLAY, OLD_PREFILL, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, fixed, slower, unknown, wrong

if TYPE_CHECKING:
    from torch import Tensor

PREPARE = "sglang.srt.model_executor.piecewise_cuda_graph_runner:PiecewiseCudaGraphRunner.replay_prepare"
CAPTURE = ("_warmup", "_capture_all", "_build_capture_forward_batch")
# attribute on the runner that holds this fix's state for its model
STATE = "bcg_fixes_captured_layers"
# fields that the captured batch has a buffer for, and that every replay fills
BUFFERED = ("input_ids", "positions", "mrope_positions", "input_embeds")
# the batch itself, in addition to its fields
ITSELF = "forward_batch"
# embeddings that the model computes before it calls the layers
COMPUTED = "computed"
# fields of a batch that replay_prepare omits from the batch that the model runs with
LEFT_OUT = (
    "multi_item_delimiter_indices",
    "ngram_embedding_info",
    "return_hidden_states_before_norm",
    "attn_cp_metadata",
)
OFF = "SGLANG_BCG_FIX_SINGLE_REQUEST_CAPTURE=off"

logger = logging.getLogger("sglang_bcg_fixes")


def probe(source: Source) -> Finding:
    captured = source.need(f"{OLD_PREFILL}._run_forward", f"{PREFILL}._run_forward")
    if "self.layer_model.forward" in captured.calls:
        return fixed("the layers are captured without the logits", captured)
    admission = source.need(*MAY_REPLAY)
    if "self.model_runner.model.forward" in captured.calls and admission.mentions("forward_batch.batch_size > 1"):
        replay = source.need(f"{OLD_PREFILL}.replay")
        capture = [source.need(f"{OLD_PREFILL}.{name}") for name in CAPTURE]
        prepare = source.need(PREPARE)
        reason = "the whole model is captured with one request, and can_run refuses more"
        return affected(reason, captured, admission, replay, prepare, *capture)
    return unknown("the prefill runner captures something that no known release does", captured, admission)


class Called(Exception):
    """Raised to leave a model where it would run its layers."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class CapturedLayers:
    """The layers of one model, their input and output buffers, and the arguments that bypass the graphs."""

    def __init__(
        self,
        stack: layer_stack.LayerStack,
        rows: int,
        handed: dict[str, str | None],
        embeddings: Tensor | None = None,
    ) -> None:
        self.stack = stack
        # as returned by handed_over
        self.handed = handed
        # buffers of the arguments that each replay copies
        self.embeddings = embeddings
        self.computed = [name for name, field in handed.items() if field == COMPUTED]
        self.rows = rows
        self.buffers: list[Tensor] = []
        self.signature = inspect.signature(stack.module.forward)
        self.warned = False

    def run(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Any:
        """Run the layers, with their output in the shared buffers."""
        import torch

        # the model's own forward has this decorator, its layers do not
        with torch.no_grad():
            output = self.stack.module.forward(**self.arguments(forward_batch))
            buffers = iter(self.buffers) if self.buffers else self.allocate(output)
            return map_tensors(output, lambda part: next(buffers)[: len(part)].copy_(part))

    def arguments(self, batch: Any) -> dict[str, Any]:
        """Everything that the captured layers read, by their own parameter names."""
        fields: dict[str | None, Any] = {field: getattr(batch, field) for field in BUFFERED}
        fields |= {ITSELF: batch, None: None}
        if self.embeddings is not None:
            fields[COMPUTED] = self.embeddings[: len(batch.input_ids)]
        return {name: fields[field] for name, field in self.handed.items()}

    def allocate(self, output: Any) -> Iterator[Tensor]:
        """Allocate full-size buffers before any capture, so that they lie outside the graphs' memory."""
        map_tensors(output, lambda part: self.buffers.append(part.new_empty(self.rows, *part.shape[1:])))
        return iter(self.buffers)

    @contextlib.contextmanager
    def replayed(self, graph: Any, output: Any, batch: Any) -> Iterator[None]:
        """Make the model's call of its layers replay the graph, while the context lasts."""
        layers_forward = self.stack.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            given, seen = self.signature.bind(*args, **kwargs).arguments, self.arguments(batch)
            unlike = self.unlike_capture(given, seen)
            if unlike:
                self.warn_once(unlike)
                return layers_forward(*args, **kwargs)
            for name in self.computed:
                seen[name].copy_(given[name])
            graph.replay()
            return output

        with replaced(self.stack.module, "forward", forward):
            yield

    def unlike_capture(self, given: dict[str, Any], seen: dict[str, Any]) -> str | None:
        """Name an argument that the graph would miss: it reads only the batch's tensors and the copied ones."""
        for name, value in seen.items():
            # a replay reads the captured buffer even where this batch has none
            missing = value is None and self.handed[name]
            is_seen = takes(value, given.get(name)) if name in self.computed else given.get(name) is value
            if missing or not is_seen:
                return name
        for name, value in given.items():
            parameter = self.signature.parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                if any(extra is not None for extra in value.values()):
                    return ", ".join(value)
            elif name not in seen and value is not parameter.default and value is not None:
                return name
        return None

    def warn_once(self, name: str) -> None:
        if not self.warned:
            self.warned = True
            logger.warning(
                "bcg-fixes single_request_capture: %s is called with another '%s' than was captured; such batches run "
                "eagerly. %s restores SGLang's own behaviour",
                self.stack.path,
                name,
                OFF,
            )

    def detached(self, output: Any) -> Any:
        """Copy an answer out of the buffers, which the next replay overwrites."""
        ours = {buffer.untyped_storage().data_ptr() for buffer in self.buffers}
        return map_tensors(output, lambda part: part.clone() if part.untyped_storage().data_ptr() in ours else part)


def takes(buffer: Tensor, value: Tensor | None) -> bool:
    """Check that a copy would be the value itself: no broadcast, no cast."""
    return value is not None and value.shape == buffer.shape and value.dtype == buffer.dtype


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Rebuild a structure with every tensor changed and other values as they are."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def captured_layers(runner: Any) -> CapturedLayers | None:
    """Find the layers once; None, with a warning, where nothing may be captured."""
    if STATE not in vars(runner):
        setattr(runner, STATE, find_layers(runner))
    found: CapturedLayers | None = getattr(runner, STATE)
    return found


def find_layers(runner: Any) -> CapturedLayers | None:
    model_runner = runner.model_runner
    try:
        refuse_configuration(model_runner)
        stack = layer_stack.resolve(model_runner.model, runner.attention_layers)
        handed, embeddings = handed_over(runner, stack)
    except layer_stack.Unresolved as reason:
        logger.warning(
            "bcg-fixes single_request_capture: no prefill graphs for %s.%s, prefill runs eagerly: %s. %s restores "
            "SGLang's own behaviour",
            type(model_runner.model).__module__,
            type(model_runner.model).__qualname__,
            reason,
            OFF,
        )
        return None
    return CapturedLayers(stack, runner.max_num_tokens, handed, embeddings)


def handed_over(runner: Any, stack: layer_stack.LayerStack) -> tuple[dict[str, str | None], Tensor | None]:
    """Map a model's layer arguments for text to fields of the batch, with a buffer for embeddings that are not one.

    Raises Unresolved.
    """
    batch = runner._build_capture_forward_batch(runner.capture_num_tokens[0])
    given = layers_call(runner, stack, batch)
    fields = {id(getattr(batch, field)): field for field in BUFFERED} | {id(batch): ITSELF, id(None): None}
    parameters = inspect.signature(stack.module.forward).parameters
    handed: dict[str, str | None] = {}
    embeddings = None
    for name, value in given.items():
        parameter = parameters[name]
        nothing = parameter.kind is parameter.VAR_KEYWORD and all(extra is None for extra in value.values())
        if id(value) in fields:
            handed[name] = fields[id(value)]
        elif name in layer_stack.EMBEDDINGS and is_one_row_a_token(value, batch):
            handed[name] = COMPUTED
            embeddings = value.new_zeros(runner.max_num_tokens, *value.shape[1:])
        elif value is not parameter.default and not nothing:
            raise layer_stack.Unresolved(f"{stack.path} is called with a '{name}' that lies in no buffer of the graphs")
    return handed, embeddings


def is_one_row_a_token(value: Any, batch: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and len(value) == len(batch.input_ids)


def layers_call(runner: Any, stack: layer_stack.LayerStack, batch: Any) -> dict[str, Any]:
    """Arguments of the layers' call, which is not made."""
    import torch
    from sglang.srt.compilation.piecewise_context_manager import set_forward_context

    signature = inspect.signature(stack.module.forward)

    def forward(*args: Any, **kwargs: Any) -> None:
        raise Called(signature.bind(*args, **kwargs).arguments)

    parts = (runner.attention_layers, runner.quant_config, runner.moe_layers, runner.moe_fusions)
    with torch.no_grad(), set_forward_context(batch, *parts), replaced(stack.module, "forward", forward):
        try:
            runner.model_runner.model.forward(batch.input_ids, batch.positions, batch)
        except Called as call:
            return call.arguments
    raise layer_stack.Unresolved(f"{stack.path} is not called for a batch of text")


def refuse_configuration(model_runner: Any) -> None:
    """Raise for configurations that this release would capture with no request's state, or another's."""
    arguments, configuration = model_runner.server_args, model_runner.model_config
    reasons = {
        "LoRA: the adapters of the capture batch would be replayed": arguments.enable_lora or arguments.lora_paths,
        "DP attention: the ranks' own token counts would be replayed": arguments.enable_dp_attention,
        "pipeline stages: a stage's input is not in the capture batch": arguments.pp_size > 1,
        "an encoder-decoder model: its encoder's output would not be seen": configuration.is_encoder_decoder,
        "MLA without mla_dispatch_unaware: the break would look up another layer than was captured": (
            model_runner.use_mla_backend and not is_chosen_by("mla_dispatch_unaware")
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise layer_stack.Unresolved(reason)


def warm_up(original: Callable[..., None], self: Any) -> None:
    if captured_layers(self):
        original(self)


def capture_all(original: Callable[..., None], self: Any) -> None:
    if captured_layers(self):
        original(self)


def run_layers(original: Callable[..., Any], self: Any, forward_batch: Any, num_tokens: int) -> Any:
    """Run in the original's contexts, with the layers in place of the model."""
    layers = captured_layers(self)
    assert layers, "nothing is captured without layers"
    with replaced(self.model_runner.model, "forward", layers.run):
        return original(self, forward_batch, num_tokens)


def can_run(original: Callable[..., bool], self: Any, forward_batch: Any) -> bool:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    if not captured_layers(self) or forward_batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
        return False
    if any(getattr(forward_batch, name) for name in LEFT_OUT) or forward_batch.contains_mm_inputs():
        return False
    # everything that it checks except the number of requests
    single = copy.copy(forward_batch)
    single.batch_size = 1
    return original(self, single)


def replay(self: Any, forward_batch: Any, **kwargs: Any) -> Any:
    from sglang.srt.compilation.piecewise_context_manager import set_forward_context
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.breakable_cuda_graph.context import enable_breakable_cuda_graph

    layers = captured_layers(self)
    assert layers, "can_run admits nothing without layers"
    tokens = len(forward_batch.input_ids)
    size = self.capture_num_tokens[bisect.bisect_left(self.capture_num_tokens, tokens)]
    with enable_breakable_cuda_graph():
        batch = self.replay_prepare(forward_batch, **kwargs)
        # as the batch asks: it was forced on for a capture of the whole model
        batch.return_pooled_hidden_states = forward_batch.return_pooled_hidden_states
        self.model_runner.attn_backend.init_forward_metadata(forward_batch)
        parts = (self.attention_layers, self.quant_config, self.moe_layers, self.moe_fusions)
        with (
            set_forward_context(batch, *parts),
            layers.replayed(self.graphs[size], self.output_buffers[size], batch),
        ):
            output = self.model_runner.model.forward(batch.input_ids, batch.positions, batch, **kwargs)
    changes = {field.name: layers.detached(getattr(output, field.name)) for field in dataclasses.fields(output)}
    if isinstance(output, LogitsProcessorOutput) and output.hidden_states is not None:
        # one row per token, padding included, or one per request
        changes["hidden_states"] = changes["hidden_states"][:tokens]
    return dataclasses.replace(output, **changes)


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/24662",),
    probe=probe,
    patches=(
        PatchPoint((f"{OLD_PREFILL}._warmup",), How.AROUND, warm_up),
        PatchPoint((f"{OLD_PREFILL}._capture_all",), How.AROUND, capture_all),
        PatchPoint((f"{OLD_PREFILL}._run_forward",), How.AROUND, run_layers),
        PatchPoint((f"{OLD_PREFILL}.can_run",), How.AROUND, can_run),
        PatchPoint((f"{OLD_PREFILL}.replay",), How.REPLACE, replay),
    ),
    after=("linear_attention_captured", "mla_dispatch_unaware"),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_several_requests",),
    concerns=wrong(PREFILL_GRAPHS, EMBEDDINGS) + slower(PREFILL_GRAPHS),
)
