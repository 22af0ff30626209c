# SPDX-License-Identifier: Apache-2.0
"""The probe of the first fix on drifted sources, and its body where it could do harm."""

from __future__ import annotations

import pathlib
import sys
import types
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.fixes import linear_attention_captured as fix
from sglang_bcg_fixes.planning.plan import ask
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import wheels
from tests.fixes import alone
from tests.mutated import rewritten
from tests.wheels import NEWEST, RELEASES

FIX = declared_in(fix)
FILE = "sglang/srt/layers/radix_linear_attention.py"
OLD_GRAPHS = "sglang/srt/model_executor/breakable_cuda_graph/breakable_cuda_graph.py"


MUTANTS = {
    "the operation is renamed": (FILE, fix.OPERATION, "linear_attention_operation"),
    "the class is renamed": (FILE, "RadixLinearAttention(", "RadixLinear("),
    "forward is renamed": (FILE, "def forward(", "def apply("),
    "forward has one more statement": (FILE, "seq_len = mixed_qkv.shape[0]", "seq_len = mixed_qkv.shape[0]; x = 1"),
    "the operation has one more statement": (FILE, "context = get_forward_context()", "context = f(); x = 1"),
    "the operation has another decorator": (FILE, '@register_custom_op(mutates_args=["output"])', "@register()"),
    "the break decorator does something new": (OLD_GRAPHS, "capture._end_current_segment()", "capture.stop()"),
    "the break decorator is renamed": (OLD_GRAPHS, "def eager_on_graph", "def break_here"),
}
FIXED_MUTANTS = {
    "the break is disabled": ("0.5.13", FILE, "eager_on_graph(True)", "eager_on_graph(False)"),
    "the break is renamed": ("0.5.16", FILE, f"bcg_{fix.OPERATION}(", "other_break("),
    "the break has a new argument": ("0.5.20", FILE, "eager_on_graph(\n    True,", "eager_on_graph(\n    True, 1,"),
    "the break is no longer one": (NEWEST, FILE, "@eager_on_graph(", "@not_a_break("),
    "forward has one more statement": (NEWEST, FILE, "is_extend = ", "x = 1; is_extend = "),
}


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12", "0.5.12.post1"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_drifted_source_is_unknown(release: str, mutant: str) -> None:
    finding = alone.asked(FIX, release, *MUTANTS[mutant])
    assert finding.verdict is Verdict.UNKNOWN, finding


@pytest.mark.parametrize("mutant", FIXED_MUTANTS)
def test_a_mended_source_that_drifts_is_unknown(mutant: str) -> None:
    finding = alone.asked(FIX, *FIXED_MUTANTS[mutant])
    assert finding.verdict is Verdict.UNKNOWN, finding


@pytest.mark.parametrize("release", RELEASES)
def test_a_comment_is_no_drift(release: str) -> None:
    root = wheels.unpacked(release)
    plain = ask(FIX, Source(Folder(root)))
    changed = ask(FIX, Source(rewritten(root, FILE, "    def forward(", "    # a comment\n    def forward(")))
    assert plain.verdict is changed.verdict is not Verdict.UNKNOWN
    assert [e.form for e in plain.evidence] == [e.form for e in changed.evidence]


def test_a_release_without_breakable_graphs_is_absent(tmp_path: pathlib.Path) -> None:
    assert ask(FIX, Source(Folder(tmp_path))).verdict is Verdict.ABSENT


@pytest.fixture
def forward_context(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """SGLang's forward context with a batch in it, without SGLang."""
    batch = types.SimpleNamespace(num_token_non_padded_cpu=None)
    name = "sglang.srt.compilation.piecewise_context_manager"
    module = types.ModuleType(name)
    module.get_forward_context = lambda: types.SimpleNamespace(forward_batch=batch)  # type: ignore[attr-defined]
    parents = ("sglang", "sglang.srt", "sglang.srt.compilation")
    for parent in parents:
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    return batch


# None is what the breakable runner has while it captures: every row is real then
@pytest.mark.parametrize(("real", "rows"), [(3, 3), (5, 5), (0, 0), (None, 5)])
def test_the_padded_tail_is_zero_and_the_real_rows_are_not(
    forward_context: types.SimpleNamespace, real: int | None, rows: int
) -> None:
    forward_context.num_token_non_padded_cpu = real
    output = torch.full((1, 5, 2, 2), torch.nan)

    def original(mixed_qkv: Any, a: Any, b: Any, output: torch.Tensor, layer_id: int) -> None:
        output[:, :real].fill_(layer_id)

    unread = torch.empty(0)
    fix.run_and_zero_tail(original, unread, unread, unread, output, 7)
    assert (output[:, :rows] == 7).all() and (output[:, rows:] == 0).all()


def test_torch_compile_still_traces_through_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled prefill graphs use the same operation: what stands in its place must not break the trace."""
    calls: list[Any] = []
    context = types.SimpleNamespace(is_in_breakable_cuda_graph=lambda: False)
    monkeypatch.setattr(graph_break, "load", lambda name: context)
    monkeypatch.setattr(graph_break, "decorate", lambda inner, stub: calls.append)

    @torch.library.custom_op("bcg_fixes_test::operation", mutates_args=["output"])
    def operation(x: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(x * 2)

    dispatch = graph_break.rebuild(torch.ops.bcg_fixes_test.operation, lambda original, x, output: None)

    def model(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        dispatch(x, output)
        return output + 1

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.arange(4.0)
    assert torch.equal(compiled(x), x * 2 + 1) and calls == []
