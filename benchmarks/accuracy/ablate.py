# SPDX-License-Identifier: Apache-2.0
"""Show what a trained model's answers hang on: questions in plain torch, with the linear layers' state damaged.

    python benchmarks/accuracy/ablate.py --model benchmarks/accuracy/checkpoint

A server hands the state on twice: from the prefix cache to the question, and from the prompt to the decoding of the
answer. At each place it is replaced, as a server would do that keeps it wrongly. The keys and values of full attention
are left as they are.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

import families
import hybrid
import task
import torch
from torch import Tensor

# what a linear layer hands on: the last inputs of its convolution, and its recurrent state
Linear = tuple[Tensor, Tensor]
# from this prompt's and another prompt's
DAMAGES: dict[str, Callable[[Linear, Linear], Linear]] = {
    "nothing": lambda own, other: own,
    "recurrent state zero": lambda own, other: (own[0], torch.zeros_like(own[1])),
    "recurrent state of another prompt": lambda own, other: (own[0], other[1]),
    "convolution state zero": lambda own, other: (torch.zeros_like(own[0]), own[1]),
    "convolution state of another prompt": lambda own, other: (other[0], own[1]),
}
PLACES = ("before the question", "before the answer")


@torch.no_grad()
def ablate(model: hybrid.Hybrid, problems: list[task.Problem]) -> dict[str, dict[str, float]]:
    """Share of right answers for each place and damage; the other prompt is the one before."""
    device = next(model.parameters()).device
    right = {place: dict.fromkeys(DAMAGES, 0) for place in PLACES}

    def run(tokens: list[int], past: list[Any] | None) -> tuple[list[int], list[Any]]:
        logits, states = model(torch.tensor([tokens], device=device), past)
        return logits[0].argmax(-1).tolist(), states

    def prompt(problem: task.Problem) -> tuple[int, dict[str, list[Any]]]:
        """The answer's first token, which comes from the prompt, and the states at both places."""
        before_question = run(problem.context, None)[1]
        given, before_answer = run(problem.question, before_question)
        return given[-1], dict(zip(PLACES, (before_question, before_answer), strict=True))

    others = prompt(problems[-1])[1]
    for problem in problems:
        first, states = prompt(problem)
        for place in PLACES:
            for name, damage in DAMAGES.items():
                past = [
                    damage(own, other) if model.is_linear(layer) else own
                    for layer, (own, other) in enumerate(zip(states[place], others[place], strict=True))
                ]
                if place == PLACES[0]:
                    given = run(problem.question + problem.answer[:-1], past)[0][len(problem.question) - 1 :]
                else:
                    given = [first, *run(problem.answer[:-1], past)[0]]
                right[place][name] += given == problem.answer
        others = states
    return {
        place: {name: round(count / len(problems), 4) for name, count in counts.items()}
        for place, counts in right.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--questions", type=int, default=200)
    options = parser.parse_args()
    model = families.load(options.model).to("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(ablate(model, task.test_problems(options.questions)), indent=1))


if __name__ == "__main__":
    main()
