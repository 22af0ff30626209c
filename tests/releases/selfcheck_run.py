# SPDX-License-Identifier: Apache-2.0
"""A release's own prefill graphs under the self-check, in a process of its own: what it says, does and leaves behind.

python -m tests.releases.selfcheck_run MODEL [--freed-memory kept] [--break WHAT]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cpu_sglang import graphs, one_batch, prefill
from tests.scenarios import debugged

BUCKETS = (2, 4, 8)


def pools_of(model_runner: Any) -> list[Any]:
    from sglang_bcg_fixes.process.selfcheck import bookkeeping

    roots = (model_runner.req_to_token_pool, model_runner.token_to_kv_pool_allocator, model_runner.token_to_kv_pool)
    return list(bookkeeping.reachable(roots))


def content_of(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield everything that a value holds, with a digest of each tensor."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            yield tuple(value.shape), hashlib.sha256(value.contiguous().float().numpy().tobytes()).hexdigest()
    elif isinstance(value, dict):
        for key in value:
            yield repr(key)
            yield from content_of(value[key], depth + 1)
    elif isinstance(value, list | tuple | set) or type(value).__name__ == "deque":
        for item in value:
            yield from content_of(item, depth + 1)
    elif isinstance(value, int | float | str | None):
        yield value
    elif depth < 4 and type(value).__name__.endswith("State"):
        yield from content_of(vars(value), depth + 1)


def trace(loaded: Any, runner: Any) -> dict[str, str]:
    """Everything that the check may have touched, by name."""
    import random

    import torch

    model_runner = loaded.model_runner
    found = {
        f"{type(pool).__name__}.{name}": value for pool in pools_of(model_runner) for name, value in vars(pool).items()
    }
    found |= {
        "forward": "forward" in vars(model_runner),
        "passes": model_runner.forward_pass_id,
        "asked": [name for name in ("can_run", "can_run_graph") if name in vars(runner)],
        "replay": graphs_replay().__qualname__,
        "python's generator": list(random.getstate()[1]),
        "torch's generator": torch.get_rng_state(),
    }
    return {name: repr(list(content_of(value))) for name, value in found.items()}


def graphs_replay() -> Any:
    from sglang_bcg_fixes.engine import graph_break

    return graph_break.load("breakable_cuda_graph").BreakableCUDAGraph.replay


def break_it(what: str | None, runner: Any, model_runner: Any) -> None:
    """Defects that no release has, as the check must not need to know what is wrong; and a check that leaves traces."""
    from sglang_bcg_fixes.kernels.attention_extend import fa3
    from sglang_bcg_fixes.process.selfcheck import bookkeeping, check, pools

    captured = prefill.captured_graphs(runner)
    if what == "earlier bucket":
        # as when a later capture was given the memory of the graph that was captured first
        vars(captured[max(BUCKETS)]).update(vars(captured[min(BUCKETS)]))
    elif what == "stale positions":
        load = runner.load_batch

        def load_without_positions(*args: Any, **kwargs: Any) -> Any:
            loaded = load(*args, **kwargs)
            batch = loaded[0] if isinstance(loaded, tuple) else loaded
            batch.positions.zero_()
            return loaded

        runner.load_batch = load_without_positions
    elif what == "admitted, then eager":
        name = next(name for name in ("execute", "replay") if hasattr(runner, name))
        setattr(runner, name, lambda batch, *_, **__: run_eagerly(runner, model_runner, batch))
    elif what == "refused, then replayed":
        question = check.question(runner)
        ask, extend = getattr(runner, question), model_runner.forward_extend

        def extend_as_it_likes(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(runner, question, ask):
                return extend(*args, **kwargs)

        model_runner.forward_extend = extend_as_it_likes
    elif what == "eager":
        model_runner.model.forward = None
    elif what == "slots stay taken":
        mock.patch.object(bookkeeping.Bookkeeping, "restore", lambda books: None).start()
    elif what == "attention inside":
        # as if no request had tokens
        mock.patch.object(fa3.Tables, "fill", lambda tables, metadata, rows: tables.clear(rows)).start()
    elif what == "slots stay written":
        mock.patch.object(pools.Requests, "empty", lambda requests, model_runner: None).start()


def run_eagerly(runner: Any, model_runner: Any, batch: Any) -> Any:
    from sglang_bcg_fixes.process.selfcheck import check

    with mock.patch.object(runner, check.question(runner), lambda *_: False):
        found = model_runner.forward_extend(batch)
    return found[0] if isinstance(found, tuple) else found


def prefill_again(loaded: Any, prompt: list[int], eager: Any) -> dict[str, Any]:
    """Prefill again, and tell if the answer is the one without graphs and how many were replayed."""
    before = graphs.counters.replays
    _tokens, logits = one_batch.generate(loaded, [prompt], 1)
    # slots differ in what they hold, not in what is computed
    return {"equal": bool((logits == eager).all()), "replays": graphs.counters.replays - before}


def shown_to_prometheus() -> str:
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    collector: Any = multiprocess.MultiProcessCollector
    collector(registry)
    return generate_latest(registry).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--freed-memory", choices=("garbage", "kept"), default="garbage")
    parser.add_argument("--break", dest="broken")
    parser.add_argument("--prefills", type=int, default=1, help="how many to serve afterwards")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--server", type=json.loads, default={}, help="further arguments of the server, as JSON")
    parser.add_argument("--seconds", type=float, default=1000)
    parser.add_argument("--metrics", action="store_true", help="tell what Prometheus is shown, too")
    options = parser.parse_args()

    debugged.show()
    one_batch.import_sglang(with_graphs=True)
    if options.metrics:
        # read by its client, which a server with metrics imports
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()
        options.server["enable_metrics"] = True
    one_batch.load_plugins()
    loaded = one_batch.load(options.model, **options.server)
    one_batch.randomize(loaded.model_runner.model)
    prompts = [[3 + 7 * number + token for token in range(5)] for number in range(options.prefills)]
    eager = [one_batch.generate(loaded, [prompt], 1)[1] for prompt in prompts]
    graphs.freed_memory_is_garbage = options.freed_memory == "garbage"
    runner = prefill.capture_prefill(loaded.model_runner, BUCKETS)

    from sglang_bcg_fixes import plugin
    from sglang_bcg_fixes.process.selfcheck import at_start, check

    check.SECONDS = options.seconds
    break_it(options.broken, runner, loaded.model_runner)
    before = trace(loaded, runner)
    error = None
    try:
        if not options.no_check:
            at_start.after_scheduler(plugin.load(), loaded.model_runner)
    except SystemExit as refused:
        error = str(refused)
    if options.broken == "eager":
        del loaded.model_runner.model.forward
    after = trace(loaded, runner)
    found = plugin.load().report.selfcheck
    result = {
        "selfcheck": found,
        "refused": error,
        "touched": sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)),
        "compared": len(before),
        "prefills": [prefill_again(loaded, *each) for each in zip(prompts, eager, strict=True)],
    }
    result |= {
        "metrics": shown_to_prometheus() if options.metrics else None,
        "canary": plugin.load().report.canary,
        "selfcheck afterwards": plugin.load().report.selfcheck,
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
