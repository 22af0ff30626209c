"""FlashAttention's metadata in one launch, against what each release's own backend fills: every integer, on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.kernels.fa_metadata.declaration import KERNEL, MODULE
from sglang_bcg_fixes.model import Accepted, Rejected
from sglang_bcg_fixes.planning import plan, registry
from sglang_bcg_fixes.source import tree
from tests import processes
from tests.wheels import since

Root = Callable[[str], pathlib.Path]
Found = dict[str, Any]

# one of each form that the backend's methods have had
RELEASES = (
    *("0.5.11", "0.5.12.post1", "0.5.13", "0.5.14", "0.5.15.post1", "0.5.16"),
    *("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21"),
    *since("0.5.23"),
)
MUTATED = "0.5.12.post1"
ADAPTER = "sglang_bcg_fixes.kernels.fa_metadata.adapter"
INSTALLED = (f"{ADAPTER}.eager_step", f"{ADAPTER}.replay_step")
# the first release whose eager step can do without lengths on the host
BLIND = "0.5.16"

MUTANTS = {
    "counts a step less": ('"draft decode", delta=backend.speculative_step_id + 1', '"draft decode", delta=0'),
    "forgets drafts before a replay": (
        'self.tables("verify", metadata, delta=delta)',
        'self.tables("verify", metadata)',
    ),
    "keeps the last page": (
        "drop_last=self.page_size > 1)\n        metadata.max",
        "drop_last=False)\n        metadata.max",
    ),
    "takes one query for each": ("        metadata.max_seq_len_q = new\n        expand", "        expand"),
    "forgets what was accepted": ("return self.for_every_row(new), max(on_host) if on_host else 1", "return 1, 1"),
    "forgets the window's pages": (
        '        found: dict[str, Any] = {"swa_page_table": metadata',
        '        return {}\n        found = {"x": metadata',
    ),
    "begins with the encoder's": ("row_start=self.encoder_lens,", ""),
    "forgets the encoder's own": ("        self.encoder(metadata)\n        return metadata", "        return metadata"),
    "takes the whole for the chunk": ("mapping=self.mapping,\n            zero_tail=True", "zero_tail=True"),
    "sees padded rows": ("live_rows=self.spec_info.positions.numel(),", ""),
    "sums what is new twice": ("        metadata.cu_seqlens_q = metadata.cu_seqlens_k\n", "        pass\n"),
    "forgets the window's tree": (
        "        if backend.has_swa:\n            backend._init",
        "        if False:\n            backend._init",
    ),
    "tells too long a bound": (
        "metadata.max_seq_len_k = self.longest + delta",
        "metadata.max_seq_len_k = self.longest + delta + 1",
    ),
    "lists a step more": (
        "DraftExpand(\n            self.seq_lens,\n            batch.out_cache_loc",
        "DraftExpand(\n            self.seq_lens + 1,\n            batch.out_cache_loc",
    ),
}


# what runs beside a release


def main(observer: str) -> None:
    from cpu_sglang import one_batch

    one_batch.import_sglang(with_graphs=True)
    importlib.import_module(MODULE)
    print("RESULT", json.dumps(globals()[observer]()))


def observe() -> Found:
    from sglang_bcg_fixes import plugin
    from tests.releases import flash_steps

    world, steps = flash_steps.World(), every_step()
    stock = {step.name: world.run(step) for step in steps}
    odd = {name: run() for name, run in odd_steps(world)}
    wrong = [name for name, run, right in chunks_in_pages(world) if run() != right]
    outcome = plugin.load().report.kernels[KERNEL.op]
    return {
        "outcome": [outcome.choice.name, outcome.state],
        "steps": len(steps),
        **compared(world, steps, stock),
        "odd": {name: [run() == odd[name], reasons()] for name, run in odd_steps(world)},
        "wrong": wrong,
        "mended": {name: run() == right for name, run, right in chunks_in_pages(world)},
    }


def observe_mutants() -> Found:
    from sglang_bcg_fixes import plugin
    from tests.releases import flash_steps

    world, steps = flash_steps.World(), every_step()
    stock = {step.name: world.run(step) for step in steps}
    plugin.load()
    files = {module: pathlib.Path(str(module.__file__)) for module in map(importlib.import_module, INSTALLED)}
    texts = {module: file.read_text() for module, file in files.items()}
    found: Found = {}
    for name, (old, new) in MUTANTS.items():
        assert any(old in text for text in texts.values()), name
        for module, text in texts.items():
            exec(compile(text.replace(old, new), str(files[module]), "exec"), vars(module))
        found[name] = any(compared(world, [step], stock)["differences"] for step in steps)
        for module, text in texts.items():
            exec(compile(text, str(files[module]), "exec"), vars(module))
    return found


def every_step() -> list[Any]:
    from tests.releases import flash_steps

    return list(flash_steps.steps(has()))


def has() -> Any:
    from tests.releases import flash_steps

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
    """Where ours differ from SGLang's, and what was left to SGLang though it should not have been."""
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
    """Why batches were left to SGLang since this was asked."""
    from sglang_bcg_fixes.kernels import active

    if KERNEL.op not in active._selected:
        return []
    counted = active.selected(KERNEL.op).fallbacks
    found = list(counted)
    counted.clear()
    return found


def chunks_in_pages(world: Any) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Local attention with pages of 16 tokens, and what the chunks are whatever SGLang says."""
    from tests.releases import flash_steps

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
    """What SGLang has to prepare by itself, each with the reason that is to be given."""
    from tests.kernels.flash_backend import Backend
    from tests.releases import flash_steps

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


# what has to come out


@functools.cache
def run(observer: str, root: pathlib.Path) -> Found:
    program = f"from tests.releases.test_fa_metadata import main; main({observer!r})"
    return processes.beside(root, "-c", program, timeout=600, **{KERNEL.flag: "triton"})[0]


@pytest.mark.parametrize("release", RELEASES)
def test_every_integer_is_sglangs_own(release: str, release_root: Root) -> None:
    found = run("observe", release_root(release))
    assert found["outcome"] == ["triton", "applied"]
    assert found["steps"] >= 70
    assert found["differences"] == []
    assert found["left"] == {}


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_not_known_to_be_equal_is_left_and_said(release: str, release_root: Root) -> None:
    odd = run("observe", release_root(release))["odd"]
    for reason, (equal, said) in odd.items():
        assert equal, reason
        assert said == [reason]
    assert ("lengths that the host does not know" in odd) == (RELEASES.index(release) >= RELEASES.index(BLIND))


@pytest.mark.parametrize("release", RELEASES)
def test_chunks_of_local_attention_are_right_in_pages_too(release: str, release_root: Root) -> None:
    found = run("observe", release_root(release))
    assert all(found["mended"].values()), found["mended"]
    # SGLang's own: page ids were looked up as slots, and then only in graphs with a pool for windows
    place = RELEASES.index(release)
    eager = ["eager", "eager, pool"] if place < RELEASES.index("0.5.20") else []
    assert found["wrong"] == [*eager, *(["replay, pool"] if place < RELEASES.index("0.5.23") else [])]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_differs(mutant: str, release_root: Root) -> None:
    assert run("observe_mutants", release_root(MUTATED))[mutant]


class Changed(tree.Folder):
    """A release with one more statement in a method that would be changed."""

    def read(self, path: str) -> str | None:
        text = super().read(path)
        if text and path == f"{MODULE.replace('.', '/')}.py":
            line = "        metadata = FlashAttentionMetadata()\n"
            assert line in text
            return text.replace(line, f"{line}        drifted = True\n", 1)
        return text


def choice(files: tree.Files, **environ: str) -> plan.Choice:
    known = registry.discover()
    made = plan.make(known, flags.read(known.fixes, known.kernels, environ), tree.Source(files))
    return next(each for each in made.kernels if each.op == KERNEL.op)


def test_a_source_that_nobody_has_read_keeps_its_own(release_root: Root) -> None:
    root = release_root(RELEASES[-1])
    named = {KERNEL.flag: "triton"}
    assert choice(tree.Folder(root), **named).impl
    drifted = choice(Changed(root), **named)
    assert drifted.impl is None
    assert "init_forward_metadata" in drifted.why and "has not been read yet" in drifted.why
    assert set(drifted.rejected) == {impl.name for impl in KERNEL.impls}


def test_auto_takes_cuda_or_else_triton(release_root: Root) -> None:
    files = tree.Folder(release_root(RELEASES[-1]))
    source = tree.Source(files)
    for answer, name in ((Accepted(), "cuda"), (Rejected("no driver"), "triton")):
        impls = [dataclasses.replace(impl, accepts=lambda answer=answer: answer) for impl in KERNEL.impls[:1]]
        kernel = dataclasses.replace(KERNEL, impls=(*impls, *KERNEL.impls[1:]))
        auto = plan.choose(kernel, "auto", plan.ask(KERNEL, source))
        assert auto.impl and auto.impl.name == name
        assert "for tests" in auto.rejected["reference"]
    assert auto.rejected["cuda"] == "no driver"
    assert choice(files, **{KERNEL.flag: "triton"}).impl
    assert choice(files, **{KERNEL.flag: "reference"}).impl
    assert choice(files, **{KERNEL.flag: "off"}).impl is None
    assert choice(files, SGLANG_BCG_FIXES="off").impl is None
