# SPDX-License-Identifier: Apache-2.0
"""A real release's LFM2 under prefill graphs, its short convolutions captured with a kernel of ours, on the CPU.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 SGLANG_BCG_FIX_HYBRIDS_WITHOUT_GRAPHS=on \\
        SGLANG_BCG_KERNEL_SHORT_CONV_EXTEND=reference SGLANG_MAMBA_CONV_DTYPE=float16 \\
        python -m tests.releases.short_conv_prefill SCENARIO ARCHITECTURE

As tests.releases.gdn_prefill, which has the steps and what is compared.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from cpu_sglang import graphs, prefill
from sglang_bcg_fixes.kernels.linear_extend import serving
from sglang_bcg_fixes.kernels.short_conv_extend import triton
from tests.releases import gdn_prefill
from tests.releases.gdn_prefill import CHUNKED, RAGGED, Found, compared, scenario
from tests.scenarios import admitted_hybrids, telling

# pieces that are shorter than a window of two, behind each other and beside longer ones
SHORT_PIECES = [[1, 1, 2, 7], [0, 4, 3, 1], [4, 1, 1, 2]]
BRIEF = [RAGGED[0], RAGGED[3], CHUNKED[-1], SHORT_PIECES]
# a prompt, and what of it comes first
PROMPT, PREFIX = 70, 64

MUTANTS = {
    "fills the tables once": gdn_prefill.MUTANTS["fills the tables once"],
    "never fills the tables": gdn_prefill.MUTANTS["never fills the tables"],
    "forgets prefixes": ("slots, batch.extend_prefix_lens", "slots, batch.extend_prefix_lens * 0"),
    "takes rows for slots": ("slots = backend.forward_metadata.mamba_cache_indices", "slots = batch.req_pool_indices"),
    "takes whole lengths": ("self.tables.fill(batch.extend_seq_lens", "self.tables.fill(batch.seq_lens"),
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


def right(architecture: str) -> Found:
    return scenario(World(architecture), [*RAGGED, *CHUNKED, SHORT_PIECES], prefill.BUCKETS)


def brief(architecture: str) -> Found:
    return scenario(World(architecture), BRIEF, prefill.BUCKETS)


def mixed(architecture: str) -> Found:
    return gdn_prefill.mixed_in(World(architecture))


def own_eager(architecture: str) -> Found:
    return gdn_prefill.own_eager_in(World(architecture), BRIEF)


def poisoned(architecture: str) -> Found:
    """Run with padding that is NaN from the embedding on; no prompt has the token that it is of."""
    import torch

    world = World(architecture)
    padded = torch.zeros((), dtype=torch.int64)

    def poison(layer: Any, given: Any, rows: Any) -> Any:
        is_padding = given[0] == 0
        # replayed, too
        padded.add_(is_padding.sum())
        return rows.masked_fill(is_padding[:, None], float("nan"))

    world.runner.model.model.embed_tokens.register_forward_hook(poison)
    found = scenario(world, [RAGGED[0], *CHUNKED], prefill.BUCKETS)
    return {**found, "padded": int(padded)}


def warm(architecture: str) -> Found:
    """Run a prompt whole, and in two pieces: a prefix that stays in its slot, and the rest behind it."""
    import torch

    world = World(architecture)
    # in the smallest bucket that fits: later releases replay nothing that leaves most of one empty
    world.capture((8, 80))
    world.loaded.runner.clear()
    windows, before = world.pools[0], graphs.counters.replays
    windows.fill_(float("nan"))
    (text,) = prefill._prompts([PROMPT])

    def extend(request: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            _, logits, batch = world.loaded.runner.extend([request])
        (slot,) = world.runner.req_to_token_pool.get_mamba_indices(batch.req_pool_indices).tolist()
        return logits.float(), windows[:, slot].float().clone()

    cold, window = extend(world.begin(text))
    prefix = world.begin(text[:PREFIX])
    extend(prefix)
    world.go_on(prefix, text, PREFIX)
    warmed, again = extend(prefix)
    replays = graphs.counters.replays - before
    return {
        "replays": replays,
        "logits": gdn_prefill.relative(warmed, cold),
        "conv": gdn_prefill.relative(again, window),
        "left": world.left(),
    }


def two_ranks(architecture: str) -> Found:
    def compare(eager: Any, again: Any) -> Found:
        return {"scripts": [compared(*pair) for pair in zip(eager, again, strict=True)]}

    return admitted_hybrids.on_two_ranks(functools.partial(World, architecture), compare)


def refused(architecture: str) -> Found:
    return gdn_prefill.refused_in(World(architecture))


def with_checkpoints(architecture: str) -> Found:
    """Capture where the prefix cache wants states from inside an extend, which SGLang allows LFM2 nowhere."""
    world = World(architecture)
    serving.checkpoint_unit = lambda arguments: 64
    return {"breaks": world.capture(prefill.BUCKETS), "left": world.left()}


def configured(architecture: str) -> Found:
    """Run with windows of another type than the model's, where the break is left as it is."""
    world = World(architecture)
    script = [[8, 8]]
    eager = world.run(script)
    return {
        "breaks": world.capture(prefill.BUCKETS),
        "script": compared(eager, world.run(script)),
        "left": world.left(),
    }


def mutants(architecture: str) -> Found:
    return gdn_prefill.of_mutants(World(architecture), MUTANTS)


def main(name: str, architecture: str) -> None:
    telling.result(globals()[name](architecture))


if __name__ == "__main__":
    main(*sys.argv[1:])
