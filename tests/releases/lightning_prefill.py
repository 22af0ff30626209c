# SPDX-License-Identifier: Apache-2.0
"""A real release's lightning attention under prefill graphs, its layers captured, on the CPU.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 SGLANG_BCG_KERNEL_LIGHTNING_EXTEND=seg_la \\
        python -m tests.releases.lightning_prefill SCENARIO MODEL

As tests.releases.gdn_prefill, which has the steps and what is compared.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from cpu_sglang import mamba, one_batch, prefill
from sglang_bcg_fixes.anatomy import latent_attention
from sglang_bcg_fixes.anatomy.runners import PREFILL, PREFILL_MODULE
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.kernels.lightning_extend import triton
from sglang_bcg_fixes.kernels.linear_extend import serving
from sglang_bcg_fixes.kernels.linear_extend.walks import Walk
from tests.releases import gdn_prefill
from tests.releases.gdn_prefill import CHUNKED, LONG, RAGGED, Found, compared, scenario

MUTANTS = {
    "fills the tables once": gdn_prefill.MUTANTS["fills the tables once"],
    "never fills the tables": gdn_prefill.MUTANTS["never fills the tables"],
    "forgets prefixes": ("slots, batch.extend_prefix_lens", "slots, batch.extend_prefix_lens * 0"),
    "takes rows for slots": ("slots = backend.forward_metadata.mamba_cache_indices", "slots = batch.req_pool_indices"),
    "takes whole lengths": ("self.tables.fill(batch.extend_seq_lens", "self.tables.fill(batch.seq_lens"),
    "shares one layer's states": (
        "state=self.cache(layer.layer_id)",
        "state=self.cache(min(self.layers))",
    ),
    "shares one layer's decay": ("tp_slope[layer.layer_id]", "tp_slope[1]"),
    "forgets the scale": ("scale=layer.scaling", "scale=1.0"),
    "takes keys for queries": ("            *(q, k, v),", "            *(k, q, v),"),
    "takes values for keys": ("            *(q, k, v),", "            *(q, v, k),"),
}


RUNNER, RESTORE = PREFILL.partition(":")[2], latent_attention.RESTORE.rpartition(".")[2]
# all of these are replayed: later releases leave batches to eager prefill that leave most of a bucket empty
BRIEF = [RAGGED[0], RAGGED[3], CHUNKED[-1]]
AS_CONFIGURED: dict[str, Any] = {}
# a prompt, and the checkpoint that it leaves inside
PROMPT, BOUNDARY = 70, 64


class World(gdn_prefill.World):
    module, op = "sglang_bcg_fixes.kernels.lightning_extend.adapter", "lightning_extend"

    overrides = AS_CONFIGURED

    def __init__(self, model: str, **server_args: Any) -> None:
        super().__init__(model, **server_args)
        # on the interpreter every program takes its time, work or none
        installed: Any = triton
        walk = Walk(programs=2, warps=4, stages=1, part=32)
        installed.tuning_for = lambda shape, q: triton.Tuning(walk, relate_programs=2, clearing_programs=2)
        one_batch.derive(self.runner.model)
        if model == "bailing_full":
            attend_as_captured(self.runner)


def attend_as_captured(runner: Any) -> None:
    """Have latent attention compute in the same form without a graph as in one, and replays prepared for it."""
    prefills = sys.modules.get(PREFILL_MODULE)
    latent = importlib.import_module("sglang.srt.models.deepseek_v2")
    choose = latent.DeepseekV2AttentionMLA.dispatch_attn_forward_method

    def choose_absorbed(self: Any, batch: Any) -> Any:
        # it also notes which backend there is
        chosen = choose(self, batch)
        is_captured = graph_break.load("context").is_in_breakable_cuda_graph()
        return chosen if is_captured or captures_expanded() else latent.AttnForwardMethod.MLA

    latent.DeepseekV2AttentionMLA.dispatch_attn_forward_method = choose_absorbed
    if prefills is not None:
        # as on an NVIDIA GPU: elsewhere replays are prepared for the other form
        vars(prefills)["is_cuda"] = lambda: True


def captures_expanded() -> bool:
    """Tell 0.5.16, whose break takes the expanded form, from the others."""
    prepares = hasattr(getattr(sys.modules.get(PREFILL_MODULE), RUNNER, None), RESTORE)
    choose = vars(sys.modules[latent_attention.HANDLERS])["_handle_attention_backend"]
    return prepares and "is_in_breakable_cuda_graph" not in choose.__code__.co_names


def right(model: str) -> Found:
    return scenario(World(model), [*RAGGED, *CHUNKED], prefill.BUCKETS)


def brief(model: str) -> Found:
    return scenario(World(model), BRIEF, prefill.BUCKETS)


def with_checkpoints(model: str) -> World:
    """A server with the prefix cache's extra buffer, which wants states from inside an extend."""
    one_batch.import_sglang(with_graphs=True)
    options: dict[str, Any] = {"disable_radix_cache": False, "context_length": 256, **mamba.allow_extra_buffer()}
    return World(model, **options)


def checkpoints(model: str) -> Found:
    return scenario(with_checkpoints(model), LONG, (80,))


def warm(model: str) -> Found:
    """Run a prompt, and its last tokens twice more: from the state that its first ones leave, and from its checkpoint.

    Logits are compared between those two: behind a prefix the harness's latent attention may add in another order.
    """
    import torch

    world = with_checkpoints(model)
    # in the smallest bucket that fits: later releases replay nothing that leaves most of one empty
    world.capture((8, 80))
    world.loaded.runner.clear()
    state = world.pools[1]
    state.fill_(float("nan"))
    (text,) = prefill._prompts([PROMPT])

    def extend(request: Any) -> tuple[Any, int]:
        with torch.no_grad():
            _, logits, batch = world.loaded.runner.extend([request])
        return logits.float(), int(world.runner.req_to_token_pool.get_mamba_indices(batch.req_pool_indices)[0])

    def begun() -> tuple[Any, int]:
        prefix = world.begin(text[:BOUNDARY])
        _, slot = extend(prefix)
        world.go_on(prefix, text, BOUNDARY)
        return prefix, slot

    whole = world.begin(text)
    _, slot = extend(whole)
    wanted = state[:, slot].clone()
    (kept,) = (slot for slot in gdn_prefill.checkpoints_of(whole) if bool(state[:, slot].isfinite().all()))
    cold, _ = extend(begun()[0])
    prefix, slot = begun()
    state[:, slot] = state[:, kept]
    warmed, again = extend(prefix)
    assert again == slot
    return {
        "logits": gdn_prefill.relative(warmed, cold),
        "state": gdn_prefill.relative(state[:, slot], wanted),
        "left": world.left(),
    }


def mixed(model: str) -> Found:
    return gdn_prefill.mixed_in(World(model))


def own_eager(model: str) -> Found:
    return gdn_prefill.own_eager_in(World(model), BRIEF)


def poisoned(model: str) -> Found:
    return gdn_prefill.poisoned_in(World(model))


def refused(model: str) -> Found:
    """Run batches that are not replayed: too many sequences."""
    world = World(model)
    scripts = [[[4], [3], [2]], [[5], [2]]]
    eager = [world.run(script) for script in scripts]
    serving.MOST_SEQUENCES = 2
    found: Found = {"breaks": world.capture(prefill.BUCKETS)}
    found["too many"] = compared(eager[0], world.run(scripts[0]))
    found["not too many"] = compared(eager[1], world.run(scripts[1]))
    return {**found, "left": world.left()}


def configured(model: str) -> Found:
    """Run with a backend of lightning attention whose kernels are others, where the break is left as it is."""
    world = World(model)
    script = [[8, 8]]
    world.runner.attn_backend.linear_attn_backend.linear_backend = "minimax"
    eager = world.run(script)
    return {
        "breaks": world.capture(prefill.BUCKETS),
        "script": compared(eager, world.run(script)),
        "left": world.left(),
    }


def without_checkpoints(model: str) -> Found:
    """Capture with the prefix cache's extra buffer, where the kernels write no state from inside an extend."""
    world = with_checkpoints(model)
    return {"breaks": world.capture((80,)), "left": world.left()}


def mutants(model: str) -> Found:
    # a norm behind the layers would take their scale away
    World.overrides = {"use_output_norm": False}
    return gdn_prefill.of_mutants(World(model), MUTANTS)


def main(name: str, model: str) -> None:
    print("RESULT", json.dumps(globals()[name](model)))


if __name__ == "__main__":
    main(*sys.argv[1:])
