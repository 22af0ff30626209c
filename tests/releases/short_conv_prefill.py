# SPDX-License-Identifier: Apache-2.0
"""A real release's LFM2 under prefill graphs, its short convolutions captured with a kernel of ours, on the CPU.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 SGLANG_BCG_FIX_HYBRIDS_WITHOUT_GRAPHS=on \\
        SGLANG_BCG_KERNEL_SHORT_CONV_EXTEND=reference SGLANG_MAMBA_CONV_DTYPE=float16 \\
        python -m tests.releases.short_conv_prefill SCENARIO ARCHITECTURE

As tests.releases.gdn_prefill, which has the steps and what is compared.
"""

from __future__ import annotations

import functools
from typing import Any

from cpu_sglang import prefill
from sglang_bcg_fixes.kernels.linear_extend import serving
from sglang_bcg_fixes.kernels.short_conv_extend import triton
from tests.releases import gdn_prefill
from tests.releases.gdn_prefill import CHUNKED, RAGGED, Found, compared, scenario
from tests.scenarios import admitted_hybrids

# pieces that are shorter than a window of two, behind each other and beside longer ones
SHORT_PIECES = [[1, 1, 2, 7], [0, 4, 3, 1], [4, 1, 1, 2]]

MUTANTS = {
    "fills the tables once": gdn_prefill.MUTANTS["fills the tables once"],
    "never fills the tables": gdn_prefill.MUTANTS["never fills the tables"],
    **gdn_prefill.OF_TABLES,
    "shares one layer's windows": ("conv=self.cache(layer.layer_idx)", "conv=self.cache(min(self.layers))"),
    "keeps the first weights": (
        "conv_weights=layer.conv_weight",
        "conv_weights=vars(self).setdefault('weights', layer.conv_weight)",
    ),
    "takes one gate for the other": ("before, after, x = projected", "after, before, x = projected"),
    "forgets the first gate": ("inputs = before * x", "inputs = 1 * x"),
    "forgets the second gate": ("layer.out_proj(after * output)", "layer.out_proj(output)"),
}


class World(admitted_hybrids.World):
    module, op = "sglang_bcg_fixes.kernels.short_conv_extend.adapter", "short_conv_extend"

    def __init__(self, architecture: str, **server_args: Any) -> None:
        super().__init__(architecture, **server_args)
        # on the interpreter every program takes its time, work or none
        triton.TUNING = triton.Tuning(programs=2)


class Scenarios(gdn_prefill.Scenarios):
    world, mistakes = World, MUTANTS
    scripts = (*gdn_prefill.Scenarios.scripts, SHORT_PIECES)
    few_scripts = (*gdn_prefill.Scenarios.few_scripts, SHORT_PIECES)

    def own_eager(self) -> Found:
        return gdn_prefill.own_eager_in(self.start(), self.few_scripts)

    def poisoned(self) -> Found:
        """Run with padding that is NaN from the embedding on; no prompt has the token that it is of."""
        import torch

        world = self.start()
        padded = torch.zeros((), dtype=torch.int64)

        def poison(layer: Any, given: Any, rows: Any) -> Any:
            is_padding = given[0] == 0
            # replayed, too
            padded.add_(is_padding.sum())
            return rows.masked_fill(is_padding[:, None], float("nan"))

        world.runner.model.model.embed_tokens.register_forward_hook(poison)
        found = scenario(world, [RAGGED[0], *CHUNKED], prefill.BUCKETS)
        return {**found, "padded": int(padded)}

    def warm(self) -> Found:
        """Run a prompt whole, and in two pieces: a prefix that stays in its slot, and the rest behind it."""
        return gdn_prefill.warmed_in(self.start(), has_checkpoints=False)

    def two_ranks(self) -> Found:
        def compare(eager: Any, again: Any) -> Found:
            return {"scripts": [compared(*pair) for pair in zip(eager, again, strict=True)]}

        return admitted_hybrids.on_two_ranks(functools.partial(World, self.model), compare)

    def refused_checkpoints(self) -> Found:
        """Capture where the prefix cache wants states from inside an extend, which SGLang allows LFM2 nowhere."""
        world = self.start()
        serving.checkpoint_unit = lambda arguments: 64
        return {"breaks": world.capture(prefill.BUCKETS), "left": world.left()}

    def configured(self) -> Found:
        """Run with windows of another type than the model's, where the break is left as it is."""
        return gdn_prefill.configured_in(self.start())


if __name__ == "__main__":
    Scenarios.main()
