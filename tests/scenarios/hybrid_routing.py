# SPDX-License-Identifier: Apache-2.0
"""The attention that the real hybrid backend sends each kind of layer to, with the fix and without it."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from cpu_sglang import stand_ins
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.fixes import layers_routed_by_id as fix
from sglang_bcg_fixes.planning.registry import declared_in
from tests.scenarios import named, plugins

FIX = declared_in(fix)
# whose layer, its id, where it belongs
Rows = dict[str, tuple[str, int, str]]
RUNNER = "sglang.srt.model_executor.model_runner"
MIXERS = {
    "bailing": ("sglang.srt.models.bailing_moe_linear", "BailingMoELinearAttention"),
    "minicpm": ("sglang.srt.models.minicpm", "MiniCPMLightningMixer"),
}
INKLING = "sglang.srt.layers.attention.linear.inkling_sconv_backend"
POINTS = ("forward", "forward_decode", "forward_extend", "_is_full_attn")


def routing(target_rows: str, draft_rows: str, builds: str, has_inkling: str, stand_in_names: str) -> dict[str, Any]:
    stand_ins.install()
    sys.modules.update({name: mock.MagicMock() for name in json.loads(stand_in_names)})
    plugins.load()
    process = plugin.load()
    states = [process.report.state(FIX.id)]
    found: dict[str, Any] = {"early": sorted({RUNNER, fix.MODULE} & set(sys.modules))}
    # as a server does: the runner first, the models and with them the backend when a model is loaded
    importlib.import_module(RUNNER)
    importlib.import_module(fix.MODULE)
    found["states"] = [*states, process.report.state(FIX.id)]

    layers = Layers()
    arms = [Arm(layers, json.loads(target_rows), False, [1, 3]), Arm(layers, json.loads(draft_rows), True, [0])]
    target, draft = arms
    lists = [arm.backend.full_attn_layers for arm in arms]
    found["patched"] = table(arms)
    found["marked"] = sorted(
        name for arm in arms for name, (_, layer) in arm.layers.items() if getattr(layer, fix.MARK, False)
    )
    found["odd"] = target.odd_calls()
    linear_module = importlib.import_module("sglang.srt.layers.radix_linear_attention")
    changes: dict[str, tuple[Any, str, Any]] = {
        "a target's RadixAttention is full": (target.backend.linear_attn_backend, "is_draft_worker", True),
        "drafts do not count": (draft.backend.linear_attn_backend, "is_draft_worker", False),
        "marks do not count": (fix, "MARK", "_nobody_has_this"),
        "the kind does not count": (linear_module, "RadixLinearAttention", layers.full_child),
    }
    found["no guards"] = {name: table_with(arms, *change) for name, change in changes.items()}
    if json.loads(has_inkling):
        found["inkling"] = inkling(layers)

    found["wrapped"] = wrapped(layers.hybrid)
    applied = next(decision.subject for decision in process.plan.decisions if decision.id == FIX.id)
    process.ledger.undo(FIX.id)
    found |= {
        "wrapped after undo": wrapped(layers.hybrid),
        "unpatched": table(arms),
        "odd unpatched": target.odd_calls(),
    }
    found["lists kept"] = all(arm.backend.full_attn_layers is ids for arm, ids in zip(arms, lists, strict=True))

    found["builds"] = []
    for body in json.loads(builds):
        before = layers.hybrid._is_full_attn
        layers.hybrid._is_full_attn = layers.method(body)
        # the marks of before are those that such a build sets itself, if it looks at them
        unpatched = table(arms)
        process.ledger.apply(applied)
        patched = table(arms)
        process.ledger.undo(FIX.id)
        layers.hybrid._is_full_attn = before
        found["builds"].append([unpatched, patched])
    return found


class Layers:
    """Layers of each kind without weights, and a hybrid backend whose children say who they are."""

    def __init__(self) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

        self.backends: Any = importlib.import_module(fix.MODULE)
        self.hybrid: Any = self.backends.HybridLinearAttnBackend
        self.full: Any = RadixAttention
        self.linear: Any = RadixLinearAttention
        self.kinds = {
            "linear": RadixLinearAttention,
            "plain": RadixAttention,
            "derived": type("Derived", (RadixAttention,), {}),
        }

        base: Any = self.backends.MambaAttnBackendBase

        class Child(base):
            # only the linear one is made by its constructor
            name = "linear"

            def forward_decode(self, *args: Any, **kwargs: Any) -> str:
                return self.name

            forward_extend = forward_decode

        class FullChild(Child):
            name = "full"

        self.linear_child, self.full_child = Child, FullChild
        self.settings = types.SimpleNamespace(speculative_eagle_topk=0, enable_unified_memory=False, enable_mis=False)
        for name in ("get_spec", "get_memory"):
            if hasattr(self.backends, name):
                setattr(self.backends, name, lambda: self.settings)

    def of(self, kind: str, layer_id: int) -> Any:
        cls = self.kinds.get(kind, self.full)
        return bare(cls, layer_id=layer_id, num_v_heads=4, head_v_dim=5, tp_q_head_num=2, v_head_dim=3)

    def backend_for(self, model: torch.nn.Module, is_draft: bool, ids: list[int]) -> Any:
        runner = types.SimpleNamespace(
            device="cpu",
            server_args=self.settings,
            req_to_token_pool=None,
            token_to_kv_pool=None,
            is_draft_worker=is_draft,
            model=model,
            spec_algorithm=None,
        )
        backend = self.hybrid.__new__(self.hybrid)
        backend.full_attn_layers = ids
        backend.full_attn_backend = self.full_child.__new__(self.full_child)
        backend.linear_attn_backend = self.linear_child(runner)
        return backend

    def method(self, body: str) -> Any:
        """The method of a build between releases."""
        space = {"RadixAttention": self.full, "RadixLinearAttention": self.linear}
        exec(f"def _is_full_attn(self, layer, layer_id=None):{body}", space)
        return space["_is_full_attn"]


class Arm:
    """A model of such layers, and its backend."""

    def __init__(self, layers: Layers, rows: Rows, is_draft: bool, ids: list[int]) -> None:
        model = torch.nn.ModuleList()
        self.bare_layer = bare(layers.full)
        self.layers: dict[str, tuple[str, Any]] = {}
        for name, (kind, layer_id, _) in rows.items():
            layer = layers.of(kind, layer_id)
            if kind in MIXERS:
                module, mixer = MIXERS[kind]
                owner = getattr(importlib.import_module(module), mixer, None)
                if owner is None:
                    continue
                model.append(bare(owner, attn=layer))
            else:
                model.append(layer)
            self.layers[name] = (kind, layer)
        self.backend = layers.backend_for(model, is_draft, ids)

    def routes(self, kind: str, layer: Any) -> str | list[str]:
        backend, modes = self.backend, forward_modes()
        q, mixed = torch.zeros(2, 6), torch.zeros(2, 9)

        def forward(mode: Any) -> Any:
            # as RadixAttention.forward calls it, and as RadixLinearAttention's operation does
            if kind != "linear":
                return backend.forward(q, q, q, layer, batch(mode), True, mixed_qkv=mixed)
            return backend.forward(layer=layer, forward_batch=batch(mode), mixed_qkv=mixed, a=None, b=None, q=q)

        found = {
            backend.forward_decode(layer, batch(modes.DECODE), True, q, q, q),
            backend.forward_extend(layer, forward_batch=batch(modes.EXTEND), mixed_qkv=mixed),
            forward(modes.DECODE),
            forward(modes.EXTEND),
            {(2, 6): "full", (2, 4, 5): "linear"}[tuple(forward(modes.IDLE).shape)],
        }
        return found.pop() if len(found) == 1 else sorted(found)

    def odd_calls(self) -> list[str]:
        """Call with a layer that only has an id, with one that has none, and with children that fail."""
        backend, modes = self.backend, forward_modes()
        results = []
        calls: tuple[Callable[[], Any], ...] = (
            lambda: backend.forward_decode(None, batch(modes.DECODE), layer_id=1),
            lambda: backend.forward_extend(None, batch(modes.EXTEND), layer_id=2),
            lambda: backend.forward(forward_batch=batch(modes.DECODE), layer_id=3),
            lambda: backend.forward(forward_batch=batch(modes.DECODE)),
            lambda: backend.forward_decode(self.bare_layer, batch(modes.DECODE)),
        )
        for call in calls:
            try:
                results.append(call())
            except Exception as error:
                results.append(f"{type(error).__name__}: {error}")
        children = backend.full_attn_backend, backend.linear_attn_backend
        for child in children:
            child.forward_decode = fails
        for _, layer in self.layers.values():
            try:
                backend.forward_decode(layer, batch(modes.DECODE))
            except ZeroDivisionError:
                results.append("failed")
        for child in children:
            del child.forward_decode
        return results


def bare(kind: Any, **attributes: Any) -> Any:
    """A module that its constructor has not seen."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def batch(mode: Any) -> Any:
    return types.SimpleNamespace(forward_mode=mode, logical_forward_mode=mode)


def forward_modes() -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode


def fails(*args: Any, **kwargs: Any) -> None:
    raise ZeroDivisionError


def table(arms: Sequence[Arm]) -> dict[str, str | list[str]]:
    for arm in arms:
        for _, layer in arm.layers.values():
            vars(layer).pop(fix.DECIDED, None)
    return {name: arm.routes(*row) for arm in arms for name, row in arm.layers.items()}


def table_with(arms: Sequence[Arm], owner: Any, name: str, value: Any) -> dict[str, str | list[str]]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        return table(arms)
    finally:
        setattr(owner, name, before)


def inkling(layers: Layers) -> list[bool]:
    module = importlib.import_module(INKLING)
    cls = module.InklingShortConvHybridAttnBackend
    own = vars(cls)["_is_full_attn"]
    backend = cls.__new__(cls)
    return [
        own.__module__ == cls.__module__,
        hasattr(own, "__bcg_fix__"),
        backend._is_full_attn(layers.of("linear", 0)),
        backend._is_full_attn(layers.of("plain", 7)),
    ]


def wrapped(hybrid: Any) -> list[str]:
    return [name for name in POINTS if hasattr(vars(hybrid).get(name), "__bcg_fix__")]


if __name__ == "__main__":
    named.run(globals())
