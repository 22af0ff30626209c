# SPDX-License-Identifier: Apache-2.0
"""Every fix with every other one, in a released SGLang: what each of them mends, observed side by side.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m tests.releases.fix_pairs OUT.json '' ID+ID ID+ID+ID...

Each argument is a combination: the fixes that are on, and nothing else. It takes one process for each model, forked
from one that has done the imports.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cpu_sglang import draft_extend, graphs, one_batch, prefill
from sglang_bcg_fixes.model import Fix
from sglang_bcg_fixes.planning import registry

STEP = draft_extend.Step(prefix=(20, 5), new=(draft_extend.NEW_TOKENS,) * 2, seq_lens=(24, 9))
BUCKET = 8
# linear attention in layers 0 and 2
EVERY_LAYER = (0, 1, 2)


def combinations(fixes: Sequence[str], every_pair: bool) -> list[tuple[str, ...]]:
    """None of them, each pair that meets, and all."""
    pairs = [pair for pair in itertools.combinations(fixes, 2) if every_pair or meet(*pair)]
    return [(), *pairs, tuple(fixes)]


def meet(one: str, other: str) -> bool:
    """Two fixes that patch the same module, or of which one has to come after the other."""
    first, second = map(declared, (one, other))
    return bool(modules(first) & modules(second)) or one in second.after or other in first.after


def declared(fix: str) -> Fix:
    return registry.declared_in(importlib.import_module(f"sglang_bcg_fixes.fixes.{fix}"))


def modules(fix: Fix) -> set[str]:
    return {place.partition(":")[0] for point in fix.patches for place in point.where}


def attempt(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        # where a server would end
        return f"{type(error).__name__}: {error}"


def captured(loaded: one_batch.LoadedModel) -> Any:
    return attempt(lambda: sorted(prefill.captured_graphs(prefill.capture_prefill(loaded.model_runner, [BUCKET]))))


def hybrid_model() -> dict[str, Any]:
    loaded = one_batch.load("qwen3next")
    one_batch.randomize(loaded.model_runner.model)
    batches = {"two requests": prefill._prompts([4, 3]), "one request": prefill._prompts([5])}
    eager = {name: one_batch.generate(loaded, prompts, 1) for name, prompts in batches.items()}

    def compared(name: str) -> dict[str, Any]:
        replays = graphs.counters.replays
        tokens, logits = one_batch.generate(loaded, batches[name], 1)
        return {
            "right": tokens == eager[name][0] and bool((logits == eager[name][1]).all()),
            "replayed": graphs.counters.replays > replays,
        }

    found: dict[str, Any] = {}
    backend = loaded.model_runner.attn_backend
    right_layers, backend.full_attn_layers = backend.full_attn_layers, list(EVERY_LAYER)
    found["list of a draft"] = attempt(lambda: compared("one request"))
    backend.full_attn_layers = right_layers
    found["capture"] = captured(loaded)
    # what a batch of two leaves behind must not be in the way of the one after it
    found |= {name: attempt(functools.partial(compared, name)) for name in batches}
    return found


def other_models_stack() -> dict[str, Any]:
    loaded = one_batch.load("phi")
    return {"phi": captured(loaded)}


def draft() -> dict[str, Any]:
    triton = draft_extend.Triton(draft_extend.load("llama"))
    return {"draft extend": attempt(lambda: triton.replayed(STEP)["extent"][: len(STEP.prefix)])}


def padded_decode() -> dict[str, Any]:
    from tests.releases import decode_buffers

    shared = decode_buffers.buffers()
    decode_buffers.fill(shared, [1, 2, 3, 4], [5, 6, 7, 8])
    decode_buffers.fill(shared, [1, 2, 3], [5, 6, 7])
    rows, slots = shared.req_pool_indices.tolist(), shared.out_cache_loc_swa.tolist()
    started = decode_buffers.breakable_runner_shares(decode_buffers.buffers())
    return {"rows": rows, "slots": slots, "breakable runner": isinstance(started, list)}


OBSERVED = (hybrid_model, other_models_stack, draft, padded_decode)


def observe(number: int, on: tuple[str, ...]) -> dict[str, Any]:
    os.environ["SGLANG_PLUGINS"] = "bcg_fixes"
    os.environ["SGLANG_BCG_FIXES"] = "off"
    os.environ.update({f"SGLANG_BCG_FIX_{fix.upper()}": "on" for fix in on})
    one_batch.load_plugins()
    found = OBSERVED[number]()
    from sglang_bcg_fixes import plugin

    # importing a model or a runner is what some wait for
    return found | {"applied": sorted(plugin.load().report.ids("applied"))}


def main() -> None:
    target, *combined = sys.argv[1:]
    one_batch.import_sglang(with_graphs=True)
    one_batch._import_benchmark()
    chosen = [tuple(fix for fix in fixes.split("+") if fix) for fixes in combined]
    runs = [(number, on) for on in chosen for number in range(len(OBSERVED))]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = iter(pool.starmap(observe, runs, chunksize=1))
    rows = [{"on": on, **{observed.__name__: next(found) for observed in OBSERVED}} for on in chosen]
    pathlib.Path(target).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
