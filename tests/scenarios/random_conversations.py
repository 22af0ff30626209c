# SPDX-License-Identifier: Apache-2.0
"""Random conversations with a real scheduler: the first token of each turn from a warm prefix cache beside a cold one.

Arguments: the model, then server arguments as JSON. Among them, "seed" and "turns" draw the conversations: up to five
are answered together, some of them once others have begun. A turn goes on with a conversation and its last answer,
leaves one at any token, or begins one. Half of the turns end within a token of a chunk's boundary. Cold answers follow
at the end, each prompt alone. Where one differs by more than rounding usually does, the prompt is answered cold in
other ways: together with those of its round, and in pieces. If one of these differs from the first half as much, it is
rounding; with another prefix of 80 tokens it is a hundred times as much.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from cpu_sglang import scheduler
from tests.scenarios import warm_answers

TOGETHER, KEPT, LONGEST = 5, 8, 600
CHUNK, MOST_ADDED, MOST_ANSWERED = 64, 150, 20
GOES_ON, LEAVES = 0.6, 0.8
# a state after an answer has been rounded with each token of it
FEW = 5


class Talks:
    """Conversations that are under way, each as its tokens so far."""

    def __init__(self, seed: int, longest: int = LONGEST, answers_come_back: bool = True) -> None:
        self.random, self.kept = random.Random(seed), list[list[int]]()
        self.longest, self.answers_come_back = longest, answers_come_back

    def turn(self) -> list[int]:
        """Take one that can go on, or begin one, and add to it."""
        chance, begun = self.random.random(), [talk for talk in self.kept if len(talk) < self.longest - MOST_ADDED]
        talk: list[int] = []
        if begun and chance < GOES_ON:
            talk = self.random.choice(begun)
            self.kept.remove(talk)
        elif begun and chance < LEAVES:
            talk = self.random.choice(begun)
            talk = talk[: self.random.randrange(len(talk))]
        return [*talk, *(self.random.randrange(3, 120) for _ in range(self.added(len(talk))))]

    def added(self, length: int) -> int:
        if self.random.random() < 0.5:
            return self.random.randrange(1, MOST_ADDED)
        return CHUNK + self.random.randrange(-1, 2) - length % CHUNK

    def keep(self, prompt: list[int], answer: scheduler.Answer) -> None:
        said = [int(logits.argmax()) for logits in answer.logits] if self.answers_come_back else []
        self.kept = [*self.kept, [*prompt, *said]][-KEPT:]


# prompts that were answered together, and their answers
Round = tuple[dict[str, list[int]], dict[str, scheduler.Answer]]


def hold(served: scheduler.Scheduler, seed: int, turns: int, rounding: float) -> dict[str, Any]:
    return {"seed": seed, **judged(served, converse(served, Talks(seed), turns), rounding)}


def converse(served: scheduler.Scheduler, talks: Talks, turns: int) -> list[Round]:
    rounds, number = list[Round](), 0
    served.forget()
    while number < turns:
        count = min(talks.random.randrange(1, TOGETHER + 1), turns - number)
        prompts = {str(number + row): talks.turn() for row in range(count)}
        number += count
        later = dict(list(prompts.items())[1 + talks.random.randrange(count) :])
        first = {name: prompt for name, prompt in prompts.items() if name not in later}
        new = talks.random.randrange(2, MOST_ANSWERED)
        answers = served.answer(first, new, later, after=talks.random.randrange(1, new))
        rounds.append((prompts, answers))
        for name, prompt in prompts.items():
            talks.keep(prompt, answers[name])
    return rounds


def judged(served: scheduler.Scheduler, rounds: list[Round], rounding: float) -> dict[str, Any]:
    """Compare each answer's first token with the cold one."""
    wrong, rounded = list[dict[str, Any]](), list[dict[str, Any]]()
    for prompts, warm in rounds:
        for name, prompt in prompts.items():
            cold = answered(served, {name: prompt}, name)
            off = apart(warm[name].logits[0], cold)
            # not a number is wrong, too
            if off <= rounding:
                continue
            found = warm[name].found
            others = [
                apart(cold, answered(served, prompts, name)),
                *(apart(cold, in_pieces(served, name, prompt, length)) for length in pieces(served, found)),
            ]
            row = {"turn": int(name), "length": len(prompt), "found": found, "off by": off}
            is_rounding = any(off <= 2 * other for other in others)
            (rounded if is_rounding else wrong).append(row | {"cold ones differ by": others})
    answers = [answer for _, warm in rounds for answer in warm.values()]
    hits = sum(answer.found > 0 for answer in answers)
    return {"turns": len(answers), "hits": hits, "wrong": wrong, "rounded": rounded}


def answered(served: scheduler.Scheduler, prompts: dict[str, list[int]], name: str) -> torch.Tensor:
    """The first token's logits of one of these prompts; not a number where it finds what another has left."""
    served.forget()
    answer = served.answer(prompts, 1)[name]
    logits: torch.Tensor = answer.logits[0]
    return logits if not answer.found else logits * float("nan")


def pieces(served: scheduler.Scheduler, found: int) -> list[int]:
    """Lengths of pieces that round as what was found: up to there at once, and as good as token by token."""
    of_decode = not served.scheduler.req_to_token_pool.enable_mamba_extra_buffer
    return [found or CHUNK, *([FEW] if of_decode else [])]


def in_pieces(served: scheduler.Scheduler, name: str, prompt: list[int], length: int) -> torch.Tensor:
    running = served.scheduler
    size, running.chunked_prefill_size = running.chunked_prefill_size, length
    try:
        return answered(served, {name: prompt}, name)
    finally:
        running.chunked_prefill_size = size


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def main(model: str, server_args: str) -> None:
    given = json.loads(server_args)
    seed, turns = given.pop("seed"), given.pop("turns")
    warm_answers.serve(model, given, lambda served, rounding: hold(served, seed, turns, rounding), without=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
