# SPDX-License-Identifier: Apache-2.0
"""Random launches that look for defects nobody has reported: `make explore`, or

    python -m tests.explore [--release R]... [--minutes M] [--first N] [--stock] [--repeat DRAW]

A number draws a launch: a release, an architecture, flags, what happens to requests, and conversations. The real
scheduler and runners answer it on the CPU with every fix on, warm and by graphs, beside cold eager answers. Where one
differs or the server ends, the launch is tried without the fixes, and made smaller, until one command repeats it. With
--stock the fixes are off, and what is found is traced to the fixes that mend it: this shows what can be found. Each
launch is a line of explored.jsonl; a number that is there is not drawn again, so it goes on where it was.

Speculation, LoRA and GPT-OSS are not drawn: no scenario runs them with a real scheduler on the CPU. HiCache is drawn
where a release has the host pools that the harness copies to.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import itertools
import json
import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests import processes, wheels
from tests.scenarios import explored

Draw = dict[str, Any]
Found = dict[str, Any]
Run = Callable[[Draw, dict[str, str]], Found]
# the newest three, and two that people are pinned to
RELEASES = (*wheels.RELEASES[:-4:-1], "0.5.17", "0.5.12.post1")
RECORD = processes.REPOSITORY / "explored.jsonl"
SECONDS = 120
EVERY_FIX, NO_FIX = {"SGLANG_BCG_FIXES": "auto"}, {"SGLANG_BCG_FIXES": "off"}
# few layers and heads, because Triton's interpreter takes the most time; all experts answer, because where they change
# places, rounding shows as much as a wrong state
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "FalconH1ForCausalLM": ("float32", {"num_hidden_layers": 1, **FEW_HEADS}),
    "Qwen3NextForCausalLM": ("float16", {**FEW_HEADS, "num_experts_per_tok": 4}),
    "Qwen3_5ForCausalLM": ("float16", FEW_HEADS),
    "NemotronHForCausalLM": ("float32", {}),
    "GraniteMoeHybridForCausalLM": ("float32", {}),
    "Lfm2ForCausalLM": ("float32", {}),
    "KimiLinearForCausalLM": ("float16", {"num_experts_per_token": 4, "num_experts_per_tok": 4}),
    "BailingMoeV2_5ForCausalLM": ("float32", {}),
    "MiniCPMSALAForCausalLM": ("float16", {}),
}
OTHERS = (
    *("LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV2ForCausalLM", "PhiForCausalLM"),
    *("CohereForCausalLM", "MiniMaxM3SparseForCausalLM"),
)
# of a server, by SGLang's names: the first value of each is what a smaller reproducer has
SERVER: dict[str, Sequence[Any]] = {
    "disable_overlap_schedule": (True, False),
    "page_size": (1, 16, 64),
    "chunked_prefill_size": (1024, 64, 128, 192, 256),
    # a value that is there twice is drawn as often as two
    "enable_mixed_chunk": (False, True, True),
    "schedule_policy": ("fcfs", "lpm"),
}
OF_HYBRIDS: dict[str, Sequence[Any]] = {
    "mamba_radix_cache_strategy": ("extra_buffer", "extra_buffer_lazy", "no_buffer"),
    "max_mamba_cache_size": (64, 20, 20),
}
# SGLang refuses these strategies with anything else
NEEDS: dict[Any, dict[str, Any]] = {
    "extra_buffer_lazy": {"disable_overlap_schedule": False},
    "no_buffer": {"disable_overlap_schedule": True, "page_size": 1},
}
# SGLang refuses extra buffers of these
NO_EXTRA_BUFFER = ("Lfm2ForCausalLM",)
# the first release that has them; older ones refuse them, or keep no prefixes and end at a prompt of 64 tokens
EXTRA_BUFFER_SINCE = {
    "FalconH1ForCausalLM": "0.5.13",
    "GraniteMoeHybridForCausalLM": "0.5.13",
    "NemotronHForCausalLM": "0.5.13",
    "BailingMoeV2_5ForCausalLM": "0.5.13",
    "KimiLinearForCausalLM": "0.5.16",
}
GRAPHS: Sequence[Sequence[int]] = ((), (64, 256), (16, 128, 512))
TURNS = 12
RIGHT = "answers right"


def drawn(number: int, releases: Sequence[str]) -> Draw:
    """Make the launch of a number; the same number and releases make the same."""
    source = random.Random(number)
    release = source.choice(releases)
    # one whose kernel takes a hundred times as long as others' is drawn seldom
    often = [name for name in HYBRIDS if name != "KimiLinearForCausalLM"]
    architecture = source.choice([name for name in (*HYBRIDS, *often, *often, *OTHERS) if has(release, name)])
    options = {**SERVER, **(OF_HYBRIDS if architecture in HYBRIDS else {})}
    server = {name: source.choice(values) for name, values in options.items()}
    since = EXTRA_BUFFER_SINCE.get(architecture, wheels.RELEASES[0])
    if architecture in NO_EXTRA_BUFFER or release not in wheels.since(since):
        server["mamba_radix_cache_strategy"] = "no_buffer"
    server |= NEEDS.get(server.get("mamba_radix_cache_strategy"), {})
    server["dtype"], model = HYBRIDS.get(architecture, ("float32", {}))
    can_happen = [name for name in explored.HAPPENINGS if name != explored.HOSTS or has_host_pools(release)]
    happens = [name for name in can_happen if source.random() < 0.25]
    return {
        "number": number,
        "release": release,
        "architecture": architecture,
        "server": with_old_names(server),
        "model": model,
        "graphs": list(source.choice(GRAPHS)),
        "happens": happens,
        "turns": TURNS,
        "seed": number,
    }


@functools.cache
def has(release: str, architecture: str) -> bool:
    models = (wheels.unpacked(release) / "sglang" / "srt" / "models").glob("*.py")
    return any(re.search(rf"\nEntryClass[^#]*\b{architecture}\b", path.read_text()) for path in models)


def has_host_pools(release: str) -> bool:
    """Tell whether a release has the pools that the harness copies to and from."""
    return (wheels.unpacked(release) / "sglang" / "srt" / "mem_cache" / "pool_host" / "mamba.py").exists()


def with_old_names(server: dict[str, Any]) -> dict[str, Any]:
    """Add the name that the strategy had before 0.5.16; a release takes those that it knows."""
    strategy = server.get("mamba_radix_cache_strategy")
    return {**server, "mamba_scheduler_strategy": strategy} if strategy else server


def run(draw: Draw, environment: dict[str, str]) -> Found:
    """Answer a launch; one that ends says why, and one that never served is refused."""
    try:
        done = processes.on_cpu(
            wheels.unpacked(draw["release"]),
            *("-m", "tests.scenarios.explored", json.dumps(draw)),
            environment={"SGLANG_BCG_KERNELS": "off", **environment},
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"refused": True, "ends": f"it took more than {SECONDS} seconds here"}
    refused = explored.SERVES not in done.stdout.splitlines()
    if found := {} if done.returncode else processes.result(done):
        return {"refused": refused, **found}
    # SGLang's own handler has ended the process, sometimes with a status of 0
    errors = [line for line in done.stderr.splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
    return {"refused": refused, "ends": (errors or [f"exit status {done.returncode}"])[-1][:300]}


def outcome(found: Found) -> str:
    """Name what became of a launch; numbers in an error differ from one to another."""
    if "ends" in found:
        return ("is refused: " if found["refused"] else "ends: ") + re.sub(r"\d+", "N", found["ends"])[:80]
    return "answers wrongly" if found["wrong"] else RIGHT


def examined(draw: Draw, run: Run, stock: bool) -> Found:
    """The line of a launch; where it is bad, with the other arm's outcome, and the smallest launch or the fixes."""
    found = run(draw, NO_FIX if stock else EVERY_FIX)
    line = {"draw": draw, "stock": stock, "outcome": outcome(found), **found}
    if line["outcome"] == RIGHT:
        return line
    other = run(draw, EVERY_FIX if stock else NO_FIX)
    line["other"] = outcome(other)
    if found["refused"] and other["refused"]:
        return line
    if stock:
        return line | ({"fixes": those_that_mend(draw, run, other["applied"])} if line["other"] == RIGHT else {})
    small = smaller(draw, lambda tried: outcome(run(tried, EVERY_FIX)) == line["outcome"])
    return line | {"small": small}


def those_that_mend(draw: Draw, run: Run, applied: Sequence[str]) -> list[str]:
    """Find fixes that are enough, and each of them needed, by halving."""
    needed, left = list[str](), list(applied)

    def suffices(names: Sequence[str]) -> bool:
        return outcome(run(draw, NO_FIX | {f"SGLANG_BCG_FIX_{name.upper()}": "on" for name in names})) == RIGHT

    # the shortest beginning of the list that suffices ends with one that is needed
    while left and not suffices(needed):
        few, many = 0, len(left)
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (few, middle) if suffices([*needed, *left[:middle]]) else (middle, many)
        needed, left = [*needed, left[many - 1]], left[: many - 1]
    return needed


def smaller(draw: Draw, is_same: Callable[[Draw], bool]) -> Draw:
    """Drop whatever it does not need, one thing at a time."""
    for tried in simplifications(draw):
        if tried != draw and is_same(tried):
            return smaller(tried, is_same)
    return draw


def simplifications(draw: Draw) -> Iterator[Draw]:
    if draw["turns"] > 1:
        yield {**draw, "turns": draw["turns"] // 2}
        yield {**draw, "turns": draw["turns"] - 1}
    if draw["graphs"]:
        yield {**draw, "graphs": []}
    for name in draw["happens"]:
        yield {**draw, "happens": [other for other in draw["happens"] if other != name]}
    for name, (first, *_) in {**SERVER, **OF_HYBRIDS}.items():
        if draw["server"].get(name, first) != first:
            yield {**draw, "server": with_old_names({**draw["server"], name: first})}


def summary(lines: Sequence[Found]) -> Iterator[str]:
    """Say what was tried, how often each drawn thing reached a replay, and what was found."""
    counts = collections.Counter(line["outcome"].partition(":")[0] for line in lines)
    yield f"{len(lines)} launches: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    reached: collections.Counter[str] = collections.Counter()
    for line in lines:
        draw = line["draw"]
        words = [f"{name}={value}" for name, value in draw["server"].items() if name in SERVER | OF_HYBRIDS]
        for word in (draw["release"], draw["architecture"], *draw["happens"], *words):
            reached[word] += line.get("replays", 0)
    yield "replays with: " + ", ".join(f"{word} {count}" for word, count in sorted(reached.items()))
    for name, found in sorted(again(lines).items()):
        first = found[0]["draw"]
        yield f"found again {len(found)} times: {name}, first on {first['release']} by number {first['number']}"
    for line in lines:
        if "small" in line:
            draw = line["draw"]
            yield f"number {draw['number']}, {draw['release']}: {line['outcome']}; without the fixes: {line['other']}"
            yield f"  python -m tests.explore --repeat '{json.dumps(line['small'])}'"


def again(lines: Sequence[Found]) -> dict[str, list[Found]]:
    """Gather by fix the launches that need it."""
    names = {name for line in lines for name in line.get("fixes", ())}
    return {name: [line for line in lines if name in line.get("fixes", ())] for name in names}


def read() -> list[Found]:
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="append", choices=wheels.RELEASES, help=f"default: {', '.join(RELEASES)}")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--first", type=int, default=1, metavar="N", help="the first number")
    parser.add_argument("--stock", action="store_true", help="find known defects again, with the fixes off")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", metavar="DRAW", help="answer this launch alone, with the fixes and without")
    given = parser.parse_args()
    if given.repeat:
        draw = json.loads(given.repeat)
        print(*(json.dumps(run(draw, fixes)) for fixes in (EVERY_FIX, NO_FIX)), sep="\n")
        return
    releases, end = tuple(given.release or RELEASES), time.monotonic() + 60 * given.minutes
    print(f"numbers from {given.first}, releases {', '.join(releases)}; every launch is a line of {RECORD.name}")
    before = read()
    known = {(line["draw"]["number"], line["draw"]["release"], line["stock"]) for line in before}
    draws = (drawn(number, releases) for number in itertools.count(given.first))
    todo = (draw for draw in draws if (draw["number"], draw["release"], given.stock) not in known)
    lines = list(before)
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool, RECORD.open("a") as out:
        running = {pool.submit(examined, next(todo), run, given.stock) for _ in range(given.jobs)}
        while running:
            done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for each in done:
                line = each.result()
                lines.append(line)
                print(json.dumps(line), file=out, flush=True)
                if line["outcome"] != RIGHT:
                    print(f"number {line['draw']['number']}: {line['outcome']}", flush=True)
                if time.monotonic() < end:
                    running.add(pool.submit(examined, next(todo), run, given.stock))
    print(*summary([line for line in lines if line["stock"] == given.stock]), sep="\n")


if __name__ == "__main__":
    main()
