# SPDX-License-Identifier: Apache-2.0
"""Time to first token and throughput of servers that are alive at once and take turns.

First every server answers the same prompts. One that answers wrongly, that never replays, or that dies is not timed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TextIO

from benchmarks.bench import hybrid_models, mamba2_model, model, timing
from benchmarks.bench.rows import GREEN, RED, TOKENS_PER_SECOND, Row
from sglang_bcg_fixes import flags
from sglang_bcg_fixes.anatomy.launches import has_breakable_graphs_by_default
from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.fixes.hybrids_without_graphs import feed_forward
from sglang_bcg_fixes.kernels.gdn_extend import declaration as gdn_extend
from sglang_bcg_fixes.kernels.kda_extend import declaration as kda_extend
from sglang_bcg_fixes.kernels.mamba2_extend import declaration as mamba2_extend
from sglang_bcg_fixes.kernels.short_conv_extend import declaration as short_conv_extend
from sglang_bcg_fixes.lab.verify import cases, command, compare
from sglang_bcg_fixes.lab.verify.arms import EAGER, PATCHED, REFERENCE, STOCK
from sglang_bcg_fixes.lab.verify.cases import Call
from sglang_bcg_fixes.lab.verify.servers import FINISHED, Outcome, Runner, ended_by_signals, lines_in, outcome
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.process.selfcheck import check
from sglang_bcg_fixes.source.tree import Source

PART = "server"
FIRST_TOKEN, THROUGHPUT = "time to first token", "output throughput"
KERNEL, KERNEL_TRITON, CANARY = "kernel", "kernel_triton", "canary"
ARMS = {
    PATCHED: "breakable graphs, patched",
    KERNEL: "breakable graphs, patched, linear layers inside",
    KERNEL_TRITON: "breakable graphs, patched, linear layers inside, in Triton",
    CANARY: "breakable graphs, patched, every prefill compared",
    REFERENCE: "breakable graphs, replay refused",
    EAGER: "no prefill graphs",
    STOCK: "breakable graphs, stock",
}
BY_DEFAULT = tuple(arm for arm in ARMS if arm != KERNEL_TRITON)
# by model name: the kernel that takes its linear layers into the graph, and its form in each arm that has it
TWO_FORMS, ONE_FORM = {KERNEL: "cuda", KERNEL_TRITON: "triton"}, {KERNEL: "triton"}
GDN, MAMBA2 = (gdn_extend.KERNEL, TWO_FORMS), (mamba2_extend.KERNEL, TWO_FORMS)
INSIDE = {
    model.NAME: GDN,
    model.DENSE: GDN,
    mamba2_model.NEMOTRON: MAMBA2,
    mamba2_model.FALCON: MAMBA2,
    hybrid_models.GRANITE: MAMBA2,
    hybrid_models.LFM2: (short_conv_extend.KERNEL, ONE_FORM),
    hybrid_models.KIMI: (kda_extend.KERNEL, ONE_FORM),
}
# to which SGLang refuses prefill graphs in every release
WITHOUT_GRAPHS = (hybrid_models.GRANITE, hybrid_models.LFM2)
BUCKETS = (256, 1024, 4096, 8192)
# just below each bucket, so that every replay has padding
LENGTHS = tuple(bucket - 3 for bucket in BUCKETS)
TOGETHER, PROMPT, OUTPUT = 16, 1021, 32
# how far logprobs may be from the reference's; unrelated ones are ten apart
NEAR = 2.0
# GiB of one server: model, states and graphs
GIB, GIB_OF_FEW_LAYERS = 20, 12
# log line with the capture time; its gigabytes are useless, because other servers fill the same GPU
CAPTURE = re.compile(r"Capture .*?(?:piecewise|prefill) CUDA graph end\..*?([\d.]+) s")
# room for one call
PIPE_BYTES = 2**20
# a server that waits for its turn is silent too; one that is asked has this long
LIMITS, ANSWER_LIMIT, SECONDS_BETWEEN_LOOKS = (400.0, 500.0), 60.0, 0.002
Say = Callable[[str], None]


class Ended(Exception):
    """The server has ended or does not answer."""


def some_of_everything(buckets: Sequence[int]) -> list[Call]:
    """Prompts for comparing answers: alone at every length, again after others, and together."""
    script = cases.Script()
    alone = [script.ask("alone", [bucket - 3]) for bucket in buckets for _ in range(2)]
    script.ask("together", [5, buckets[0] // 2, buckets[0] - 9, 60])
    for call in (alone[-1], alone[0]):
        script.ask_again("again", call)
    return script.calls


def nothing_twice(buckets: Sequence[int]) -> list[Call]:
    """The same, without prompts that the radix cache would answer."""
    return [call for call in some_of_everything(buckets) if call.again is None]


MODELS = "benchmarks.bench.model"
CASE = cases.Case(
    "bench",
    "The first token.",
    model.NAME,
    script=some_of_everything,
    extra=lambda source: {"--context-length": 16384, "--max-total-tokens": 65536},
)


def gib_of(name: str) -> int:
    return GIB if name in (model.NAME, model.DENSE) else GIB_OF_FEW_LAYERS


def is_admitted_by_a_fix(case: cases.Case, source: Source) -> bool:
    """Tell whether SGLang refuses the model prefill graphs, which a fix gives it if its flag asks."""
    is_nemotron = case.model == mamba2_model.NEMOTRON
    return case.model in WITHOUT_GRAPHS or (is_nemotron and feed_forward.counts_layers(source))


# in most releases these do not start with the attention backend of the other cases
OF_HYBRIDS = dataclasses.replace(CASE, extra=lambda source: {**CASE.extra(source), "--attention-backend": False})
# by model name; Qwen3.5 is started as users start it
CASES = {
    model.NAME: CASE,
    model.DENSE: dataclasses.replace(
        CASE,
        model=model.DENSE,
        script=nothing_twice,
        module="sglang.srt.models.qwen3_5_text",
        served=has_breakable_graphs_by_default,
        by_default=True,
    ),
    mamba2_model.NEMOTRON: dataclasses.replace(
        OF_HYBRIDS,
        model=mamba2_model.NEMOTRON,
        module="sglang.srt.models.nemotron_h",
    ),
    mamba2_model.FALCON: dataclasses.replace(
        OF_HYBRIDS, model=mamba2_model.FALCON, module="sglang.srt.models.falcon_h1"
    ),
    **{
        name: dataclasses.replace(OF_HYBRIDS, model=name, module=f"sglang.srt.models.{module}")
        for name, module in (
            (hybrid_models.GRANITE, "granitemoehybrid"),
            (hybrid_models.LFM2, "lfm2"),
            (hybrid_models.KIMI, "kimi_linear"),
        )
    },
}


@dataclasses.dataclass
class Alive:
    """A server driven through its pipe; `why` says why it is no longer used."""

    run: command.Run
    future: concurrent.futures.Future[Outcome]
    pipe: TextIO
    why: str = ""
    compared: dict[str, float] = dataclasses.field(default_factory=dict)
    answered: int = 0
    size: int = 0

    def ask(self, call: Call, **more: Any) -> dict[str, Any]:
        print(json.dumps({**dataclasses.asdict(call), **more}), file=self.pipe, flush=True)
        self.answered += 1
        found: dict[str, Any] = self.wait_for(self.answered, ANSWER_LIMIT)
        return found

    def wait_for(self, number: int, limit: float) -> Any:
        """Wait for output line `number`; the first one reports that the server has started."""
        file, began = self.run.server.answers, time.monotonic()
        while time.monotonic() - began < limit:
            if file.exists() and file.stat().st_size != self.size:
                self.size = file.stat().st_size
                lines = lines_in(file)
                if len(lines) > number:
                    return lines[number]
            if self.future.done():
                raise Ended(self.future.result().ending)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        raise Ended(f"no answer within {limit:.0f} s")

    def now(self) -> Outcome:
        """Outcome so far, as if it had finished."""
        return outcome(self.run.server, self.why or FINISHED, 0)

    def prefills(self) -> collections.Counter[str]:
        """Count prefill passes replayed, refused and run without a graph."""
        return collections.Counter(line[1] for line in self.now().passes if line[0] == "prefill")


def measure(
    python: str,
    known: registry.Registry,
    source: Source,
    folder: pathlib.Path,
    rounds: int,
    say: Say,
    case: cases.Case = CASE,
    arms: Collection[str] = BY_DEFAULT,
) -> Iterator[list[Row]]:
    runs = runs_of(known, source, folder, case, arms)
    with (
        ended_by_signals(),
        Runner([python, "-m", command.ENGINE], len(runs), LIMITS) as runner,
        contextlib.ExitStack() as pipes,
    ):
        say(f"starting {len(runs)} servers")
        alive = [start(each, runner, pipes) for each in runs]
        every_one(alive, lambda each: each.wait_for(0, LIMITS[0]), say, "started")
        for call in runs[0].calls:
            every_one(alive, functools.partial(Alive.ask, call=call), say)
        judge(alive, say)
        for length in LENGTHS:
            yield rows_of(alive, FIRST_TOKEN, length, 1, rounds, say)
        yield rows_of(alive, THROUGHPUT, PROMPT, TOGETHER, rounds, say)


def runs_of(
    known: registry.Registry,
    source: Source,
    folder: pathlib.Path,
    case: cases.Case = CASE,
    arms: Collection[str] = BY_DEFAULT,
) -> list[command.Run]:
    """Runs for each arm, and for the reference that the others are judged against."""
    kernel, forms = INSIDE[case.model]
    more = {**{arm: {kernel.flag: form} for arm, form in forms.items()}, CANARY: {flags.CANARY: "1"}}
    order = [PATCHED, REFERENCE, EAGER, STOCK]
    admitting = {}
    if is_admitted_by_a_fix(case, source):
        admitting = {registry.declared_in(hybrids_without_graphs).flag: "on"}
        # stock has no graphs: it would be the eager server once more
        order.remove(STOCK)
    made = command.runs_of(case, order, known, source, BUCKETS, folder)
    found = {each.arm: command.with_variables(each, admitting) for each in made}
    patched = found[PATCHED]
    for arm, variables in more.items():
        name = f"{case.name}/{arm}"
        run = command.with_variables(patched, variables)
        server = dataclasses.replace(run.server, name=name, folder=folder / name)
        found[arm] = dataclasses.replace(run, arm=arm, server=server)
    return [found[arm] for arm in ARMS if arm in found and (arm in arms or arm == REFERENCE)]


def start(each: command.Run, runner: Runner, pipes: contextlib.ExitStack) -> Alive:
    folder = each.server.folder
    folder.mkdir(parents=True)
    path = folder / "pipe"
    os.mkfifo(path)
    # opened for reading too, so that it can be written before the server reads
    pipe = pipes.enter_context(os.fdopen(os.open(path, os.O_RDWR), "w"))
    # a server that no longer reads must not block the writer
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    job = {**{name: value for name, value in each.server.job.items() if name != "calls"}, "pipe": str(path)}
    # a server near the reference but not equal to it is right only if its self-check says so
    checks = each.arm not in (REFERENCE, EAGER)
    environment = {**each.server.environment, flags.SELFCHECK: "warn" if checks else "off"}
    run = dataclasses.replace(each, server=dataclasses.replace(each.server, job=job, environment=environment))
    return Alive(run, runner.start(run.server), pipe)


def every_one(alive: Sequence[Alive], do: Callable[[Alive], object], say: Say, done: str = "") -> None:
    """Ask every live server; drop one that fails."""
    for each in alive:
        if each.why:
            continue
        try:
            do(each)
        except Ended as ended:
            each.why = str(ended)
            say("\n    ".join([f"{each.run.arm}: {each.why}", *each.now().tail]))
        else:
            if done:
                say(f"{each.run.arm}: {done}")


def judge(alive: Sequence[Alive], say: Say) -> None:
    """Judge each server against the one that refuses to replay."""
    reference = next(each.now() for each in alive if each.run.arm == REFERENCE)
    for each in alive:
        if each.why:
            continue
        calls, mine = each.run.calls, each.now()
        if each.run.arm == REFERENCE:
            each.why = compare.doubt_about(CASE, calls, [mine])
        elif each.run.arm == EAGER:
            each.why = why_no_baseline(calls, mine, reference)
        else:
            each.why = why_wrong(calls, mine, reference)
        if each.run.arm in INSIDE[each.run.case.model][1] and not each.why:
            each.why = why_not_inside(each.run, mine)
        if reference.finished:
            equal = compare.compare(CASE, calls, mine, reference)
            count = sum(request.outcome == compare.EQUAL for request in equal)
            each.compared = {"equal": count, "of": len(equal), "largest_gap": round(gap(calls, mine, reference), 4)}
        say(f"{each.run.arm}: {f'red, {each.why}' if each.why else GREEN} {each.compared}")


def why_not_inside(run: command.Run, mine: Outcome) -> str:
    """Say why a server does not show what the form of the kernel that was named does."""
    kernel, forms = INSIDE[run.case.model]
    form, ran = forms[run.arm], mine.kernels.get(kernel.op, "none")
    if ran != form:
        return f"proves nothing: {kernel.flag}={form}, and the form that runs is {ran}"
    left = mine.left.get(kernel.op)
    return f"proves nothing: {kernel.op} is left to other code here: {'; '.join(left)}" if left else ""


def why_no_baseline(calls: Sequence[Call], mine: Outcome, reference: Outcome) -> str:
    """Say why a server is not a baseline: most first tokens must agree, despite other rounding."""
    if not reference.finished:
        return f"the reference: {reference.ending}"
    broken = [each for each in compare.compare(CASE, calls, mine, None) if each.outcome == compare.BROKEN]
    if broken:
        return broken[0].difference
    pairs = answers(calls, mine, reference)
    same = sum(one["tokens"][0] == other["tokens"][0] for one, other in pairs)
    return "" if 2 * same > len(pairs) else f"only {same} of {len(pairs)} first tokens are the reference's"


def why_wrong(calls: Sequence[Call], mine: Outcome, reference: Outcome) -> str:
    """Say why a server is wrong; equal in every bit is right, but padding may round large products differently.

    A server that differs is right if it repeats its own answers bit for bit, starts near the reference, and passed its
    self-check layer by layer: through so many random layers, a last bit can become another token.
    """
    found = compare.judge(CASE, calls, mine, [reference])
    doubtful = not mine.finished or compare.proves_nothing(CASE, mine) or compare.doubt_about(CASE, calls, [reference])
    if not found.why or doubtful:
        return found.why
    itself = [each for each in compare.compare(CASE, calls, mine, None) if each.outcome != compare.EQUAL]
    if itself:
        return f"{itself[0].part}, {itself[0].length} tokens: {itself[0].difference}"
    if not mine.selfcheck or mine.selfcheck["verdict"] != check.RIGHT:
        return f"{found.why}; self-check: {mine.selfcheck['verdict'] if mine.selfcheck else 'none'}"
    off = gap(calls, mine, reference)
    return "" if off <= NEAR else f"{found.why}; first logprobs off by {off:.3g}, where {NEAR} is near"


def gap(calls: Sequence[Call], mine: Outcome, reference: Outcome) -> float:
    """Largest logprob difference of the first token, over the tokens that both servers report."""
    worst = 0.0
    for one, other in answers(calls, mine, reference):
        ours, theirs = ({token: logprob for logprob, token in each["top"][0]} for each in (one, other))
        both = ours.keys() & theirs.keys()
        worst = max([worst, *(abs(ours[token] - theirs[token]) for token in both)]) if both else float("inf")
    return worst


def answers(calls: Sequence[Call], *outcomes: Outcome) -> list[tuple[compare.Answer, ...]]:
    every = [[answer for call in each.answers[: len(calls)] for answer in call] for each in outcomes]
    return list(zip(*every, strict=True))


def rows_of(alive: Sequence[Alive], measured: str, length: int, together: int, rounds: int, say: Say) -> list[Row]:
    """Measure; every round has its own prompts and sends them to each server once."""
    script = cases.Script()
    script.random.seed(f"{measured} {length}")
    new = OUTPUT if measured == THROUGHPUT else 1
    numbers = [script.ask(measured, [length] * together, new) for _ in range(rounds + timing.WARM_UP)]
    before = {each.run.arm: each.prefills() for each in alive}
    taken: dict[str, Iterator[int]] = {each.run.arm: iter(numbers) for each in alive}

    def asking(each: Alive) -> Callable[[], timing.Sample]:
        def ask() -> timing.Sample:
            if each.why:
                return {}
            try:
                seconds = each.ask(script.calls[next(taken[each.run.arm])], logprobs=False)["milliseconds"] / 1e3
            except Ended as ended:
                each.why = str(ended)
                return {}
            return {measured: together * new / seconds if measured == THROUGHPUT else 1e3 * seconds}

        return ask

    samples = timing.in_turn({each.run.arm: asking(each) for each in alive}, rounds)
    rows = []
    for each in alive:
        row = Row(
            PART,
            measured,
            TOKENS_PER_SECOND if measured == THROUGHPUT else "ms",
            ARMS[each.run.arm],
            each.run.case.model,
            length,
            together,
            RED if each.why else GREEN,
            each.why,
            details={
                "new_tokens": new,
                "prefill_passes": dict(each.prefills() - before[each.run.arm]),
                "answers": each.compared,
                "capture": capture_of(each.run.server.log.read_text(errors="replace")),
                **({"selfcheck": selfcheck} if (selfcheck := each.now().selfcheck) else {}),
            },
        )
        rows.append(row if each.why else row.with_times(timing.spreads(samples[each.run.arm])[measured]))
        say(f"{measured}, {length} tokens in {together}, {row.arm}: {each.why or rows[-1].median} {row.unit}")
    return rows


def capture_of(log: str) -> dict[str, float] | None:
    """Capture time of all sizes together, as SGLang logs it."""
    found = CAPTURE.search(log)
    return {"seconds": float(found[1])} if found else None


def make_model(python: str, folder: pathlib.Path, case: cases.Case = CASE) -> None:
    command.make_models(python, [case], folder, MODELS)
