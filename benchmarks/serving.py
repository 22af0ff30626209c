# SPDX-License-Identifier: Apache-2.0
"""Time users gain: HTTP servers with default flags, asked in turn, alone and by SGLang's own bench_serving.

    python benchmarks/serving.py --model qwen3_5_4b --jsonl FILE         # or a folder that serving_models.py made
    python benchmarks/serving.py --model qwen3_5_4b --jsonl FILE --server-argument=--tp-size=2
    python benchmarks/serving.py --model qwen3_1_7b --jsonl FILE --cached 0,4096 \\
        --arms "stock,stock again,stock with graphs without breaks,bcg_fixes with attention inside,..."
    python benchmarks/serving.py --plot-only FILE

Every server is `python -m sglang.launch_server` with the flags of SIZES, which only let several share a GPU, and
without a chat at its start. They start together; then all but one are stopped by a signal, so that none takes a core
while another is measured. Rounds alternate: each asks every server once, in shuffled order. `stock` and `stock again`
are the same command: their difference is chance. So are `bcg_fixes` and `bcg_fixes again`, with our own defaults or the
flags that --flag gives. --copies 3 starts three servers of each arm: what one process happened to get is told from what
its command does. A server whose first tokens are not near those without prefill graphs is not timed.

Clients that ask once come all at once to an idle server: one that answers the first sooner takes the others in more
steps. With --asks 4 they come as others leave.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import io
import itertools
import json
import os
import pathlib
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.kernels.attention_extend import declaration as attention_extend
from sglang_bcg_fixes.lab.verify import environment
from sglang_bcg_fixes.lab.verify.models import OF_IMAGES
from sglang_bcg_fixes.lab.verify.servers import PORTS, ended_by_signals, is_free, tail_of, without_places
from sglang_bcg_fixes.source import releases

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.bench import rows, timing
from benchmarks.bench.rows import GREEN, RED, Row

HERE = pathlib.Path(__file__).parent
PART = "serving"
FIRST_TOKEN, WITH_IMAGE = "first token", "first token, with an image"
CHAT, VARIED, PREFILL, TURNS = "chat-like", "varied", "prefill-heavy", "chat turns"
STOCK, AGAIN, FULL, OURS, OURS_AGAIN, INSIDE, WITHOUT, NONE = (
    "stock",
    "stock again",
    "stock with graphs without breaks",
    "bcg_fixes",
    "bcg_fixes again",
    "bcg_fixes with attention inside",
    "bcg_fixes without its kernels",
    "stock without prefill graphs",
)
WITH_PLUGIN = {"SGLANG_PLUGINS": "bcg_fixes"}
ENVIRONMENTS = {
    OURS: WITH_PLUGIN,
    OURS_AGAIN: WITH_PLUGIN,
    INSIDE: {**WITH_PLUGIN, attention_extend.KERNEL.flag: "fa3"},
    WITHOUT: {**WITH_PLUGIN, flags.KERNELS: "off"},
}
NO_PREFILL_GRAPHS = ("--cuda-graph-backend-prefill", "disabled")
# early releases have none of that, and other graphs by default
EARLY_GRAPHS = ("--enable-breakable-cuda-graph", "--enforce-piecewise-cuda-graph")
NO_EARLY_GRAPHS = ("--disable-piecewise-cuda-graph",)
# SGLang's experimental backend; two requests, for it takes longer the more it has room for
NO_BREAKS = ("--cuda-graph-config", '{"prefill":{"backend":"full","full_prefill_max_req":2}}')
ARMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((STOCK, AGAIN), ()),
    FULL: NO_BREAKS,
    **dict.fromkeys((OURS, OURS_AGAIN, INSIDE, WITHOUT), ()),
    NONE: NO_PREFILL_GRAPHS,
}
# of a server's name: its number among those of its arm
COPY = " #"
ASKED_ARMS = (STOCK, AGAIN, OURS, WITHOUT, NONE)
# flags that only say how much of a GPU one of several servers may take
SIZES = {
    "--max-running-requests": 64,
    "--max-total-tokens": 280_000,
    # up to five states for each request
    "--max-mamba-cache-size": 320,
    "--mem-fraction-static": 0.95,
}
# its own warm-up is a chat, and the model has no template for one
WITHOUT_CHAT = ("--skip-server-warmup",)
LENGTHS, IMAGE_LENGTHS = (253, 1021, 4093, 8189), (509, 1021)
IMAGE_SIDE, IMAGE_TOKENS = 512, 256
CLIENTS = (16, 64)
# tokens in, tokens out, and the least part of both that a request may have
WORKLOADS = {CHAT: (1024, 256, 1), VARIED: (1024, 256, 0.25), PREFILL: (4096, 64, 1), TURNS: (64, 32, 1)}
# tokens of a chat that the prefix cache has before its first turn
BEFORE_TURNS = 4096
# requests of one length come and leave together
ASKED_WORKLOADS = (CHAT, PREFILL)
COLOURS = {
    **{STOCK: "tab:gray", AGAIN: "lightgray", OURS: "tab:green", OURS_AGAIN: "lightgreen"},
    **{WITHOUT: "tab:olive", NONE: "tab:red", FULL: "tab:blue", INSIDE: "darkgreen"},
}
TAKEN = (
    *("total_throughput", "median_ttft_ms", "mean_ttft_ms", "median_tpot_ms", "mean_tpot_ms", "median_itl_ms"),
    "duration",
)
# requests whose median is one round's first-token time
ASKED = 5
SEED = 0
SECONDS_TO_START, SECONDS_TO_ANSWER = 400.0, 120.0
# how far a first token's logprobs may be from those without graphs; unrelated ones are further apart
NEAR, TOP = 2.0, 5
REPLAYED = re.compile(r"Prefill batch.*cuda graph: (True|False)")
PLUGIN_LINE = re.compile(r"bcg-fixes.*(?:applied|gdn_extend).*")
Say = Callable[[str], None]
LAUNCH = (sys.executable, "-m", "sglang.launch_server")


class ServingError(Exception):
    """Nothing can be measured; the message says what to do."""


class Wrong(Exception):
    """A server has ended, does not answer, or answers wrongly."""


@dataclasses.dataclass
class Server:
    """An HTTP server in its own process group; `why` says why it is no longer timed."""

    arm: str
    port: int
    log: pathlib.Path
    process: subprocess.Popen[bytes]
    seconds: float = 0.0
    why: str = ""
    compared: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def last_lines(self) -> str:
        return indented(tail_of(without_places(self.text(), self.log).splitlines()))

    def is_healthy(self) -> bool:
        if self.process.poll() is not None:
            raise Wrong(f"ended with exit status {self.process.returncode}: {self.last_lines()}")
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def generate(self, **request: Any) -> dict[str, Any]:
        try:
            return self.post("generate", SECONDS_TO_ANSWER, request)
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            raise Wrong(f"no answer ({error}): {self.last_lines()}") from error

    def post(self, path: str, seconds: float, request: Mapping[str, Any]) -> dict[str, Any]:
        body = json.dumps(request).encode()
        asked = urllib.request.Request(f"{self.address}/{path}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=seconds) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def stop(self) -> None:
        # it may be stopped, and has nothing to save
        self.signal(signal.SIGKILL)
        self.process.wait()


def indented(lines: Sequence[str]) -> str:
    return "\n    ".join(["", *lines])


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a run of this program may be told."""

    model: pathlib.Path
    # or copies of them
    arms: Sequence[str] = ASKED_ARMS
    rounds: int = timing.LEAST_ROUNDS
    launch: Sequence[str] = LAUNCH
    # of every server, after our own: the last of an option counts
    more: Sequence[str] = ()
    lengths: Sequence[int] = LENGTHS
    image_lengths: Sequence[int] = IMAGE_LENGTHS
    # tokens before those of `lengths` that the prefix cache has
    cached: Sequence[int] = (0,)
    # a release that makes breakable prefill graphs only where they are asked for
    is_early: bool = False
    clients: Sequence[int] = CLIENTS
    # requests of each client, one after the other
    asks: int = 1
    workloads: Sequence[str] = ASKED_WORKLOADS
    # of this package, for every server that has it
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    words: int = 0

    def command(self, arm: str, port: int) -> list[str]:
        sizes = [str(word) for pair in SIZES.items() for word in pair]
        where = ["--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(port)]
        return [*self.launch, *where, *sizes, *WITHOUT_CHAT, *flags_of(arm_of(arm), self.is_early), *self.more]


def copies(arms: Sequence[str], count: int) -> list[str]:
    """Name several servers of each arm; one without prefill graphs is enough."""
    return [arm if n == 1 else f"{arm}{COPY}{n}" for n in range(1, count + 1) for arm in arms if n == 1 or arm != NONE]


def arm_of(server: str) -> str:
    return server.partition(COPY)[0]


def flags_of(arm: str, is_early: bool) -> tuple[str, ...]:
    """SGLang's flags of an arm."""
    if not is_early:
        return ARMS[arm]
    return NO_EARLY_GRAPHS if arm == NONE else EARLY_GRAPHS


def start(plan: Plan, arm: str, folder: pathlib.Path) -> Server:
    port, log = free_port(), folder / f"{arm.replace(' ', '_')}.log"
    ours = {**plan.flags, **ENVIRONMENTS[arm_of(arm)]} if arm_of(arm) in ENVIRONMENTS else {}
    environment = {**flags.environment_without_ours(), "SGLANG_PLUGINS": "__none__", **ours}
    with log.open("wb") as out:
        process = subprocess.Popen(
            plan.command(arm, port),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(arm, port, log, process)


def free_port() -> int:
    for port in random.sample(PORTS, len(PORTS)):
        if is_free(port):
            return port
    raise ServingError(f"no free port between {PORTS.start} and {PORTS.stop}")


def wait_until_healthy(every: Sequence[Server], say: Say) -> None:
    began, waiting = time.monotonic(), list(every)
    while waiting:
        for each in list(waiting):
            try:
                if not each.is_healthy():
                    if time.monotonic() - began < SECONDS_TO_START:
                        continue
                    each.why = f"not healthy within {SECONDS_TO_START:.0f} s: {each.last_lines()}"
            except Wrong as wrong:
                each.why = str(wrong)
            each.seconds = round(time.monotonic() - began, 1)
            waiting.remove(each)
            say(f"{each.arm}: {each.why or f'started in {each.seconds:.0f} s'}")
        time.sleep(0.5)


@contextlib.contextmanager
def alone(server: Server) -> Iterator[Server]:
    """Let one of the stopped servers run."""
    server.signal(signal.SIGCONT)
    try:
        yield server
    finally:
        server.signal(signal.SIGSTOP)


class Prompts:
    """New prompts of the model's words; the same for every server."""

    def __init__(self, what: str, words: int) -> None:
        self.random, self.words = random.Random(f"{SEED} {what}"), words

    def tokens(self, length: int) -> dict[str, Any]:
        return {"input_ids": [self.random.randrange(2, self.words) for _ in range(length)]}

    def with_image(self, length: int) -> dict[str, Any]:
        """An image of IMAGE_TOKENS tokens and words, `length` tokens together."""
        start, end, image, _ = OF_IMAGES
        words = " ".join(str(self.random.randrange(2, self.words)) for _ in range(max(1, length - IMAGE_TOKENS - 2)))
        return {"text": f"{start} {image} {end} {words}", "image_data": [self.image()]}

    def image(self) -> str:
        from PIL import Image

        made = io.BytesIO()
        # a few large squares: a photograph's size as a file does not matter here
        small = Image.frombytes("RGB", (8, 8), self.random.randbytes(8 * 8 * 3))
        small.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.NEAREST).save(made, "PNG")
        return f"data:image/png;base64,{base64.b64encode(made.getvalue()).decode()}"


def first_token(server: Server, request: dict[str, Any]) -> float:
    """Milliseconds from the request to the answer of one token."""
    began = time.perf_counter()
    server.generate(**request, sampling_params={"max_new_tokens": 1, "temperature": 0})
    return 1e3 * (time.perf_counter() - began)


def judge(every: Sequence[Server], plan: Plan, say: Say) -> None:
    """Compare every server's first tokens with those of the one without prefill graphs."""
    prompts = Prompts("judge", plan.words)
    asked = [prompts.tokens(length) for length in plan.lengths for _ in range(2)]
    asked += [prompts.with_image(length) for length in plan.image_lengths for _ in range(2)]
    answers: dict[str, list[dict[int, float]]] = {}
    for each in every:
        if each.why:
            continue
        with alone(each):
            try:
                answers[each.arm] = [top_of(each.generate(**request, **WANTED)) for request in asked]
            except Wrong as wrong:
                each.why = str(wrong)
    if NONE not in answers:
        why = [each.why for each in every if each.arm == NONE] or ["leave it in --arms"]
        raise ServingError(f"'{NONE}' has no answers, and the others nothing to be compared with: {why[0]}")
    for each in every:
        if each.arm in answers:
            each.compared = compare(answers[each.arm], answers[NONE])
            if each.compared["largest_gap"] > NEAR:
                each.why = f"first logprobs off by {each.compared['largest_gap']:.3g}, where {NEAR} is near"
        say(f"{each.arm}: {each.why or GREEN} {each.compared}")


WANTED: dict[str, Any] = {
    "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    "return_logprob": True,
    "top_logprobs_num": TOP,
}


def top_of(answer: dict[str, Any]) -> dict[int, float]:
    """Logprobs of the likeliest first tokens, the likeliest first."""
    return {token: logprob for logprob, token, *_ in answer["meta_info"]["output_top_logprobs"][0]}


def compare(mine: Sequence[dict[int, float]], others: Sequence[dict[int, float]]) -> dict[str, Any]:
    worst, equal = 0.0, 0
    for one, other in zip(mine, others, strict=True):
        both = one.keys() & other.keys()
        worst = max([worst, *(abs(one[token] - other[token]) for token in both)]) if both else float("inf")
        equal += next(iter(one)) == next(iter(other))
    return {"equal": equal, "of": len(mine), "largest_gap": round(worst, 4)}


def measured(
    every: Sequence[Server],
    plan: Plan,
    case: tuple[str, int, int],
    unit: str,
    take: Callable[[Server, int], dict[str, float]],
    say: Say,
) -> list[Row]:
    """Take one sample of every server in each round; `take` gets the number of the round."""
    name, tokens, clients = case
    numbers = {each.arm: iter(range(plan.rounds + timing.WARM_UP)) for each in every}
    before = {each.arm: len(each.text()) for each in every}
    load = os.getloadavg()[0]

    def sampling(server: Server) -> timing.Sample:
        number = next(numbers[server.arm])
        if server.why:
            return {}
        with alone(server):
            try:
                return take(server, number)
            except Wrong as wrong:
                server.why = str(wrong)
                return {}

    # each case has its own order: what runs before a server may slow it down
    shuffled = random.Random(f"{SEED} {case}").sample(every, len(every))
    samples = timing.in_turn({each.arm: functools.partial(sampling, each) for each in shuffled}, plan.rounds)
    found = []
    for each in every:
        taken = [sample for sample in samples[each.arm] if sample]
        replays = REPLAYED.findall(each.text()[before[each.arm] :])
        details = {
            "rounds": taken,
            "load": round(load, 1),
            "answers": each.compared,
            "prefills": {"replayed": replays.count("True"), "eager": replays.count("False")},
            "seconds_to_start": each.seconds,
        }
        row = Row(PART, name, unit, each.arm, plan.model.name, tokens, clients, RED if each.why else GREEN, each.why)
        row = dataclasses.replace(row, details=details)
        found.append(row if each.why else row.with_times(timing.spreads(taken)[name]))
        say(f"{name}, {tokens} tokens, {clients} clients, {each.arm}: {each.why or found[-1].median} {unit}")
    return found


def measure(plan: Plan, folder: pathlib.Path, say: Say) -> Iterator[list[Row]]:
    with contextlib.ExitStack() as ending:
        started = {}
        # where a server's processes come to lie may hang on its place among them
        for arm in random.Random().sample(plan.arms, len(plan.arms)):
            started[arm] = start(plan, arm, folder)
            ending.callback(started[arm].stop)
        every = [started[arm] for arm in plan.arms]
        say(f"starting {len(every)} servers, load {os.getloadavg()[0]:.1f}")
        wait_until_healthy(every, say)
        for each in every:
            for line in dict.fromkeys(PLUGIN_LINE.findall(each.text())):
                say(f"{each.arm}: {line[:300]}")
            each.signal(signal.SIGSTOP)
        judge(every, plan, say)
        for cached in plan.cached:
            for length in plan.lengths:
                yield first_tokens(every, plan, FIRST_TOKEN, length, say, cached)
        for length in plan.image_lengths:
            yield first_tokens(every, plan, WITH_IMAGE, length, say)
        for name in plan.workloads:
            for clients in plan.clients:
                if name == TURNS:
                    yield turns(every, plan, clients, say)
                else:
                    yield served(every, plan, name, clients, folder, say)


def first_tokens(every: Sequence[Server], plan: Plan, kind: str, length: int, say: Say, cached: int = 0) -> list[Row]:
    """Rows of the time to the first token of new prompts, all behind the same tokens where some are cached."""
    prompts = Prompts(f"{kind} {length}", plan.words)
    make = prompts.tokens if kind == FIRST_TOKEN else prompts.with_image
    # the first one of a round wakes the server, and does not count
    asked = [[make(length) for _ in range(1 + ASKED)] for _ in range(plan.rounds + timing.WARM_UP)]
    if cached:
        kind = behind(cached)
        before = prompts.tokens(cached)["input_ids"]
        asked = [[{"input_ids": before + each["input_ids"]} for each in some] for some in asked]

    def take(server: Server, number: int) -> dict[str, float]:
        if cached:
            # it may have been evicted since the last round
            first_token(server, {"input_ids": before})
        return {kind: timing.quantile([first_token(server, each) for each in asked[number]][1:], 0.5)}

    return measured(every, plan, (kind, length, 1), "ms", take, say)


def behind(cached: int) -> str:
    return f"{FIRST_TOKEN} behind {cached:,} cached"


def served(every: Sequence[Server], plan: Plan, name: str, clients: int, folder: pathlib.Path, say: Say) -> list[Row]:
    """Rows of output tokens a second; bench_serving's other numbers are in the details of each round."""
    load, requests = WORKLOADS[name], clients * plan.asks

    def take(server: Server, number: int) -> dict[str, float]:
        found = bench_serving(server, plan.model, (*load, clients, requests), number, folder)
        if found["completed"] != requests:
            raise Wrong(f"bench_serving completed {found['completed']} of {requests}")
        return {
            name: found["output_throughput"],
            **{key: round(found[key], 3) for key in TAKEN},
        }

    return measured(every, plan, (name, load[0], clients), rows.TOKENS_PER_SECOND, take, say)


def turns(every: Sequence[Server], plan: Plan, clients: int, say: Say) -> list[Row]:
    """Rows of output tokens a second of chats that the prefix cache has, each of which adds little a turn."""
    prompts, (new, out, _) = Prompts(TURNS, plan.words), WORKLOADS[TURNS]
    chats = [prompts.tokens(BEFORE_TURNS)["input_ids"] for _ in range(clients)]
    added = [
        [[prompts.tokens(new)["input_ids"] for _ in range(plan.asks)] for _ in chats]
        for _ in range(plan.rounds + timing.WARM_UP)
    ]
    answered = {"max_new_tokens": out, "temperature": 0, "ignore_eos": True}

    def take(server: Server, number: int) -> dict[str, float]:
        def chat(before: list[int], turns: list[list[int]]) -> list[float]:
            seconds = []
            for turn in turns:
                before, began = before + turn, time.perf_counter()
                server.generate(input_ids=before, sampling_params=answered)
                seconds.append(time.perf_counter() - began)
            return seconds

        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            # it may have been evicted since the last round
            for _ in pool.map(lambda each: first_token(server, {"input_ids": each}), chats):
                pass
            began = time.perf_counter()
            of_chats = list(pool.map(chat, chats, added[number]))
            duration = time.perf_counter() - began
        of_turns = [seconds for of_chat in of_chats for seconds in of_chat]
        return {
            TURNS: round(out * len(of_turns) / duration, 1),
            "median_turn_ms": round(1e3 * timing.quantile(of_turns, 0.5), 3),
            "duration": round(duration, 3),
        }

    return measured(every, plan, (TURNS, new, clients), rows.TOKENS_PER_SECOND, take, say)


def bench_serving(
    server: Server, model: pathlib.Path, load: tuple[int, int, float, int, int], seed: int, folder: pathlib.Path
) -> dict[str, Any]:
    """Run SGLang's own program in this process, which has imported it once, and read the line that it writes."""
    (tokens, new, least, clients, asked), out = load, folder / "bench_serving.jsonl"
    out.unlink(missing_ok=True)
    words = f"""--backend sglang --host 127.0.0.1 --port {server.port} --model {model} --dataset-name random-ids
        --random-input-len {tokens} --random-output-len {new} --random-range-ratio {least} --num-prompts {asked}
        --max-concurrency {clients} --tokenize-prompt --seed {seed} --warmup-requests 0
        --flush-cache --disable-tqdm --output-file {out}"""
    arguments, sys.argv = sys.argv, ["bench_serving", *words.split()]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            runpy.run_module(program_of_sglang(), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise Wrong(f"bench_serving: {indented(tail_of(said.getvalue().splitlines()))}") from ended
    finally:
        sys.argv = arguments
    found: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return found


@functools.cache
def program_of_sglang() -> str:
    """Name bench_serving's module; newer releases have it elsewhere and warn at the old name."""
    newer = "sglang.benchmark.serving"
    return newer if importlib.util.find_spec(newer) else "sglang.bench_serving"


def model_of(name: str, made: pathlib.Path) -> pathlib.Path:
    """The folder of that name, or a model made in a process of its own, which gives the GPU's memory back."""
    if pathlib.Path(name, "config.json").is_file():
        return pathlib.Path(name)
    folder = made / name
    if subprocess.run([sys.executable, str(HERE / "serving_models.py"), str(folder), name]).returncode:
        raise SystemExit(f"--model {name}: it is no folder of a model, and none was made; see above")
    return folder


def words_of(model: pathlib.Path) -> int:
    return len(json.loads((model / "tokenizer.json").read_text())["model"]["vocab"])


def sees(model: pathlib.Path) -> bool:
    return "vision_config" in json.loads((model / "config.json").read_text())


def numbers_of(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def draw(file: pathlib.Path) -> pathlib.Path:
    """Draw first-token times and throughput as ratios to stock, with the range of the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = {
        (row.arm, (row.measured, *row.case)): row for row in rows.read(file)[1] if row.verdict == GREEN and row.median
    }
    arms = list(dict.fromkeys(arm for arm, _ in good))
    first = tuple(dict.fromkeys(case[0] for _, case in good if case[0] not in WORKLOADS))
    width = 0.8 / len(arms)
    loads = tuple(dict.fromkeys(case[0] for _, case in good if case[0] in WORKLOADS))
    shown = [(first, "time to first token, ms (less is better)", 3)]
    shown += [(loads, "output tokens/s, stock = 1 (more is better)", 2)] if loads else []
    figure, panels = pyplot.subplots(
        1,
        len(shown),
        figsize=(11, 4.2),
        width_ratios=[parts for *_, parts in shown],
        squeeze=False,
        layout="constrained",
    )
    for panel, (kinds, title, _) in zip(panels[0], shown, strict=True):
        cases = list(dict.fromkeys(case for _, case in good if case[0] in kinds))
        for (place, arm), (at, case) in itertools.product(enumerate(arms), enumerate(cases)):
            row = good.get((arm, case))
            if row is None:
                continue
            scale = 1 / (good[STOCK, case].median or 1) if row.measured in WORKLOADS else 1.0
            low, middle, high = (
                scale * timing.quantile([taken[row.measured] for taken in row.details["rounds"]], part)
                for part in (0, 0.5, 1)
            )
            panel.bar(
                at + (place - (len(arms) - 1) / 2) * width,
                middle,
                width,
                yerr=[[middle - low], [high - middle]],
                color=COLOURS[arm_of(arm)],
                label=arm if at == 0 else None,
            )
        panel.set_xticks(range(len(cases)), [label_of(*case) for case in cases], fontsize=8)
        panel.set_title(title, fontsize=10)
        panel.grid(axis="y", alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), fontsize=8, ncols=3, loc="outside upper center")
    picture = file.with_suffix(".png")
    figure.savefig(picture, dpi=120)
    return picture


def label_of(measured: str, shape: str, tokens: int, clients: int) -> str:
    if measured in WORKLOADS:
        return f"{measured}\n{tokens:,} in\n{WORKLOADS[measured][1]} out\n{clients} clients"
    more = {WITH_IMAGE: ",\nan image\namong them", FIRST_TOKEN: ""}
    return f"{tokens:,}\ntokens" + more.get(measured, measured.removeprefix(FIRST_TOKEN).replace(" ", "\n"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", metavar="NAME", help="one of serving_models.py, or a folder that it made")
    parser.add_argument("--jsonl", type=pathlib.Path)
    parser.add_argument("--arms", default=",".join(ASKED_ARMS), metavar="A,B", help="in the order of the tables")
    parser.add_argument("--copies", type=int, default=1, metavar="N", help="servers of each arm (default: %(default)s)")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), metavar="M,N", help="of single prompts")
    parser.add_argument("--cached", default="0", metavar="M,N", help="tokens before them that the prefix cache has")
    parser.add_argument("--image-lengths", default=",".join(map(str, IMAGE_LENGTHS)), metavar="M,N")
    parser.add_argument("--clients", default=",".join(map(str, CLIENTS)), metavar="M,N", help="of bench_serving")
    parser.add_argument("--workloads", default=",".join(ASKED_WORKLOADS), metavar="A,B", help="of bench_serving")
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE", help="of servers with bcg_fixes")
    parser.add_argument(
        "--server-argument", action="append", default=[], metavar="=ARG", help="of every server, as =--tp-size=2"
    )
    parser.add_argument(
        "--asks", type=int, default=1, metavar="N", help="requests of each client (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=timing.LEAST_ROUNDS)
    parser.add_argument("--logs", type=pathlib.Path, help="where the servers' logs stay")
    parser.add_argument("--plot-only", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.plot_only:
        print(draw(options.plot_only))
        return 0
    if not options.model or not options.jsonl:
        parser.error("--model and --jsonl are needed")
    arms, workloads = options.arms.split(","), options.workloads.split(",")
    for option, given, known in (("--arms", arms, ARMS), ("--workloads", workloads, WORKLOADS)):
        for name in given:
            if name not in known:
                nearest = flags.nearest(name, list(known))
                raise SystemExit(f"{option}: there is no '{name}'{nearest}; there are {', '.join(known)}")
    ours = dict(flag.partition("=")[::2] for flag in options.flag)
    here = environment.look(sys.executable)
    source = releases.installed()
    is_early = source is not None and not source.has_option(NO_PREFILL_GRAPHS[0])
    header = {
        **environment.header(here),
        "rounds": options.rounds,
        "asks": options.asks,
        "flags": SIZES,
        "flags_of_ours": ours,
        "server_arguments": options.server_argument,
        "arms": {arm: flags_of(arm, is_early) for arm in arms},
    }
    file = rows.File(options.jsonl, header)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        made = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bcg-serving-")))
        folder = options.logs or made
        folder.mkdir(parents=True, exist_ok=True)
        model = model_of(options.model, made)
        plan = Plan(
            model,
            copies(arms, options.copies),
            options.rounds,
            more=options.server_argument,
            lengths=numbers_of(options.lengths),
            cached=numbers_of(options.cached),
            is_early=is_early,
            image_lengths=numbers_of(options.image_lengths) if sees(model) else (),
            clients=numbers_of(options.clients),
            asks=options.asks,
            workloads=workloads,
            flags=ours,
            words=words_of(model),
        )
        found = []
        for some in measure(plan, folder, lambda line: print(line, file=sys.stderr, flush=True)):
            file.add(some)
            found += some
    return 0 if found and all(row.verdict == GREEN for row in found if arm_of(row.arm) in ENVIRONMENTS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
