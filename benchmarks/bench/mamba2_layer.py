# SPDX-License-Identifier: Apache-2.0
"""One Mamba2 layer as a graph break runs it, and the same kernels captured: the installed SGLang's own code, and ours.

    python -m benchmarks.bench.mamba2_layer JOB

From the convolution to the output of the scan, before the gated norm; the projections are the same in all arms and left
out. JOB, output and arms are gdn_layer's.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.bench import gdn_layer
from benchmarks.bench.gdn_layer import CAPTURED_SEQUENCES, CUDA, EAGER, PREFIX, SEED, SGLANG, TRITON, Layer
from benchmarks.bench.rows import RED, Row
from sglang_bcg_fixes.kernels.mamba2_extend import Shape as Heads
from sglang_bcg_fixes.model import Rejected
from sglang_bcg_fixes.source.tree import Source
from tests.kernels import accuracy, mamba2_reference

if TYPE_CHECKING:
    from sglang_bcg_fixes.kernels.mamba2_extend.triton import Call, Tuning

MIXER = "sglang.srt.layers.attention.mamba.mamba:MambaMixer2"
METADATA = "sglang.srt.layers.attention.mamba.mamba2_metadata"
NEEDED = (f"{MIXER}.forward", f"{METADATA}:Mamba2Metadata.prepare_mixed", f"{METADATA}:ForwardMetadata")
# of SGLang's own error against the reference
TIMES = 1.1


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's Mamba2 layers on one GPU, and their number; `chunk` is SGLang's."""

    layers: int
    heads: int = 128
    groups: int = 8
    head: int = 64
    states: int = 128
    width: int = 4
    chunk: int = 128
    # of the pool's states
    kept: str = "float32"

    @property
    def of_kernel(self) -> Heads:
        return Heads(self.heads, self.groups, self.head, self.states, self.width)


# Nemotron-H-8B, Nemotron-Nano-9B-v2, Nemotron-3-Nano-30B-A3B, Falcon-H1-7B and -34B, Granite-4.0-H-Small; and what one
# GPU of eight or of two has of them
SHAPES = {
    "nemotron_h_8b": Shape(24),
    "nemotron_h_8b_tp8": Shape(24, 16, 1),
    "nemotron_nano_9b": Shape(27, head=80),
    "nemotron_3_nano": Shape(23, 64),
    "falcon_h1_7b": Shape(44, 24, 1, 128, 256),
    "falcon_h1_34b": Shape(72, 32, 2, 128, 256),
    "falcon_h1_34b_tp2": Shape(72, 16, 1, 128, 256),
    "granite_4_h_small": Shape(36, groups=1, chunk=256),
}


def floor_us(shape: Shape, tokens: int, sequences: int, gpu: str) -> float | None:
    """Lower bound of a layer's time: its inputs, outputs and states moved once. Only for GPUs with measured rates."""
    if "H200" not in gpu:
        return None
    sizes = shape.of_kernel
    per_token = 2 * (sizes.channels + shape.heads + sizes.inner)
    of_state = 4 if shape.kept == "float32" else 2
    per_sequence = 2 * (of_state * sizes.inner * shape.states + 2 * sizes.channels * (shape.width - 1))
    return round(1e6 * (tokens * per_token + sequences * per_sequence) / 4.3e12, 1)


def missing(source: Source) -> list[str]:
    return [where for where in NEEDED if not source.find(where)]


class Problem(gdn_layer.Pools):
    """A step of `layers` consecutive layers: the same inputs and weights, separate pools, one output."""

    times = TIMES

    def __init__(self, shape: Shape, lengths: Sequence[int], device: str, kind: str = "bfloat16") -> None:
        import torch

        half, kept = getattr(torch, kind), getattr(torch, shape.kept)
        self.shape, self.lengths, self.layers, self.device = shape, list(lengths), shape.layers, device
        source = torch.Generator(device).manual_seed(SEED)
        sizes, tokens, sequences = shape.of_kernel, sum(lengths), len(lengths)

        def normal(*of: int, dtype: torch.dtype = half) -> torch.Tensor:
            return torch.randn(*of, generator=source, device=device).to(dtype)

        # as the input projection leaves them: gate, x, B, C, step sizes
        self.projected = normal(tokens, sizes.inner + sizes.channels + shape.heads)
        self.projected[:, -shape.heads :] -= 2
        _, inputs, dt = torch.split(self.projected, [sizes.inner, sizes.channels, shape.heads], 1)
        self.inputs = mamba2_reference.Inputs(
            lengths=self.lengths,
            shape=sizes,
            inputs=inputs,
            dt=dt,
            conv_weights=normal(sizes.channels, shape.width) * 0.5,
            # as they are initialised: some heads forget faster than others
            A=-torch.linspace(1, 16, shape.heads, device=device),
            D=normal(shape.heads, dtype=torch.float32),
            dt_bias=normal(shape.heads, dtype=torch.float32) * 0.5,
            conv=normal(sequences, sizes.channels, shape.width - 1),
            state=normal(sequences, shape.heads, shape.head, shape.states, dtype=kept),
            bias=normal(sizes.channels),
        )
        # slot 0 is unused: NaN exposes whoever reads it
        self.slots = torch.arange(1, sequences + 1, dtype=torch.int32, device=device)
        self.conv, self.state = (
            torch.full((self.layers, sequences + 1, *each.shape[1:]), torch.nan, dtype=each.dtype, device=device)
            for each in (self.inputs.conv, self.inputs.state)
        )
        self.output: Any = torch.empty(tokens, shape.heads, shape.head, dtype=half, device=device)

    def wanted(self) -> accuracy.Results:
        return mamba2_reference.recurrent(self.inputs)

    def results(self, layer: int) -> accuracy.Results:
        return accuracy.Results(self.output, self.conv[layer, 1:], self.state[layer, 1:])


def of_sglang(problem: Problem) -> Layer:
    """Call MambaMixer2.forward on our own pools, its projections and its norm replaced by what they were given."""
    import torch
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
    from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata, Mamba2Metadata

    shape, inputs, lengths = problem.shape, problem.inputs, problem.lengths
    sizes = shape.of_kernel
    mixer = types.SimpleNamespace(
        tp_size=1,
        num_heads=shape.heads,
        head_dim=shape.head,
        n_groups=shape.groups,
        ssm_state_size=shape.states,
        intermediate_size=sizes.inner,
        conv_dim=sizes.channels,
        groups_ssm_state_size=shape.groups * shape.states,
        activation="silu",
        conv1d=types.SimpleNamespace(weight=inputs.conv_weights[:, None], bias=inputs.bias),
        A=inputs.A,
        D=inputs.D,
        dt_bias=inputs.dt_bias,
        in_proj=lambda projected: (projected, None),
        norm=lambda found, gate: found,
        out_proj=lambda found, **others: (found, None),
    )
    real = torch.tensor(lengths, dtype=torch.int32, device=problem.device)
    mode = types.SimpleNamespace(is_target_verify=lambda: False, is_decode=lambda: False)
    batch = types.SimpleNamespace(
        forward_mode=mode,
        logical_forward_mode=mode,
        extend_num_tokens=sum(lengths),
        extend_seq_lens=real,
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens=torch.full_like(real, PREFIX),
        seq_lens=real + PREFIX,
        spec_info=None,
        mamba_track_mask=None,
        mamba_track_indices=None,
    )
    starts = torch.nn.functional.pad(real.cumsum(0), (1, 0)).to(torch.int32)
    # once for all layers of a step, as in SGLang
    metadata = Mamba2Metadata.prepare_mixed(
        ForwardMetadata(query_start_loc=starts, mamba_cache_indices=problem.slots), shape.chunk, batch
    )
    forward: Any = MambaMixer2.forward
    others = {"forward_batch": batch} if "forward_batch" in inspect.signature(forward).parameters else {}
    output = problem.output.flatten(1)

    def layer(number: int) -> None:
        cache = types.SimpleNamespace(conv=[problem.conv[number]], temporal=problem.state[number])
        forward(
            mixer,
            hidden_states=problem.projected,
            output=output,
            layer_cache=cache,
            metadata=metadata,
            use_triton_causal_conv=True,
            **others,
        )

    return layer


def of_ours(problem: Problem, implementation: str) -> Layer:
    call = calls_of_ours(problem, implementation)
    return lambda number: call(number).launch()


def calls_of_ours(
    problem: Problem, implementation: str = TRITON, tuning: Tuning | None = None, sequences: int = CAPTURED_SEQUENCES
) -> Callable[[int], Call]:
    """Call our kernels as the captured graph would, on static tables made for far more sequences."""
    import torch

    from sglang_bcg_fixes.kernels.linear_extend import metadata
    from sglang_bcg_fixes.kernels.mamba2_extend import cuda, triton

    implementations: dict[str, Any] = {TRITON: triton, CUDA: cuda}
    inputs, sizes = problem.inputs, problem.shape.of_kernel
    tokens = sum(problem.lengths)
    tuning = tuning or triton.tuning_for(sizes)
    tables = metadata.Tables(tokens, max(sequences, len(problem.lengths)), problem.device)
    scratch = implementations[implementation].Scratch.for_rows(tokens, tables, sizes, problem.output.dtype, tuning)
    lengths = torch.tensor(problem.lengths, dtype=torch.int32, device=problem.device)
    # once for all layers of a step, like SGLang's own metadata
    tables.fill(lengths, problem.slots, torch.full_like(lengths, PREFIX))

    def call(number: int) -> Call:
        made: Call = implementations[implementation].Call(
            inputs.inputs,
            inputs.dt,
            shape=sizes,
            conv_weights=inputs.conv_weights,
            bias=inputs.bias,
            A=inputs.A,
            D=inputs.D,
            dt_bias=inputs.dt_bias,
            conv=problem.conv[number],
            state=problem.state[number],
            tables=tables,
            scratch=scratch,
            output=problem.output,
            tracking=False,
            tuning=tuning,
        )
        return made

    return call


# each makes, for a problem, the function that runs one of its layers; the first is the baseline of the others
KERNELS: dict[str, Callable[[Problem], Layer]] = {
    SGLANG: of_sglang,
    **{f"bcg_fixes {name}": functools.partial(of_ours, implementation=name) for name in (TRITON, CUDA)},
}


def kernels_on(device: gdn_layer.Device) -> dict[str, Callable[[Problem], Layer]]:
    """Leave out the CUDA implementation on GPUs that it is not for."""
    from sglang_bcg_fixes.kernels.mamba2_extend import cuda

    missing = device.name == "cuda" and isinstance(cuda.ready(0), Rejected)
    return {arm: build for arm, build in KERNELS.items() if not (missing and arm.endswith(CUDA))}


def case_of(
    name: str, tokens: int, sequences: int, rounds: int, device: gdn_layer.Device, gpu: str, flashinfer: bool = False
) -> list[Row]:
    shape = SHAPES[name]
    try:
        problem = Problem(shape, [tokens // sequences] * sequences, device.name)
        found = gdn_layer.measure(problem, device, rounds, kernels_on(device))
    except Exception as error:
        # out of memory, or a GPU that another case left broken: report it and try the next case
        found = [gdn_layer.Measured(f"{SGLANG}, {EAGER}", RED, f"{type(error).__name__}: {error}"[:500])]
    floor = floor_us(shape, tokens, sequences, gpu)
    return list(gdn_layer.rows_of(found, name, shape.layers, tokens, sequences, floor))


if __name__ == "__main__":
    gdn_layer.serve(json.loads(sys.argv[1]), case_of)
