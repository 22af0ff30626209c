# SPDX-License-Identifier: Apache-2.0
"""1,319 few-shot questions to a trained hybrid model on the installed SGLang: stock, patched, reference and eager.

    python benchmarks/accuracy/evaluate.py --json benchmarks/results/accuracy-0.5.12.post1.json
    python benchmarks/accuracy/evaluate.py --family nemotron_h --arms reference,kernels,eager --json FILE

Every arm is a fresh server that answers all questions greedily: one after the other (`serial`), 64 at a time
(`concurrent`), and four times more, 64 at a time, while all that stands before the questions is in the prefix cache
(`warm 1` ... `warm 4`).

    reference   prefill graphs are captured and never replayed: what replays have to be equal to
    stock       breakable prefill graphs and no fix
    patched     the same with the plugin's fixes
    kernels     the same with the plugin's fixes and its own kernel for the family's linear layers: gdn_extend,
                mamba2_extend, kda_extend or short_conv_extend; not asked for by default
    eager       no prefill graphs and no fix; twice, because its difference from itself is what concurrency does

A server that dies or hangs is a result: what it has not answered is wrong, and the end of its log is kept. So is one
that an interrupt cuts off.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import functools
import json
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import task

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.lab.verify import cases, compare, environment, instruments, servers
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.tree import Source

SERVER = (sys.executable, __file__, "--serve")
ARMS = ("reference", "stock", "patched", "eager", "eager")
BUCKETS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
CONCURRENCY = 64
WARM = tuple(f"warm {number}" for number in range(1, 5))
PHASES = ("serial", "concurrent", *WARM)
# the first so many questions, for the time to the first token
TIMED = 200
# of one server among as many, for the progress line to begin with
SECONDS = 130
HERE = pathlib.Path(__file__).parent
WITHOUT_GRAPHS = "HYBRIDS_WITHOUT_GRAPHS"


@dataclass(frozen=True)
class Family:
    """Settings of an architecture's servers.

    Its folder here, attention, our kernel that one arm turns on, and fixes that every arm with fixes asks for.
    """

    checkpoint: pathlib.Path
    attention: str
    kernel: str
    implementation: str
    fixes: tuple[str, ...] = ()


FAMILIES = {
    "qwen3_next": Family(HERE / "checkpoint", "triton", "GDN_EXTEND", "cuda"),
    # SGLang refuses it triton; fa3 is its own choice on Hopper
    "nemotron_h": Family(HERE / "checkpoint_mamba2", "fa3", "MAMBA2_EXTEND", "cuda"),
    # what SGLang chooses for latent attention on Hopper
    "kimi_linear": Family(HERE / "checkpoint_kimi", "fa3", "KDA_EXTEND", "triton"),
    # stock has no prefill graphs of the others
    "granitemoehybrid": Family(HERE / "checkpoint_granite", "fa3", "MAMBA2_EXTEND", "cuda", (WITHOUT_GRAPHS,)),
    "lfm2": Family(HERE / "checkpoint_lfm2", "fa3", "SHORT_CONV_EXTEND", "triton", (WITHOUT_GRAPHS,)),
}
# phase -> answers in the order of the questions; None where there is none
Answers = dict[str, list[list[int] | None]]


def family_of(model: pathlib.Path) -> Family:
    file = model / "config.json"
    if not file.exists():
        raise SystemExit(f"{file} is not there: train the model first, with train.py --out {model}")
    return FAMILIES[json.loads(file.read_text())["model_type"]]


def engine_arguments(source: Source, arm: str, model: pathlib.Path) -> dict[str, Any]:
    """By the options that this source has."""
    decode = "--cuda-graph-max-bs-decode" if source.has_option("--cuda-graph-max-bs-decode") else "--cuda-graph-max-bs"
    chosen = {
        "--model-path": str(model),
        "--skip-tokenizer-init": True,
        "--attention-backend": family_of(model).attention,
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--dtype": "bfloat16",
        "--random-seed": 0,
        "--log-level": "info",
        # of what is free when it starts: the pools are small, and other servers start beside it
        "--mem-fraction-static": 0.5,
        "--max-running-requests": CONCURRENCY,
        "--max-total-tokens": 2**20,
        # every statement and every answer keeps a state of the linear layers, and nothing should be evicted
        "--max-mamba-cache-size": 4 * task.QUESTIONS,
        "--chunked-prefill-size": max(BUCKETS),
        "--context-length": 2048,
        decode: CONCURRENCY,
        **cases.prefill_graphs(source, () if arm == "eager" else BUCKETS),
    }
    return {option.removeprefix("--").replace("-", "_"): value for option, value in chosen.items()}


def environment_of(arm: str, family: Family) -> dict[str, str]:
    """The plugin counts in every server, and mends in those that are neither stock nor eager."""
    wanted = [*instruments.COUNTERS, *(["refuse_prefill"] if arm == "reference" else [])]
    mends = arm not in ("stock", "eager")
    return {
        "SGLANG_PLUGINS": "bcg_fixes",
        flags.FIXES: "auto" if mends else "off",
        # graphs that fail the check must stay: it is the answers that are judged here
        flags.SELFCHECK: "off",
        flags.INSTRUMENTS: ",".join(wanted),
        f"{flags.PREFIX}KERNEL_{family.kernel}": family.implementation if arm == "kernels" else "off",
        **{f"{flags.PREFIX}FIX_{fix}": "on" if mends else "off" for fix in family.fixes},
    }


def serve(job: dict[str, Any]) -> None:
    """One server, in this process and its children; every answer is a line in a file as soon as it is there."""
    began = time.perf_counter()
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**job["engine"])
    with open(job["answers"], "w", buffering=1) as out:

        def write(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")

        write(started=round(time.perf_counter() - began, 1))
        ask_everything(engine, task.test_problems(job["questions"]), write)
        write(**{servers.FINISHED: True})
    # whoever started this ends it: in an orderly end every process takes its report with it
    signal.pause()


def ask_everything(engine: Any, problems: list[task.Problem], write: Callable[..., Any]) -> None:
    prompts = [problem.prompt for problem in problems]
    ask(engine, prompts, 1, functools.partial(write, phase="serial"))
    flush(engine)
    ask(engine, prompts, CONCURRENCY, functools.partial(write, phase="concurrent"))
    flush(engine)
    # into the prefix cache, with the state behind the last example
    ask(engine, [problem.context for problem in problems], CONCURRENCY, lambda **_: None, new_tokens=1)
    for phase in WARM:
        ask(engine, prompts, CONCURRENCY, functools.partial(write, phase=phase))
    flush(engine)
    write(first_token_ms=first_token_times(engine, prompts[:TIMED]))


def ask(
    engine: Any,
    prompts: list[list[int]],
    at_once: int,
    write: Callable[..., Any],
    new_tokens: int = task.LONGEST_ANSWER,
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "stop_token_ids": [task.END]}

    async def every() -> None:
        gate = asyncio.Semaphore(at_once)

        async def one(number: int, prompt: list[int]) -> None:
            async with gate:
                answer = await engine.async_generate(input_ids=prompt, sampling_params=sampling)
            write(number=number, tokens=answer["output_ids"], cached=answer["meta_info"]["cached_tokens"])

        await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))

    engine.loop.run_until_complete(every())


def flush(engine: Any) -> None:
    """SGLang refuses while it still tidies up after the last request."""
    for _ in range(50):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise RuntimeError("SGLang does not flush its prefix cache")


def first_token_times(engine: Any, prompts: list[list[int]]) -> dict[str, float]:
    taken = []
    for prompt in prompts:
        start = time.perf_counter()
        engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 1})
        taken.append((time.perf_counter() - start) * 1e3)
    p20, _, _, p80 = statistics.quantiles(taken, n=5)
    return {"median": round(statistics.median(taken), 2), "p20": round(p20, 2), "p80": round(p80, 2)}


def answers_in(lines: list[dict[str, Any]], count: int) -> Answers:
    found: Answers = {phase: [None] * count for phase in PHASES}
    for line in lines:
        if "phase" in line:
            found[line["phase"]][line["number"]] = line["tokens"]
    return found


def judge(answers: Answers, others: dict[str, Answers], problems: list[task.Problem]) -> dict[str, Any]:
    """Each phase: how many answers are right, are missing, and are not those of the other arms."""
    judged = {}
    for phase, given in answers.items():
        # the others are the right ones, so these make all answers known
        wrong = {
            str(number): None if tokens is None else " ".join(map(str, tokens))
            for number, (tokens, problem) in enumerate(zip(given, problems, strict=True))
            if tokens != problem.answer
        }
        judged[phase] = {
            "accuracy": round(1 - len(wrong) / len(problems), 4),
            "right": len(problems) - len(wrong),
            "unanswered": given.count(None),
            "differs_from": {
                arm: sum(one != two for one, two in zip(given, other[phase], strict=True))
                for arm, other in others.items()
            },
            "wrong": wrong,
        }
    return judged


def result_of(
    arm: str, server: servers.Server, outcome: servers.Outcome, phases: dict[str, Any], lines: list[dict[str, Any]]
) -> dict[str, Any]:
    cached: collections.Counter[str] = collections.Counter()
    for line in lines:
        cached[line.get("phase", "")] += line.get("cached", 0)
    times = next((line["first_token_ms"] for line in lines if "first_token_ms" in line), None)
    # how fast a wrong answer comes is of no use to anybody
    is_right = arm == "eager" or not phases["serial"]["differs_from"].get("reference")
    return {
        "arm": arm,
        "ending": outcome.ending,
        "seconds": outcome.seconds,
        "start_seconds": outcome.start_seconds,
        "first_token_ms": times if is_right else None,
        "cached_tokens": {phase: cached[phase] for phase in PHASES},
        "applied": outcome.applied,
        "counts": compare.counts(outcome),
        "environment": dict(server.environment),
        # no file of results tells where a machine keeps things
        "engine": {**server.job["engine"], "model_path": pathlib.Path(server.job["engine"]["model_path"]).name},
        "log_tail": [] if outcome.finished else outcome.tail,
        "phases": phases,
    }


def summary(results: list[dict[str, Any]]) -> str:
    """A table; what differs is counted for each phase."""
    head = ["arm", *PHASES, "differs from reference", "differs from eager", "replays", "first token, ms"]
    rows = [head, ["---"] * len(head)]
    for result in results:
        phases = [result["phases"][phase] for phase in PHASES]
        differs = [
            " ".join(str(phase["differs_from"][arm]) for phase in phases if arm in phase["differs_from"])
            for arm in ("reference", "eager")
        ]
        ending = "" if result["ending"] == servers.FINISHED else f": {result['ending']}"
        replays = str(result["counts"].get("prefill", {}).get("replayed", 0))
        first_token = str((result["first_token_ms"] or {}).get("median", ""))
        accuracies = [f"{phase['accuracy']:.1%}" for phase in phases]
        rows.append([result["arm"] + ending, *accuracies, *differs, replays, first_token])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def evaluate(options: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    source = releases.installed()
    if not source:
        raise SystemExit(f"{sys.executable} has no SGLang")
    family = family_of(options.model)
    problems = task.test_problems(options.questions)
    arms = options.arms.split(",")
    waiting = []
    with servers.ended_by_signals(), servers.Runner(SERVER, options.jobs) as runner:
        for position, arm in enumerate(arms, 1):
            job = {"engine": engine_arguments(source, arm, options.model), "questions": len(problems)}
            server = servers.Server(f"{position} {arm}", folder / str(position), job, environment_of(arm, family))
            waiting.append((arm, server, runner.start(server)))
        progress = servers.Progress(runner, len(arms), SECONDS * -(-len(arms) // options.jobs))
        try:
            progress.follow({future: server for _, server, future in waiting})
        except KeyboardInterrupt:
            print("interrupted; this is what there is so far", file=sys.stderr, flush=True)
    lines = {server.name: servers.lines_in(server.answers) for _, server, _ in waiting}
    answers = {name: answers_in(some, len(problems)) for name, some in lines.items()}
    # an arm is compared with the first server of every arm, the second eager one with the first
    first = {arm: server.name for arm, server, _ in reversed(waiting)}
    results = []
    for arm, server, future in waiting:
        others = {other: answers[name] for other, name in sorted(first.items()) if name != server.name}
        phases = judge(answers[server.name], others, problems)
        outcome = servers.NEVER_STARTED if future.cancelled() else future.result()
        results.append(result_of(arm, server, outcome, phases, lines[server.name]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=tuple(FAMILIES), default="qwen3_next", help="which of the checkpoints here")
    parser.add_argument("--model", type=pathlib.Path, help="folder with another checkpoint, of one of them")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--questions", type=int, default=task.QUESTIONS)
    parser.add_argument("--jobs", type=int, default=len(ARMS), help="servers at a time; 1 for times to be compared")
    parser.add_argument("--json", type=pathlib.Path, help="write everything there")
    parser.add_argument("--serve", type=pathlib.Path, metavar="JOB", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve.read_text()))
        return
    options.model = options.model or FAMILIES[options.family].checkpoint
    with tempfile.TemporaryDirectory(prefix="bcg-accuracy-") as folder:
        results = evaluate(options, pathlib.Path(folder))
    if options.json:
        about = {
            **environment.header(environment.here()),
            "questions": options.questions,
            "task": task.digest(task.test_problems(options.questions)),
            "jobs": options.jobs,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**about, "servers": results}, indent=1) + "\n")
    print(summary(results))


if __name__ == "__main__":
    main()
