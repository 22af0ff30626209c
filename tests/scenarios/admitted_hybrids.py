# SPDX-License-Identifier: Apache-2.0
"""Models that SGLang refuses prefill graphs, and hybrids_without_graphs admits: eagerly, then with graphs.

Arguments: a function of this file, and the architecture. Every step's logits and states are compared bit by bit. The
states that nobody has are NaN, and so is all memory that was freed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from cpu_sglang import architectures, graphs, mamba, one_batch, prefill, ranks, scheduler
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.anatomy import latent_attention
from sglang_bcg_fixes.anatomy.runners import PREFILL, PREFILL_MODULE, SETUP_MODULE
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.fixes.hybrids_without_graphs import feed_forward, latent, measured, mixers
from tests.harm.forked_rows import Said
from tests.releases import gdn_prefill
from tests.releases.gdn_prefill import CHUNKED, RAGGED, Found
from tests.scenarios import telling, warm_answers

# a mixer is the last layer once, and its neighbours are of the other kind and of its own
LAYERS = {
    "GraniteMoeHybridForCausalLM": ["mamba", "attention", "mamba", "mamba", "attention"],
    "Lfm2ForCausalLM": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
    "Lfm2MoeForCausalLM": ["conv", "full_attention", "conv", "conv"],
    "BailingMoeV2_5ForCausalLM": ["linear", "linear", "attention", "linear", "linear", "attention"],
    # feed-forward layers first, last, and beside each other
    "NemotronHForCausalLM": ["mlp", "mamba", "moe", "mlp", "attention", "mamba", "mlp"],
}
BAILING = "BailingMoeV2_5ForCausalLM"
RUNNER, RESTORE = PREFILL.partition(":")[2], latent_attention.RESTORE.rpartition(".")[2]
NEMOTRON_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
# layers with nothing to break at
FEED_FORWARD = ("mlp", "moe")
# longer than the largest bucket, beside one that is not
TOO_LONG = [[[20]], [[9], [11]]]
SCRIPTS = [RAGGED[1], RAGGED[4], *CHUNKED]
COMPARED = ("logits", "conv", "state", "kept conv", "kept state")
# of a server with a prefix cache, whose checkpoints lie 64 tokens apart where a batch leaves some inside
BUCKETS = (16, 32, 64, 128)
# what comes together, one after the other: how many tokens of the common text, and of its own
ASKED: Sequence[Mapping[str, tuple[int, int]]] = (
    {"one": (70, 0)},
    {"its beginning": (66, 5), "all of it": (70, 9)},
    {"again": (70, 9), "longer": (70, 61), "new": (0, 43)},
)

MUTANTS = {
    "none": ("", ""),
    "takes padded rows for tokens": ("real = batch.extend_num_tokens", "real = len(hidden_states)"),
    "forgets a token": ("real = batch.extend_num_tokens", "real = batch.extend_num_tokens - 1"),
    "keeps the batch of the capture": (
        "    def run_on_real_tokens(mixer: Any, hidden_states: Tensor, output: Tensor) -> None:\n"
        "        batch = prefill_batch()",
        "    captured: list[Any] = []\n\n"
        "    def run_on_real_tokens(mixer: Any, hidden_states: Tensor, output: Tensor) -> None:\n"
        "        captured.append(prefill_batch())\n        batch = captured[0]",
    ),
    "is not replayed": ("graph_break.decorate(run_on_real_tokens, None)", "run_on_real_tokens"),
}


class World(gdn_prefill.World):
    module, op = "sglang_bcg_fixes.kernels.mamba2_extend.adapter", "mamba2_extend"

    def __init__(self, architecture: str, **server_args: Any) -> None:
        ranks = server_args.pop("ranks", 1)
        # each rank normalises whole groups
        self.overrides = {**overrides_of(architecture), **({"group_norm_size": ranks} if ranks > 1 else {})}
        if not server_args.pop("with_experts", True):
            self.overrides[measured.COUNT_OF_EXPERTS] = 0
        with tempfile.TemporaryDirectory() as folder:
            one_batch.import_sglang(with_graphs=True)
            model = warm_answers.configured(architecture, pathlib.Path(folder))
            super().__init__(model, **attention_of(architecture), **server_args)
        if architecture == BAILING:
            attend_as_captured(self.runner)
        run_experts_on_a_cpu(self.runner.model)


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


def run_experts_on_a_cpu(model: Any) -> None:
    """Stand in for what NemotronH's experts need a GPU for: their activation, and a product of another type."""
    for layer in model.model.layers:
        experts = getattr(getattr(layer, "mixer", None), "experts", None)
        if experts is not None:
            experts.forward = functools.partial(run_experts, experts)
            torch.mm = functools.partial(wide, torch.mm)


def run_experts(experts: Any, hidden_states: torch.Tensor, chosen: Any) -> torch.Tensor:
    inner = (hidden_states[:, None, None].float() * experts.w13_weight.float()).sum(-1).relu().square()
    each = (inner[:, :, None] * experts.w2_weight.float()).sum(-1)
    index = chosen.topk_ids.long()[..., None].expand(-1, -1, each.shape[-1])
    found: torch.Tensor = (each.gather(1, index) * chosen.topk_weights[..., None]).sum(1)
    return found.to(hidden_states.dtype)


def wide(
    product: Callable[..., torch.Tensor], left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return product(left, right) if out_dtype is None else product(left.to(out_dtype), right.to(out_dtype))


def overrides_of(architecture: str) -> Found:
    kinds = LAYERS[architecture]
    if architecture.startswith("Nemotron"):
        sizes = {"n_routed_experts": 4, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64}
        return {"hybrid_override_pattern": "".join(NEMOTRON_LETTERS[kind] for kind in kinds), **sizes}
    if architecture == BAILING:
        # with some of the experts a router that hesitates turns a rounding into another answer
        size = kinds.index("attention") + 1
        return {"num_hidden_layers": len(kinds), "layer_group_size": size, "num_experts_per_tok": 4}
    return {"num_hidden_layers": len(kinds), "layer_types": kinds}


def attention_of(architecture: str) -> Found:
    """Return the server's arguments for attention."""
    return architectures.CONFIGURATIONS[architecture].server_args if architecture == BAILING else {}


def breaks_of(architecture: str) -> int:
    return sum(kind not in FEED_FORWARD for kind in LAYERS[architecture])


def run_all(world: World, scripts: Sequence[Any]) -> list[list[Found]]:
    return [world.run(script) for script in scripts]


def report(eager: list[list[Found]], again: list[list[Found]]) -> Found:
    pairs = [pair for steps in zip(eager, again, strict=True) for pair in zip(*steps, strict=True)]
    return {
        "replays": [step["replays"] for steps in again for step in steps],
        "differ": [name for one, other in pairs for name in COMPARED if not is_same(one[name], other[name])],
        # with norms in groups Ling writes some eagerly, too
        "nobody's": all(other["nobody's"] or not one["nobody's"] for one, other in pairs),
    }


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit; what nobody has written is NaN in both."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def steps(architecture: str) -> Found:
    """Run several requests side by side, in pieces behind their prefixes, of odd lengths, and too long for a graph."""
    world = World(architecture)
    eager, too_long = run_all(world, SCRIPTS), run_all(world, TOO_LONG)
    found: Found = {"breaks": world.capture(prefill.BUCKETS)}
    # NaN in every padded row, from the embedding on: padding has token 0, which no prompt has
    layers = world.runner.model.model
    with torch.no_grad():
        getattr(layers, "word_embeddings" if architecture == BAILING else "embed_tokens").weight[0] = float("nan")
    found["poisoned"] = report(eager, run_all(world, SCRIPTS))
    found["too long"] = report(too_long, run_all(world, TOO_LONG))
    return found


def with_kernel(architecture: str, **world_of: Any) -> Found:
    """Run the same where a kernel of ours takes the mixers into the graph."""
    world = World(architecture, **world_of)
    eager = run_all(world, SCRIPTS)
    breaks = world.capture(prefill.BUCKETS)
    pairs = zip(eager, run_all(world, SCRIPTS), strict=True)
    return {"breaks": breaks, "scripts": [gdn_prefill.compared(*pair) for pair in pairs], "left": world.left()}


def with_kernel_and_no_experts(architecture: str) -> Found:
    return with_kernel(architecture, with_experts=False)


def checkpoints(architecture: str) -> Found:
    """Run with the prefix cache's extra buffer, which wants states from inside an extend."""
    one_batch.import_sglang(with_graphs=True)
    world = World(architecture, disable_radix_cache=False, context_length=256, **mamba.allow_extra_buffer())
    eager = run_all(world, gdn_prefill.LONG)
    breaks = world.capture((80,))
    kept = [step["kept state"].numel() for steps in eager for step in steps]
    return {"breaks": breaks, "kept": min(kept), **report(eager, run_all(world, gdn_prefill.LONG))}


def two_ranks(architecture: str) -> Found:
    return on_two_ranks(functools.partial(World, architecture, ranks=2), report)


def on_two_ranks(begin: Callable[[], World], compare: Callable[..., Any]) -> Found:
    """Run on two ranks of tensor parallelism, whose projections meet in the breaks and beside them."""
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()

    def act(rank: ranks.Rank) -> Found:
        def load(model: str, **server_args: Any) -> one_batch.LoadedModel:
            return rank.load(model, **{"attention_backend": "torch_native", **server_args})

        # a fork has what was imported
        done: Any = {"import_sglang": lambda **_: None, "load_plugins": lambda: None, "load": load}
        with mock.patch.multiple(one_batch, **done):
            world = begin()
        eager = run_all(world, SCRIPTS)
        breaks = world.capture(prefill.BUCKETS)
        return {"breaks": breaks, **compare(eager, run_all(world, SCRIPTS))}

    return {"ranks": ranks.each(2, act)}


def mutants(architecture: str) -> Found:
    """Compare the steps with each mistake in the break; "none" is without one."""
    world = World(architecture)
    eager = run_all(world, SCRIPTS)
    text = pathlib.Path(str(mixers.__file__)).read_text()
    found: Found = {}
    for name, (old, new) in MUTANTS.items():
        assert old in text, name
        exec(compile(text.replace(old, new), str(mixers.__file__), "exec"), vars(mixers))
        try:
            world.capture(prefill.BUCKETS)
            found[name] = report(eager, run_all(world, SCRIPTS))["differ"]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def admission(architecture: str) -> Found:
    """Tell when a layer's mixer is shown, what is captured then, and what is said of it."""
    world, said = World(architecture), heard()
    runner, layers = world.runner, world.runner.model.model.layers
    show: Callable[[Any], contextlib.AbstractContextManager[None]] = mixers.mixers_shown
    name = mixers.KNOWN_NAME
    if architecture == BAILING:
        show, name = latent.latent_attention_shown, latent.LATENT_NAME
    before_any = [hasattr(layer, name) for layer in layers]

    def shown() -> bool:
        with show(runner):
            return [hasattr(layer, name) for layer in layers] != before_any

    settings, values = prefill._settings(runner, prefill.BUCKETS)
    before = prefill._set(settings, values)
    found: Found = {"with breaks": shown(), "afterwards": [hasattr(layer, name) for layer in layers] != before_any}
    with mock.patch.object(runner, "spec_algorithm", types.SimpleNamespace(is_none=lambda: False)):
        found["speculation"] = shown()
    if "backend" in values:
        for other in ("full", "tc_piecewise", "disabled"):
            settings.backend = other
            found[other] = shown()
    else:
        settings.enable_breakable_cuda_graph = False
        found["tc_piecewise"] = shown()
    prefill._set(settings, before)
    return {**found, "captured": captured(world), "said": about_graphs(said)}


def capture(architecture: str, **world_of: Any) -> Found:
    """Tell what a server captures, and what it says of it at which level."""
    world, said = World(architecture, **world_of), heard()
    return {"captured": captured(world), "said": [line for line in said.lines if is_about_graphs(line[1])]}


def capture_without_experts(architecture: str) -> Found:
    return capture(architecture, with_experts=False)


def heard() -> Said:
    said = Said()
    logging.getLogger().addHandler(said)
    for name in ("sglang", "sglang_bcg_fixes"):
        logging.getLogger(name).setLevel(logging.INFO)
    return said


def about_graphs(said: Said) -> list[str]:
    return [line for _, line in said.lines if is_about_graphs(line)]


def is_about_graphs(line: str) -> bool:
    return "Disable p" in line or "bcg-fixes hybrids" in line


def captured(world: World) -> Found | str:
    try:
        return world.capture(prefill.BUCKETS)
    except RuntimeError as nothing:
        return str(nothing)


def counted(architecture: str) -> Found:
    """Tell what is captured of NemotronH, speculating and not, and what is said of it."""
    world, said = World(architecture), heard()
    speculating = type(world.runner.spec_algorithm).from_string("NGRAM")
    with mock.patch.object(world.runner, "spec_algorithm", speculating):
        with_speculation = captured(world)
    setup = sys.modules[SETUP_MODULE]
    before = getattr(setup, feed_forward.COUNT)
    found = {"speculation": with_speculation, "captured": captured(world)}
    return {**found, "restored": getattr(setup, feed_forward.COUNT) is before, "said": about_graphs(said)}


def cached(architecture: str) -> None:
    cached_by(architecture, "no_buffer")


def cached_by_extra_buffer(architecture: str) -> None:
    cached_by(architecture, "extra_buffer")


def cached_by(architecture: str, strategy: str) -> None:
    """Ask a real scheduler with a prefix cache, before graphs are captured and after."""

    def act(served: scheduler.Scheduler, _: float) -> Found:
        model_runner = served.scheduler.tp_worker.model_runner
        run_experts_on_a_cpu(model_runner.model)
        if architecture == BAILING:
            attend_as_captured(model_runner)
        eager = conversation(served)
        graphs.freed_memory_is_garbage = True
        runner = prefill.capture_prefill(model_runner, BUCKETS)
        before = graphs.counters.replays
        replayed = conversation(served)
        pairs = zip(eager, replayed, strict=True)
        return {
            "breaks": sorted({len(graph._break_fns) for graph in prefill.captured_graphs(runner).values()}),
            "replays": graphs.counters.replays - before,
            "hits": [answer.found for answer in replayed],
            "same hits": [answer.found for answer in eager] == [answer.found for answer in replayed],
            "differ": [
                number for number, (one, other) in enumerate(pairs) if not all(map(is_same, one.logits, other.logits))
            ],
            "off": max(
                gdn_prefill.relative(again.float(), once.float())
                for one, other in zip(eager, replayed, strict=True)
                for once, again in zip(one.logits, other.logits, strict=True)
            ),
        }

    named = dict.fromkeys(("mamba_scheduler_strategy", "mamba_radix_cache_strategy"), strategy)
    given = {
        **attention_of(architecture),
        "dtype": "float16",
        "disable_overlap_schedule": True,
        "chunked_prefill_size": 128,
        **named,
    }
    warm_answers.serve(architecture, {**given, "model": overrides_of(architecture)}, act, without=False)


def conversation(served: scheduler.Scheduler) -> list[scheduler.Answer]:
    served.forget()
    (common,) = prefill._prompts([100])
    found: list[scheduler.Answer] = []
    for number, asked in enumerate(ASKED):
        (own,) = prefill._prompts([90 + number])
        prompts = {f"{number} {name}": [*common[:shared], *own[:rest]] for name, (shared, rest) in asked.items()}
        found += served.answer(prompts, 3).values()
    return found


def main(name: str, architecture: str) -> None:
    found = globals()[name](architecture)
    if found is not None:
        telling.result({"applied": plugin.load().ledger.applied(), **found})


if __name__ == "__main__":
    main(*sys.argv[1:])
