# SPDX-License-Identifier: Apache-2.0
"""The Triton form of lightning attention and SGLang's own kernels, each beside fp64: how far off they are.

Argument: the dtype of inputs. Triton's interpreter multiplies fp32 exactly, where a GPU takes TF32 for both.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from cpu_sglang import one_batch
from tests.scenarios import telling

LENGTHS, PREFIXES, HEADS, HEAD, SCALE = [200, 3, 64], [0, 64, 5], 2, 128, 128**-0.5


def main(kind: str) -> None:
    one_batch.import_sglang()
    from sglang_bcg_fixes.kernels.lightning_extend import seg_la, triton
    from sglang_bcg_fixes.kernels.linear_extend.walks import Walk
    from tests.kernels import accuracy, lightning_reference

    dtype, generator, device = getattr(torch, kind), torch.Generator().manual_seed(0), torch.device("cpu")
    q, k, v = (torch.randn(sum(LENGTHS), HEADS, HEAD, generator=generator).to(dtype) for _ in range(3))
    before = torch.randn(len(LENGTHS), HEADS, HEAD, HEAD, generator=generator)
    before[0] = 0
    decay = torch.tensor([0.8, 0.004])
    output, state = lightning_reference.recurrent(
        lightning_reference.Inputs(LENGTHS, q, k, v, decay, SCALE, before), torch.float64
    )
    walk = Walk(programs=2, warps=4, stages=1, part=32)
    tuning = triton.Tuning(walk, relate_programs=2, clearing_programs=2)
    found: dict[str, Any] = {}
    for name, form, others in (("ours", triton, {"tuning": tuning}), ("SGLang's", seg_la, {})):
        tables: Any = form.Tables(sum(LENGTHS), len(LENGTHS), device)
        tables.fill(torch.tensor(LENGTHS), torch.arange(len(LENGTHS)), torch.tensor(PREFIXES))
        after = before.clone()
        got = form.extend(q, k, v, decay=decay, scale=SCALE, state=after, tables=tables, **others)
        found[name] = {
            "output": accuracy.relative(got, output.flatten(1)),
            "state": accuracy.relative(after, state),
        }
    telling.result(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
