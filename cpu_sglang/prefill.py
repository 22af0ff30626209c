# SPDX-License-Identifier: Apache-2.0
"""Compare a release's breakable prefill graphs with its own eager prefill: same process, weights and prompts.

The runner, the capture, the breaks and the replay are SGLang's; only the CUDA graph under them is a stand-in (see
graphs.py). Batches are ragged, one needs padding to its bucket, and the bucket captured first is replayed
again after the others. The exit status is 0 even if answers differ or the release fails: read the report.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m cpu_sglang.prefill \
        --model qwen3next --graph bcg --json OUT
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import traceback
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import graphs, one_batch, stand_ins

BUCKETS = (8, 16)
# prompt lengths of each batch. SGLang captures the largest bucket first; the last batch replays it again, with fewer
# tokens, so that leftovers in the padding show
BATCHES = {
    1: [[11], [8], [9]],
    2: [[6, 5], [5, 3], [5, 4]],
}


def _prompts(lengths: list[int], vocabulary: int = 100) -> list[list[int]]:
    return [[3 + (17 * row + 5 * i + length) % vocabulary for i in range(length)] for row, length in enumerate(lengths)]


def _graph_config(model_runner: Any) -> Any:
    config = getattr(model_runner.server_args, "cuda_graph_config", None)
    if config is not None:
        return config
    from sglang.srt.runtime_context import get_exec

    return get_exec().graph.cuda_graph_config


def _settings(model_runner: Any, buckets: Sequence[int]) -> tuple[Any, dict[str, Any]]:
    """The object that has the release's settings of prefill graphs, and their values where its flags turn them on."""
    if hasattr(model_runner, "init_prefill_cuda_graph"):
        return _graph_config(model_runner).prefill, {"backend": "breakable", "bs": list(buckets)}
    return model_runner.server_args, {
        "disable_piecewise_cuda_graph": False,
        "enable_breakable_cuda_graph": True,
        "piecewise_cuda_graph_tokens": list(buckets),
    }


def _set(settings: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Set the values; return those that were there."""
    before = {name: getattr(settings, name) for name in values}
    for name, value in values.items():
        setattr(settings, name, value)
    return before


@contextlib.contextmanager
def built_for_graphs(buckets: Sequence[int] = BUCKETS) -> Iterator[None]:
    """Models and attention backends that are built meanwhile find prefill graphs turned on, as in a real server.

    Some decide then which kernels they take, or whether their layers are captured. Before and after, the graphs are
    off: nothing is captured until capture_prefill(), and what runs is eager.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    # early releases have no method for all of the backends
    all_backends = "init_attention_backends"
    backends = all_backends if hasattr(ModelRunner, all_backends) else "init_attention_backend"

    def with_graphs(build: Callable[..., None]) -> Callable[..., None]:
        def build_with_graphs(model_runner: Any, *args: Any, **kwargs: Any) -> None:
            settings, values = _settings(model_runner, buckets)
            before = _set(settings, values)
            try:
                build(model_runner, *args, **kwargs)
            finally:
                _set(settings, before)

        return build_with_graphs

    with contextlib.ExitStack() as stack:
        for name in ("load_model", backends):
            build = getattr(ModelRunner, name)
            stack.enter_context(unittest.mock.patch.object(ModelRunner, name, with_graphs(build)))
        yield


def capture_prefill(model_runner: Any, buckets: Sequence[int] = BUCKETS) -> Any:
    """Turn on breakable prefill graphs, as the release's flags would, and capture; return the runner.

    A server knows of the graphs when it builds its model and its attention backends: see built_for_graphs().
    """
    _set(*_settings(model_runner, buckets))
    if hasattr(model_runner, "init_prefill_cuda_graph"):
        model_runner.init_prefill_cuda_graph()
        runner = model_runner.prefill_cuda_graph_runner
    else:
        model_runner.init_piecewise_cuda_graphs()
        runner = model_runner.piecewise_cuda_graph_runner
    if not captured_graphs(runner):
        raise RuntimeError(f"{type(runner).__name__} captured nothing: SGLang's log says why")
    return runner


def capture_prefill_whole(model_runner: Any, buckets: Sequence[int], requests: int) -> Any:
    """Capture prefill graphs without breaks, for as many requests; return the runner.

    Attention must have no part in them: the CPU's cannot be captured.
    """
    phase = _graph_config(model_runner).prefill
    phase.backend, phase.bs, phase.full_prefill_max_req = "full", list(buckets), requests
    model_runner.attn_backend.init_forward_metadata_out_graph = lambda batch, in_capture=False: None
    model_runner.init_prefill_cuda_graph()
    return model_runner.prefill_cuda_graph_runner


def captured_graphs(runner: Any) -> dict[int, Any]:
    """Bucket -> the release's BreakableCUDAGraph."""
    if hasattr(runner, "backend"):
        return {key.size: graph for key, graph in runner.backend._graphs.items()}
    return dict(getattr(runner, "graphs", {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=sorted(folder.name for folder in one_batch.MODELS.iterdir()))
    parser.add_argument("--requests", type=int, choices=sorted(BATCHES), default=2, help="requests in a batch")
    parser.add_argument("--graph", choices=("none", "bcg"), default="bcg", help="none repeats the eager run instead")
    parser.add_argument(
        "--freed-memory",
        choices=("garbage", "kept"),
        default="garbage",
        help="what memory holds once nobody holds it: the worst case, or what was last written to it",
    )
    parser.add_argument("--steps", type=int, default=2, help="tokens to generate for each request")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    arguments = parser.parse_args()

    sglang = one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    loaded = one_batch.load(arguments.model)
    one_batch.randomize(loaded.model_runner.model)
    batches = [_prompts(lengths) for lengths in BATCHES[arguments.requests]]
    eager = [one_batch.generate(loaded, batch, arguments.steps) for batch in batches]

    report = {
        "release": sglang.__version__,
        "model": arguments.model,
        "graph": arguments.graph,
        "buckets": {},
        "batches": [],
    }
    graphs.freed_memory_is_garbage = arguments.freed_memory == "garbage"
    try:
        if arguments.graph == "bcg":
            runner = capture_prefill(loaded.model_runner)
            report["runner"] = type(runner).__name__
            for size, graph in captured_graphs(runner).items():
                report["buckets"][size] = {"segments": len(graph._segments), "breaks": len(graph._break_fns)}
        for batch, (eager_tokens, eager_logits) in zip(batches, eager, strict=True):
            entry = {"lengths": [len(prompt) for prompt in batch], "tokens_eager": eager_tokens}
            replays_before = graphs.counters.replays
            try:
                entry["tokens"], logits = one_batch.generate(loaded, batch, arguments.steps)
                entry["max_abs_logit_difference"] = (logits - eager_logits).abs().max().item()
            finally:
                entry["segments_replayed"] = graphs.counters.replays - replays_before
                report["batches"].append(entry)
    except Exception as error:
        # a server would end here, at start or while serving; earlier results are still worth a report
        traceback.print_exc()
        report["error"] = repr(error)
    report["counters"] = dataclasses.asdict(graphs.counters)
    report["stand_ins"] = {module: sorted(names) for module, names in stand_ins.touched.items()}
    arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
