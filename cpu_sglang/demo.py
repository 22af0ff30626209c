# SPDX-License-Identifier: Apache-2.0
"""Tiny models on a released SGLang, as it is and with the plugin, beside one eager run: what `make demo` shows.

SGLang is imported once; each arm of each model is a fork with its own environment. The first arm also runs eagerly,
before it captures: that is the reference of all. The same captured graphs then answer twice: freed memory keeps what
was written to it last, and freed memory is in use elsewhere (see graphs.py).

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m cpu_sglang.demo --json OUT --model falcon_h1 phi \\
        --arm stock SGLANG_PLUGINS=__none__ --arm plugin SGLANG_PLUGINS=bcg_fixes
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import sys
import traceback
from typing import Any

from . import graphs, one_batch, prefill

REQUESTS = 2
# freed memory holds garbage, or does not
MEMORIES = {"kept": False, "reused": True}


def run(model: str, environment: dict[str, str], steps: int, eagerly_too: bool) -> dict[str, Any]:
    """Answers of a model with prefill graphs, for each kind of memory; and before them without graphs."""
    os.environ.update(environment)
    one_batch.load_plugins()
    report: dict[str, Any] = {"with_plugin": "sglang_bcg_fixes.plugin" in sys.modules}
    loaded = one_batch.load(model)
    one_batch.randomize(loaded.model_runner.model)
    batches = [prefill._prompts(lengths) for lengths in prefill.BATCHES[REQUESTS]]
    if eagerly_too:
        report["eager"] = _answers(loaded, batches, steps)
    for memory, freed_memory_is_garbage in MEMORIES.items():
        graphs.freed_memory_is_garbage = freed_memory_is_garbage
        try:
            if memory == next(iter(MEMORIES)):
                prefill.capture_prefill(loaded.model_runner)
            before = graphs.counters.replays
            report[memory] = _answers(loaded, batches, steps)
            report[memory]["replays"] = graphs.counters.replays - before
        except Exception as error:
            # a server would end here, at start or while serving
            traceback.print_exc()
            report[memory] = {"error": _cause(error)}
            if not graphs.counters.replays:
                # nothing was captured, whatever memory holds
                return report | {name: report[memory] for name in MEMORIES}
    return report


def _answers(loaded: one_batch.LoadedModel, batches: list[list[list[int]]], steps: int) -> dict[str, Any]:
    tokens, logits = [], []
    for batch in batches:
        answered, values = one_batch.generate(loaded, batch, steps)
        tokens += answered
        logits += values.tolist()
    return {"tokens": tokens, "logits": logits}


def _cause(error: BaseException) -> str:
    """The exception that began it, as SGLang or CUDA words it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"


def _largest_difference(logits: list[Any], reference: list[Any]) -> float:
    import torch

    return (torch.tensor(logits) - torch.tensor(reference)).abs().max().item()


def compare(arms: dict[str, dict[str, str]], models: list[str], steps: int, processes: int) -> dict[str, Any]:
    """Report of each model: eager tokens, and of each arm its tokens and how far its logits are off."""
    # forked processes inherit the imports, which take the longest
    one_batch._import_benchmark()
    first = next(iter(arms))
    runs = [(model, environment, steps, arm == first) for model in models for arm, environment in arms.items()]
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        found = iter(pool.starmap(run, runs, chunksize=1))
    report = {}
    for model in models:
        of_arms = {name: next(found) for name in arms}
        eager = of_arms[first].pop("eager")
        for ran in of_arms.values():
            for memory in MEMORIES:
                logits = ran[memory].pop("logits", None)
                if logits is not None:
                    ran[memory]["max_abs_logit_difference"] = _largest_difference(logits, eager["logits"])
        report[model] = {"eager": eager["tokens"], "arms": of_arms}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument(
        "--arm", action="append", nargs="+", required=True, metavar=("NAME", "VARIABLE=VALUE"), help="repeat"
    )
    parser.add_argument("--steps", type=int, default=4, help="tokens to generate for each request")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="side by side")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    arms = {name: dict(pair.split("=", 1) for pair in pairs) for name, *pairs in arguments.arm}
    release = one_batch.import_sglang(with_graphs=True).__version__
    models = compare(arms, arguments.model, arguments.steps, arguments.processes)
    arguments.json.write_text(json.dumps({"release": release, "models": models}))


if __name__ == "__main__":
    main()
