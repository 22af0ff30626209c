# SPDX-License-Identifier: Apache-2.0
"""`python -m sglang_bcg_fixes -- MODULE ...`: the plugin for modules that load no plugins."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence

from sglang_bcg_fixes import plugin

USAGE = "python -m sglang_bcg_fixes -- MODULE ARGUMENTS..., such as `-- sglang.bench_one_batch --model-path M`"
FAILED = 2


def exists(module: str) -> bool:
    """Asked of the folders alone: to import the packages above it is for later, when the plugin is there."""
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first)
    for name in rest:
        places = spec.submodule_search_locations if spec else None
        spec = importlib.machinery.PathFinder.find_spec(name, places) if places is not None else None
    return spec is not None


def run(arguments: Sequence[str]) -> int:
    """Load the plugin in this process and run the module in it as `python -m` would; its exit is ours."""
    if not arguments or arguments[0].startswith("-"):
        print(f"bcg-fixes: name a module: {USAGE}", file=sys.stderr)
        return FAILED
    module = arguments[0]
    if not exists(module):
        print(f"bcg-fixes: there is no module {module} here: {USAGE}", file=sys.stderr)
        return FAILED
    plugin.load()
    print(
        f"bcg-fixes: processes that {module} starts have the plugin only where SGLang loads plugins in them; "
        f"`bcg-fixes status` shows which have it",
        file=sys.stderr,
    )
    sys.argv = list(arguments)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0
