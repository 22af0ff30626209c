# SPDX-License-Identifier: Apache-2.0
"""The draft model's extend step on the real attention backends: how much of the cache it attends to.

For every step it is noted what the backends list in eager mode, in capture and in replay, and, where the Triton backend
computes it, how far attention is from attention that is written out in 32 bits.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from cpu_sglang import draft_extend, one_batch
from cpu_sglang.draft_extend import NEW_TOKENS, Step
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.engine.wrappers import MARK
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.planning.registry import declared_in
from tests.scenarios import named
from tests.wheels import RELEASES

Found = dict[str, Any]

EXTENT, PREFIX_ONLY = "draft_extend_cache_extent", "draft_extend_prefix_only"
AFFECTED = ("0.5.11", "0.5.12", "0.5.12.post1")
CHANGEABLE = (
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.layers.attention.flashattention_backend",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner",
    "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner",
)


def counted(*lengths: int, wider: int = 0) -> Step:
    """Lengths as workers for topk 1 pass them; with wider rows the new tokens begin before the end of the prefix."""
    prefix = tuple(max(length - wider, 0) for length in lengths)
    width = NEW_TOKENS + wider
    whole = tuple(length + NEW_TOKENS for length in lengths)
    return Step(prefix=prefix, new=(width,) * len(lengths), seq_lens=whole, width=width)


def accepted(prefix: tuple[int, ...], new: tuple[int, ...]) -> Step:
    """The worker for topk above 1 passes what was accepted, one request's tokens right behind the other's."""
    whole = tuple(map(sum, zip(prefix, new, strict=True)))
    return Step(prefix=prefix, new=new, seq_lens=whole, mode="DRAFT_EXTEND")


STEPS = {
    "one page and two": counted(15, 16, 33, 1),
    "padded": counted(20, 5),
    "second layer": counted(20, 5, 9, wider=1),
    "third layer": counted(20, 5, 9, wider=2),
    # the second prefix is shorter than they are and passed as 0: prefix and new tokens are more than the length
    "front tokens": counted(20, 1, wider=2),
}
ACCEPTED = {"accepted": accepted((20, 5, 9), (2, 4, 1)), "accepted, no padding": accepted((20, 5, 9, 1), (2, 4, 1, 1))}
PREFIX_ALONE = {"prefix alone": dataclasses.replace(STEPS["padded"], seq_lens=STEPS["padded"].prefix)}
# from 0.5.16 on a worker need not know its lengths on the host
ON_DEVICE = {"prefix alone, on the device": dataclasses.replace(PREFIX_ALONE["prefix alone"], on_host=False)}
EVERY_STEP = STEPS | ACCEPTED | PREFIX_ALONE | ON_DEVICE


def since(release: str, first: str) -> bool:
    return RELEASES.index(release) >= RELEASES.index(first)


def backends(requests: Any) -> dict[str, Any]:
    flash = {f"flash, page {size}": draft_extend.Flash(requests, size) for size in (1, draft_extend.PAGE_SIZE)}
    return {"triton": draft_extend.Triton(requests), **flash}


def noted(backend: Any, steps: dict[str, Step], ways: tuple[str, ...]) -> Found:
    found: Found = {}
    for name, step in steps.items():
        found[name] = {way: getattr(backend, way)(step) for way in ways if not way.endswith("runner")}
        for way in set(ways) & {"runner", "multi-layer runner"}:
            found[name][way] = draft_extend.filled_by_runner(backend, step, multi_layer=way != "runner")
    return found


def whole_lengths_passed(requests: Any) -> Found:
    ways = ("eager", "captured", "replayed", "runner")
    return {name: noted(backend, STEPS, ways) for name, backend in backends(requests).items()}


def attention(requests: Any) -> Found:
    steps = {name: STEPS[name] for name in ("padded", "third layer")} | ACCEPTED
    return {"triton": noted(draft_extend.Triton(requests), steps, ("attended", "attended_in_graph"))}


def compared_with_prefix(requests: Any, steps: dict[str, Step], release: str) -> Found:
    """Go through everything that is handed a batch, and in it a prefix to compare the lengths with."""
    ways = ("eager", "runner", "multi-layer runner", *(("captured", "replayed") if since(release, "0.5.13") else ()))
    in_graph = ("computed_in_graph",) if since(release, "0.5.16") else ()
    return {
        name: noted(backend, steps, ways if name == "triton" else (*ways, *in_graph))
        for name, backend in backends(requests).items()
    }


def prefix_passed(requests: Any, release: str) -> Found:
    return compared_with_prefix(requests, PREFIX_ALONE | (ON_DEVICE if since(release, "0.5.16") else {}), release)


def whole_lengths_compared(requests: Any, release: str) -> Found:
    return compared_with_prefix(requests, {name: STEPS[name] for name in ("padded", "front tokens")}, release)


def observed(release: str, *models: str) -> Found:
    begin()
    return {model: draft_extend.in_child(observe, model, release) for model in models}


def mutants_observed(release: str, mutants: str, *models: str) -> Found:
    begin()
    return {model: draft_extend.in_child(observe_mutants, model, release, json.loads(mutants)) for model in models}


def begin() -> None:
    one_batch.import_sglang(with_graphs=True)
    for module in CHANGEABLE:
        importlib.import_module(module)
    one_batch.load_plugins()


def observe(model: str, release: str) -> Found:
    requests, process = draft_extend.load(model), plugin.load()
    decisions = {decision.id: decision for decision in process.plan.decisions}
    found: Found = {
        "states": [process.report.state(EXTENT), process.report.state(PREFIX_ONLY)],
        "changed": changed(),
        "whole": whole_lengths_passed(requests),
        "prefix, off": prefix_passed(requests, release),
    }
    if release in AFFECTED:
        found["attention"] = attention(requests)
        found["positions"] = {name: draft_extend.positions_after_decode(step) for name, step in ACCEPTED.items()}
        process.ledger.undo(EXTENT)
        found |= {"left": changed(), "whole, stock": whole_lengths_passed(requests)}
        found["attention, stock"] = attention(requests)
        process.ledger.apply(decisions[EXTENT].subject)
    process.ledger.apply(plan.with_needed_points(decisions[PREFIX_ONLY], process.source).subject)
    found["prefix, on"] = prefix_passed(requests, release)
    found["whole, on"] = whole_lengths_compared(requests, release)
    return found


def observe_mutants(model: str, release: str, mutants: Mapping[str, tuple[str, str, str]]) -> Found:
    """Note the steps of each mutant: a fix in whose file one text stands for another."""
    requests, process = draft_extend.load(model), plugin.load()
    decisions = {decision.id: decision for decision in process.plan.decisions}
    found: Found = {}
    for name, (fix, old, new) in mutants.items():
        module = importlib.import_module(f"sglang_bcg_fixes.fixes.{fix}")
        text = pathlib.Path(str(module.__file__)).read_text()
        assert text.count(old) == 1, name
        # where another function of the module finds it too
        exec(compile(text.replace(old, new), str(module.__file__), "exec"), vars(module))
        mutant = dataclasses.replace(decisions[fix], subject=declared_in(module))
        if fix in process.ledger.applied():
            process.ledger.undo(fix)
        process.ledger.apply(plan.with_needed_points(mutant, process.source).subject)
        if fix == EXTENT:
            found[name] = [whole_lengths_passed(requests), attention(requests)]
        else:
            found[name] = [prefix_passed(requests, release), whole_lengths_compared(requests, release)]
        process.ledger.undo(fix)
    return found


def changed() -> list[str]:
    """Everything that carries the mark of one of the two fixes in the classes that they could change."""
    modules = [importlib.import_module(name) for name in CHANGEABLE]
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    own = [kind for kind in kinds if kind.__module__ in CHANGEABLE]
    marks = {
        f"{kind.__name__}.{name}": getattr(value, MARK, None) for kind in own for name, value in vars(kind).items()
    }
    return sorted(where for where, mark in marks.items() if mark in (EXTENT, PREFIX_ONLY))


if __name__ == "__main__":
    named.run(globals())
