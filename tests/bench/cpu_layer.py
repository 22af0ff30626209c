# SPDX-License-Identifier: Apache-2.0
"""benchmarks.bench.gdn_layer where there is no GPU: a real SGLang's layer, tiny, in Triton's interpreter.

The interpreter knows float16 better than bfloat16; SGLang's kernels take both.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from benchmarks.bench import gdn_layer, timing
from cpu_sglang import one_batch
from sglang_bcg_fixes.kernels.gdn_extend import triton
from tests.bench.cpu_device import Cpu, once

if __name__ == "__main__":
    one_batch.import_sglang()
    import torch

    torch.cuda.get_device_name = lambda *_: "none"
    gdn_layer.Cuda = Cpu  # type: ignore[assignment, misc]
    gdn_layer.SHAPES = {"qwen3_next": gdn_layer.Shape(1, 1, 2, head=32)}
    gdn_layer.Problem = functools.partial(gdn_layer.Problem, kind="float16")  # type: ignore[assignment, misc]
    # the interpreter runs every program of a grid, also those that find nothing to do
    few = functools.partial(triton.Tuning, prepare_programs=2, advance_programs=2)
    triton.Tuning = few  # type: ignore[assignment, misc]
    triton.FOR_FEW_ROWS = {}
    if os.environ.get("WRONG_KERNEL"):
        from sglang.srt.layers.attention.linear import gdn_backend

        # as if it had forgotten what the sequence had before
        right = gdn_backend.GDNAttnBackend.forward_extend

        def forgets(self: Any, layer: Any, forward_batch: Any, **others: Any) -> Any:
            self.req_to_token_pool.mamba2_layer_cache(layer.layer_id).temporal.zero_()
            return right(self, layer=layer, forward_batch=forward_batch, **others)

        gdn_backend.GDNAttnBackend.forward_extend = forgets
    timing.in_turn = once  # type: ignore[assignment]
    gdn_layer.main(sys.argv[1:])
