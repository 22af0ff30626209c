# SPDX-License-Identifier: Apache-2.0
"""A real release's Kimi delta attention under prefill graphs, its layers captured with kernels of ours, on the CPU.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 SGLANG_BCG_KERNEL_KDA_EXTEND=reference \\
        python -m tests.releases.kda_prefill SCENARIO

As tests.releases.gdn_prefill, which has the steps and what is compared.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from cpu_sglang import mamba, one_batch, prefill
from tests.releases import gdn_prefill
from tests.releases.gdn_prefill import CHUNKED, LONG, RAGGED, SHORT, Found, scenario

RUNNERS = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
MUTANTS = {
    "forgets prefixes": ("slots, batch.extend_prefix_lens", "slots, batch.extend_prefix_lens * 0"),
    "takes rows for slots": ("slots = backend.forward_metadata.mamba_cache_indices", "slots = batch.req_pool_indices"),
    "takes whole lengths": ("self.tables.fill(batch.extend_seq_lens", "self.tables.fill(batch.seq_lens"),
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

    def __init__(self, **server_args: Any) -> None:
        one_batch.import_sglang(with_graphs=True)
        with prefill.built_for_graphs():
            super().__init__("kimi_linear", **{"dtype": "float16", "attention_backend": "fa3", **server_args})
        # latent attention keeps products of its weights
        one_batch.derive(self.runner.model)

    def capture(self, buckets: Sequence[int]) -> Found:
        # as on an NVIDIA GPU: elsewhere 0.5.17 and later take captures of latent attention for the expanded form
        importlib.import_module(RUNNERS).is_cuda = lambda: True  # type: ignore[attr-defined]
        return super().capture(buckets)


def right() -> Found:
    return scenario(World(), [*RAGGED, *CHUNKED], prefill.BUCKETS)


def brief() -> Found:
    return scenario(World(), [RAGGED[0], RAGGED[3], CHUNKED[-1]], prefill.BUCKETS)


def short() -> Found:
    return scenario(few_programs(), SHORT, prefill.BUCKETS)


def few_programs() -> World:
    """Take the interpreter's time for work only: there every program takes its time, work or none."""
    from sglang_bcg_fixes.kernels.kda_extend import triton

    world = World()
    installed: Any = triton
    few = triton.Tuning(prepare_programs=2, advance_programs=2)
    installed.tuning_for = lambda rows: few
    return world


def with_checkpoints() -> World:
    """A server with the prefix cache's extra buffer, which wants states from inside an extend."""
    one_batch.import_sglang(with_graphs=True)
    options: dict[str, Any] = {"disable_radix_cache": False, "context_length": 256, **mamba.allow_extra_buffer()}
    return World(**options)


def checkpoints() -> Found:
    return scenario(with_checkpoints(), LONG, (80,))


def warm() -> Found:
    return gdn_prefill.warmed(with_checkpoints())


def own_eager() -> Found:
    return gdn_prefill.own_eager_in(few_programs(), SHORT)


def refused() -> Found:
    """Run batches that are not replayed: too many sequences, states loaded layer by layer, old tables."""
    return gdn_prefill.refused_in(World())


def configured() -> Found:
    return gdn_prefill.configured_in(World())


def checked() -> Found:
    """Return what the self-check says before the first request."""
    world = World()
    world.capture((2, 4, 8))
    from sglang_bcg_fixes import plugin
    from sglang_bcg_fixes.process.selfcheck import at_start, check

    # the interpreter is slow
    check.SECONDS = 1000
    at_start.after_scheduler(plugin.load(), world.loaded.model_runner)
    return {"selfcheck": plugin.load().report.selfcheck, "left": world.left()}


def mutants() -> Found:
    return gdn_prefill.of_mutants(World(), MUTANTS)


def main(name: str) -> None:
    print("RESULT", json.dumps(globals()[name]()))


if __name__ == "__main__":
    main(*sys.argv[1:])
