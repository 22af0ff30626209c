# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's metadata on a GPU: every implementation against the reference, and its times against SGLang's own.

    python benchmarks/fa_metadata.py                    # with the installed SGLang: some minutes
    python benchmarks/fa_metadata.py --newest FOLDER    # with metadata.py of a late release and its kernels
    python benchmarks/fa_metadata.py --check-only --cases 2000
    python benchmarks/fa_metadata.py --plot-only FILE   # tables and plot of an earlier JSONL, without a GPU

It first runs random calls, some of them large, eagerly and in a captured graph that is replayed with other lengths. An
implementation with one wrong integer is red and is not timed. Then it times the arms in turn: the installed SGLang's
eager method and the one it calls before each replay, the newest release's Triton kernels, ours alone, and ours
installed over SGLang's methods. `host` is the time until a call returns, `wall` until the device is done, `device` one
node of a captured graph of many. Tables are as wide as the context, 128K by default.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import pathlib
import random
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_bcg_fixes.engine import ledger
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.fa_metadata import reference
from sglang_bcg_fixes.kernels.fa_metadata.declaration import KERNEL
from sglang_bcg_fixes.kernels.fa_metadata.jobs import FaMetadata
from sglang_bcg_fixes.lab.verify import environment
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.source import releases

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.bench import rows, timing  # noqa: E402
from benchmarks.bench.gdn_layer import Cuda  # noqa: E402
from benchmarks.bench.rows import GREEN, HOT, RED, Row  # noqa: E402
from tests.kernels import fa_metadata_cases as cases  # noqa: E402
from tests.kernels.flash_backend import Backend, Batch, Setting  # noqa: E402

Tensor = torch.Tensor

PART = "fa_metadata"
HOST, WALL, DEVICE = "host time of a call", "wall time of a call", "device time of a call"
EAGER, REPLAY, NEWEST, OURS = "sglang, eager", "sglang, before a replay", "newest triton", "ours, "
INSTALLED_EAGER, INSTALLED_REPLAY = "ours, installed, eager", "ours, installed, before a replay"
BATCHES, LENGTHS, PAGES = (1, 8, 64, 256, 1024), (1024, 32768, 131072), (1, 16, 64)
MODES = ("decode", "verify", "draft extend", "extend")
CONTEXT, DRAFT_TOKENS, EXTEND = 131072, 4, 64
# limit of one table, so that two fit any data-centre GPU
MOST_SLOTS = 2**28
CALLS, COPIES, LONGEST_GRAPH = 10, 20, 2e-3


# correctness


def check(implementation: Any, name: str, count: int, device: str) -> list[str]:
    wrong: list[str] = []
    for operation, seed in itertools.product(cases.OPERATIONS, range(count)):
        # a few large ones: building a case takes longer than the launch
        sizes = cases.LARGE if seed % 8 == 0 else cases.Sizes(rows=300, tokens=9000, draft_tokens=17)
        wrong += cases.differences(operation, seed, implementation, reference, sizes, device)
        if seed % 4 == 1:
            wrong += differences_in_graph(operation, seed, implementation, sizes, device)
        if len(wrong) > 20:
            break
    say(f"{name}: {len(wrong)} differences in {count} cases of {len(cases.OPERATIONS)} operations")
    for line in wrong[:20]:
        say(f"  {name}, {line}")
    return wrong


def differences_in_graph(operation: str, seed: int, implementation: Any, sizes: cases.Sizes, device: str) -> list[str]:
    """Capture with some lengths, replay with others, in the same memory."""
    expected = cases.draw(operation, random.Random(seed), sizes, device)
    found, before = copy.deepcopy(expected), copy.deepcopy(expected).tensors()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found.run(implementation)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.run(implementation)
    for call in (expected, found):
        # outputs that are inputs too have been written by the first run
        for name, tensor in call.tensors().items():
            tensor.copy_(before[name])
        shorten(call)
    expected.run(reference)
    graph.replay()
    tensors = found.tensors()
    return [
        f"seed {seed}, {operation}, replayed: {name} differs, {expected}"
        for name, value in expected.tensors().items()
        if not torch.equal(value, tensors[name])
    ]


def shorten(call: cases.Call) -> None:
    lengths = call.inputs["seq_lens"]
    lengths.copy_(lengths // 2)
    for name in ("req_pool_indices", "extend_lens", "out_cache_loc"):
        if name in call.inputs:
            call.inputs[name].copy_(call.inputs[name].flip(0))
    if "cu_seqlens" in call.inputs:
        call.inputs["cu_seqlens"].copy_(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))


# arms


@dataclasses.dataclass(frozen=True)
class Case:
    mode: str
    bs: int
    length: int
    page_size: int
    window: bool

    @property
    def shape(self) -> str:
        return f"{self.mode}, page {self.page_size}" + (", window" if self.window else "")

    @property
    def new_tokens(self) -> int:
        return {"decode": 1, "verify": DRAFT_TOKENS, "draft extend": DRAFT_TOKENS, "extend": EXTEND}[self.mode]

    @property
    def bytes_moved(self) -> int:
        """Count bytes of slots and tables; a single slot costs a 32-byte sector, plus 8 of the mapping."""
        pages = self.bs * -(-self.total // self.page_size)
        return pages * ((4 if self.page_size == 1 else 32) + 4 + self.window * (8 + 4))

    @property
    def total(self) -> int:
        return self.length + (DRAFT_TOKENS if self.mode == "verify" else 0)


@dataclasses.dataclass
class World:
    """Requests of a case, laid out like SGLang's allocator after a while: runs of pages in random order."""

    case: Case
    context: int
    table: Tensor
    mapping: Tensor
    batch: Batch

    @property
    def setting(self) -> Setting:
        drafts = DRAFT_TOKENS if self.case.mode in ("verify", "draft extend") else None
        topk, steps = (1, DRAFT_TOKENS - 1) if drafts else (0, 0)
        return Setting(self.context, self.case.page_size, topk=topk, steps=steps, draft_tokens=drafts)


@functools.lru_cache(maxsize=1)
def layout(bs: int, length: int, page_size: int, context: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    run = max(page_size, 64)
    tokens = min(-(-(length + EXTEND) // run) * run, context)
    runs = -(-tokens // run)
    order = torch.randperm(bs * runs, generator=generator, device="cuda", dtype=torch.int32) + 1
    slots = order.view(bs, runs, 1) * run + torch.arange(run, device="cuda", dtype=torch.int32)
    # SGLang leaves room after the context
    table = torch.zeros(bs + 1, context + 4, dtype=torch.int32, device="cuda")
    table[1:, :tokens] = slots.flatten(1)[:, :tokens]
    order = torch.randperm(bs * runs + 1, generator=generator, device="cuda")
    mapping = (order[:, None] * run + torch.arange(run, device="cuda")).flatten()
    return table, torch.cat([mapping, torch.tensor([-1], device="cuda")])


def world(case: Case, context: int) -> World:
    table, mapping = layout(case.bs, case.length, case.page_size, context)
    seq_lens = torch.full((case.bs,), case.length, dtype=torch.int64, device="cuda")
    indices = torch.arange(1, case.bs + 1, device="cuda")
    mode = {"decode": "DECODE", "verify": "TARGET_VERIFY", "draft extend": "DRAFT_EXTEND_V2", "extend": "EXTEND"}
    has_own = case.mode in ("draft extend", "extend")
    new = torch.full((case.bs,), case.new_tokens, dtype=torch.int64, device="cuda") if has_own else None
    width = case.new_tokens
    batch = Batch(
        mode[case.mode],
        seq_lens,
        indices,
        out_cache_loc=table[1:, :width].flatten().long(),
        spec_info=types.SimpleNamespace(
            extend_seq_lens_tensor=new,
            extend_seq_lens_cpu=[width] * case.bs,
            num_tokens_per_req=width,
        )
        if case.mode in ("verify", "draft extend")
        else None,
        prefix_lens=[case.length - width] * case.bs,
        extend_lens=new,
    )
    return World(case, context, table, mapping, batch)


Call = Callable[[], object]


@dataclasses.dataclass
class Arm:
    """One way to compute the metadata, and its outputs."""

    call: Call
    found: Callable[[], dict[str, Tensor]]


def sglang_arms(now: World, is_installed: bool) -> Iterator[tuple[str, Arm]]:
    """SGLang's methods unpatched, and with ours installed."""
    mapping = now.mapping if now.case.window else None

    def backend() -> Backend:
        return Backend(now.setting, now.table, mapping)

    pairs = [(backend().without_patches(), EAGER)] + [(backend(), INSTALLED_EAGER)] * is_installed
    for eager, name in pairs:
        yield name, Arm(eager.eager_of(now.batch), functools.partial(of_backend, eager))
    pairs = [(backend().without_patches(), REPLAY)] + [(backend(), INSTALLED_REPLAY)] * is_installed
    for replayed, name in pairs * (now.case.mode != "extend"):
        replayed.capture(now.batch)
        yield name, Arm(replayed.replay_of(now.batch), functools.partial(of_backend, replayed))


def of_backend(backend: Backend) -> dict[str, Tensor]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "page_table", "swa_page_table")
    found = {name: getattr(backend.found, name) for name in names}
    return {"cache_seqlens": backend.found.cache_seqlens_int32, **found}


class Buffers:
    """Buffers of a graph runner for one batch size."""

    def __init__(self, now: World) -> None:
        bs, width = now.case.bs, -(-now.context // now.case.page_size)
        self.cache_seqlens = integers(bs)
        self.cu_seqlens_k = integers(bs + 1)
        self.cu_seqlens_q = torch.arange(bs + 1, dtype=torch.int32, device="cuda") * now.case.new_tokens
        self.page_table = integers(bs, width)
        self.swa_page_table = integers(bs, width) if now.case.window else None
        self.swa_out = torch.zeros(len(now.batch.out_cache_loc), dtype=torch.int64, device="cuda")

    def found(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if name != "swa_out" and value is not None}


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device="cuda")


def newest_arm(now: World, newest: Any) -> Arm:
    buffers, batch = Buffers(now), now.batch
    width = buffers.page_table.shape[1]
    mapping = now.mapping if now.case.window else None
    if now.case.mode in ("draft extend", "extend"):
        window = (mapping, buffers.swa_page_table, batch.out_cache_loc, buffers.swa_out) if now.case.window else ()
        return Arm(
            lambda: newest.draft_extend_set_metadata(
                buffers.cache_seqlens,
                buffers.cu_seqlens_k,
                buffers.cu_seqlens_q,
                buffers.page_table,
                now.table,
                batch.req_pool_indices,
                batch.seq_lens,
                batch.extend_lens,
                now.case.page_size,
                *window,
            ),
            buffers.found,
        )
    return Arm(
        lambda: newest.normal_decode_set_metadata(
            buffers.cache_seqlens,
            buffers.cu_seqlens_k,
            buffers.page_table,
            now.table,
            batch.req_pool_indices,
            width,
            batch.seq_lens,
            now.case.total - now.case.length,
            now.case.page_size,
            buffers.swa_page_table,
            full_to_swa_index_mapping=mapping,
        ),
        buffers.found,
    )


def our_arm(now: World, implementation: Any) -> Arm:
    buffers, batch = Buffers(now), now.batch
    more: dict[str, Any] = {}
    if now.case.mode in ("draft extend", "extend"):
        more |= {"cu_seqlens_q": buffers.cu_seqlens_q, "extend_lens": batch.extend_lens}
    if now.case.window:
        more |= {"swa_page_table": buffers.swa_page_table, "mapping": now.mapping}
        if "extend_lens" in more:
            more |= {"out_cache_loc": batch.out_cache_loc, "swa_out_cache_loc": buffers.swa_out}
    delta = now.case.total - now.case.length
    return Arm(
        lambda: implementation.fa_metadata(
            FaMetadata(
                batch.seq_lens,
                batch.req_pool_indices,
                now.table,
                buffers.cache_seqlens,
                buffers.cu_seqlens_k,
                buffers.page_table,
                now.case.page_size,
                delta=delta,
                **more,
            )
        ),
        buffers.found,
    )


def our_eager_arm(now: World, implementation: Any) -> Arm:
    """Fill new tensors as wide as the batch needs, as the eager method does."""
    buffers = Buffers(now)
    case, batch = now.case, now.batch
    width = -(-case.total // case.page_size)

    def call() -> None:
        buffers.cache_seqlens = torch.empty(case.bs, dtype=torch.int32, device="cuda")
        buffers.cu_seqlens_k = torch.empty(case.bs + 1, dtype=torch.int32, device="cuda")
        buffers.cu_seqlens_q = torch.empty(case.bs + 1, dtype=torch.int32, device="cuda")
        buffers.page_table = torch.empty(case.bs, width, dtype=torch.int32, device="cuda")
        more: dict[str, Any] = {}
        if case.window:
            buffers.swa_page_table = torch.empty_like(buffers.page_table)
            buffers.swa_out = torch.empty(len(batch.out_cache_loc), dtype=torch.int64, device="cuda")
            more |= {"swa_page_table": buffers.swa_page_table, "mapping": now.mapping}
            more |= {"out_cache_loc": batch.out_cache_loc, "swa_out_cache_loc": buffers.swa_out}
        job = FaMetadata(
            batch.seq_lens,
            batch.req_pool_indices,
            now.table,
            buffers.cache_seqlens,
            buffers.cu_seqlens_k,
            buffers.page_table,
            case.page_size,
            delta=case.total - case.length,
            cu_seqlens_q=buffers.cu_seqlens_q,
            extend_lens=batch.extend_lens,
            q_stride=0 if batch.extend_lens is not None else case.new_tokens,
            zero_tail=True,
            **more,
        )
        implementation.fa_metadata(job)

    return Arm(call, buffers.found)


def expected(now: World) -> dict[str, Tensor]:
    buffers = Buffers(now)
    arm = our_arm(now, reference)
    arm.call()
    return {**buffers.found(), **arm.found()}


def wrong_in(now: World, found: dict[str, Tensor], right: dict[str, Tensor]) -> str:
    live = -(-now.case.total // now.case.page_size)
    for name, value in right.items():
        other = found.get(name)
        if other is None:
            return f"no {name}"
        if value.ndim == 2:
            value, other = value[:, :live], other[:, :live]
        if not torch.equal(value, other.to(value.dtype)):
            return f"{name} differs"
    return ""


# times


def sample(call: Call, replay: Call, copies: int, device: Cuda) -> dict[str, float]:
    each = [timing.launch(call, device.synchronize) for _ in range(CALLS)]
    found = {part: 1e6 * statistics.median(one[part] for one in each) for part in ("host", "wall")}
    return {HOST: found["host"], WALL: found["wall"], DEVICE: 1e6 * device.seconds(replay) / copies}


def measure(now: World, arms: dict[str, Arm], rounds: int, device: Cuda) -> list[Row]:
    case, right = now.case, expected(now)
    verdicts, measured = {}, {}
    for name, arm in arms.items():
        arm.call()
        device.synchronize()
        verdicts[name] = wrong_in(now, arm.found(), right)
        if not verdicts[name]:
            once = max(device.seconds(arm.call) for _ in range(2))
            copies = max(1, min(COPIES, int(LONGEST_GRAPH / once)))
            replay = device.capture(lambda arm=arm, copies=copies: [arm.call() for _ in range(copies)])
            replay()
            measured[name] = functools.partial(sample, arm.call, replay, copies, device)
    del right
    samples = timing.in_turn(measured, rounds) if measured else {}
    found = []
    for name, why in verdicts.items():
        base = Row(PART, "", "us", name, case.shape, case.length, case.bs, RED if why else GREEN, why, HOT)
        base.details["bytes"] = case.bytes_moved
        base.details["floor_us"] = round(case.bytes_moved / 4.3e12 * 1e6, 2)
        spreads = timing.spreads(samples[name]) if name in samples else {}
        for what in (HOST, WALL, DEVICE):
            row = dataclasses.replace(base, measured=what)
            found.append(row.with_times(spreads[what]) if what in spreads else row)
    return found


def all_cases(options: argparse.Namespace) -> Iterator[Case]:
    for page_size, bs, length, window, mode in itertools.product(
        options.pages, options.batches, options.lengths, (False, True), options.modes
    ):
        if bs * length <= MOST_SLOTS and length + EXTEND <= options.context + EXTEND:
            yield Case(mode, bs, length, page_size, window)


def install(implementation: str) -> str:
    """Install the implementation over SGLang's methods; return the reason if that is impossible."""
    source = releases.installed()
    if source is None:
        return "no SGLang is installed here"
    choice = plan.choose(KERNEL, implementation, plan.ask(KERNEL, source))
    if choice.impl:
        choice = plan.with_needed_points(choice, source)
    if choice.impl is None:
        return choice.reason
    active.use(choice)
    ledger.Ledger().apply(choice.subject)
    return ""


def arms_of(
    now: World, implementations: dict[str, Any], newest: Any, is_installed: bool, failures: set[str]
) -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    try:
        arms |= dict(sglang_arms(now, is_installed))
    except Exception as error:
        # another SGLang may build its backend differently; the rest does not depend on it
        failures.add(f"sglang's own could not be measured: {type(error).__name__}: {error}")
    if newest is not None:
        arms[NEWEST] = newest_arm(now, newest)
    for name, implementation in implementations.items():
        arms[f"{OURS}{name}"] = our_arm(now, implementation)
        arms[f"{OURS}{name}, eager"] = our_eager_arm(now, implementation)
    return arms


def table(found: list[Row]) -> Iterator[str]:
    """Print microseconds on device and host, and our speedups."""
    names = list(dict.fromkeys(row.arm for row in found))
    head = ["case", "length", "bs", "floor", *(f"{name} [dev|host|wall]" for name in names)]
    lines = []
    for case in rows.cases(found):
        mine = [row for row in found if row.case == case]
        cells = []
        for name in names:
            times = [rows.find(mine, name, what, case, HOT) for what in (DEVICE, HOST, WALL)]
            red = next((row.why for row in times if row and row.verdict == RED), "")
            cells.append(red or "|".join(rows.number(row.median if row else None, ".1f") for row in times))
        lines.append([case[0], str(case[1]), str(case[2]), str(mine[0].details["floor_us"]), *cells])
    yield from rows.table(head, lines)


def summary(found: list[Row]) -> Iterator[str]:
    """Print the least and median speedup of each arm."""
    names = dict.fromkeys(row.arm for row in found)
    alone = [name for name in names if name.startswith(OURS) and "installed" not in name and "eager" not in name]
    pairs = [(INSTALLED_EAGER, EAGER), (INSTALLED_REPLAY, REPLAY), *itertools.product(alone, (REPLAY, NEWEST))]
    for (mine, base), what in itertools.product(pairs, (DEVICE, HOST, WALL)):
        ratios = {}
        for case in rows.cases(found):
            ratio = rows.speed_up(rows.find(found, base, what, case, HOT), rows.find(found, mine, what, case, HOT))
            if ratio:
                ratios[case] = ratio
        if ratios:
            least = min(ratios, key=lambda case: ratios[case])
            middle = statistics.median(ratios.values())
            yield f"{mine} against {base}, {what}: median {middle:.2f}x, least {ratios[least]:.2f}x at {least}"


def draw(found: list[Row], file: pathlib.Path) -> None:
    """Plot the speedup over SGLang's method before a replay against the bytes to move."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), sharey=True)
    names = (NEWEST, f"{OURS}triton", f"{OURS}cuda", INSTALLED_REPLAY)
    for panel, what in zip(panels, (DEVICE, HOST, WALL), strict=True):
        base = {row.case: row for row in found if (row.arm, row.measured) == (REPLAY, what)}
        for name in names:
            mine = [row for row in found if (row.arm, row.measured) == (name, what)]
            ups = [(row.details["bytes"], rows.speed_up(base.get(row.case), row)) for row in mine]
            panel.plot(*zip(*[each for each in ups if each[1]], strict=True), ".", label=name, markersize=4)
        panel.axhline(1, color="k", linewidth=0.5)
        panel.set(xscale="log", yscale="log", xlabel="bytes to be moved", title=what)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("times as fast as SGLang before a replay")
    panels[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def module_from(path: pathlib.Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"newest_{path.stem}", path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_implementations(names: list[str]) -> dict[str, Any]:
    return {name: importlib.import_module(f"sglang_bcg_fixes.kernels.fa_metadata.{name}") for name in names}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--forms", dest="implementations", default="triton", help="of ours, with commas: triton,cuda")
    parser.add_argument("--newest", type=pathlib.Path, metavar="FOLDER", help="with a late release's metadata.py")
    parser.add_argument("--cases", type=int, default=250, help="random calls of each operation and implementation")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--plot-only", type=pathlib.Path, metavar="FILE", help="of an earlier run; needs matplotlib")
    parser.add_argument("--rounds", type=int, default=timing.LEAST_ROUNDS)
    parser.add_argument("--batches", type=numbers, default=BATCHES)
    parser.add_argument("--lengths", type=numbers, default=LENGTHS)
    parser.add_argument("--pages", type=numbers, default=PAGES)
    parser.add_argument("--modes", type=lambda text: tuple(text.split(",")), default=MODES)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--seconds", type=float, default=900, help="begin no case after this many")
    parser.add_argument("--jsonl", type=pathlib.Path, default=pathlib.Path("fa_metadata.jsonl"))
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.plot_only:
        found = rows.read(options.plot_only)[1]
        print("\n".join([*table(found), *summary(found)]))
        draw(found, options.plot_only.with_suffix(".png"))
        return 0
    began = time.monotonic()
    implementations = load_implementations(options.implementations.split(","))
    right = {name: each for name, each in implementations.items() if not check(each, name, options.cases, "cuda")}
    if options.check_only:
        return 0 if len(right) == len(implementations) else 1
    newest = module_from(options.newest / "metadata.py") if options.newest else None
    header = {**environment.header(environment.here()), "rounds": options.rounds, "context": options.context}
    file, device, failures = rows.File(options.jsonl, header), Cuda(), set[str]()
    not_installed = install(next(iter(right))) if right else "no implementation is right"
    if not_installed:
        failures.add(f"ours could not be installed in SGLang: {not_installed}")
    found = []
    todo = list(all_cases(options))
    for number, case in enumerate(todo):
        if time.monotonic() - began > options.seconds:
            say(f"out of time: {len(todo) - number} of {len(todo)} cases are left out")
            break
        now = world(case, options.context)
        fresh = measure(now, arms_of(now, right, newest, not not_installed, failures), options.rounds, device)
        file.add(fresh)
        found += fresh
        if number % 20 == 0:
            say(f"{number} of {len(todo)} cases, {time.monotonic() - began:.0f} s")
        del now
        torch.cuda.empty_cache()
    if not not_installed:
        failures |= {
            f"left to SGLang in {number} calls: {why}" for why, number in active.selected(KERNEL.op).fallbacks.items()
        }
    print("\n".join([*table(found), *summary(found), *sorted(failures)]))
    return 0 if len(right) == len(implementations) else 1


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
