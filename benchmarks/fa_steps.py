# SPDX-License-Identifier: Apache-2.0
"""Decode and verify step times of a server, with FlashAttention's metadata in one launch and without.

    python benchmarks/fa_steps.py --jsonl fa_steps.jsonl        # a GPU, FlashAttention 3, and some minutes

Servers with Llama-3.2-1B's shapes and no weights to speak of are alive at once and asked in turn: plain decode, EAGLE
with topk 1 and with topk 4, each with SGLang's own code and with every implementation of ours. A step's time is the
slope between a short and a long answer to the same prompts, so that prefill drops out. The metadata are integers: a
server whose tokens are not those of SGLang's own has no times. A second server of SGLang's own shows what is chance.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from sglang_bcg_fixes.kernels.fa_metadata.declaration import KERNEL
from sglang_bcg_fixes.lab.verify import cases, command, environment, models
from sglang_bcg_fixes.lab.verify.arms import PATCHED
from sglang_bcg_fixes.lab.verify.servers import FINISHED, Outcome, Runner, ended_by_signals, lines_in, outcome
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.tree import Source

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.bench import rows, timing
from benchmarks.bench.rows import GREEN, RED, Row

PART, STEP = "fa_steps", "time of a step"
SGLANG = "off"
# two of the same show what is chance
AGAIN = "off again"
ARMS = (SGLANG, AGAIN, "triton", "cuda")
# of the drafts: topk, steps and tokens that are verified
KINDS = {"decode": None, "EAGLE topk 1": (1, 3, 4), "EAGLE topk 4": (4, 3, 8)}
BATCHES, PROMPT, SHORT, LONG = (1, 4, 16, 64), 512, 16, 144
TARGET, DRAFT = "llama_1b", "llama_1b_draft"
SIZES = models.options(
    """hidden_size=2048 intermediate_size=8192 num_attention_heads=16 num_key_value_heads=8 head_dim=128
    vocab_size=32000 max_position_embeddings=8192"""
)
# room for one call
PIPE_BYTES = 2**20
# a server that waits for its turn is silent too; one that is asked has this long
LIMITS, ANSWER_LIMIT, SECONDS_BETWEEN_LOOKS = (400.0, 500.0), 60.0, 0.002
Say = Callable[[str], None]


class Ended(Exception):
    """The server has ended or does not answer."""


@dataclasses.dataclass
class Alive:
    """A server driven through its pipe; `why` says why it is no longer used."""

    run: command.Run
    future: concurrent.futures.Future[Outcome]
    pipe: TextIO
    why: str = ""
    answered: int = 0
    size: int = 0

    def ask(self, call: cases.Call) -> dict[str, Any]:
        print(json.dumps(dataclasses.asdict(call)), file=self.pipe, flush=True)
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


def start(run: command.Run, runner: Runner, pipes: contextlib.ExitStack) -> Alive:
    folder = run.server.folder
    folder.mkdir(parents=True)
    path = folder / "pipe"
    os.mkfifo(path)
    # opened for reading too, so that it can be written before the server reads
    pipe = pipes.enter_context(os.fdopen(os.open(path, os.O_RDWR), "w"))
    # a server that no longer reads must not block the writer
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    job = {**{name: value for name, value in run.server.job.items() if name != "calls"}, "pipe": str(path)}
    run = dataclasses.replace(run, server=dataclasses.replace(run.server, job=job))
    return Alive(run, runner.start(run.server), pipe)


def wait_until_started(alive: Sequence[Alive], say: Say) -> None:
    for each in alive:
        try:
            each.wait_for(0, LIMITS[0])
        except Ended as ended:
            each.why = str(ended)
            say("\n    ".join([f"{each.run.arm}: {each.why}", *each.now().tail]))
        else:
            say(f"{each.run.arm}: started")


def configs() -> dict[str, dict[str, Any]]:
    target = {**models.MODELS["llama_eagle_target"].config_json(), **SIZES, "num_hidden_layers": 16}
    draft = {**models.MODELS["llama_eagle_draft"].config_json(), **SIZES, "num_hidden_layers": 1}
    return {TARGET: target, DRAFT: draft}


def case_of(kind: str) -> cases.Case:
    drafts = KINDS[kind]
    flags: cases.Flags = {
        "--attention-backend": "fa3",
        "--load-format": "dummy",
        "--chunked-prefill-size": 8192,
        "--max-total-tokens": max(BATCHES) * 1024,
        "--max-running-requests": max(BATCHES),
    }
    if drafts:
        names = ("eagle-topk", "num-steps", "num-draft-tokens")
        flags |= {f"--speculative-{name}": number for name, number in zip(names, drafts, strict=True)}
        flags["--speculative-algorithm"] = "EAGLE"
    return cases.Case(
        kind.replace(" ", "_"),
        "Steps.",
        TARGET,
        script=lambda buckets: [],
        phase="decode",
        draft=DRAFT if drafts else None,
        decode_sizes=BATCHES,
        extra=lambda source: flags,
        logprobs=False,
    )


def runs_of(kind: str, arms: Sequence[str], source: Source, folder: pathlib.Path) -> Iterator[command.Run]:
    [run] = command.runs_of(case_of(kind), [PATCHED], registry.discover(), source, cases.BUCKETS, folder)
    for arm in arms:
        name = f"{run.case.name}/{arm.replace(' ', '_')}"
        settings = {**run.server.environment, KERNEL.flag: SGLANG if arm == AGAIN else arm}
        server = dataclasses.replace(run.server, name=name, folder=folder / name, environment=settings)
        yield dataclasses.replace(run, arm=arm, server=server)


def measure(kind: str, alive: Sequence[Alive], batches: Sequence[int], rounds: int, say: Say) -> Iterator[list[Row]]:
    for batch in batches:
        script = cases.Script()
        short = script.ask("short", [PROMPT] * batch, SHORT)
        prompts = script.calls[short].prompts
        long = script.say("long", prompts, LONG)
        own = answer(alive, SGLANG, script.calls[long])
        for each in alive:
            if not each.why and own is None:
                each.why = "SGLang's own server has not answered"
            elif not each.why and answer(alive, each.run.arm, script.calls[long]) != own:
                each.why = f"other tokens than SGLang's own, {batch} together"
        steps = functools.partial(step, calls=(script.calls[short], script.calls[long]))
        arms: dict[str, Callable[[], timing.Sample]] = {
            each.run.arm: functools.partial(steps, each) for each in alive if not each.why
        }
        samples = timing.in_turn(arms, rounds) if arms else {}
        found = []
        for each in alive:
            taken = [sample for sample in samples.get(each.run.arm, ()) if sample]
            verdict = RED if each.why else GREEN
            row = Row(PART, STEP, "us", name_of(each.run.arm), kind, PROMPT, batch, verdict, each.why)
            found.append(row.with_times(timing.spreads(taken)[STEP]) if taken else row)
            say(f"{kind}, {batch} together, {row.arm}: {each.why or found[-1].median} us")
        yield found


def name_of(arm: str) -> str:
    return {SGLANG: "sglang", AGAIN: "sglang again"}.get(arm, f"ours, {arm}")


def answer(alive: Sequence[Alive], arm: str, call: cases.Call) -> list[list[int]] | None:
    each = next(each for each in alive if each.run.arm == arm)
    found = asked(each, call)
    return None if found is None else [one["tokens"] for one in found["answers"]]


def asked(each: Alive, call: cases.Call) -> dict[str, Any] | None:
    if each.why:
        return None
    try:
        return each.ask(call)
    except Ended as ended:
        each.why = str(ended)
        return None


def step(each: Alive, calls: Sequence[cases.Call]) -> timing.Sample:
    taken, steps = [], []
    for call in calls:
        found = asked(each, call)
        if found is None:
            return {}
        taken.append(found["milliseconds"])
        # the last request of a batch to end has had the most
        steps.append(max(one["verifications"] or call.new_tokens for one in found["answers"]))
    return {STEP: 1e3 * (taken[1] - taken[0]) / (steps[1] - steps[0])}


def table(found: Sequence[Row]) -> Iterator[str]:
    arms = list(dict.fromkeys(row.arm for row in found))
    lines = []
    for case in rows.cases(found):
        mine = [rows.find(found, arm, STEP, case) for arm in arms]
        ups = [rows.speed_up(mine[0], row) for row in mine[1:]]
        medians = [rows.number(row.median if row else None) for row in mine]
        lines.append([case[0], str(case[2]), *medians, *(rows.number(up, ".3f") for up in ups)])
    yield from rows.table(
        ["steps of", "together", *(f"{arm}, us" for arm in arms), *(f"{a}, x" for a in arms[1:])], lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--arms", default=",".join(ARMS), help=f"the first is {SGLANG}")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--rounds", type=int, default=timing.LEAST_ROUNDS)
    parser.add_argument("--jsonl", type=pathlib.Path, default=pathlib.Path("fa_steps.jsonl"))
    options = parser.parse_args()
    source = releases.installed()
    if source is None or importlib.util.find_spec("sgl_kernel.flash_attn") is None:
        raise SystemExit(f"{sys.executable} has no SGLang with FlashAttention 3")
    arms, batches = options.arms.split(","), [int(word) for word in options.batches.split(",")]
    file = rows.File(options.jsonl, {**environment.header(environment.here()), "rounds": options.rounds})
    found: list[Row] = []
    engine = [sys.executable, "-m", command.ENGINE]
    kinds = options.kinds.split(",")
    with tempfile.TemporaryDirectory(prefix="bcg-steps-") as made, contextlib.ExitStack() as stack:
        folder = pathlib.Path(made)
        for name, config in configs().items():
            (folder / "models" / name).mkdir(parents=True)
            (folder / "models" / name / "config.json").write_text(json.dumps(config))
        stack.enter_context(ended_by_signals())
        runner = stack.enter_context(Runner(engine, len(arms) * len(kinds), LIMITS))
        alive = {kind: [start(run, runner, stack) for run in runs_of(kind, arms, source, folder)] for kind in kinds}
        for kind, some in alive.items():
            wait_until_started(some, say)
            for fresh in measure(kind, some, batches, options.rounds, say):
                file.add(fresh)
                found += fresh
    print("\n".join(table(found)))
    return 0 if found and all(row.verdict == GREEN for row in found) else 1


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
