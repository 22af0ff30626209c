# SPDX-License-Identifier: Apache-2.0
"""A real release's gated delta net under prefill graphs, its layers captured with kernels of ours, on the CPU.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 SGLANG_BCG_KERNEL_GDN_EXTEND=reference \\
        python -m tests.releases.gdn_prefill SCENARIO MODEL

Steps run eagerly, then again with graphs; the last line is RESULT and JSON. The states that nobody has are NaN, and
what the tables of a step were is gone before the next one.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import importlib
import importlib.util
import json
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cpu_sglang import graphs, mamba, one_batch, prefill
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.linear_extend import serving

Found = dict[str, Any]
MODULE = "sglang_bcg_fixes.kernels.gdn_extend.adapter"
GARBAGE = -(2**30)
# with some of them a router that hesitates turns a rounding into another answer
EVERY_EXPERT = {"num_experts_per_tok": 4}
# which the CUDA kernels are for
HEADS_OF_128 = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
# of each request, how many tokens come in each step; a request may begin late, and go on behind a prefix
RAGGED = [[[11]], [[6], [5]], [[5], [3]], [[9], [1], [6]], [[4], [4]]]
CHUNKED = [[[8, 8, 3]], [[6, 5], [0, 7]], [[5, 1, 2], [3, 4, 0]], [[0, 2, 3], [1, 1, 9], [4, 3, 4]]]
# for kernels whose programs run one by one here
SHORT = [[[5], [3]], [[6, 5], [0, 7]]]
# checkpoints for the prefix cache lie 64 tokens apart: inside an extend, and at the end of one
LONG = [[[70], [3, 66]], [[64], [16, 48]]]

# what is wrong with a copy of the adapter, or of what it shares with others, and what is written instead of what
OF_TABLES = {
    "forgets prefixes": ("slots, batch.extend_prefix_lens", "slots, batch.extend_prefix_lens * 0"),
    "takes rows for slots": ("slots = backend.forward_metadata.mamba_cache_indices", "slots = batch.req_pool_indices"),
    "takes whole lengths": ("self.tables.fill(batch.extend_seq_lens", "self.tables.fill(batch.seq_lens"),
}
FILL = "        self.tables.fill(batch"
MUTANTS = {
    **OF_TABLES,
    "fills the tables once": (
        FILL,
        "        once = vars(self).setdefault('once', [])\n        once or once.append(1) or self.tables.fill(batch",
    ),
    "never fills the tables": (FILL, "        0 and self.tables.fill(batch"),
    "shares one layer's states": ("mamba2_layer_cache(layer_id)", "mamba2_layer_cache(0)"),
    "keeps the first weights": (
        "conv_weights=layer.conv_weights,",
        "conv_weights=vars(self).setdefault('weights', layer.conv_weights),",
    ),
    "mixes the gates up": ("            a,\n            b,\n", "            b,\n            a,\n"),
}


class World:
    """One model in one process, with its requests' states in sight."""

    # the adapter, the operation and the model's options
    module, op, overrides = MODULE, "gdn_extend", EVERY_EXPERT

    def __init__(self, model: str = "qwen3next", **server_args: Any) -> None:
        one_batch.import_sglang(with_graphs=True)
        one_batch.load_plugins()
        options = {
            "max_mamba_cache_size": 12,
            "max_running_requests": 4,
            "chunked_prefill_size": 256,
            "json_model_override_args": json.dumps(self.overrides),
        }
        self.loaded = one_batch.load(model, **{**options, **server_args})
        self.runner = self.loaded.model_runner
        one_batch.randomize(self.runner.model)
        self.installed: Any = importlib.import_module(self.module)
        self.prefill: Any = None

    @property
    def pools(self) -> tuple[Any, Any]:
        cache = self.runner.req_to_token_pool.mamba_pool.mamba_cache
        return cache.conv[0], cache.temporal

    def capture(self, buckets: Sequence[int]) -> Found:
        graphs.freed_memory_is_garbage = True
        self.prefill = prefill.capture_prefill(self.runner, buckets)
        captured = prefill.captured_graphs(self.prefill)
        return {str(size): len(graph._break_fns) for size, graph in sorted(captured.items())}

    def run(self, script: Sequence[Sequence[int]]) -> list[Found]:
        """The steps of these requests: logits, what the states of each are afterwards, and what else has changed."""
        import torch

        self.loaded.runner.clear()
        # so that no request's states are where its row is
        pool = self.runner.req_to_token_pool
        getattr(pool, "mamba_allocator", pool.mamba_pool).alloc(1)
        for pool in self.pools:
            pool.fill_(float("nan"))
        texts = prefill._prompts([sum(lengths) for lengths in script])
        requests: dict[int, Any] = {}
        used: set[int] = set()
        found = []
        for step in range(max(map(len, script))):
            going = [number for number, lengths in enumerate(script) if step < len(lengths) and lengths[step]]
            for number in going:
                start = sum(script[number][:step])
                text = texts[number][: start + script[number][step]]
                if start:
                    self.go_on(requests[number], text, start)
                else:
                    requests[number] = self.begin(text)
            self.spoil_tables()
            before = graphs.counters.replays
            with torch.no_grad():
                _, logits, batch = self.loaded.runner.extend([requests[number] for number in going])
            conv, state = self.pools
            slots = self.runner.req_to_token_pool.get_mamba_indices(batch.req_pool_indices)
            kept = [slot for number in going for slot in checkpoints_of(requests[number])]
            # with slot 0, which is nobody's and anybody's
            used |= {0, *slots.tolist(), *kept}
            nobodys = [slot for slot in range(conv.shape[1]) if slot not in used]
            found.append(
                {
                    "logits": logits.float().clone(),
                    "conv": conv[:, slots].float().clone(),
                    "state": state[:, slots].float().clone(),
                    "kept conv": conv[:, kept].float().clone(),
                    "kept state": state[:, kept].float().clone(),
                    "nobody's": all(bool(pool[:, nobodys].isnan().all()) for pool in self.pools),
                    "replays": graphs.counters.replays - before,
                }
            )
        return found

    def begin(self, prompt: list[int]) -> Any:
        import numpy

        prompts = [numpy.array(prompt, dtype=numpy.int32)]
        (request,) = self.loaded.benchmark.prepare_synthetic_inputs_for_latency_test(1, len(prompt), prompts)
        return request

    def go_on(self, request: Any, text: Any, start: int) -> None:
        """Its next tokens, behind those whose keys and states it has."""
        cut = types.SimpleNamespace(cut_len=start)
        known = getattr(request, "full_untruncated_fill_ids", None)
        if isinstance(known, array.array):
            text = array.array(known.typecode, text)
        self.loaded.benchmark.prepare_extend_inputs_for_correctness_test(cut, [text], [request], self.runner)
        if hasattr(request, "req_pool_idx") and hasattr(request, "prefix_indices"):
            # SGLang's benchmark takes the number of a request for that of its row, in early releases
            row = self.runner.req_to_token_pool.req_to_token[request.req_pool_idx, :start]
            request.prefix_indices = row.to(request.prefix_indices.dtype)

    def spoil_tables(self) -> None:
        for served in list(self.installed.OPERATION.of_runner.values()):
            for table in served.tables.buffers:
                table.fill_(GARBAGE)

    def left(self) -> dict[str, int]:
        return dict(active.selected(self.op).fallbacks) if active.is_used(self.op) else {}


def compared(one: Sequence[Found], other: Sequence[Found]) -> Found:
    """The largest differences between two runs of a script, and proof that they touched nothing else."""
    found: Found = {"replays": [step["replays"] for step in other]}
    # lightning attention has no convolution
    names = [name for name in ("logits", "conv", "state", "kept conv", "kept state") if one[0][name].numel()]
    for name in names:
        found[name] = max(relative(mine[name], theirs[name]) for theirs, mine in zip(one, other, strict=True))
    # of the first layer, whose inputs are the same in both
    for name in names[1:]:
        found[f"first {name}"] = max(
            relative(mine[name][0], theirs[name][0]) for theirs, mine in zip(one, other, strict=True)
        )
    found["nobody's"] = all(step["nobody's"] for step in other)
    return found


def checkpoints_of(request: Any) -> list[int]:
    """The slots that the prefix cache's states of a request go to."""
    # of the request itself before 0.5.19
    name, memory = "mamba_ping_pong_track_buffer", getattr(request, "kv", None)
    buffer = getattr(memory if hasattr(memory, name) else request, name, None)
    return [] if buffer is None else [int(slot) for slot in buffer if slot >= 0]


def relative(found: Any, wanted: Any) -> float:
    """RMS(error) over RMS(reference); what nobody has written is NaN, and has to be so in both."""
    import torch

    written = ~wanted.isnan()
    if not torch.equal(written, found.isfinite()):
        return float("inf")
    found, wanted = found[written], wanted[written]
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def scenario(world: World, scripts: Sequence[Any], buckets: Sequence[int]) -> Found:
    """Eagerly, then with graphs, and once more when every graph has run."""
    eager = [world.run(script) for script in scripts]
    report = {"breaks": world.capture(buckets)}
    replayed = [world.run(script) for script in scripts]
    return {
        **report,
        "scripts": [compared(*pair) for pair in zip(eager, replayed, strict=True)],
        "again": [compared(first, world.run(script)) for first, script in zip(replayed, scripts, strict=True)],
        "left": world.left(),
    }


def mixed_in(world: World) -> Found:
    """Run chunks mixed with decoding: requests of one new token beside those of several."""
    modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    forward = world.runner.forward

    def forward_mixed(batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch.forward_mode = modes.MIXED
        return forward(batch, *args, **kwargs)

    world.runner.forward = forward_mixed
    return scenario(world, [CHUNKED[-1]], prefill.BUCKETS)


def own_eager_in(world: World, scripts: Sequence[Any]) -> Found:
    """Compare replays with the same implementation without a graph, on as many rows as there are tokens."""
    breaks = world.capture(prefill.BUCKETS)
    replayed = [world.run(script) for script in scripts]
    (served,) = world.installed.OPERATION.of_runner.values()
    world.installed.OPERATION = types.SimpleNamespace(
        capturing=served,
        captured=lambda batch: served,
        of_runner={},
        prepared=served.fill,
        can_replay=lambda original, runner, batch: False,
    )
    if hasattr(world.installed, "is_taken"):
        # it asks for the batch that is captured
        world.installed.is_taken = lambda *given, **named: True
    eager = [world.run(script) for script in scripts]
    return {"breaks": breaks, "scripts": [compared(*pair) for pair in zip(replayed, eager, strict=True)]}


def warmed_in(world: World, has_checkpoints: bool = True) -> Found:
    """Run a prompt, and its last tokens once more: from the checkpoint that it left inside, or behind its first ones.

    The states that are compared are those of the prompt's last token.
    """
    import torch

    # in the smallest bucket that fits: later releases replay nothing that leaves most of one empty
    world.capture((8, 80))
    world.loaded.runner.clear()
    before = graphs.counters.replays
    for pool in world.pools:
        pool.fill_(float("nan"))
    (text,) = prefill._prompts([70])

    def extend(request: Any) -> tuple[Any, int]:
        with torch.no_grad():
            _, logits, batch = world.loaded.runner.extend([request])
        return logits.float(), int(world.runner.req_to_token_pool.get_mamba_indices(batch.req_pool_indices)[0])

    whole = world.begin(text)
    cold, slot = extend(whole)
    conv, state = world.pools
    wanted = [pool[:, slot].clone() for pool in world.pools]
    left = [slot for slot in checkpoints_of(whole) if bool(state[:, slot].isfinite().all())]
    assert len(left) == has_checkpoints
    prefix = world.begin(text[:64])
    _, slot = extend(prefix)
    for pool in world.pools:
        for kept in left:
            pool[:, slot] = pool[:, kept]
    world.go_on(prefix, text, 64)
    warmed, again = extend(prefix)
    assert again == slot
    return {
        "replays": graphs.counters.replays - before,
        "logits": relative(warmed, cold),
        "conv": relative(conv[:, slot].float(), wanted[0].float()),
        "first layer": all(
            bool((pool[0, slot] == each[0]).all()) for pool, each in zip(world.pools, wanted, strict=True)
        ),
        "left": world.left(),
    }


def refused_in(world: World) -> Found:
    """Run batches that are not replayed: too many sequences, states loaded layer by layer, old tables."""
    scripts = [[[4], [3], [2]], [[5], [2]]]
    eager = [world.run(script) for script in scripts]
    serving.MOST_SEQUENCES = 2
    found: Found = {"breaks": world.capture(prefill.BUCKETS)}
    found["too many"] = compared(eager[0], world.run(scripts[0]))
    found["not too many"] = compared(eager[1], world.run(scripts[1]))
    pool = world.runner.req_to_token_pool
    pool.layer_transfer_counter = types.SimpleNamespace(wait_until=lambda layer: None)
    found["by layer"] = compared(eager[1], world.run(scripts[1]))
    pool.layer_transfer_counter = None
    try:
        prefill.captured_graphs(world.prefill)[8].replay()
    except RuntimeError as error:
        found["not filled"] = str(error)
    return {**found, "left": world.left()}


def configured_in(world: World, change: Callable[[], None] = lambda: None) -> Found:
    """Run a configuration where the break is left as it is, from this change on."""
    # which fill their buckets: later releases replay no others that are as small
    script = [[8, 8]]
    eager = world.run(script)
    change()
    return {
        "breaks": world.capture(prefill.BUCKETS),
        "script": compared(eager, world.run(script)),
        "left": world.left(),
    }


def of_mutants(world: Any, mistakes: Mapping[str, tuple[str, str]]) -> Found:
    """Measure each mistake in the adapter, or in what it builds on, against eager; "none" is without one."""
    script = CHUNKED[-1]
    eager = world.run(script)
    # the adapter builds on the other
    texts = {module: pathlib.Path(str(module.__file__)).read_text() for module in (serving, world.installed)}
    found: Found = {}
    for name, (old, new) in {"none": ("", ""), **mistakes}.items():
        assert any(old in text for text in texts.values()), name
        for module, text in texts.items():
            exec(compile(text.replace(old, new), str(module.__file__), "exec"), vars(module))
        try:
            world.capture(prefill.BUCKETS)
            seen = compared(eager, world.run(script))
            found[name] = max(seen[measured] for measured in seen if measured not in ("replays", "nobody's"))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class Scenarios:
    """Scenarios that operations have, each in a world of its own; the command line names one of them and a model."""

    world: Callable[..., World] = World
    mistakes: Mapping[str, tuple[str, str]] = MUTANTS
    scripts: Sequence[Any] = [*RAGGED, *CHUNKED]
    few_scripts: Sequence[Any] = [RAGGED[0], RAGGED[3], CHUNKED[-1]]

    def __init__(self, model: str) -> None:
        self.model = model

    def start(self, **server_args: Any) -> World:
        return type(self).world(self.model, **server_args)

    def few_programs(self, **server_args: Any) -> World:
        """Take the interpreter's time for work only: there every program takes its time, work or none."""
        return self.start(**server_args)

    def with_checkpoints(self) -> World:
        """A server with the prefix cache's extra buffer, which wants states from inside an extend."""
        one_batch.import_sglang(with_graphs=True)
        options: dict[str, Any] = {"disable_radix_cache": False, "context_length": 256, **mamba.allow_extra_buffer()}
        return self.start(**options)

    def right(self) -> Found:
        return scenario(self.start(), self.scripts, prefill.BUCKETS)

    def brief(self) -> Found:
        return scenario(self.start(), self.few_scripts, prefill.BUCKETS)

    def short(self) -> Found:
        return scenario(self.few_programs(), SHORT, prefill.BUCKETS)

    def mixed(self) -> Found:
        return mixed_in(self.start())

    def own_eager(self) -> Found:
        return own_eager_in(self.few_programs(), SHORT)

    def checkpoints(self) -> Found:
        return scenario(self.with_checkpoints(), LONG, (80,))

    def warm(self) -> Found:
        return warmed_in(self.with_checkpoints())

    def refused(self) -> Found:
        return refused_in(self.start())

    def configured(self) -> Found:
        """Run with an option with which nothing is captured."""
        world = self.start()

        def change() -> None:
            option = "enable_deterministic_inference"
            try:
                setattr(world.runner.server_args, option, True)
            except AttributeError:
                # later releases keep what options come to elsewhere
                context = importlib.import_module("sglang.srt.runtime_context").get_context()
                context.override("test", **{option: True})

        return configured_in(world, change)

    def mutants(self) -> Found:
        return of_mutants(self.start(), self.mistakes)

    @classmethod
    def main(cls) -> None:
        scenario, model = sys.argv[1:]
        print("RESULT", json.dumps(getattr(cls(model), scenario)()))


class OfGatedDeltaNet(Scenarios):
    """Scenarios of gated delta net alone, too."""

    def few_programs(self, **server_args: Any) -> World:
        from sglang_bcg_fixes.kernels.gdn_extend import triton

        world = super().few_programs(**server_args)
        installed: Any = triton
        installed.Tuning = functools.partial(triton.Tuning, prepare_programs=2, advance_programs=2)
        triton.FOR_FEW_ROWS = {}
        return world

    def other_backend(self) -> Found:
        """Replays with another backend than the captured one, as adaptive speculation puts in its place."""
        world = self.start()
        eager = world.run(RAGGED[0])
        breaks = world.capture(prefill.BUCKETS)
        captured, other = world.runner.attn_backend, world.runner._get_attention_backend()
        world.runner.attn_backend = other
        found = [compared(eager, world.run(RAGGED[0]))]
        # once more after a second capture, as of a reload of weights
        world.runner.attn_backend = captured
        world.capture(prefill.BUCKETS)
        world.runner.attn_backend = other
        found.append(compared(eager, world.run(RAGGED[0])))
        return {"breaks": breaks, "scripts": found, "left": world.left()}

    def nothing(self) -> Found:
        """Capture where SGLang's break is missing and no fix may add it."""
        world = self.start()
        try:
            world.capture(prefill.BUCKETS)
        except RuntimeError as error:
            return {"said": str(error)}
        return {}

    def in_cuda(self) -> Found:
        """The CUDA source on the host, as if there were a driver."""
        from sglang_bcg_fixes.kernels.cuda import driver, nvrtc

        driver.library = nvrtc.is_installed = lambda *_: True  # type: ignore[assignment]
        world = self.start(json_model_override_args=json.dumps(EVERY_EXPERT | HEADS_OF_128))
        from sglang_bcg_fixes.kernels.gdn_extend import cuda
        from sglang_bcg_fixes.kernels.gdn_extend.program import PROGRAM
        from tests.kernels import gdn_extend_on_host

        launched: collections.Counter[str] = collections.Counter()
        with tempfile.TemporaryDirectory() as folder:
            kernels = gdn_extend_on_host.build(PROGRAM.file, pathlib.Path(folder))

        def counted(name: str) -> dict[Any, Any]:
            def count(launch: Any, *fields: int) -> None:
                launched[name] += 1
                launch(*fields)

            return {kind: functools.partial(count, launch) for kind, launch in getattr(kernels, name).items()}

        chosen = dataclasses.replace(kernels, prepare=counted("prepare"), advance=counted("advance"))
        implementation: Any = cuda
        implementation.on_device = lambda device: chosen
        # the stand-in for graphs sees torch's and Triton's launches only
        implementation.extend = graphs.opaque(implementation.extend)
        serving.runs_on_the_host = lambda implementation: implementation == "cuda"
        return {**scenario(world, SHORT, prefill.BUCKETS), "launched": launched}


if __name__ == "__main__":
    OfGatedDeltaNet.main()
