# SPDX-License-Identifier: Apache-2.0
"""Synthetic batches, run through SGLang's one-batch benchmark, which every release has."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import importlib
import importlib.util
import random
import types
from typing import Any

from sglang_bcg_fixes.process.selfcheck.pools import Requests

BENCHMARKS = ("sglang.benchmark.one_batch", "sglang.bench_one_batch")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts by length; run eagerly, one more request stands for the padding of the graph."""

    name: str
    lengths: tuple[int, ...]
    bucket: int
    prefix: int = 0

    @property
    def padding(self) -> int:
        return self.bucket - sum(self.lengths)

    def __str__(self) -> str:
        lengths = " + ".join(map(str, self.lengths))
        behind = f" behind a prefix of {self.prefix}" if self.prefix else ""
        return f"{self.name} ({lengths} tokens{behind}, bucket {self.bucket})"


def chosen(buckets: list[int], most: int) -> list[Batch]:
    """Every way in which a replay can go wrong that a synthetic batch can show, cheap ones first.

    Buckets are captured from the largest to the smallest, so the largest is replayed after all others were captured,
    and the smallest again after it was replayed.
    """
    usable = sorted(bucket for bucket in buckets if bucket <= most)
    if not usable:
        return []
    small, middle, large = usable[0], usable[len(usable) // 2], usable[-1]
    below = max((bucket for bucket in usable if bucket < middle), default=0)
    batches = [Batch("smallest bucket", (small,), small)]
    if middle > small:
        batches.append(Batch("middle bucket", (middle,), middle))
    if middle >= 4:
        batches.append(Batch("several requests", (middle - middle // 3 - 1, middle // 3, 1), middle))
    if middle - below > 1:
        batches.append(Batch("padded", ((below + middle + 1) // 2,), middle))
    if 2 * middle <= most:
        batches.append(Batch("behind a prefix", (middle,), middle, prefix=middle // 2 + 1))
    if large > middle:
        batches.append(Batch("largest bucket", (large,), large))
    return [*batches, Batch("smallest bucket again", (small,), small)]


class OneBatch:
    """One batch at a time through the model runner, without scheduler and prefix cache."""

    def __init__(self, model_runner: Any) -> None:
        found = [name for name in BENCHMARKS if importlib.util.find_spec(name)]
        if not found:
            raise LookupError(f"this SGLang has none of {' and '.join(BENCHMARKS)}, which run one batch")
        self.benchmark: types.ModuleType = importlib.import_module(found[0])
        self.model_runner = model_runner
        self.runner = self.benchmark._TorchBenchRunner(model_runner)

    def prompts(self, batch: Batch, seed: int, padded: bool) -> list[array.array[int]]:
        """The same for every rank; where they are padded, by a last prompt that fills the bucket."""
        lengths = [batch.prefix + batch.lengths[0], *batch.lengths[1:]]
        if padded and batch.padding:
            lengths.append(batch.padding)
        words = random.Random(seed)
        vocabulary = self.model_runner.model_config.vocab_size
        return [array.array("q", (words.randrange(1, vocabulary) for _ in range(length))) for length in lengths]

    def run(
        self, batch: Batch, seed: int, padded: bool, last: contextlib.AbstractContextManager[None]
    ) -> tuple[Any, Requests]:
        """The logits after each prompt, and the rows of its requests; a prefix runs on its own first."""
        import numpy

        prompts = self.prompts(batch, seed, padded)
        first = [prompts[0][: batch.prefix]] if batch.prefix else prompts
        requests = self.benchmark.prepare_synthetic_inputs_for_latency_test(
            len(first), max(map(len, first)), [numpy.array(prompt, dtype=numpy.int32) for prompt in first]
        )
        if batch.prefix:
            requests = self.continued(requests, prompts, batch.prefix)
        with last:
            _tokens, logits, done = self.runner.extend(requests)
        return logits.float().clone(), Requests(done.req_pool_indices, tuple(map(len, prompts)))

    def continued(self, requests: list[Any], prompts: list[array.array[int]], prefix: int) -> list[Any]:
        """The same requests with their first tokens done."""
        _tokens, _logits, done = self.runner.extend(requests)
        cut = types.SimpleNamespace(cut_len=prefix)
        requests = self.benchmark.prepare_extend_inputs_for_correctness_test(cut, prompts, requests, self.model_runner)
        table = self.model_runner.req_to_token_pool.req_to_token
        for request, row in zip(requests, done.req_pool_indices, strict=True):
            # releases that name the slots of a prefix count rows from 0, whoever has those
            if len(getattr(request, "prefix_indices", ())):
                request.prefix_indices = table[row, :prefix].to(request.prefix_indices.dtype)
        return requests
