# SPDX-License-Identifier: Apache-2.0
"""Memory that prefill graphs take of a GPU, as SGLang's own log gives it, for some lists of sizes.

    python benchmarks/graph_memory.py qwen3_0_6b FILE       # or a folder of a model; nothing else may run on this GPU

SGLang takes free memory before and after, of the whole GPU. A server of each list starts as it is without this package,
and is stopped once its prefill graphs are captured.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import serving
from sglang_bcg_fixes.lab.verify import environment

# one small, one large, many small: what each graph takes beside what the largest does; SGLang's own list tests that
LISTS = ((256,), (4096,), tuple(range(16, 257, 16)), ())
BEGIN = re.compile(r"Capture target prefill CUDA graph begin\. backend=(\w+), num_tokens=(\[.*?\])")
END = re.compile(r"Capture target prefill CUDA graph end\. elapsed=([\d.]+) s, mem usage=(-?[\d.]+) GB")


def measure(plan: serving.Plan, folder: pathlib.Path) -> dict[str, Any]:
    """Start a server and return what its log says of its prefill graphs."""
    server, began = serving.start(plan, serving.STOCK, folder), time.monotonic()
    try:
        while not (end := END.search(server.text())):
            if server.process.poll() is not None or time.monotonic() - began > serving.SECONDS_TO_START:
                raise SystemExit(f"{' '.join(plan.more)}: no prefill graphs were captured: {server.last_lines()}")
            time.sleep(0.5)
    finally:
        server.stop()
    (begin,) = BEGIN.findall(server.text())
    return {"backend": begin[0], "sizes": json.loads(begin[1]), "seconds": float(end[1]), "gb": float(end[2])}


def main(name: str, file: str) -> None:
    servers: list[dict[str, Any]] = []
    found = environment.header(environment.look(sys.executable)) | {"model": name, "servers": servers}
    with tempfile.TemporaryDirectory(prefix="bcg-memory-") as made:
        model = serving.model_of(name, pathlib.Path(made))
        for sizes in LISTS:
            more = ("--cuda-graph-bs-prefill", *map(str, sizes)) if sizes else ()
            servers.append(measure(serving.Plan(model, more=more), pathlib.Path(made)))
            print(json.dumps(servers[-1]), file=sys.stderr, flush=True)
            # early, so an interrupted run leaves results
            pathlib.Path(file).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
