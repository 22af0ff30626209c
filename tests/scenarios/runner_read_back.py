# SPDX-License-Identifier: Apache-2.0
"""A real runner of prefill graphs, and what `bcg-fixes status` tells of its fixes and of their calls."""

from __future__ import annotations

from typing import Any

from cpu_sglang import one_batch, prefill
from sglang_bcg_fixes import flags, plugin
from sglang_bcg_fixes.cli import status
from sglang_bcg_fixes.process import report
from tests.scenarios import debugged, named, released


def one_prefill() -> dict[str, Any]:
    loaded = released.load("qwen3next")
    process = plugin.load()
    assert process.report.read_back is None
    runner = prefill.capture_prefill(loaded.model_runner)
    assert process.report.read_back is not None
    built = process.report.read_back.occasion
    one_batch.generate(loaded, prefill._prompts([6, 5]), 2)
    [content] = [status.with_calls(content) for _, content in report.read_all(flags.report_dir())]
    rows = [row for row in content["fixes"] if row["state"] == "applied"]
    kernels = [op for op, row in content["kernels"].items() if row["state"] == "applied"]
    return {
        "built": built,
        "found": content["verified"],
        "runner": type(runner).__name__,
        "batches": content["batches"],
        # in the order of application
        "applied": [*kernels, *(row["id"] for row in rows)],
        "calls": {row["id"]: sum(row["calls"].values()) for row in rows},
        "words": {row["id"]: status.calls_words(content, row) for row in rows},
    }


if __name__ == "__main__":
    debugged.show()
    named.run(globals())
