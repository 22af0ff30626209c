# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 captured beside the same call run eagerly: bits, rows of padding, device time, the rule of splits.

    python benchmarks/attention_extend.py --jsonl FILE

A line for each shape, number of new tokens and prefix. `agree` is what kernels/attention_extend/splits.py says of the
captured call, `bits` what the GPU says: where the first is true the second must be.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_bcg_fixes.kernels.attention_extend import fa3, splits, trial
from sglang_bcg_fixes.lab.verify import environment

CONTEXT = 131_072
SHAPES = {
    "qwen3_1_7b": splits.Heads(16, 8, 128),
    "qwen3_8b": splits.Heads(32, 8, 128),
    "qwen3_8b_tp4": splits.Heads(8, 2, 128),
    "llama_3_2_1b": splits.Heads(32, 8, 64),
    "qwen3_5_4b": splits.Heads(16, 4, 256),
    "qwen3_5_35b_a3b": splits.Heads(16, 2, 256),
    "gpt_oss": splits.Heads(64, 8, 64),
    "gpt_oss_window": splits.Heads(64, 8, 64, 127),
    "gemma3_window": splits.Heads(16, 8, 256, 1023),
}
WITH_SINKS = ("gpt_oss", "gpt_oss_window")
BUCKETS = (4, 8, 16, 32, 64, 128, 256, 512)
NEW = (1, 5, 13, 29, 61, 125, 200, 253, 381, 509)
PREFIXES = (0, 3, 130, 300, 512, 1000, 2048, 4096, 10_000, 32_768, 100_000)
TIMED, REPEATED = 20, 5


def requests_of(source: Any) -> trial.Requests:
    """Two or three requests, each with new tokens and keys."""
    number = 2 + int(torch.randint(0, 2, (), generator=source))

    def pick(of: Sequence[int]) -> int:
        return of[int(torch.randint(0, len(of), (), generator=source))]

    new = [pick(NEW[:7]) for _ in range(number)]
    return tuple((each, each + pick(PREFIXES)) for each in new)


def microseconds(call: Callable[[], Any]) -> float:
    """Device time of one call, from graphs of many."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TIMED):
            call()
    best = float("inf")
    for _ in range(REPEATED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / TIMED)
    return round(best, 2)


def compared(
    layer: trial.Layer, tables: fa3.Tables, requests: trial.Requests, parts: int, is_timed: bool
) -> dict[str, Any]:
    heads, device = layer.heads, layer.device
    new, longest = sum(rows for rows, _ in requests), max(rows for rows, _ in requests)
    rows = next(bucket for bucket in BUCKETS if bucket >= new)
    metadata = trial.metadata_of(requests, layer.page_size, len(layer.key_cache), device, layer.random)
    queries = layer.normal(rows, heads.queries, heads.size)
    eager = layer.attend(queries[:new], metadata, longest, 0)
    table = (longest, metadata.page_table.shape[1] * layer.page_size)
    found: dict[str, Any] = {"requests": requests, "rows": rows}
    if is_timed:
        found["eager_us"] = microseconds(lambda: layer.attend(queries[:new], metadata, longest, 0))
    for bound in (1, 0):
        tables.fill(metadata, rows)
        call = functools.partial(layer.attend, queries, tables.metadata, rows, bound)
        inside = trial.captured(call, device)
        found[f"bound {bound}"] = {
            "agree": splits.agree(heads, requests, table, (rows, CONTEXT), bound, parts),
            "bits": torch.equal(inside[:new], eager),
            "zeros": not bool(inside[new:].any()),
        }
        if is_timed:
            found[f"bound {bound}"]["us"] = microseconds(call)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jsonl", type=pathlib.Path, required=True)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--several", type=int, default=40, help="batches of two or three requests for each shape")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    parts, wrong = fa3.multiprocessors(device), 0
    pages = -(-CONTEXT // options.page_size)
    with options.jsonl.open("w") as file:
        print(json.dumps(environment.header(environment.look(sys.executable))), file=file)
        for name in options.shapes.split(","):
            heads = SHAPES[name]
            layer = trial.Layer(heads, CONTEXT, options.page_size, device, torch.bfloat16, name in WITH_SINKS)
            first = trial.metadata_of(((1, 1),), options.page_size, 1, device, layer.random)
            tables = fa3.Tables(first, pages, max(BUCKETS), device)
            alone: list[trial.Requests] = [((new, new + prefix),) for new in NEW for prefix in PREFIXES]
            source = torch.Generator().manual_seed(0)
            for requests in alone + [requests_of(source) for _ in range(options.several)]:
                if sum(rows for rows, _ in requests) > max(BUCKETS):
                    continue
                is_timed = len(requests) == 1 and requests[0][0] in (61, 253) and requests[0][1] < 40_000
                row = compared(layer, tables, requests, parts, is_timed)
                both = [row["bound 1"], row["bound 0"]]
                row["wrong"] = any((each["agree"] and not each["bits"]) or not each["zeros"] for each in both)
                wrong += row["wrong"]
                print(json.dumps({"shape": name, **row}), file=file, flush=True)
            print(f"{name}: {wrong} wrong so far", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
