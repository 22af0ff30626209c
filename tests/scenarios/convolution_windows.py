# SPDX-License-Identifier: Apache-2.0
"""A prompt of a model with short convolutions, in one piece and behind prefixes of it, on a real runner.

Argument: the architecture. The result has largest distances of logits: by the length of the prefix, of two requests
side by side of which the second has a prefix, and of the token that is decoded behind one.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from cpu_sglang import prefill
from tests.scenarios import telling
from tests.scenarios.admitted_hybrids import World

TOKENS, PREFIXES = 20, (1, 3, 12, 19)


class Requests:
    """Requests of one text and another, each measured on empty pools."""

    def __init__(self, world: World) -> None:
        self.world, self.runner = world, world.loaded.runner
        self.text, self.other = prefill._prompts([TOKENS, 7])

    def extend(self, *requests: Any) -> tuple[torch.Tensor, Any, Any]:
        with torch.no_grad():
            chosen, logits, batch = self.runner.extend(list(requests))
        return logits.float(), chosen, batch

    def begin(self, text: Any) -> Any:
        self.runner.clear()
        return self.world.begin(text)

    def behind(self, prefix: int, beside: Any = None) -> list[Any]:
        """Run a prefix of the text, and return the request for the rest of it, alone or beside that of another text."""
        request = self.begin(self.text[:prefix])
        self.extend(request)
        self.world.go_on(request, self.text, prefix)
        return [request] if beside is None else [self.world.begin(beside), request]

    def decoded_after(self, *requests: Any, token: Any = None) -> tuple[torch.Tensor, Any]:
        _, chosen, batch = self.extend(*requests)
        token = chosen if token is None else token
        with torch.no_grad():
            return self.runner.decode(token, batch)[1].float(), token


def distances(world: World) -> dict[str, Any]:
    asked = Requests(world)
    whole, alone = (asked.extend(asked.begin(text))[0] for text in (asked.text, asked.other))
    both = asked.extend(*asked.behind(12, beside=asked.other))[0]
    decoded, token = asked.decoded_after(asked.begin(asked.text))
    again, _ = asked.decoded_after(*asked.behind(12), token=token)
    return {
        "behind": {prefix: off(asked.extend(*asked.behind(prefix))[0], whole) for prefix in PREFIXES},
        "side by side": {"fresh": off(both[:1], alone), "behind": off(both[1:], whole)},
        "decoded": off(again, decoded),
    }


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max())


def main(architecture: str) -> None:
    world = World(architecture)
    telling.with_and_perhaps_without(functools.partial(distances, world))


if __name__ == "__main__":
    main(*sys.argv[1:])
