# SPDX-License-Identifier: Apache-2.0
"""One gated delta net layer as a graph break runs it, and the same kernels captured: the installed SGLang's own code.

    python -m benchmarks.bench.gdn_layer JOB

JOB is JSON: {"shape", "tokens", "sequences", "rounds", "flashinfer"}. Every case is one line of JSON on stdout, a list
of rows; progress goes to stderr. To compare another kernel, add an entry to KERNELS.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from benchmarks.bench import timing
from benchmarks.bench.rows import COLD, GREEN, HOT, RED, Row
from sglang_bcg_fixes.source.tree import Source
from tests.kernels import accuracy, gdn_reference

if TYPE_CHECKING:
    from sglang_bcg_fixes.kernels.gdn_extend.triton import Call, Tuning

GDN = "sglang.srt.layers.attention.linear.gdn_backend:GDNAttnBackend"
LAYER = "sglang.srt.layers.radix_linear_attention:RadixLinearAttention"
BATCH = "sglang.srt.model_executor.forward_batch_info:ForwardBatch"
MODE = "sglang.srt.model_executor.forward_batch_info:ForwardMode"
NEEDED = (f"{GDN}.init_forward_metadata", f"{GDN}.forward_extend", LAYER, BATCH, MODE)
PART = "layer"
EAGER, CAPTURED = "eager", "captured"
# implementations of our own kernels
TRITON, CUDA = "triton", "cuda"
WALL, HOST, DEVICE = "wall time of a layer", "host time of a layer", "device time of a layer"
SEED, PREFIX, CHUNK = 0, 64, 64
# types of the states, the usual one first
STATES = ("float32", "bfloat16")


class LayerBenchError(Exception):
    """This SGLang's layer cannot be run on its own."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's gated delta net layers on one GPU, and their number."""

    layers: int
    key_heads: int = 16
    value_heads: int = 32
    head: int = 128
    width: int = 4

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.head


# both have layers of the same size
BY_DEFAULT = {"qwen3_next": Shape(36), "qwen3_5_4b": Shape(24)}
# other ratios of value heads to key heads, and what one GPU has of larger models under tensor parallelism
BY_NAME = {
    "qwen3_5_2b": Shape(18, 16, 16),
    "qwen3_5_27b": Shape(48, 16, 48),
    "qwen3_next_tp2": Shape(36, 8, 16),
    "qwen3_next_tp4": Shape(36, 4, 8),
    "qwen3_next_tp8": Shape(36, 2, 4),
    "qwen3_5_397b_tp8": Shape(45, 2, 8),
}
SHAPES = BY_DEFAULT | BY_NAME


def floor_us(shape: Shape, tokens: int, sequences: int, gpu: str) -> float | None:
    """Lower bound of a layer's time: its inputs, outputs and states moved once, or its products in chunks of 64.

    Only for GPUs whose real rates have been measured.
    """
    if "H200" not in gpu:
        return None
    bytes_per_second, operations_per_second = 4.3e12, 790e12
    values, states = shape.value_heads * shape.head, shape.value_heads * shape.head**2
    per_token = 2 * (shape.channels + 2 * shape.value_heads + values)
    per_sequence = 2 * (4 * states + 2 * shape.channels * (shape.width - 1))
    operations = 2 * 3 * (CHUNK * values + states)
    moved = (tokens * per_token + sequences * per_sequence) / bytes_per_second
    return round(1e6 * max(moved, tokens * operations / operations_per_second), 1)


def missing(source: Source) -> list[str]:
    return [where for where in NEEDED if not source.find(where)]


class Device(Protocol):
    """GPU operations that the benchmark needs; tests substitute their own."""

    name: str

    def synchronize(self) -> None: ...

    def flush(self) -> None: ...

    def capture(self, work: Callable[[], object]) -> Callable[[], object]: ...

    def seconds(self, work: Callable[[], object]) -> float: ...

    def release(self) -> None: ...


class Cuda:
    name = "cuda"

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch
        self.synchronize = torch.cuda.synchronize
        self.release = torch.cuda.empty_cache
        size = torch.cuda.get_device_properties().L2_cache_size
        self.larger_than_l2 = torch.empty(4 * size, dtype=torch.uint8, device="cuda")
        self.first, self.last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))

    def flush(self) -> None:
        self.larger_than_l2.zero_()

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Capture work that has run before, so that every kernel is compiled and tuned."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            work()
        replay: Callable[[], object] = graph.replay
        return replay

    def seconds(self, work: Callable[[], object]) -> float:
        self.first.record()
        work()
        self.last.record()
        self.synchronize()
        milliseconds: float = self.first.elapsed_time(self.last)
        return milliseconds / 1e3


class OneStep(Protocol):
    """A step of consecutive layers of some kind, on pools of its own."""

    # members that a layer's own bench adds are its own affair
    layers: int
    output: Any
    # the most that an error may be, as a multiple of SGLang's own
    times: float

    def restore(self) -> None: ...

    def wanted(self) -> accuracy.Results: ...

    def errors(self, wanted: accuracy.Results) -> dict[str, float]: ...


class Pools:
    """The pools of consecutive layers, whose slot 0 is unused, and the inputs that say what they begin with."""

    layers: int
    inputs: Any
    conv: Any
    state: Any
    output: Any

    def results(self, layer: int) -> accuracy.Results:
        raise NotImplementedError

    def restore(self) -> None:
        self.conv[:, 1:], self.state[:, 1:] = self.inputs.conv, self.inputs.state
        self.output.fill_(float("nan"))

    def errors(self, wanted: accuracy.Results) -> dict[str, float]:
        """Largest error over all layers; the output is the last layer's."""
        every = [accuracy.errors(self.results(layer), wanted) for layer in range(self.layers)]
        # not max(), which may skip a NaN
        return {name: sorted((each[name] for each in every), key=lambda x: (x != x, x))[-1] for name in every[0]}


class Problem(Pools):
    """A step of `layers` consecutive layers: the same inputs and weights, separate pools, one output."""

    def __init__(
        self, shape: Shape, lengths: Sequence[int], device: str, kind: str = "bfloat16", states: str = STATES[0]
    ) -> None:
        import torch

        kept = getattr(torch, kind)
        self.shape, self.lengths, self.layers, self.device = shape, list(lengths), shape.layers, device
        source = torch.Generator(device).manual_seed(SEED)
        tokens, heads, size, sequences = sum(lengths), shape.value_heads, shape.head, len(lengths)

        def normal(*sizes: int, dtype: torch.dtype = kept) -> torch.Tensor:
            return torch.randn(*sizes, generator=source, device=device).to(dtype)

        self.inputs = gdn_reference.Inputs(
            lengths=self.lengths,
            key_heads=shape.key_heads,
            mixed_qkv=normal(tokens, shape.channels),
            a=normal(tokens, heads),
            b=normal(tokens, heads),
            conv_weights=normal(shape.channels, shape.width) * 0.5,
            # some heads forget at once, others slowly
            A_log=torch.linspace(-4, 2, heads, device=device),
            dt_bias=normal(heads),
            conv=normal(sequences, shape.channels, shape.width - 1),
            state=normal(sequences, heads, size, size, dtype=getattr(torch, states)),
        )
        # slot 0 is unused: NaN exposes whoever reads it
        self.slots = torch.arange(1, sequences + 1, dtype=torch.int32, device=device)
        inputs = self.inputs
        self.conv, self.state = (
            torch.full((self.layers, sequences + 1, *each.shape[1:]), torch.nan, dtype=each.dtype, device=device)
            for each in (inputs.conv, inputs.state)
        )
        self.output = torch.empty(1, tokens, heads, size, dtype=kept, device=device)

    times = accuracy.OF_SGLANGS

    def wanted(self) -> accuracy.Results:
        return gdn_reference.recurrent(self.inputs)

    def results(self, layer: int) -> accuracy.Results:
        return accuracy.Results(self.output[0], self.conv[layer, 1:], self.state[layer, 1:])


Layer = Callable[[int], None]
Step = TypeVar("Step", bound=OneStep)


def of_sglang(problem: Problem, flashinfer: bool = False) -> Layer:
    """Call GDNAttnBackend.forward_extend and copy into the break's output, on our own pools."""
    import torch
    from sglang.srt.layers.attention.linear import utils as kinds
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    shape, inputs, lengths = problem.shape, problem.inputs, problem.lengths
    pool = types.SimpleNamespace(
        size=len(lengths) + 1,
        mamba_pool=types.SimpleNamespace(mamba_cache=types.SimpleNamespace(conv=[problem.conv])),
        get_mamba_indices=lambda requests: problem.slots,
        translate_mamba_indices=lambda slots: slots,
        mamba2_layer_cache=lambda layer: types.SimpleNamespace(
            conv=[problem.conv[layer]], temporal=problem.state[layer]
        ),
    )
    runner = types.SimpleNamespace(
        device=problem.device,
        server_args=server_args(),
        req_to_token_pool=pool,
        token_to_kv_pool=None,
        is_draft_worker=False,
    )
    kind = kinds.LinearAttnKernelBackend
    chosen = {"decode": kind("triton"), "prefill": kind("flashinfer" if flashinfer else "triton")}
    if hasattr(kinds, "LinearAttnBackends"):
        # from 0.5.18 a runner chooses for itself
        runner.linear_attn_backends = kinds.LinearAttnBackends(**chosen, verify=kind("triton"))
    layers = [
        RadixLinearAttention(
            layer_id=number,
            num_q_heads=shape.key_heads,
            num_k_heads=shape.key_heads,
            num_v_heads=shape.value_heads,
            head_q_dim=shape.head,
            head_k_dim=shape.head,
            head_v_dim=shape.head,
            conv_weights=inputs.conv_weights,
            bias=None,
            activation="silu",
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
        )
        for number in range(problem.layers)
    ]
    real = torch.tensor(lengths, dtype=torch.int32, device=problem.device)
    prefixes = torch.full_like(real, PREFIX)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=torch.zeros(sum(lengths), dtype=torch.int64, device=problem.device),
        req_pool_indices=problem.slots.long(),
        seq_lens=real.long() + PREFIX,
        out_cache_loc=torch.zeros(sum(lengths), dtype=torch.int64, device=problem.device),
        seq_lens_sum=sum(lengths) + PREFIX * len(lengths),
    )
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = real, lengths
    batch.extend_start_loc = (real.cumsum(0) - real).to(torch.int32)
    batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = prefixes, [PREFIX] * len(lengths)
    backend = GDNAttnBackend(runner)
    if flashinfer and not hasattr(kinds, "LinearAttnBackends"):
        # as with --linear-attn-prefill-backend
        backend.kernel_dispatcher = type(backend.kernel_dispatcher)(*chosen.values())
    # once for all layers of a step, as in SGLang
    backend.init_forward_metadata(batch)

    def layer(number: int) -> None:
        found = backend.forward_extend(
            layer=layers[number], forward_batch=batch, mixed_qkv=inputs.mixed_qkv, a=inputs.a, b=inputs.b
        )
        problem.output.copy_(found)

    return layer


def server_args() -> Any:
    """Settings that the layer reads, as in a server without flags; from 0.5.17 servers publish them."""
    try:
        from sglang.srt.runtime_context import publish
    except ImportError:
        return types.SimpleNamespace(speculative_eagle_topk=None, enable_unified_memory=False)
    from sglang.srt.server_args import ServerArgs

    made = ServerArgs(model_path="dummy")
    publish(made, role="test")
    return made


# a server's capture limits, however many sequences a step has
CAPTURED_SEQUENCES = 512


def of_ours(problem: Problem, implementation: str) -> Layer:
    call = calls_of_ours(problem, implementation)
    return lambda number: call(number).launch()


def calls_of_ours(
    problem: Problem, implementation: str = TRITON, tuning: Tuning | None = None, sequences: int = CAPTURED_SEQUENCES
) -> Callable[[int], Call]:
    """Call our kernels as the captured graph would, on static tables made for far more sequences."""
    import torch

    from sglang_bcg_fixes.kernels.gdn_extend import Shape, cuda, triton
    from sglang_bcg_fixes.kernels.linear_extend import metadata

    implementations: dict[str, Any] = {TRITON: triton, CUDA: cuda}

    inputs, shape = problem.inputs, problem.shape
    heads = Shape(shape.key_heads, shape.value_heads, shape.head, shape.head, shape.width)
    tokens = sum(problem.lengths)
    tuning = tuning or triton.tuning_for(tokens)
    tables = metadata.Tables(tokens, max(sequences, len(problem.lengths)), problem.device)
    scratch = implementations[implementation].Scratch.for_rows(tokens, tables, heads, problem.output.dtype, tuning)
    lengths = torch.tensor(problem.lengths, dtype=torch.int32, device=problem.device)
    # once for all layers of a step, like SGLang's own metadata
    tables.fill(lengths, problem.slots, torch.full_like(lengths, PREFIX))

    def call(number: int) -> Call:
        made: Call = implementations[implementation].Call(
            inputs.mixed_qkv,
            inputs.a,
            inputs.b,
            shape=heads,
            conv_weights=inputs.conv_weights,
            bias=None,
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
            conv=problem.conv[number],
            state=problem.state[number],
            tables=tables,
            scratch=scratch,
            output=problem.output[0],
            tracking=False,
            tuning=tuning,
        )
        return made

    return call


SGLANG, FLASHINFER = "sglang", "sglang flashinfer"
OURS = {f"bcg_fixes {name}": functools.partial(of_ours, implementation=name) for name in (TRITON, CUDA)}
# each makes, for a problem, the function that runs one of its layers; the first is the baseline of the others
KERNELS: dict[str, Callable[[Problem], Layer]] = {SGLANG: of_sglang, **OURS}
# only on request: its first use compiles for some ten minutes
ON_FLASHINFER = {FLASHINFER: functools.partial(of_sglang, flashinfer=True)}


@dataclasses.dataclass
class Measured:
    """One arm of a case: its correctness, and microseconds per layer."""

    arm: str
    verdict: str
    why: str
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    times: dict[tuple[str, str], timing.Spread] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Baseline for a kernel: the fp32 reference, and SGLang's own errors where they are known."""

    problem: OneStep
    wanted: accuracy.Results
    of_sglang: dict[str, float] | None

    def judge(self, arm: str, work: Callable[[], object], device: Device) -> Measured:
        self.problem.restore()
        work()
        device.synchronize()
        errors = self.problem.errors(self.wanted)
        why = accuracy.why_wrong(errors, self.of_sglang, self.problem.times)
        return Measured(arm, RED if why else GREEN, why, {name: round(value, 5) for name, value in errors.items()})


def measure(
    problem: Step, device: Device, rounds: int, kernels: Mapping[str, Callable[[Step], Layer]]
) -> list[Measured]:
    """Run every kernel launched by the host and captured; time the correct ones, interleaved."""
    import torch

    found: list[Measured] = []
    of_sglang: dict[str, float] | None = None
    arms: dict[str, Callable[[], timing.Sample]] = {}
    with torch.no_grad():
        wanted = problem.wanted()
        replay_flushes = device.capture(lambda: flushes(problem, device))
        for name, builder in kernels.items():
            try:
                compare = Comparison(problem, wanted, None if name == FLASHINFER else of_sglang)
                arms |= judged(name, builder(problem), compare, device, replay_flushes, found)
            except Exception as error:
                # this kernel is red with its reason; others may still work
                found.append(Measured(f"{name}, {EAGER}", RED, f"{type(error).__name__}: {error}"[:500]))
            of_sglang = found[0].errors
        samples = timing.in_turn(arms, rounds) if arms else {}
    for each in found:
        for (arm, l2), taken in ((name.split("; "), samples[name]) for name in samples):
            if arm == each.arm:
                each.times |= {(measured, l2): spread for measured, spread in timing.spreads(taken).items()}
    return found


def judged(
    name: str,
    layer: Layer,
    compare: Comparison,
    device: Device,
    replay_flushes: Callable[[], object],
    found: list[Measured],
) -> dict[str, Callable[[], timing.Sample]]:
    """Add the verdicts on both arms of these kernels; return timers for the correct ones."""
    problem = compare.problem

    def step() -> None:
        for number in range(problem.layers):
            layer(number)

    def flushed_step() -> None:
        for number in range(problem.layers):
            device.flush()
            layer(number)

    # compiles and tunes, which a capture must not contain
    problem.restore()
    step()
    eager = compare.judge(f"{name}, {EAGER}", step, device)
    found.append(eager)
    output = problem.output.clone()
    replay = device.capture(step)
    captured = compare.judge(f"{name}, {CAPTURED}", replay, device)
    if captured.verdict == GREEN and not bool((problem.output == output).all()):
        captured.verdict, captured.why = RED, "the replay differs from its own eager run"
    found.append(captured)
    replay_flushed = device.capture(flushed_step)

    def per_layer(sample: timing.Sample) -> timing.Sample:
        return {measured: seconds / problem.layers * 1e6 for measured, seconds in sample.items()}

    def launched(work: Callable[[], object]) -> timing.Sample:
        taken = timing.launch(work, device.synchronize)
        return per_layer({WALL: taken["wall"], HOST: taken["host"]})

    def replayed() -> timing.Sample:
        return {**launched(replay), **per_layer({DEVICE: device.seconds(replay)})}

    def replayed_cold() -> timing.Sample:
        return per_layer({DEVICE: device.seconds(replay_flushed) - device.seconds(replay_flushes)})

    arms: dict[str, Callable[[], timing.Sample]] = {}
    if eager.verdict == GREEN:
        arms[f"{eager.arm}; {HOT}"] = lambda: launched(step)
    if captured.verdict == GREEN:
        arms |= {f"{captured.arm}; {HOT}": replayed, f"{captured.arm}; {COLD}": replayed_cold}
    return arms


def flushes(problem: OneStep, device: Device) -> None:
    for _ in range(problem.layers):
        device.flush()


def rows_of(
    found: Sequence[Measured], name: str, layers: int, tokens: int, sequences: int, floor: float | None
) -> Iterator[Row]:
    """Rows of one case: one per timing, and one without numbers for an arm that has none."""
    for each in found:
        details = {"errors": each.errors, "layers": layers, "floor_us": floor}
        row = Row(PART, WALL, "us", each.arm, name, tokens, sequences, each.verdict, each.why, details=details)
        if not each.times:
            yield row
        for (measured, l2), spread in each.times.items():
            yield dataclasses.replace(row, measured=measured, l2=l2).with_times(spread)


def case_of(
    name: str, tokens: int, sequences: int, rounds: int, device: Device, gpu: str, flashinfer: bool = False
) -> list[Row]:
    shape = SHAPES[name]
    problem = Problem(shape, [tokens // sequences] * sequences, device.name)
    try:
        found = measure(problem, device, rounds, KERNELS | ON_FLASHINFER if flashinfer else KERNELS)
    except Exception as error:
        # out of memory, or a GPU that another case left broken: report it and try the next case
        found = [Measured(f"sglang, {EAGER}", RED, f"{type(error).__name__}: {error}"[:500])]
    return list(rows_of(found, name, shape.layers, tokens, sequences, floor_us(shape, tokens, sequences, gpu)))


def main(arguments: list[str]) -> None:
    serve(json.loads(arguments[0]), case_of)


def serve(job: dict[str, Any], case: Callable[..., list[Row]]) -> None:
    """Measure every case of a job, and print its rows."""
    import torch

    # SGLang's log lines must not mix with the rows
    out, sys.stdout = sys.stdout, sys.stderr
    device, gpu = Cuda(), torch.cuda.get_device_name()
    wanted = [(tokens, sequences) for tokens in job["tokens"] for sequences in job["sequences"]]
    for number, (tokens, sequences) in enumerate(wanted, 1):
        rows = case(job["shape"], tokens, sequences, job["rounds"], device, gpu, job["flashinfer"])
        device.release()
        where = f"[{number}/{len(wanted)}] {job['shape']}, {tokens} tokens in {sequences}"
        print(f"{where}: {summary(rows)}", file=sys.stderr, flush=True)
        print(json.dumps([dataclasses.asdict(row) for row in rows]), file=out, flush=True)


def summary(rows: Sequence[Row]) -> str:
    wrong = [f"{row.arm} is red: {row.why}" for row in rows if row.verdict == RED]
    times = [f"{row.arm} {row.measured.split()[0]} {row.l2} {row.median:.0f} us" for row in rows if row.median]
    return "; ".join(wrong or times)


if __name__ == "__main__":
    main(sys.argv[1:])
