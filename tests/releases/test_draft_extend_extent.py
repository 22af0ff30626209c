"""The draft model's extend step on the real attention backends of every release: how much of the cache it attends to.

Each release runs in one process, whose program is `main` below. It loads two models and notes, for every step, what the
backends list in eager mode, in capture and in replay, and, where the Triton backend computes it, how far attention is
from attention that is written out in 32 bits.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cpu_sglang import draft_extend
from cpu_sglang.draft_extend import NEW_TOKENS, Step
from tests import processes
from tests.wheels import NEWEST, RELEASES

Root = Callable[[str], pathlib.Path]
Found = dict[str, Any]

EXTENT, PREFIX_ONLY = "draft_extend_cache_extent", "draft_extend_prefix_only"
AFFECTED = ("0.5.11", "0.5.12", "0.5.12.post1")
PATCHED = [
    "TritonAttnBackend.forward_extend",
    "TritonAttnBackend.init_forward_metadata",
    "TritonAttnBackend.init_forward_metadata_capture_cuda_graph",
    "TritonAttnBackend.init_forward_metadata_replay_cuda_graph",
]
CHANGEABLE = (
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.layers.attention.flashattention_backend",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner",
    "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner",
)
# the second one has layers with a sliding window
MODELS = ("llama", "gpt_oss")
# both sides compute in 32 bits; with a wrong prefix they are a tenth and more apart
TOLERANCE = 1e-5


def counted(*lengths: int, wider: int = 0) -> Step:
    """What SGLang's workers for topk 1 pass; with wider rows the new tokens begin before the end of the prefix."""
    prefix = tuple(max(length - wider, 0) for length in lengths)
    width = NEW_TOKENS + wider
    whole = tuple(length + NEW_TOKENS for length in lengths)
    return Step(prefix=prefix, new=(width,) * len(lengths), seq_lens=whole, width=width)


def accepted(prefix: tuple[int, ...], new: tuple[int, ...]) -> Step:
    """The worker for topk above 1 passes what was accepted, one request's tokens right behind the other's."""
    whole = tuple(map(sum, zip(prefix, new, strict=True)))
    return Step(prefix=prefix, new=new, seq_lens=whole, mode="DRAFT_EXTEND")


STEPS = {
    "one page and two": counted(15, 16, 33, 1),
    "padded": counted(20, 5),
    "second layer": counted(20, 5, 9, wider=1),
    "third layer": counted(20, 5, 9, wider=2),
    # the second prefix is shorter than they are and passed as 0: prefix and new tokens are more than the length
    "front tokens": counted(20, 1, wider=2),
}
ACCEPTED = {
    "accepted": accepted((20, 5, 9), (2, 4, 1)),
    "accepted, no padding": accepted((20, 5, 9, 1), (2, 4, 1, 1)),
}
PREFIX_ALONE = {"prefix alone": dataclasses.replace(STEPS["padded"], seq_lens=STEPS["padded"].prefix)}
# from 0.5.16 on a worker need not know its lengths on the host
ON_DEVICE = {"prefix alone, on the device": dataclasses.replace(PREFIX_ALONE["prefix alone"], on_host=False)}
EVERY_STEP = STEPS | ACCEPTED | PREFIX_ALONE | ON_DEVICE

MUTANTS = {
    "adds the new tokens": (EXTENT, "(seq_lens - new.to", "(seq_lens + new.to"),
    "takes them off twice": (EXTENT, "(seq_lens - new.to", "(seq_lens - 2 * new.to"),
    "lets padded rows be negative": (EXTENT, ".clamp_(min=0)", ""),
    "forgets the capture": (EXTENT, "PatchPoint((CAPTURE,), How.AROUND, capture_prefix_alone),", ""),
    "forgets the replay": (EXTENT, "PatchPoint((REPLAY,), How.AROUND, replay_prefix_alone),", ""),
    "forgets the eager step": (EXTENT, "PatchPoint((EAGER,), How.AROUND, eager_prefix_alone),", ""),
    "lays all rows out alike": (EXTENT, "backend.qo_indptr[1 : len(new) + 1] = new.cumsum(0)", "pass"),
    "leaves nobody's rows unwritten": (EXTENT, "if forward_batch.forward_mode.is_draft_extend():", "if False:"),
    "adds to whole lengths": (PREFIX_ONLY, "(lengths[:rows] == prefix) * new[:rows]", "new[:rows]"),
    "adds nothing": (PREFIX_ONLY, "(lengths[:rows] == prefix) * new[:rows]", "0 * new[:rows]"),
    "forgets the host": (PREFIX_ONLY, "whole | on_host if on_host else {}", "whole"),
    "keeps what it added": (PREFIX_ONLY, "for name, value in passed.items():", "for name, value in ():"),
    "forgets what the graph computes": (
        PREFIX_ONLY,
        "with lengths(forward_batch, whole_lengths(forward_batch)):",
        "if 1:",
    ),
}
RELEASE_OF_MUTANTS = {EXTENT: "0.5.12.post1", PREFIX_ONLY: NEWEST}


def since(release: str, first: str) -> bool:
    return RELEASES.index(release) >= RELEASES.index(first)


# what runs beside a release


def backends(requests: Any) -> dict[str, Any]:
    flash = {f"flash, page {size}": draft_extend.Flash(requests, size) for size in (1, draft_extend.PAGE_SIZE)}
    return {"triton": draft_extend.Triton(requests), **flash}


def noted(backend: Any, steps: dict[str, Step], ways: tuple[str, ...]) -> Found:
    found: Found = {}
    for name, step in steps.items():
        found[name] = {way: getattr(backend, way)(step) for way in ways if not way.endswith("runner")}
        for way in set(ways) & {"runner", "multi-layer runner"}:
            found[name][way] = draft_extend.filled_by_runner(backend, step, multi_layer=way != "runner")
    return found


def whole_lengths_passed(requests: Any) -> Found:
    ways = ("eager", "captured", "replayed", "runner")
    return {name: noted(backend, STEPS, ways) for name, backend in backends(requests).items()}


def attention(requests: Any) -> Found:
    steps = {name: STEPS[name] for name in ("padded", "third layer")} | ACCEPTED
    return {"triton": noted(draft_extend.Triton(requests), steps, ("attended", "attended_in_graph"))}


def compared_with_prefix(requests: Any, steps: dict[str, Step], release: str) -> Found:
    """Through everything that is handed a batch, and in it a prefix to compare the lengths with."""
    ways = ("eager", "runner", "multi-layer runner", *(("captured", "replayed") if since(release, "0.5.13") else ()))
    in_graph = ("computed_in_graph",) if since(release, "0.5.16") else ()
    return {
        name: noted(backend, steps, ways if name == "triton" else (*ways, *in_graph))
        for name, backend in backends(requests).items()
    }


def prefix_passed(requests: Any, release: str) -> Found:
    return compared_with_prefix(requests, PREFIX_ALONE | (ON_DEVICE if since(release, "0.5.16") else {}), release)


def whole_lengths_compared(requests: Any, release: str) -> Found:
    return compared_with_prefix(requests, {name: STEPS[name] for name in ("padded", "front tokens")}, release)


def observe(model: str, release: str) -> Found:
    from sglang_bcg_fixes import plugin
    from sglang_bcg_fixes.planning import plan

    requests, process = draft_extend.load(model), plugin.load()
    decisions = {decision.id: decision for decision in process.plan.decisions}
    found: Found = {
        "states": [process.report.state(EXTENT), process.report.state(PREFIX_ONLY)],
        "changed": changed(),
        "whole": whole_lengths_passed(requests),
        "prefix, off": prefix_passed(requests, release),
    }
    if release in AFFECTED:
        found["attention"] = attention(requests)
        found["positions"] = {name: draft_extend.positions_after_decode(step) for name, step in ACCEPTED.items()}
        process.ledger.undo(EXTENT)
        found |= {"left": changed(), "whole, stock": whole_lengths_passed(requests)}
        found["attention, stock"] = attention(requests)
        process.ledger.apply(decisions[EXTENT].fix)
    process.ledger.apply(plan.with_needed_points(decisions[PREFIX_ONLY], process.source).fix)
    found["prefix, on"] = prefix_passed(requests, release)
    found["whole, on"] = whole_lengths_compared(requests, release)
    return found


def observe_mutants(model: str, release: str) -> Found:
    from sglang_bcg_fixes import plugin
    from sglang_bcg_fixes.planning import plan

    requests, process = draft_extend.load(model), plugin.load()
    decisions = {decision.id: decision for decision in process.plan.decisions}
    found: Found = {}
    for name, (fix, old, new) in MUTANTS.items():
        if RELEASE_OF_MUTANTS[fix] != release:
            continue
        module = importlib.import_module(f"sglang_bcg_fixes.fixes.{fix}")
        text = pathlib.Path(str(module.__file__)).read_text()
        assert text.count(old) == 1, name
        # where another function of the module finds it too
        exec(compile(text.replace(old, new), str(module.__file__), "exec"), vars(module))
        mutant = dataclasses.replace(decisions[fix], fix=vars(module)["FIX"])
        if fix in process.ledger.applied():
            process.ledger.undo(fix)
        process.ledger.apply(plan.with_needed_points(mutant, process.source).fix)
        if fix == EXTENT:
            found[name] = [whole_lengths_passed(requests), attention(requests)]
        else:
            found[name] = [prefix_passed(requests, release), whole_lengths_compared(requests, release)]
        process.ledger.undo(fix)
    return found


def changed() -> list[str]:
    """What carries the mark of one of the two fixes in the classes that they could change."""
    from sglang_bcg_fixes.engine.wrappers import MARK

    modules = [importlib.import_module(name) for name in CHANGEABLE]
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    own = [kind for kind in kinds if kind.__module__ in CHANGEABLE]
    marks = {
        f"{kind.__name__}.{name}": getattr(value, MARK, None) for kind in own for name, value in vars(kind).items()
    }
    return sorted(where for where, mark in marks.items() if mark in (EXTENT, PREFIX_ONLY))


def main(observer: str, release: str, *models: str) -> None:
    from cpu_sglang import one_batch

    one_batch.import_sglang(with_graphs=True)
    for module in CHANGEABLE:
        importlib.import_module(module)
    one_batch.load_plugins()
    found = {model: draft_extend.in_child(globals()[observer], model, release) for model in models}
    print("RESULT", json.dumps(found))


# what has to come out


@functools.cache
def run(observer: str, release: str, root: pathlib.Path, models: tuple[str, ...], reports: str) -> Found:
    """One process for all tests on a release."""
    program = f"from tests.releases.test_draft_extend_extent import main; main({observer!r}, {release!r}, *{models!r})"
    return processes.beside(root, "-c", program, timeout=900, SGLANG_BCG_REPORT_DIR=reports)[0]


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("reports"))


@pytest.fixture(scope="module", params=[(release, model) for release in RELEASES for model in MODELS], ids="-".join)
def on(request: pytest.FixtureRequest, release_root: Root, reports: str) -> tuple[str, Found]:
    """A release, and what was noted there with one of the models."""
    release, model = request.param
    return release, run("observe", release, release_root(release), MODELS, reports)[model]


def misses(release: str, found: Found) -> Iterator[str]:
    """Everything that is not as it has to be, in words."""
    for backend, steps in found.items():
        for name, ways in steps.items():
            step = EVERY_STEP[name]
            for way, one in ways.items():
                for what, expected in expectations(release, backend, step, way, one).items():
                    if one[what] != expected:
                        yield f"{backend}, {name}, {way}: {what} is {one[what]}, not {expected}"
                if one.get("error", 0) > TOLERANCE and rows_are_known(release, step):
                    yield f"{backend}, {name}, {way}: {one['error']} off"


def expectations(release: str, backend: str, step: Step, way: str, one: Found) -> Found:
    pads = 0 if way in ("eager", "attended") else step.captured - len(step.new)
    ones = [1] * pads
    whole = [*wholes(step), *ones]
    # padded rows are full of new tokens and have none of them cached
    prefix = [*(max(length - new, 0) for length, new in zip(wholes(step), step.new, strict=True)), *[0] * pads]
    expected: Found = {}
    if way.endswith("runner"):
        expected |= {"passed": list(step.seq_lens), "seq_lens": whole}
        expected |= {"seq_lens_cpu": whole} if step.on_host else {}
    if "extent" in one:
        expected["extent"] = prefix if backend == "triton" else whole
        if backend != "triton" or rows_are_known(release, step):
            expected["new"] = [*step.new, *[step.width] * pads]
        # before 0.5.13 the flash backend lists its pages at the first replay
        if backend == "triton" or way != "captured" or release not in AFFECTED:
            expected["slots"] = True
            expected |= {"sums": whole} if "sums" in one else {}
    if "rest_is_finite" in one and rows_are_known(release, step):
        expected["rest_is_finite"] = True
    return expected


def wholes(step: Step) -> list[int]:
    """The lengths with their new tokens, whatever was passed."""
    if step.seq_lens != step.prefix:
        return list(step.seq_lens)
    return [length + new for length, new in zip(step.prefix, step.new, strict=True)]


def rows_are_known(release: str, step: Step) -> bool:
    """From 0.5.13 on the Triton backend takes every row for as wide as a step with topk 1 is; not the matter here."""
    return step.width == NEW_TOKENS or release in AFFECTED


@pytest.mark.forms_of("draft_extend_cache_extent", "draft_extend_prefix_only")
def test_only_what_is_needed_is_changed(on: tuple[str, Found]) -> None:
    release, found = on
    affected = release in AFFECTED
    assert found["states"] == ["applied" if affected else "not needed", "not needed"]
    assert found["changed"] == (PATCHED if affected else [])
    assert found.get("left", []) == []


@pytest.mark.forms_of("draft_extend_cache_extent", "draft_extend_prefix_only")
def test_whole_lengths_are_attended_to_once(on: tuple[str, Found]) -> None:
    release, found = on
    assert list(misses(release, found["whole"])) == []
    assert list(misses(release, found.get("attention", {}))) == []


@pytest.mark.forms_of("draft_extend_cache_extent", "draft_extend_prefix_only")
def test_a_prefix_alone_gets_its_new_tokens_where_that_is_asked_for(on: tuple[str, Found]) -> None:
    release, found = on
    assert list(misses(release, found["prefix, on"])) == []
    assert list(misses(release, found["whole, on"])) == []
    # without the flag it is as short as it was passed; only the triton backend's eager step goes by the prefix itself
    for backend, steps in found["prefix, off"].items():
        for name, ways in steps.items():
            for way, one in ways.items():
                right = not list(misses(release, {backend: {name: {way: one}}}))
                assert right is (backend == "triton" and way == "eager"), f"{backend}, {name}, {way}: {one}"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("release", AFFECTED)
def test_without_the_fix_the_triton_backend_counts_twice(
    release: str, model: str, release_root: Root, reports: str
) -> None:
    found = run("observe", release, release_root(release), MODELS, reports)[model]
    stock, mended = found["whole, stock"], found["whole"]
    for name, ways in stock["triton"].items():
        twice = [*STEPS[name].seq_lens, *[1] * (STEPS[name].captured - len(STEPS[name].new))]
        assert [ways[way]["extent"] for way in ("captured", "replayed", "runner")] == [twice] * 3, name
    for name, ways in found["attention, stock"]["triton"].items():
        assert ways["attended_in_graph"]["error"] > 0.1, name
        if name in ACCEPTED:
            # the lengths do hold what was accepted
            begins = zip(ACCEPTED[name].prefix, ACCEPTED[name].seq_lens, strict=True)
            assert found["positions"][name] == [position for begin, end in begins for position in range(begin, end)]
            assert ways["attended"]["error"] > 0.1 and ways["attended_in_graph"]["new"] == [NEW_TOKENS] * 4, name
        else:
            # it was right, and is what it was to the last bit
            assert ways["attended"] == found["attention"]["triton"][name]["attended"], name
    for backend in ("flash, page 1", "flash, page 16"):
        assert stock[backend] == mended[backend]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_does_not_pass(mutant: str, release_root: Root, reports: str) -> None:
    release = RELEASE_OF_MUTANTS[MUTANTS[mutant][0]]
    found = run("observe_mutants", release, release_root(release), MODELS[:1], reports)[MODELS[0]]
    assert [miss for one in found[mutant] for miss in misses(release, one)]
