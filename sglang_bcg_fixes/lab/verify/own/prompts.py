# SPDX-License-Identifier: Apache-2.0
"""The prompts: a user's own, or token ids whose numbers are around the usual sizes of graphs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
from typing import Any

IDS, TEXT, MESSAGES = "input_ids", "text", "messages"
EDGES = tuple(2**power for power in range(2, 14))
SEED = 20
# of each id; a model may have special ones at both ends
LOWEST = 100
# said in a second turn
MORE = "Go on."


class PromptError(Exception):
    """A file of prompts cannot be used, and what to do."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    name: str
    # one of IDS, TEXT, MESSAGES
    kind: str
    content: Any


def read(file: pathlib.Path) -> list[Prompt]:
    """One prompt a line, as JSON."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"--prompts: {file} cannot be read ({error}); name a file of JSON lines") from error
    found = [prompt_of(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise PromptError(f'--prompts: {file} holds no prompt; write one such as {{"text": "Hello"}} on each line')
    return found


def prompt_of(line: str, where: str) -> Prompt:
    wanted = f'write {{"{TEXT}": "..."}}, {{"{IDS}": [1, 2]}} or {{"{MESSAGES}": [...]}}'
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptError(f"--prompts: {where} is no JSON ({error}); {wanted}") from error
    kinds = [kind for kind in (IDS, TEXT, MESSAGES) if isinstance(row, dict) and kind in row]
    if len(kinds) != 1:
        raise PromptError(f"--prompts: {where} holds {len(kinds)} prompts; {wanted}")
    content = row[kinds[0]]
    is_right = {
        TEXT: isinstance(content, str) and content != "",
        IDS: is_list_of(content, int),
        MESSAGES: is_list_of(content, dict),
    }
    if not is_right[kinds[0]]:
        raise PromptError(f"--prompts: {where}: {kinds[0]} is not usable; {wanted}")
    return Prompt(where.rpartition(", ")[2], kinds[0], content)


def is_list_of(content: object, kind: type) -> bool:
    return isinstance(content, list) and content != [] and all(type(each) is kind for each in content)


def made(vocabulary: int, context: int) -> list[Prompt]:
    """Prompts of one id less than, exactly, and one id more than each edge that leaves room in the context."""
    chosen = random.Random(SEED)
    lengths = [edge + more for edge in EDGES if edge < context for more in (-1, 0, 1)]
    return [Prompt(f"{length} ids", IDS, ids(chosen, vocabulary, length)) for length in lengths]


def ids(chosen: random.Random, vocabulary: int, length: int) -> list[int]:
    # the upper half may hold ids of images and such, which no text has
    highest = max(vocabulary // 2, 2)
    return [chosen.randrange(min(LOWEST, highest // 2), highest) for _ in range(length)]


def second_turn(first: Prompt, answer: dict[str, Any], vocabulary: int) -> Prompt:
    """The prompt, its answer, and more."""
    if first.kind == IDS:
        more = ids(random.Random(SEED), vocabulary, 5)
        content: Any = [*first.content, *answer["tokens"], *more]
    elif first.kind == TEXT:
        content = f"{first.content}{answer['text']}\n{MORE}"
    else:
        said = {"role": "assistant", "content": answer["text"]}
        content = [*first.content, said, {"role": "user", "content": MORE}]
    return Prompt(first.name, first.kind, content)
