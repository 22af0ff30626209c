"""The padded rows of attention's outputs after a real replay, where uninitialised memory is NaN."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

ATTENTION, LINEAR = "attention_tail_uninitialised", "linear_tail_uninitialised"
# release, and which of the two fixes it needs; one for each form of the patched breaks, and where each is mended
RELEASES = {
    "0.5.11": (ATTENTION,),
    "0.5.12.post1": (ATTENTION,),
    "0.5.13.post1": (ATTENTION, LINEAR),
    "0.5.14": (ATTENTION, LINEAR),
    "0.5.15.post1": (ATTENTION, LINEAR),
    "0.5.16": (LINEAR,),
    "0.5.18": (LINEAR,),
    "0.5.19": (),
}
CODE = """
import hashlib, json, sys
from cpu_sglang import one_batch, prefill
one_batch.import_sglang(with_graphs=True)
from sglang_bcg_fixes.engine import graph_break
context = graph_break.load("context")
scope, inside_another = context.enable_breakable_cuda_graph, []

def watched_scope():
    inside_another.append(context.is_in_breakable_cuda_graph())
    return scope()

for place in (context, sys.modules[context.__package__]):
    place.enable_breakable_cuda_graph = watched_scope
one_batch.load_plugins()
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang_bcg_fixes.plugin import load

PROMPT, BUCKET = list(range(5, 16)), 16
loaded = one_batch.load("qwen3next")
one_batch.randomize(loaded.model_runner.model)
eager = one_batch.generate(loaded, [PROMPT], 3)[1]
outputs = []
for module in loaded.model_runner.model.modules():
    if isinstance(module, (RadixAttention, RadixLinearAttention)):
        kind = type(module).__name__
        module.register_forward_hook(lambda *call, kind=kind: outputs.append((kind, call[2])))

def rows_of(kind, output):
    return output[0] if kind == "RadixLinearAttention" else output

def kind_of_tail(tail):
    return "nan" if tail.isnan().all() else "zero" if (tail == 0).all() else "other"

def capture_and_replay():
    outputs.clear()
    prefill.capture_prefill(loaded.model_runner, (BUCKET,))
    # the runs that warm up come first, and the last three layers are those of the graph
    captured = outputs[-3:]
    whole = all(bool(rows_of(*item).flatten(1).any(1).all()) for item in captured)
    replayed = one_batch.generate(loaded, [PROMPT], 3)[1]
    rows = [(kind, rows_of(kind, output)) for kind, output in captured]
    return {
        "every row is real while capturing": whole,
        "equal": bool((replayed == eager).all()),
        # the first of its kind: what follows a layer with NaN in its tail may write NaN into its own
        "tails": {kind: kind_of_tail(tail[len(PROMPT):]) for kind, tail in reversed(rows)},
        "real": [hashlib.sha256(real[:len(PROMPT)].numpy().tobytes()).hexdigest() for _, real in rows],
    }

process = load()
applied = [name for name in process.ledger.applied() if name.endswith("_tail_uninitialised")]
places = [c.slot.where for name in applied for c in process.ledger._changes[name]]
with_fixes = capture_and_replay()
for name in applied:
    process.ledger.undo(name)
found = {"applied": applied, "places": places, "with": with_fixes, "without": capture_and_replay()}
print("RESULT", json.dumps({**found, "scopes inside another": inside_another}))
"""


@pytest.mark.parametrize("release", RELEASES)
def test_padded_rows_are_zero_and_real_rows_as_before(
    release_root: Callable[[str], pathlib.Path], release: str
) -> None:
    # what is undone must be outermost, and latent attention's tail has a test of its own
    others = {f"SGLANG_BCG_FIX_{name}": "off" for name in ("BREAK_POSITIONS_PADDED", "FUSED_MLA_TAIL_UNINITIALISED")}
    # the scope is replaced before anything has imported it by name
    found, _ = processes.beside(release_root(release), "-c", CODE, cold=True, **others)
    needed = RELEASES[release]
    assert found["applied"] == list(needed)
    # nothing but the breaks: decode, eager and piecewise runs never call them
    assert len(found["places"]) == len(needed) and all("attention_with_output" in place for place in found["places"])
    assert all(place.partition(":")[2].startswith(("bcg_", "breakable_")) for place in found["places"])
    # why bcg_flag_not_restored is off unless asked for: scopes to capture and to replay, and never one in another
    assert len(found["scopes inside another"]) >= 4 and not any(found["scopes inside another"])
    for arm in ("with", "without"):
        assert found[arm]["equal"] and found[arm]["every row is real while capturing"], found
    assert found["with"]["real"] == found["without"]["real"]
    assert found["with"]["tails"] == {"RadixAttention": "zero", "RadixLinearAttention": "zero"}
    assert found["without"]["tails"] == {
        "RadixAttention": "nan" if ATTENTION in needed else "zero",
        "RadixLinearAttention": "nan" if LINEAR in needed else "zero",
    }
