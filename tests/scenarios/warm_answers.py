# SPDX-License-Identifier: Apache-2.0
"""Answers from a warm prefix cache beside cold ones, in conversations that a real scheduler holds together.

Arguments: the model, then server arguments as JSON. Each turn of a conversation is the last one with its answer, and
some new tokens. Every prompt is answered from a cold cache afterwards. Among the server arguments, "conversations" are
those to hold where it is not all but the longer ones, and "poisoned" makes a state that nobody writes a wrong one,
whoever had its slot before. An assertion of SGLang's stands in place of the answers.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from cpu_sglang import architectures, mamba, one_batch, scheduler
from sglang_bcg_fixes import plugin
from tests.harm.forked_rows import register
from tests.releases import kinds_of_request
from tests.scenarios import telling, trees

NEW_TOKENS = 4
Act = Callable[[scheduler.Scheduler, float], Any]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Conversations that are held together: lengths of the first prompts, and what each turn adds to an answer."""

    lengths: list[int]
    added: int
    turns: int = 1


# with chunks of 64 tokens: the fourth of the five crosses a boundary while it is answered
CONVERSATIONS = {
    "one": Conversation([200], 11),
    "two, each turn ends in another chunk": Conversation([127, 130], 70, turns=2),
    "three": Conversation([100, 192, 70], 11),
    "five around a boundary": Conversation([63, 64, 65, 61, 130], 11),
}
# held where they are asked for
LONGER = {"four chunks beside another": Conversation([100, 390], 11)}
SERVER = {
    "dtype": "float32",
    "disable_radix_cache": False,
    "page_size": 1,
    "max_total_tokens": 8192,
    "context_length": 1024,
    "chunked_prefill_size": 1024,
    "max_mamba_cache_size": 64,
    "max_running_requests": 8,
    "mamba_track_interval": 64,
}


# of products of other sizes, and of the state itself where it is kept in the model's type; a wrong one is off by far
# more
ROUNDING = {"float32": 1e-4, "float16": 1e-2}


def hold(served: scheduler.Scheduler, held: Conversation, rounding: float, poisoned: bool) -> list[list[Any]]:
    """By turn, and by conversation: how much was found in the cache, and whether the answer is the cold one."""
    source = random.Random(sum(held.lengths))

    def tokens(number: int) -> list[int]:
        return [source.randrange(3, 120) for _ in range(number)]

    served.forget()
    if poisoned:
        poison(served)
    prompts = {str(row): tokens(length) for row, length in enumerate(held.lengths)}
    answers = served.answer(prompts, NEW_TOKENS)
    assert all(answer.found == 0 for answer in answers.values())
    turns = []
    for _ in range(held.turns):
        prompts = {
            name: [*prompt, *(int(logits.argmax()) for logits in answers[name].logits), *tokens(held.added)]
            for name, prompt in prompts.items()
        }
        answers = served.answer(prompts, NEW_TOKENS)
        turns.append((prompts, answers))
    return [compare(served, *turn, rounding) for turn in turns]


def poison(served: scheduler.Scheduler) -> None:
    for state in states_of(served.scheduler):
        state.fill_(1)


def states_of(running: Any) -> list[torch.Tensor]:
    cache = running.req_to_token_pool.mamba_pool.mamba_cache
    return [*cache.conv, cache.temporal]


def compare(
    served: scheduler.Scheduler, prompts: dict[str, list[int]], warm: dict[str, scheduler.Answer], rounding: float
) -> list[Any]:
    served.forget()
    cold = served.answer(prompts, 1)
    return [
        [warm[name].found, bool(torch.allclose(warm[name].logits[0], cold[name].logits[0], atol=rounding, rtol=0))]
        for name in prompts
    ]


def serve(model: str, given: dict[str, Any], act: Act, without: bool = True) -> None:
    """Tell what the act gives with each prefix tree of the release, which must be the same."""
    telling.result(trees.the_same(given_by_each_tree(model, given, act, without)))


def given_by_each_tree(model: str, given: dict[str, Any], act: Act, without: bool = True) -> dict[str, Any]:
    """Give what the act gives, also without the fixes that are applied; it gets what two answers may differ by."""
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    kinds_of_request.forget_pinned_memory()
    overridden = {"max_position_embeddings": 2048, **given.pop("model", {})}
    asked = {**SERVER, **mamba.allow_extra_buffer(), **given}
    environ: Any = importlib.import_module("sglang.srt.environ")
    # bfloat16 whatever the model's type is, and written to with that
    environ.envs.SGLANG_MAMBA_CONV_DTYPE.set(asked["dtype"])

    def program(served: scheduler.Scheduler) -> dict[str, Any]:
        def acted() -> Any:
            return act(served, ROUNDING[asked["dtype"]])

        if without:
            return telling.given_with_and_perhaps_without(acted)
        return {"applied": plugin.load().ledger.applied(), **acted()}

    with tempfile.TemporaryDirectory() as folder:
        if model in architectures.CONFIGURATIONS:
            model = configured(model, pathlib.Path(folder))
        return trees.given_by_each(program, model, json_model_override_args=json.dumps(overridden), **asked)


def configured(architecture: str, folder: pathlib.Path) -> str:
    config = {**architectures.CONFIGURATIONS[architecture].config, "architectures": [architecture]}
    register(config["model_type"])
    folder.joinpath("config.json").write_text(json.dumps(config))
    return str(folder)


def main(model: str, server_args: str) -> None:
    given = json.loads(server_args)
    conversations, poisoned = given.pop("conversations", [*CONVERSATIONS]), given.pop("poisoned", False)

    def act(served: scheduler.Scheduler, rounding: float) -> dict[str, Any]:
        try:
            return {name: hold(served, {**CONVERSATIONS, **LONGER}[name], rounding, poisoned) for name in conversations}
        except AssertionError as error:
            return {"asserts": str(error)}

    serve(model, given, act)


if __name__ == "__main__":
    main(*sys.argv[1:])
