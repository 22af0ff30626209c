# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's metadata as a release's own backend fills it, and as ours does, for every step."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from cpu_sglang import one_batch
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.kernels.fa_metadata import declaration
from sglang_bcg_fixes.kernels.fa_metadata.declaration import KERNEL, MODULE
from sglang_bcg_fixes.model import Choice
from sglang_bcg_fixes.source import releases
from tests.kernels.flash_backend import Backend
from tests.releases import flash_steps
from tests.scenarios import named

Found = dict[str, Any]
ADAPTER = "sglang_bcg_fixes.kernels.fa_metadata.adapter"
INSTALLED = (f"{ADAPTER}.eager_step", f"{ADAPTER}.replay_step")


def begin() -> None:
    one_batch.import_sglang(with_graphs=True)
    importlib.import_module(MODULE)


def observe(_: str) -> Found:
    begin()
    world, steps = flash_steps.World(), every_step()
    stock = {step.name: world.run(step) for step in steps}
    odd = {name: run() for name, run in odd_steps(world)}
    wrong = [name for name, run, right in chunks_in_pages(world) if run() != right]
    outcome = plugin.load().report.outcomes[KERNEL.op]
    assert isinstance(outcome.decision, Choice)
    return {
        "outcome": [outcome.decision.name, outcome.state],
        "steps": len(steps),
        **compared(world, steps, stock),
        "odd": {name: [run() == odd[name], reasons()] for name, run in odd_steps(world)},
        "wrong": wrong,
        "mended": {name: run() == right for name, run, right in chunks_in_pages(world)},
    }


def observe_once_it_is_read(_: str) -> Found:
    """Observe a source whose forms somebody has just recorded: nothing of ours names them."""
    source = releases.installed()
    assert source is not None
    read = {item.form: "read by a test" for item in KERNEL.probe(source).evidence}
    declaration.KERNEL = dataclasses.replace(KERNEL, known=read)
    return observe("")


def observe_mutants(mutants: str) -> Found:
    """Tell which mutants differ from SGLang; each is a piece of the adapter and what stands there instead."""
    begin()
    world, steps = flash_steps.World(), every_step()
    stock = {step.name: world.run(step) for step in steps}
    plugin.load()
    files = {module: pathlib.Path(str(module.__file__)) for module in map(importlib.import_module, INSTALLED)}
    texts = {module: file.read_text() for module, file in files.items()}
    found: Found = {}
    for name, (old, new) in json.loads(mutants).items():
        assert any(old in text for text in texts.values()), name
        for module, text in texts.items():
            exec(compile(text.replace(old, new), str(files[module]), "exec"), vars(module))
        found[name] = any(compared(world, [step], stock)["differences"] for step in steps)
        for module, text in texts.items():
            exec(compile(text, str(files[module]), "exec"), vars(module))
    return found


def every_step() -> list[Any]:
    return list(flash_steps.steps(has()))


def has() -> Any:
    def names(method: Any) -> tuple[str, ...]:
        return (*method.__code__.co_names, *method.__code__.co_varnames)

    module = importlib.import_module(MODULE)
    backend = module.FlashAttentionBackend
    modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    builder = hasattr(module, "LocalAttentionMetadataBuilder")
    make = getattr(module, "make_local_attention_virtual_batches", None)
    return flash_steps.Release(
        version_1=hasattr(modes, "DRAFT_EXTEND"),
        many_encoders=not hasattr(backend, "init_forward_metadata_replay_cuda_graph"),
        local_pages=builder or "preserve_attn_chunk_size" in names(make),
        local_pages_in_pool=builder,
    )


def compared(world: Any, steps: list[Any], stock: Found) -> Found:
    """Tell where ours differ from SGLang's, and what was left to SGLang though it should not have been."""
    differences, left = [], {}
    for step in steps:
        try:
            ours = world.run(step)
        except Exception as error:
            differences.append(f"{step.name}: {type(error).__name__}: {error}")
            continue
        for name, value in stock[step.name].items():
            if ours.get(name) != value:
                differences.append(f"{step.name}: {name} is {ours.get(name)}, not {value}")
        if said := reasons():
            left[step.name] = said
    return {"differences": differences, "left": left}


def reasons() -> list[str]:
    """Reasons that batches were left to SGLang since this was asked."""
    from sglang_bcg_fixes.kernels import active

    if KERNEL.op not in active._selected:
        return []
    counted = active.selected(KERNEL.op).fallbacks
    found = list(counted)
    counted.clear()
    return found


def chunks_in_pages(world: Any) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Local attention with pages of 16 tokens, and what the chunks are whatever SGLang says."""
    for graph in (False, True):
        for has_pool in (False, True):
            name = f"{'replay' if graph else 'eager'}{', pool' * has_pool}"
            step = flash_steps.Step(name, "DECODE", graph, 16, has_pool, chunk=flash_steps.CHUNK)
            right = flash_steps.right_locally(world, step)

            def run(step: Any = step, right: Any = right) -> Any:
                found = world.run(step)
                return {key: found[key] for key in right}

            yield name, run, right


def odd_steps(world: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Steps that SGLang has to prepare by itself, each with the reason that is to be given."""
    decode = flash_steps.Step("decode", "DECODE", graph=False, page_size=1)

    def run(batch: Any = None, page_size: int = 1, **setting: Any) -> Any:
        backend = Backend(dataclasses.replace(decode.setting, page_size=page_size, **setting), world.table)
        backend.eager(batch or world.batch(decode))
        return flash_steps.told(backend.found, page_size)

    def of_two() -> Any:
        backend = Backend(decode.setting, world.table)
        backend.real.attn_cp_size = 2
        backend.eager(world.batch(decode))
        return flash_steps.told(backend.found, 1)

    def strided(tensor: Any) -> Any:
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]

    def of_other_rows() -> Any:
        backend = Backend(decode.setting, strided(world.table))
        backend.eager(world.batch(decode))
        return flash_steps.told(backend.found, 1)

    lengths, rows = world.batch(decode).seq_lens, world.batch(decode).req_pool_indices
    # what a kernel would read as if it were something else
    short = dataclasses.replace(world.batch(decode), seq_lens=lengths.short())
    apart = dataclasses.replace(world.batch(decode), req_pool_indices=strided(rows))
    yield "fa_metadata: seq_lens is torch.int16, not torch.int32 or torch.int64", lambda: run(short)
    yield "fa_metadata: req_pool_indices has stride 2, not 1", lambda: run(apart)
    yield "fa_metadata: the rows of req_to_token have stride 2, not 1", of_other_rows
    yield "pages of 48 tokens", lambda: run(page_size=48)
    verify = flash_steps.Step("verify", "TARGET_VERIFY", graph=False, page_size=1, topk=1, drafts=True)
    drafts = {"chunk": 32, "topk": 1, "draft_tokens": flash_steps.DRAFT_TOKENS}
    yield "local attention of more than one query", lambda: run(world.batch(verify), **drafts)
    if not has().local_pages:
        # later ones refuse them
        yield "chunks that are not whole pages", lambda: run(page_size=64, chunk=100)
    yield "context parallelism", of_two
    if MODULE in sys.modules and hasattr(sys.modules[MODULE], "build_ragged_target_verify_geometry"):
        blind = dataclasses.replace(world.batch(decode), on_host=False)
        yield "lengths that the host does not know", lambda: run(blind)


if __name__ == "__main__":
    named.run(globals())
