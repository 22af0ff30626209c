# SPDX-License-Identifier: Apache-2.0
"""A small model of benchmarks.bench.mamba2_model in a real SGLang, eagerly and replayed, on the CPU.

python -m tests.bench.cpu_mamba2_model FOLDER
"""

from __future__ import annotations

import sys

from cpu_sglang import one_batch, prefill
from tests.releases import gdn_prefill, mamba2_prefill
from tests.scenarios import telling


def main(folder: str) -> None:
    # weights and chunks are those of the checkpoint
    one_batch.randomize = lambda model: None  # type: ignore[assignment, misc]
    mamba2_prefill.World.overrides = {}
    world = mamba2_prefill.World(folder, load_format="auto", max_total_tokens=1024, context_length=256)
    scripts = [gdn_prefill.RAGGED[0], gdn_prefill.CHUNKED[-1]]
    eager = [world.run(script) for script in scripts]
    breaks = world.capture(prefill.BUCKETS)
    replayed = [world.run(script) for script in scripts]
    logits = [step["logits"] for script in eager for step in script]
    telling.result(
        {
            "pools": [list(pool.shape) for pool in world.pools],
            "finite": all(bool(each.isfinite().all()) for each in logits),
            "spread": min(float(each.std()) for each in logits),
            "breaks": breaks,
            "scripts": [gdn_prefill.compared(*pair) for pair in zip(eager, replayed, strict=True)],
            "left": world.left(),
        }
    )


if __name__ == "__main__":
    main(sys.argv[1])
