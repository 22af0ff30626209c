# SPDX-License-Identifier: Apache-2.0
"""One batch's answer, prefill and one decode step, with the calls of patched places that it took."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from cpu_sglang import one_batch, prefill
from sglang_bcg_fixes.engine import call_counts
from tests.releases.kinds_of_request import Answered

# the same one after each prompt, so that a rounding of the prefill's logits cannot choose another
NEXT_TOKEN = 7
Calls = dict[str, dict[str, int]]


def answer(loaded: one_batch.LoadedModel, lengths: list[int]) -> tuple[dict[str, torch.Tensor], Calls]:
    """Every tensor of the answer, by step and name, and how often each fix was called in each step."""
    prompts = [numpy.array(prompt, dtype=numpy.int32) for prompt in prefill._prompts(lengths)]
    forward = Forward(loaded.model_runner)
    with torch.no_grad(), forward.recorded():
        loaded.runner.clear()
        requests = loaded.benchmark.prepare_synthetic_inputs_for_latency_test(len(prompts), max(lengths), prompts)
        with contextlib.suppress(Answered):
            tokens, _, batch = loaded.runner.extend(requests)
            forward.step = "decode"
            loaded.runner.decode(torch.full_like(tokens, NEXT_TOKEN), batch)
    return forward.answers, forward.calls


class Forward:
    """A ModelRunner's forward that writes down what it answers and what it took."""

    def __init__(self, model_runner: Any) -> None:
        self.model_runner = model_runner
        self.step = "prefill"
        self.answers: dict[str, torch.Tensor] = {}
        self.calls: Calls = {}

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        before = by_fix()
        output = type(self.model_runner).forward(self.model_runner, batch, *args, **kwargs)
        self.calls[self.step] = {fix: count - before[fix] for fix, count in by_fix().items() if count > before[fix]}
        given = getattr(output, "logits_output", None) or (output[0] if isinstance(output, tuple) else output)
        for field in dataclasses.fields(given):
            value = getattr(given, field.name)
            if isinstance(value, torch.Tensor):
                self.answers[f"{self.step} {field.name}"] = value.float().clone()
        # an embedding has nothing to sample
        if not self.model_runner.is_generation:
            raise Answered
        return output

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        self.model_runner.forward = self
        try:
            yield
        finally:
            del self.model_runner.forward


def by_fix() -> dict[str, int]:
    return {fix: call_counts.TALLY.sum(fix) for fix in call_counts.TALLY.places}
