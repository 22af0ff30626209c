# SPDX-License-Identifier: Apache-2.0
"""Completion in a real bash, from the script that the command prints."""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess

import pytest

from sglang_bcg_fixes.cli import main
from sglang_bcg_fixes.planning import registry
from tests.wheels import NEWEST

IDS = {fix.id for fix in registry.discover().fixes}


@pytest.fixture(scope="module")
def script() -> str:
    return printed("bash")


def printed(shell: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main.main(["completion", shell]) == 0
    return out.getvalue()


def completed(script: str, *words: str) -> set[str]:
    line = " ".join(map(shlex.quote, ("bcg-fixes", *words)))
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _bcg_fixes; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-uc", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (("",), {"doctor", "bisect", "verify", "--version"}),
        (("doc",), {"doctor"}),
        (("doctor", "--js"), {"--json"}),
        (("doctor", "--json", "--rel"), {"--release"}),
        (("doctor", "--release", ""), {NEWEST, "0.5.11"}),
        (("doctor", "--gpu", "h2"), {"h200", "h20"}),
        (("explain", ""), IDS | {"states_after_warm_up", "kernels_unbounded", "SGLANG_BCG_FIXES"}),
        (("explain", "SGLANG_BCG_S"), {"SGLANG_BCG_SELFCHECK"}),
        (("list", "--fl"), {"--flags"}),
        (("verify", "--fix", "kda"), {"kda_raw_beta"}),
        (("bisect", "--among", "kda"), {"kda_raw_beta"}),
        (("completion", "z"), {"zsh"}),
        # no words of ours: the shell goes on with files
        (("doctor", "--root", ""), set()),
        (("verify", "--json", ""), set()),
        (("verify", "--case", ""), set()),
        (("doctor", "--model", "m", "--", "--js"), set()),
        (("bisect", "--", "--js"), set()),
        (("nothing", ""), set()),
    ],
)
def test_what_goes_there_is_completed(script: str, words: tuple[str, ...], some: set[str]) -> None:
    found = completed(script, *words)
    assert some <= found and bool(some) == bool(found)
    assert all(word.startswith(words[-1]) for word in found)


def test_zsh_gets_the_same_behind_what_it_needs(script: str) -> None:
    assert printed("zsh").endswith(script) and "bashcompinit" in printed("zsh").removesuffix(script)
