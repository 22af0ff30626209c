# SPDX-License-Identifier: Apache-2.0
"""Every attribute of every module of a release, before the plugin is loaded, while it is, and after it is taken off."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from cpu_sglang import stand_ins
from sglang_bcg_fixes.engine import graph_break
from tests.scenarios import named

Attributes = dict[str, Any]
MODULES = ("sglang.srt.layers.radix_linear_attention", "sglang.srt.layers.radix_attention")


def whole_cycle() -> dict[str, Any]:
    names = import_release()
    before, modules = attributes(names), set(sys.modules)
    load_plugins()
    after = attributes(names)
    imported = {name.partition(".")[0] for name in set(sys.modules) - modules}
    from sglang_bcg_fixes import plugin

    process = plugin.load()
    applied = process.ledger.applied()
    wrong = {name: process.ledger.read_back(name) for name in applied}
    changes = {**process.ledger._changes, **process.watches._changes}
    places = {change.slot.where for name in changes for change in changes[name]}
    for ledger in (process.watches, process.ledger):
        for name in reversed(ledger.applied()):
            ledger.undo(name)
    return {
        "changed": differences(before, after),
        "unaccounted for": sorted(set(differences(before, after)) - places),
        "applied": applied,
        "imported": sorted(imported & {"sglang", "torch", "transformers", "triton"}),
        "state": process.report.state("linear_attention_captured"),
        "wrong": wrong,
        "left_after_undo": differences(before, attributes(names)),
        **rebuilt_breaks(before),
    }


def loaded_by_sglang() -> dict[str, list[str]]:
    names = import_release()
    before = attributes(names)
    load_plugins()
    return {"changed": differences(before, attributes(names))}


def load_plugins() -> None:
    from sglang.srt import plugins

    plugins.load_plugins()


def import_release() -> list[str]:
    """The modules of SGLang that are there without the plugin."""
    stand_ins.install()
    for module in (*MODULES, "sglang.srt.plugins"):
        importlib.import_module(module)
    for module in ("breakable_cuda_graph", "context"):
        graph_break.load(module)
    # the plugin framework notes that it has run
    return [name for name in sys.modules if name.startswith("sglang.") and "srt.plugins" not in name]


def attributes(names: list[str]) -> Attributes:
    """Everything in these modules, and in the classes that they define, by its place."""
    found = {}
    for name in names:
        for key, value in list(vars(sys.modules[name]).items()):
            found[f"{name}:{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}:{key}.{inner}": item for inner, item in list(vars(value).items())})
    return found


def differences(before: Attributes, after: Attributes) -> list[str]:
    return sorted(key for key in before.keys() | after.keys() if before.get(key) is not after.get(key))


def rebuilt_breaks(before: Attributes) -> dict[str, Any]:
    """The release's graph breaks, each in the form that its own decorator gives it."""
    calls: list[Any] = []

    def body(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(original)
        return original(*args, **kwargs)

    breaks = {}
    for place, value in before.items():
        if not graph_break.is_product(value):
            continue
        rebuilt = graph_break.rebuild(value, body)
        old, new = graph_break.closure_of(value), graph_break.closure_of(rebuilt)
        assert type(rebuilt) is type(value) and old.keys() == new.keys(), place
        assert old.get("capture_stub") is new.get("capture_stub"), place
        assert new["inner"] is not old["inner"] and new["inner"].__name__ == old["inner"].__name__, place
        breaks[place] = old.get("capture_stub") is not None
    rebuilt = graph_break.rebuild(graph_break.load("breakable_cuda_graph").break_graph, body)
    rebuilt()
    if hasattr(rebuilt, "run_eager"):
        rebuilt.run_eager()
    return {"breaks": breaks, "has_run_eager": hasattr(rebuilt, "run_eager"), "calls": len(calls)}


if __name__ == "__main__":
    named.run(globals())
