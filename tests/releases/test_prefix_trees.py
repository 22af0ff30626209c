# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix tree in Rust, which users have from 0.5.21 on, beside Python's: which functions run with which.

Every test of answers from a warm prefix cache runs with both trees: see tests/scenarios/trees.py.
"""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source import forms
from tests import processes, wheels
from tests.scenarios import trees
from tests.wheels import NEWEST, since

PROGRAM = ("-m", "tests.scenarios.tree_calls")
CACHE = "sglang.srt.mem_cache"
TREE, COMPONENTS = f"{CACHE}.unified_cache.unified_tree_core:", f"{CACHE}.unified_cache.components."
# with either tree, and with Python's alone
SHARED = {
    f"{CACHE}.unified_radix_cache:UnifiedRadixCache.match_prefix",
    f"{COMPONENTS}mamba:MambaComponent.prepare_for_caching_req",
}
OF_PYTHON = {
    f"{TREE}UnifiedTreeCore.match_prefix",
    f"{TREE}UnifiedTreeCore.evict_device_leaf",
    f"{COMPONENTS}mamba:MambaComponent.commit_insert_component_data",
}


def rested_on(release: str) -> set[str]:
    """Every definition that a fix changes, and that a probe has read in this release."""
    changed = {where for fix in registry.discover().fixes for point in fix.patches for where in point.where}
    known = forms.load().items()
    read = {where for where, of_it in known if any(release in form["releases"] for form in of_it.values())}
    return changed | {where.removesuffix("'s header") for where in read}


@pytest.mark.parametrize("release", since("0.5.21"))
def test_no_fix_rests_on_what_the_tree_in_rust_does_not_call(release: str) -> None:
    given, _ = processes.beside(wheels.unpacked(release), *PROGRAM)
    assert [*given] == ["python", "rust"]
    python, rust = (set(found["called"]) for found in given.values())
    assert python & rust >= SHARED and python - rust >= OF_PYTHON
    skipped = {where for where in rested_on(release) if where in python - rust or where.startswith(TREE)}
    assert not skipped, f"with the tree that users have, SGLang {release} does not call {', '.join(sorted(skipped))}"


def test_until_then_the_tree_is_pythons() -> None:
    given, _ = processes.beside(wheels.unpacked("0.5.20"), *PROGRAM)
    assert [*given] == ["python"] and set(given["python"]["called"]) >= OF_PYTHON


def test_a_tree_that_sglang_takes_in_place_of_that_in_rust_is_no_silent_one() -> None:
    # asks for a build from sources, which no wheel has
    done = processes.on_cpu(wheels.unpacked(NEWEST), *PROGRAM, environment={"SGLANG_RUST_BUILD_MODE": "force"})
    assert done.returncode and "SGLang was to take the tree in rust, and took that in python" in done.stderr


def test_what_differs_by_tree_is_refused() -> None:
    assert trees.the_same({"python": [[16, True]], "rust": [[16, True]]}) == [[16, True]]
    with pytest.raises(AssertionError):
        trees.the_same({"python": [[16, True]], "rust": [[16, False]]})
