# SPDX-License-Identifier: Apache-2.0
"""A real release's Kimi delta attention under prefill graphs, its layers captured with kernels of ours, on the CPU.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 SGLANG_BCG_KERNEL_KDA_EXTEND=reference \\
        python -m tests.releases.kda_prefill SCENARIO MODEL

As tests.releases.gdn_prefill, which has the steps and what is compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from cpu_sglang import one_batch, prefill
from tests.releases import gdn_prefill
from tests.releases.gdn_prefill import Found

RUNNERS = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
MUTANTS = {
    **gdn_prefill.OF_TABLES,
    "shares one layer's states": ("mamba2_layer_cache(layer_id)", "mamba2_layer_cache(0)"),
    "keeps the first weights": (
        "conv_weights=layer.conv_weights,",
        "conv_weights=vars(self).setdefault('weights', layer.conv_weights),",
    ),
    "takes squashed betas for raw ones": ("is_squashed=a.ndim == SPLIT", "is_squashed=False"),
    "takes the first gate for all": ("a[0].flatten(1),", "a[0, :1].flatten(1).expand(rows, -1),"),
}


class World(gdn_prefill.World):
    module, op, overrides = "sglang_bcg_fixes.kernels.kda_extend.adapter", "kda_extend", {}

    def __init__(self, model: str, **server_args: Any) -> None:
        one_batch.import_sglang(with_graphs=True)
        with prefill.built_for_graphs():
            super().__init__(model, **{"dtype": "float16", "attention_backend": "fa3", **server_args})
        # latent attention keeps products of its weights
        one_batch.derive(self.runner.model)

    def capture(self, buckets: Sequence[int]) -> Found:
        # as on an NVIDIA GPU: elsewhere 0.5.17 and later take captures of latent attention for the expanded form
        importlib.import_module(RUNNERS).is_cuda = lambda: True  # type: ignore[attr-defined]
        return super().capture(buckets)


class Scenarios(gdn_prefill.Scenarios):
    world, mistakes = World, MUTANTS

    def few_programs(self, **server_args: Any) -> gdn_prefill.World:
        from sglang_bcg_fixes.kernels.kda_extend import triton

        world = super().few_programs(**server_args)
        installed: Any = triton
        few = triton.Tuning(prepare_programs=2, advance_programs=2)
        installed.tuning_for = lambda rows: few
        return world

    def checked(self) -> Found:
        """Return what the self-check says before the first request."""
        world = self.start()
        world.capture((2, 4, 8))
        from sglang_bcg_fixes import plugin
        from sglang_bcg_fixes.process.selfcheck import at_start, check

        # the interpreter is slow
        check.SECONDS = 1000
        at_start.after_scheduler(plugin.load(), world.loaded.model_runner)
        return {"selfcheck": plugin.load().report.selfcheck, "left": world.left()}


if __name__ == "__main__":
    Scenarios.main()
