# SPDX-License-Identifier: Apache-2.0
"""Train a small hybrid model on the few-shot task and write it as a folder that SGLang loads.

    python benchmarks/accuracy/train.py --out OUT --minutes 5
    python benchmarks/accuracy/train.py --out OUT --minutes 5 --family nemotron_h
    python benchmarks/accuracy/train.py --out OUT --minutes 60 --small --longest 80 --tokens 2700 --steps 3000

The first two take one H200, the last a CPU, on which it shows that the task is learned.

OUT gets config.json, model.safetensors, loss.csv and training.json, again and again while it trains, and a plot of the
losses. The rate of learning stays where it is until the held-out answers are right or most of the time is over; then
it goes down to nothing.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import datetime
import json
import multiprocessing
import pathlib
import platform
import random
import time
from typing import Any

import ablate
import families
import hybrid
import numpy
import task
import torch
import torch.nn.functional as F
from torch import Tensor

# examples that a training sequence has behind the question, to learn more from each statement
MORE = 6
MORE_TOKENS = 9 * MORE
WARM_UP = 100
WEIGHT_DECAY = 0.1
# of all steps, those in which the rate goes down
COOL_DOWN = 0.2
# questions that are asked with damaged states in the end
ABLATED = 200
# a batch: tokens, and 1 where a token is to be predicted
Batch = tuple[numpy.ndarray, numpy.ndarray]


def longest_at(progress: float, longest: int) -> int:
    """Short prompts first: full length when half of the time is over."""
    return round(task.SHORTEST * (longest / task.SHORTEST) ** min(1.0, 0.25 + 1.5 * progress))


def make_batch(seed: int, number: int, longest: int, tokens: int) -> Batch:
    """All of about the same length, and the same whichever process makes it."""
    rng = random.Random(f"{seed}/{number}")
    length = task.any_length(rng, longest)
    rows = tokens // (length + MORE_TOKENS)
    return padded([lay_out(task.draw(rng, length, for_tests=False, more=MORE)) for _ in range(rows)])


def lay_out(problem: task.Problem) -> tuple[list[int], list[int]]:
    """Tokens of a whole problem, and which of them are to be predicted: every answer, the examples' too."""
    tokens = list(problem.statement)
    learned = [0] * len(tokens)
    for number, (question, answer) in enumerate([*problem.examples, (problem.question, problem.answer), *problem.more]):
        tokens += question + answer
        learned += [0] * len(question) + [1] * len(answer)
        if number == 0 and problem.kind == "arithmetic":
            # nobody can know the offset yet
            learned[-2] = 0
    return tokens, learned


def padded(rows: list[tuple[list[int], list[int]]]) -> Batch:
    # few different shapes keep the GPU's allocator from fragmenting
    width = -(-max(len(tokens) for tokens, _ in rows) // 32) * 32
    batch = numpy.full((2, len(rows), width), task.PADDING, numpy.uint8)
    for row, parts in enumerate(rows):
        for part, values in enumerate(parts):
            batch[part, row, : len(values)] = values
    return batch[0], batch[1]


class Batches:
    """Made ahead by other processes: a GPU learns from a batch in less time than it takes to make it."""

    def __init__(self, seed: int, tokens: int, workers: int) -> None:
        self.pool = multiprocessing.get_context("fork").Pool(workers)
        self.seed, self.tokens, self.ahead = seed, tokens, 3 * workers
        self.number = 0
        self.waiting: collections.deque[Any] = collections.deque()

    def next(self, longest: int) -> Batch:
        while len(self.waiting) <= self.ahead:
            self.waiting.append(self.pool.apply_async(make_batch, (self.seed, self.number, longest, self.tokens)))
            self.number += 1
        return self.waiting.popleft().get()

    def close(self) -> None:
        self.pool.terminate()
        self.pool.join()


def held_out(longest: int, count: int) -> list[task.Problem]:
    """From the tests' side of the fold, with another seed than theirs."""
    rng = random.Random("held out")
    return [task.draw(rng, task.any_length(rng, longest), for_tests=True) for _ in range(count)]


@torch.no_grad()
def accuracy(model: hybrid.Hybrid, problems: list[task.Problem], rows: int) -> dict[str, float]:
    """Share of answers in which every token is the likeliest after those before it, as in greedy decoding."""
    right: dict[str, list[bool]] = {"recall": [], "arithmetic": [], "all": []}
    device = next(model.parameters()).device
    by_length = sorted(problems, key=lambda problem: len(problem.prompt))
    for start in range(0, len(by_length), rows):
        some = by_length[start : start + rows]
        tokens, _ = padded([(problem.prompt + problem.answer, []) for problem in some])
        with autocast(device):
            best = model(torch.from_numpy(tokens).to(device).long())[0].argmax(-1).tolist()
        for given, problem in zip(best, some, strict=True):
            first = len(problem.prompt) - 1
            correct = given[first : first + len(problem.answer)] == problem.answer
            right[problem.kind].append(correct)
            right["all"].append(correct)
    return {kind: round(sum(found) / max(1, len(found)), 4) for kind, found in right.items()}


def autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def optimizer(model: hybrid.Hybrid) -> torch.optim.AdamW:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    kept = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in kept]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


def learn(model: hybrid.Hybrid, adam: torch.optim.Optimizer, rate: float, batch: Batch) -> Tensor:
    device = next(model.parameters()).device
    numbers, learned = batch
    # found on the host, so that nothing waits for the GPU
    index = torch.from_numpy(numpy.flatnonzero(learned[:, 1:])).to(device)
    tokens = torch.from_numpy(numbers).to(device).long()
    with autocast(device):
        logits = model(tokens[:, :-1])[0].flatten(0, 1)[index]
    loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten()[index])
    adam.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in adam.param_groups:
        group["lr"] = rate
    adam.step()
    return loss.detach()


def shape_of(options: argparse.Namespace) -> Any:
    family = families.FAMILIES[options.family]
    shape = family.small if options.small else family.full
    if options.pattern is None:
        return shape
    if not hasattr(shape, "pattern"):
        raise SystemExit(f"--pattern: {options.family} has none; leave it out, or add --family nemotron_h")
    return dataclasses.replace(shape, pattern=options.pattern)


def train(options: argparse.Namespace) -> None:
    # its processes are forked before CUDA is there
    batches = Batches(options.seed, options.tokens, options.workers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    model = families.FAMILIES[options.family](shape_of(options)).to(device)
    adam = optimizer(model)
    problems = held_out(options.longest, options.held_out)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    losses: list[Tensor] = []
    # the step in which the rate begins to go down, and the one in which it would be nothing
    cooling, end = None, options.steps
    step = 0
    while step < end:
        progress = max(step / options.steps, (time.monotonic() - began) / (60 * options.minutes))
        reached = bool(rows) and rows[-1]["all"] >= options.target
        if cooling is None and (reached or progress >= 1 - COOL_DOWN):
            cooling, end = step, step + max(1, round(step * COOL_DOWN / (1 - COOL_DOWN)))
        share = min(1.0, (step + 1) / WARM_UP) if cooling is None else (end - step) / (end - cooling)
        longest = longest_at(progress, options.longest) if cooling is None else options.longest
        losses.append(learn(model, adam, options.rate * share, batches.next(longest)))
        step += 1
        if step % options.every and step < end:
            continue
        row = {
            "step": step,
            "seconds": round(time.monotonic() - began, 1),
            "loss": round(torch.stack(losses).mean().item(), 4),
            "rate": round(options.rate * share, 6),
            "longest": longest,
            **accuracy(model, problems, max(1, options.tokens // options.longest)),
        }
        rows.append(row)
        losses.clear()
        print(json.dumps(row), flush=True)
        record(options, model, rows)
    batches.close()


def record(options: argparse.Namespace, model: hybrid.Hybrid, rows: list[dict[str, Any]]) -> None:
    """The checkpoint, the curve and what they came from."""
    out: pathlib.Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    size = hybrid.save(model, out, end=task.END, start=task.START)
    with (out / "loss.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    on_gpu = next(model.parameters()).is_cuda
    about = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "options": {name: value for name, value in vars(options).items() if name not in ("out", "plot")},
        "shape": dataclasses.asdict(model.shape),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": size,
        "last": rows[-1],
    }
    (out / "training.json").write_text(json.dumps(about, indent=1) + "\n")


def test(options: argparse.Namespace) -> None:
    """The checkpoint as a reader has it, on the questions that it is for; into training.json."""
    model = families.load(options.out).to("cuda" if torch.cuda.is_available() else "cpu")
    problems = task.test_problems(options.test)
    file = options.out / "training.json"
    about = json.loads(file.read_text())
    found = accuracy(model, problems, max(1, options.tokens // task.LONGEST))
    about["test"] = {"questions": len(problems), "task": task.digest(problems), **found}
    about["right answers when the state is damaged"] = ablate.ablate(model, problems[:ABLATED])
    file.write_text(json.dumps(about, indent=1) + "\n")
    print(file.read_text())


def draw_curve(out: pathlib.Path) -> None:
    """loss.png from loss.csv, where matplotlib is installed."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print(f"no matplotlib, so no plot; where there is one: train.py --plot --out {out}")
        return
    with (out / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    figure, loss = pyplot.subplots(figsize=(8, 4), layout="constrained")
    loss.semilogy(steps, [float(row["loss"]) for row in rows], color="black", label="loss")
    loss.set(xlabel="step", ylabel="loss, nats per answer token")
    right = loss.twinx()
    for kind in ("recall", "arithmetic"):
        right.plot(steps, [100 * float(row[kind]) for row in rows], label=kind)
    right.set(ylabel="held-out answers that are right, %", ylim=(0, 101))
    figure.legend(loc="outside upper right", ncols=3)
    figure.savefig(out / "loss.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--family", choices=tuple(families.FAMILIES), default="qwen3_next")
    parser.add_argument("--pattern", help="of nemotron_h: a letter for each layer, M mixer, * attention, - MLP")
    parser.add_argument("--minutes", type=float, default=5, help="of training; the start and the test come on top")
    parser.add_argument("--steps", type=int, default=10000, help="of training, at most")
    parser.add_argument("--target", type=float, default=0.998, help="cool down at this share of right held-out answers")
    parser.add_argument("--tokens", type=int, default=65536, help="in a batch")
    parser.add_argument("--longest", type=int, default=task.LONGEST, help="prompt to learn from")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() - 2), help="make batches")
    parser.add_argument("--small", action="store_true", help="a model for a CPU: shows that it learns, no more")
    parser.add_argument("--held-out", type=int, default=512, help="problems to look at while training")
    parser.add_argument("--every", type=int, default=50, help="steps between looks at them")
    parser.add_argument("--test", type=int, default=task.QUESTIONS, help="questions to test the checkpoint with")
    parser.add_argument("--plot", action="store_true", help="only draw OUT/loss.csv")
    options = parser.parse_args()
    if not options.plot:
        train(options)
        test(options)
    draw_curve(options.out)


if __name__ == "__main__":
    main()
