# SPDX-License-Identifier: Apache-2.0
"""Whose memory does a graph break read and write when it is replayed? The installed SGLang's own breaks, on a GPU.

    python benchmarks/break_lifetimes.py --json break_lifetimes.json

Each way that a tensor can come to a break is captured for several sizes, the largest first, as SGLang does. Then memory
is handed out anew and the graphs are replayed with other inputs: every answer must be the eager one, and nobody else's
memory may change. Arms: `stock`; `all held`, which keeps every input and output of every break, as upstream's open
change (#37448) does; `fixed`, this package's fixes. Then what each arm costs: the memory that the breaks of a model of
36 layers keep, with the sizes that SGLang captures by default.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

ARMS = ("stock", "all held", "fixed")
FIXES = ("break_input_lifetime", "break_output_lifetime")
SIZES = (1024, 512, 256, 64)
WIDTH = 512
CHURNS = 3
# Qwen3-8B's attention: 32 query heads, 8 of keys and of values, 128 wide; and what SGLang captures by default
LAYERS, HEADS = 36, {"q": 32, "k": 8, "v": 8, "output": 32}
DEFAULT_SIZES = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 4097, 256),
    *range(4608, 8193, 512),
)


def into(output: Any, tensor: Any) -> None:
    output.copy_(tensor * 3)


def new(tensor: Any) -> Any:
    return tensor * 3


def in_a_dictionary(tensor: Any) -> dict[str, Any]:
    return {"tensor": tensor * 3}


def add_into(output: Any, first: Any, second: Any) -> None:
    output.copy_(first + second)


class Ways:
    """How a tensor comes to a break. `breaks` makes one of a function, or leaves it as it is for the eager answer."""

    def __init__(self, breaks: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.into, self.new = breaks(into), breaks(new)
        self.add_into, self.in_a_dictionary = breaks(add_into), breaks(in_a_dictionary)

    def written_by_the_graph_before_the_break(self, x: Any, kept: Any) -> Any:
        y = x * 2
        output = y.new_empty(y.shape)
        self.into(output, y)
        return output + 1

    def written_by_the_graph_and_read_by_two_breaks(self, x: Any, kept: Any) -> Any:
        y = x * 2
        output, last = y.new_empty(y.shape), y.new_empty(y.shape)
        self.into(output, y)
        z = output + 1
        self.add_into(last, y, z)
        return last + 1

    def returned_by_a_break(self, x: Any, kept: Any) -> Any:
        return self.new(x * 2) + 1

    def returned_by_a_break_and_read_by_the_next(self, x: Any, kept: Any) -> Any:
        y = self.new(x * 2)
        z = y + 1
        output = z.new_empty(z.shape)
        self.add_into(output, y, z)
        return output + 1

    def returned_by_a_break_in_a_dictionary(self, x: Any, kept: Any) -> Any:
        return self.in_a_dictionary(x * 2)["tensor"] + 1

    def made_before_the_capture(self, x: Any, kept: Any) -> Any:
        # nobody but the break keeps it
        y = x * 2
        output = y.new_empty(y.shape)
        self.add_into(output, y, kept)
        return output + 1


WAYS = [name for name in vars(Ways) if not name.startswith("_")]


def breakable() -> Any:
    from sglang_bcg_fixes.engine import graph_break

    return graph_break.load("breakable_cuda_graph")


def capture(module: Any, pool: Any, stream: Any, run: Callable[[], None]) -> Any:
    graph = module.BreakableCUDAGraph()
    with module.BreakableCUDAGraphCapture(cuda_graph=graph, pool=pool, stream=stream):
        run()
    return graph


def kept_before(size: int, device: str) -> Any:
    import torch

    return torch.full((size, WIDTH), 5.0, device=device)


def observe(way: str, device: str) -> str:
    """`right`, or what went wrong first."""
    import torch

    from sglang_bcg_fixes.engine import graph_break

    module = breakable()
    eager = getattr(Ways(lambda function: function), way)
    broken = getattr(Ways(lambda function: graph_break.decorate(function, None)), way)
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    x, answer = (torch.zeros(max(SIZES), WIDTH, device=device) for _ in range(2))
    graphs = {}
    for size in SIZES:

        def run(size: int = size, kept: Any = None) -> None:
            answer[:size].copy_(broken(x[:size], kept))

        kept = kept_before(size, device)
        eager(x[:size], kept)
        torch.cuda.synchronize()
        graphs[size] = capture(module, pool, stream, functools.partial(run, kept=kept))
        del kept, run
    gc.collect()
    for churn in range(CHURNS):
        # the allocator hands out what was freed on a stream to that stream only
        others = []
        for used in (torch.cuda.default_stream(), stream):
            with torch.cuda.stream(used):
                others += [torch.full((size, WIDTH), 7.0, device=device) for size in SIZES for _ in range(8)]
        torch.cuda.synchronize()
        for size in (*SIZES, SIZES[0]):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(size + churn)))
            expected = eager(x[:size], kept_before(size, device))
            with torch.cuda.stream(stream):
                stream.wait_stream(torch.cuda.default_stream())
                graphs[size].replay()
            torch.cuda.synchronize()
            if not torch.equal(answer[:size], expected):
                return f"wrong answer, {size} rows, {churn + 1}. time"
            if not all(bool((other == 7.0).all()) for other in others):
                return f"memory of somebody else overwritten, {size} rows, {churn + 1}. time"
    return "right"


def memory_of_breaks(device: str, sizes: tuple[int, ...] = DEFAULT_SIZES, layers: int = LAYERS) -> dict[str, float]:
    """MiB that capturing the attention breaks of a whole model keeps, and the seconds it takes."""
    import time

    import torch

    from sglang_bcg_fixes.engine import graph_break

    module = breakable()

    @lambda inner: graph_break.decorate(inner, None)
    def attention(q: Any, k: Any, v: Any, output: Any) -> None:
        output.copy_(q)

    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    x = torch.zeros(max(sizes), HEADS["q"] * 128, device=device, dtype=torch.bfloat16)
    graphs, began, before = [], time.monotonic(), torch.cuda.memory_reserved()
    for size in sorted(sizes, reverse=True):

        def run(size: int = size) -> None:
            hidden = x[:size] + 1
            for _ in range(layers):
                q, k, v = (hidden[:, : HEADS[name] * 128] * 2 for name in "qkv")
                output = torch.empty_like(q)
                attention(q, k, v, output)
                hidden = output + hidden
            x[:size].copy_(hidden)

        graphs.append(capture(module, pool, stream, run))
    return {
        "MiB": round((torch.cuda.memory_reserved() - before) / 2**20),
        "seconds": round(time.monotonic() - began, 1),
    }


def one_arm(arm: str, what: str) -> None:
    """In a process of its own: what it patches stays in it."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = breakable()
    if arm == "all held":
        module._weak_ref_if_tensor = lambda value: value
    if arm == "fixed":
        from sglang_bcg_fixes import plugin

        applied = plugin.load().report.ids("applied")
        assert set(applied) & set(FIXES), f"none of {FIXES} was applied: {applied}"
    try:
        found = memory_of_breaks(device) if what == "memory" else observe(what, device)
    except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
        found = str(error).partition("\n")[0]
    print("RESULT", json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--one", nargs=2, metavar=("ARM", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one_arm(*options.one)
        return
    from sglang_bcg_fixes.lab.verify import environment

    rows: list[dict[str, Any]] = []
    for arm in options.arms.split(","):
        row: dict[str, Any] = {"arm": arm}
        settings = {"SGLANG_BCG_FIXES": "off", **{f"SGLANG_BCG_FIX_{fix.upper()}": "on" for fix in FIXES}}
        for what in (*WAYS, "memory"):
            done = subprocess.run(
                [sys.executable, __file__, "--json", str(options.json), "--one", arm, what],
                env={**os.environ, **(settings if arm == "fixed" else {})},
                capture_output=True,
                text=True,
                timeout=180,
            )
            said = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            row[what] = json.loads(said[0].removeprefix("RESULT ")) if said else done.stderr.strip()[-500:]
            print(f"{arm:9} {what:48} {row[what]}", flush=True)
        rows.append(row)
    here = environment.look(sys.executable)
    content = {**environment.header(here), "sizes": SIZES, "layers": LAYERS, "heads": HEADS, "arms": rows}
    options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
