# SPDX-License-Identifier: Apache-2.0
"""Modules found to handle states without a break; tests/releases/test_mixers.py asks real models."""

from __future__ import annotations

import functools
import logging
import sys
import types
from typing import Any

import pytest
from torch import nn

from sglang_bcg_fixes.engine import wrappers
from sglang_bcg_fixes.fixes import unbroken_mixer_captured as fix
from sglang_bcg_fixes.planning.registry import declared_in

# as SGLang's `eager_on_graph` makes them: known by the names of the function and of its file
SCOPE: dict[str, Any] = {}
exec(compile("def wrapper(*args): ...", "sglang/breakable_cuda_graph.py", "exec"), SCOPE)
broken_function = SCOPE["wrapper"]


class LinearBackend:
    def forward(self) -> None: ...


class BrokenBackend(LinearBackend):
    def forward(self) -> None: ...


def of_fix(function: Any, fix_id: str, inner: Any = None) -> Any:
    """Mark it as a fix's wrapper, which goes on to call what is inside."""
    setattr(function, wrappers.MARK, fix_id)
    setattr(function, wrappers.INNER, inner)
    wrappers._made.add(function)
    return function


of_fix(BrokenBackend.forward, "ssm_mixer_captured")


def conv_states(pool: Any) -> Any:
    return pool.mamba2_layer_cache(0)


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Plain(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class ReadsStates(nn.Module):
    def forward(self, pool: Any) -> Any:
        return pool.mamba2_layer_cache(0)


class Inherits(ReadsStates):
    pass


class ThroughAFunction(nn.Module):
    def forward(self, pool: Any) -> Any:
        return conv_states(pool)


class Inside(nn.Module):
    @decorated
    def forward(self, pool: Any) -> Any:
        return [pool.conv_state_metadata(layer) for layer in range(2)]


class Chooses(nn.Module):
    """An indexer like DeepSeek-V3.2's."""

    def forward(self, backend: Any) -> Any:
        return backend.get_indexer_metadata(0).lengths


class ChoosesInABreak(Chooses):
    """The same indexer in later releases, which import the break where they call it."""

    def forward(self, backend: Any) -> Any:
        return backend.is_in_breakable_cuda_graph() or super().forward(backend)


class CallsTheBackend(nn.Module):
    def forward(self, backend: Any) -> Any:
        return backend.linear_attn_backend.forward(self)


class BypassesTheBackend(nn.Module):
    def forward(self, backend: Any) -> Any:
        return backend.linear_attn_backend.forward_metadata, backend.linear_attn_backend.forward(self)


class BreaksByItself(ReadsStates):
    def enter(self) -> Any:
        return broken_function(self)


class HasABreak(ReadsStates):
    inner = staticmethod(broken_function)

    def enter(self) -> Any:
        return self.inner()


class HasABreakInside(ReadsStates):
    """Another package stands round it, with nothing that says so."""

    inner = staticmethod(decorated(decorated(broken_function)))

    def enter(self) -> Any:
        return self.inner()


class MakesABreak(nn.Module):
    """A layer like Inkling's: the break is its attribute, and the states are read below it."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer_in_a_break = broken_function
        self.mixer = ReadsStates()


class AsksForAnOption(nn.Module):
    """A layer like Qwen3.5's, whose linear attention is computed by a module below it."""

    def __init__(self, below: nn.Module) -> None:
        super().__init__()
        self.attn = below

    def forward(self, options: Any, x: Any) -> Any:
        return self.attn(x) if options.linear_attn_backend == "triton" else x


class AttentionWithABreak(Plain):
    """Attention like RadixAttention, which keeps no states."""

    inner = staticmethod(broken_function)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


@pytest.fixture(autouse=True)
def radix_linear_attention(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """SGLang's module without SGLang."""
    name = "sglang.srt.layers.radix_linear_attention"
    module = types.ModuleType(name)
    vars(module)["RadixLinearAttention"] = type("RadixLinearAttention", (nn.Module,), {"__module__": name})
    parts = name.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, name, module)
    found: type[nn.Module] = vars(module)["RadixLinearAttention"]
    return found


def unbroken(module: nn.Module, backend: Any = None) -> list[str]:
    return list(fix.unbroken_mixers(nn.ModuleDict({"layers": nn.ModuleList([module])}), backend))


@pytest.mark.parametrize(
    "kind",
    [ReadsStates, Inherits, ThroughAFunction, Inside, CallsTheBackend, BypassesTheBackend, Chooses],
    ids=lambda k: k.__name__,
)
def test_what_handles_states_without_a_break_is_found(kind: type[nn.Module]) -> None:
    assert unbroken(kind(), LinearBackend()) == [f"layers.0 ({kind.__name__})"]


def test_so_is_linear_attention(radix_linear_attention: type[nn.Module]) -> None:
    assert unbroken(radix_linear_attention()) == ["layers.0 (RadixLinearAttention)"]


@pytest.mark.parametrize(
    "kind", [Plain, BreaksByItself, HasABreak, HasABreakInside, MakesABreak, ChoosesInABreak], ids=lambda k: k.__name__
)
def test_what_has_a_break_is_not(kind: type[nn.Module]) -> None:
    assert unbroken(kind(), LinearBackend()) == []


def test_a_break_in_the_backend_counts_for_those_who_call_it_and_do_nothing_else() -> None:
    assert unbroken(CallsTheBackend(), BrokenBackend()) == []
    assert unbroken(BypassesTheBackend(), BrokenBackend()) == ["layers.0 (BypassesTheBackend)"]


def test_a_break_that_another_fix_stands_round_still_counts() -> None:
    class Watched(LinearBackend):
        def forward(self) -> None: ...

    of_fix(Watched.forward, "another", BrokenBackend.forward)
    assert unbroken(CallsTheBackend(), Watched()) == []


def test_the_name_of_an_option_is_no_state_where_a_module_below_handles_them_in_a_break() -> None:
    assert unbroken(AsksForAnOption(HasABreak()), LinearBackend()) == []


def test_a_break_below_of_what_keeps_no_states_explains_nothing() -> None:
    # as in Falcon-H1's layer, which calls the backend beside its attention
    assert unbroken(AsksForAnOption(AttentionWithABreak())) == ["layers.0 (AsksForAnOption)"]
    assert unbroken(AsksForAnOption(Plain())) == ["layers.0 (AsksForAnOption)"]


def test_states_below_without_a_break_are_found_with_the_layer_that_asks() -> None:
    assert unbroken(AsksForAnOption(ReadsStates())) == ["layers.0 (AsksForAnOption)", "layers.0.attn (ReadsStates)"]


def test_a_break_counts_for_nothing_beside_it() -> None:
    layers = nn.ModuleList([*(Plain() for _ in range(10)), ReadsStates()])
    layers[1] = MakesABreak()
    assert list(fix.unbroken_mixers(layers, None)) == ["10 (ReadsStates)"]


def test_another_fix_is_no_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokenBackend.forward, wrappers.MARK, "somebody_elses")
    assert unbroken(CallsTheBackend(), BrokenBackend()) == ["layers.0 (CallsTheBackend)"]


class BreakableCudaGraphBackend: ...


class FullCudaGraphBackend: ...


def runner(model: nn.Module, **attributes: Any) -> types.SimpleNamespace:
    attention = types.SimpleNamespace(linear_attn_backend=LinearBackend())
    model_runner = types.SimpleNamespace(model=model, attn_backend=attention)
    return types.SimpleNamespace(model_runner=model_runner, captures=0, **attributes)


def serve(runner: types.SimpleNamespace) -> bool:
    def capture(self: Any) -> None:
        self.captures += 1

    fix.unless_refused(capture, runner)
    fix.unless_refused(capture, runner)
    return fix.never_if_refused(lambda self, batch: True, runner, "batch")


@pytest.mark.parametrize("attributes", [{}, {"backend": BreakableCudaGraphBackend()}])
def test_a_refused_model_is_never_captured_and_never_replayed(
    caplog: pytest.LogCaptureFixture, attributes: dict[str, Any]
) -> None:
    refused = runner(nn.ModuleList([ReadsStates(), Inherits()]), **attributes)
    with caplog.at_level(logging.WARNING):
        assert serve(refused) is False and refused.captures == 0
    (message,) = caplog.messages
    assert "ModuleList, prefill runs eagerly: 0 (ReadsStates) (and 1 more) handles recurrent states" in message
    assert "--cuda-graph-backend-prefill disabled" in message and f"{declared_in(fix).flag}=off captures it" in message


@pytest.mark.parametrize(
    "accepted",
    [runner(Plain()), runner(ReadsStates(), backend=FullCudaGraphBackend())],
    ids=["plain", "no breaks at all"],
)
def test_the_rest_is_captured_as_before(caplog: pytest.LogCaptureFixture, accepted: types.SimpleNamespace) -> None:
    assert serve(accepted) is True and accepted.captures == 2
    assert caplog.messages == []
