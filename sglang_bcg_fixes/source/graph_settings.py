# SPDX-License-Identifier: Apache-2.0
"""The JSON of --cuda-graph-config: settings of CUDA graphs by phase. Each wins over the flags that set the same."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_bcg_fixes.source.options import word_of
from sglang_bcg_fixes.source.tree import Source

OPTION = "--cuda-graph-config"
MODULE = "sglang.srt.model_executor.cuda_graph_config"
PHASES = ("decode", "prefill")

Settings = Mapping[str, Mapping[str, Any]]


def read(source: Source, text: str) -> Settings:
    """The settings of each phase. What SGLang refuses is refused, a backend already here."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{OPTION} must be JSON: {error}") from error
    check_object(OPTION, found)
    keys, backends = (allowed(source, f"ALLOWED_{name}_PER_PHASE") for name in ("KEYS", "BACKENDS"))
    for phase, settings in found.items():
        if phase not in PHASES:
            raise argparse.ArgumentTypeError(f"{OPTION}: unknown phase '{phase}', expected one of {PHASES}")
        check_object(f"{OPTION}['{phase}']", settings)
        known = keys.get(phase, tuple(settings))
        for key in settings:
            if key not in known:
                raise argparse.ArgumentTypeError(f"{OPTION}['{phase}']: unknown key '{key}', expected one of {known}")
        backend = settings.get("backend")
        if "backend" in settings and backend not in backends.get(phase, (backend,)):
            raise argparse.ArgumentTypeError(
                f"{OPTION}[{phase}].backend={backend!r} not allowed; allowed: {backends[phase]}"
            )
    return dict(found)


def check_object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{name} must be a JSON object, got {type(value).__name__}")


def allowed(source: Source, name: str) -> dict[str, tuple[str, ...]]:
    """The words of a table by phase; none where this SGLang has it elsewhere."""
    found = source.find(f"{MODULE}:{name}")
    table = getattr(found.node, "value", None) if found else None
    if not isinstance(table, ast.Dict):
        return {}
    return {
        named(phase): tuple(map(named, words.elts))
        for phase, words in zip(table.keys, table.values, strict=True)
        if phase is not None and isinstance(words, ast.Tuple)
    }


def named(node: ast.expr) -> str:
    """A word, or that for which a name such as Backend.FULL stands."""
    return word_of(node) or ast.unparse(node).rpartition(".")[2].lower()


def flag_of(phase: str, key: str) -> str:
    return f"--cuda-graph-{key.replace('_', '-')}-{phase}"


def apart(source: Source, options: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """The options with these settings as flags of their own, in the place of those that they win over."""
    if not options.get(OPTION):
        return options
    found = {name: words for name, words in options.items() if name != OPTION}
    for phase, settings in read(source, options[OPTION][0]).items():
        for key, value in settings.items():
            flag = flag_of(phase, key)
            found = {name: words for name, words in found.items() if source.value_of(name) != source.value_of(flag)}
            if value is not None:
                found[flag] = [*map(str, value)] if isinstance(value, list) else [str(value)]
    return found


def without(source: Source, settings: Settings, option: str) -> Settings:
    """The settings without the one that wins over an option."""
    value = source.value_of(option)
    kept = {
        phase: {key: each for key, each in of_phase.items() if source.value_of(flag_of(phase, key)) != value}
        for phase, of_phase in settings.items()
    }
    return {phase: of_phase for phase, of_phase in kept.items() if of_phase}
