# SPDX-License-Identifier: Apache-2.0
"""A few-shot task whose answers are in the state that a prompt leaves behind. Token ids only, nothing to download.

A prompt is a list of facts (`name = value ;`) scattered in noise, five solved examples, and a question:

    recall       name =            the value, one to four letters, then ;
    arithmetic   name + name =     both numbers, their sum, and the sum moved by the prompt's hidden offset, then ;

All arithmetic is modulo 10. The offset is told nowhere: it has to be taken from the five examples. The names that a
question asks for are in no example, so their values have to be kept from the facts on, across the noise. An answer is
right when every token is.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

VOCABULARY = 128
PADDING, START, END, IS, PLUS = range(5)
DIGITS = range(8, 18)
LETTERS = range(18, 44)
NAMES = range(44, 92)
NOISE = range(92, VOCABULARY)

MODULUS = len(DIGITS)
KINDS = ("recall", "arithmetic")

SHOTS = 5
QUESTIONS = 1319
SHORTEST, LONGEST = 60, 900
LONGEST_FACT, LONGEST_EXAMPLE, LONGEST_ANSWER = 7, 9, 5
MOST_FACTS = 24
TEST_SEED = 25110
# one statement in so many is for tests only, by its digest
FOLDS = 8

Example = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Problem:
    """`statement` and `examples` come before the question; `answer` and those of the examples end with END."""

    kind: str
    statement: list[int]
    examples: list[Example]
    question: list[int]
    answer: list[int]
    # solved as well, for training only
    more: list[Example]

    @property
    def context(self) -> list[int]:
        return self.statement + [token for example in self.examples for part in example for token in part]

    @property
    def prompt(self) -> list[int]:
        return self.context + self.question


def is_for_tests(statement: list[int]) -> bool:
    return zlib.crc32(bytes(statement)) % FOLDS == 0


def draw(rng: random.Random, length: int, for_tests: bool, more: int = 0) -> Problem:
    """A problem whose prompt has about `length` tokens; a short one has what the fewest facts need."""
    while True:
        problem = _draw(rng, length, more)
        if is_for_tests(problem.statement) == for_tests:
            return problem


def any_length(rng: random.Random, longest: int = LONGEST) -> int:
    """Spread evenly over the logarithm, so that every size of prefill graph is used and padded."""
    factor: float = (longest / SHORTEST) ** rng.random()
    return round(SHORTEST * factor)


def test_problems(count: int = QUESTIONS) -> list[Problem]:
    rng = random.Random(TEST_SEED)
    return [draw(rng, any_length(rng), for_tests=True) for _ in range(count)]


def digest(problems: list[Problem]) -> str:
    """Tells whether two machines ask the same."""
    value = 0
    for problem in problems:
        value = zlib.crc32(bytes(problem.prompt + problem.answer), value)
    return f"{value:08x}"


def _draw(rng: random.Random, length: int, more: int) -> Problem:
    kind = rng.choice(KINDS)
    asked_at_once = 1 if kind == "recall" else 2
    offset = rng.randrange(MODULUS)
    names = rng.sample(NAMES, MOST_FACTS)
    # the fewest that leave enough for the examples, then as many of either kind as there is room for
    known = names[: SHOTS + 1]
    values = {name: _value(rng, kind) for name in known}
    room = length - 1 - LONGEST_FACT - SHOTS * LONGEST_EXAMPLE
    for name in names[SHOTS + 1 : rng.randint(SHOTS + 1, MOST_FACTS)]:
        if sum(3 + len(value) for value in values.values()) > room:
            break
        kind_of_fact = rng.choice(KINDS)
        values[name] = _value(rng, kind_of_fact)
        if kind_of_fact == kind:
            known.append(name)
    asked, others = known[:asked_at_once], known[asked_at_once:]
    if kind == "recall":
        shown = [[name] for name in rng.sample(others, SHOTS)]
    else:
        shown = [rng.sample(others, 2) for _ in range(SHOTS)]
    examples = [_solve(some, values, offset) for some in shown]
    question, answer = _solve(asked, values, offset)
    left = length - len(question) - sum(len(part) for example in examples for part in example)
    statement = _scatter(rng, [[name, IS, *value, END] for name, value in values.items()], left)
    learn = [_solve(rng.sample(known, asked_at_once), values, offset) for _ in range(more)]
    return Problem(kind, statement, examples, question, answer, learn)


def _value(rng: random.Random, kind: str) -> list[int]:
    return rng.choices(LETTERS, k=rng.randint(1, 4)) if kind == "recall" else [rng.choice(DIGITS)]


def _solve(names: list[int], values: dict[int, list[int]], offset: int) -> Example:
    if len(names) == 1:
        return [names[0], IS], [*values[names[0]], END]
    first, second = names
    a, b = (values[name][0] - DIGITS[0] for name in names)
    return [first, PLUS, second, IS], [*(DIGITS[n % MODULUS] for n in (a, b, a + b, a + b + offset)), END]


def _scatter(rng: random.Random, facts: list[list[int]], length: int) -> list[int]:
    """START and the facts in any order, made `length` long by noise: up to half of it between them, the rest behind."""
    rng.shuffle(facts)
    noise = max(0, length - 1 - sum(map(len, facts)))
    between = rng.randint(0, noise // 2)
    cuts = sorted(rng.randint(0, between) for _ in facts)
    statement, used = [START], 0
    for fact, cut in zip(facts, cuts, strict=True):
        statement += rng.choices(NOISE, k=cut - used) + fact
        used = cut
    return statement + rng.choices(NOISE, k=noise - used)
