# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.model import Accepted, Impl
from tests.engine.bodies import fix, kernel, point
from tests.wheels import RELEASES

FIX = dataclasses.replace(fix("stale_table", point("function")), doc="A table is stale.")
SHY = dataclasses.replace(fix("shy_fix", point("function")), doc="Off unless asked for.", default="off")
WATCHED = dataclasses.replace(fix("only_watched"), doc="Known, not mended.")
KERNEL = kernel("metadata", *(Impl(n, Accepted, "m") for n in ("triton", "reference")))


def read(**environ: str) -> flags.Settings:
    return flags.read([FIX, SHY, WATCHED], [KERNEL], environ)


def test_defaults() -> None:
    settings = read()
    assert settings.mode == "auto" and not settings.strict
    assert settings.fixes == {"stale_table": "auto", "shy_fix": "off"}
    assert settings.kernels == {"metadata": "auto"}
    assert settings.parent_digest is None


def test_every_value_is_taken() -> None:
    settings = read(
        SGLANG_BCG_FIXES="STRICT", SGLANG_BCG_FIX_STALE_TABLE=" on ", SGLANG_BCG_KERNEL_METADATA="reference"
    )
    assert settings.strict and settings.fixes["stale_table"] == "on" and settings.kernels["metadata"] == "reference"


def test_one_switch_turns_everything_off_and_refuses_nothing() -> None:
    wrong = {"SGLANG_BCG_FIXES": "strict", "SGLANG_BCG_TYPO": "on", FIX.flag: "on", KERNEL.flag: "triton"}
    settings = read(SGLANG_BCG=" OFF ", SGLANG_BCG_CANARY="x", **wrong)
    assert settings.is_off and not settings.strict and settings.selfcheck == "off" and settings.canary == 0
    assert settings.fixes == {"stale_table": "off", "shy_fix": "off"} and settings.kernels == {"metadata": "off"}
    assert settings.off_by[FIX.flag] == settings.off_by[KERNEL.flag] == "SGLANG_BCG=off"
    assert not read(SGLANG_BCG="auto").is_off
    with pytest.raises(flags.FlagError, match="SGLANG_BCG=of is none of auto, off; did you mean off"):
        read(SGLANG_BCG="of")


def test_a_list_turns_fixes_and_kernels_off_whatever_their_own_flags_say() -> None:
    settings = read(SGLANG_BCG_OFF="stale_table, Metadata", SGLANG_BCG_FIX_STALE_TABLE="on")
    assert settings.fixes["stale_table"] == "off" and settings.kernels == {"metadata": "off"}
    assert settings.off_by[FIX.flag] == "SGLANG_BCG_OFF=stale_table"
    with pytest.raises(flags.FlagError, match="names stale_tabel, which is no fix and no kernel; did you mean stale_"):
        read(SGLANG_BCG_OFF="stale_tabel")


def test_off_switches_everything_off_but_what_is_on() -> None:
    assert read(SGLANG_BCG_FIXES="off").fixes == {"stale_table": "off", "shy_fix": "off"}
    assert read(SGLANG_BCG_FIXES="off", SGLANG_BCG_FIX_SHY_FIX="on").fixes == {"stale_table": "off", "shy_fix": "on"}
    assert read(SGLANG_BCG_FIXES="off").kernels == {"metadata": "off"}
    named = read(SGLANG_BCG_FIXES="off", SGLANG_BCG_KERNEL_METADATA="triton")
    assert named.kernels == {"metadata": "triton"}


@pytest.mark.parametrize(
    ("environ", "state", "off_by"),
    [
        ({"SGLANG_BCG_KERNELS": "off"}, "off", "SGLANG_BCG_KERNELS=off"),
        ({"SGLANG_BCG_KERNELS": "OFF", "SGLANG_BCG_KERNEL_METADATA": "auto"}, "off", "SGLANG_BCG_KERNELS=off"),
        ({"SGLANG_BCG_KERNELS": "off", "SGLANG_BCG_KERNEL_METADATA": "triton"}, "triton", None),
        ({"SGLANG_BCG_KERNELS": "off", "SGLANG_BCG_KERNEL_METADATA": "off"}, "off", "SGLANG_BCG_KERNEL_METADATA=off"),
        ({"SGLANG_BCG_FIXES": "off"}, "off", "SGLANG_BCG_FIXES=off"),
        ({"SGLANG_BCG_KERNELS": "auto"}, "auto", None),
    ],
)
def test_all_kernels_are_switched_off_at_once_but_those_that_are_named(
    environ: dict[str, str], state: str, off_by: str | None
) -> None:
    settings = read(**environ)
    assert settings.kernels == {"metadata": state} and settings.off_by.get(KERNEL.flag) == off_by
    fixes_as_ever = environ.get("SGLANG_BCG_FIXES") or settings.fixes == {"stale_table": "auto", "shy_fix": "off"}
    assert fixes_as_ever and (settings.selfcheck == "warn") is ("SGLANG_BCG_FIXES" not in environ)


@pytest.mark.parametrize(
    ("environ", "of_fix", "of_shy_fix"),
    [
        ({}, None, "SGLANG_BCG_FIX_SHY_FIX is off by default"),
        ({"SGLANG_BCG_FIXES": "off"}, "SGLANG_BCG_FIXES=off", "SGLANG_BCG_FIX_SHY_FIX is off by default"),
        ({"SGLANG_BCG_FIX_STALE_TABLE": "off"}, "SGLANG_BCG_FIX_STALE_TABLE=off", None),
        ({"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_STALE_TABLE": "off"}, "SGLANG_BCG_FIX_STALE_TABLE=off", None),
        ({"SGLANG_BCG_FIX_SHY_FIX": "off"}, None, "SGLANG_BCG_FIX_SHY_FIX=off"),
        ({"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_SHY_FIX": "auto"}, "SGLANG_BCG_FIXES=off", "SGLANG_BCG_FIXES=off"),
    ],
)
def test_what_is_off_says_which_setting_did_that(
    environ: dict[str, str], of_fix: str | None, of_shy_fix: str | None
) -> None:
    settings = read(**environ)
    assert settings.off_by.get(FIX.flag) == of_fix and (settings.fixes["stale_table"] == "off") is (of_fix is not None)
    if of_shy_fix:
        assert settings.off_by[SHY.flag] == of_shy_fix and settings.fixes["shy_fix"] == "off"


def test_off_checks_nothing_but_what_is_asked_for() -> None:
    assert (read().selfcheck, read(SGLANG_BCG_FIXES="off").selfcheck) == ("warn", "off")
    asked = read(SGLANG_BCG_FIXES="off", SGLANG_BCG_SELFCHECK="strict", SGLANG_BCG_CANARY="5")
    assert (asked.selfcheck, asked.canary) == ("strict", 5)


def test_an_empty_value_is_no_value() -> None:
    assert read(SGLANG_BCG_FIXES="").mode == "auto"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SGLANG_BCG_FIX_STALE_TABEL", "off", "did you mean SGLANG_BCG_FIX_STALE_TABLE?"),
        ("SGLANG_BCG_FIX_ONLY_WATCHED", "off", "SGLANG_BCG_FIX_ONLY_WATCHED is not a flag"),
        ("SGLANG_BCG_FIXS", "off", "did you mean SGLANG_BCG_FIXES?"),
        ("SGLANG_BCG_FIXES", "strikt", "none of auto, off, strict; did you mean strict?"),
        ("SGLANG_BCG_FIX_STALE_TABLE", "1", "none of auto, off, on"),
        ("SGLANG_BCG_KERNEL_METADATA", "cuda", "none of auto, off, reference, triton"),
        ("SGLANG_BCG_KERNELS", "on", "SGLANG_BCG_KERNELS=on is none of auto, off"),
    ],
)
def test_a_mistake_is_an_error_that_names_the_nearest(name: str, value: str, words: str) -> None:
    with pytest.raises(flags.FlagError) as caught:
        read(**{name: value})
    assert words in str(caught.value) and name in str(caught.value)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(flags.FlagError, match=r"SGLANG_BCG_NONSENSE.*SGLANG_BCG_FIXES=maybe"):
        read(SGLANG_BCG_NONSENSE="1", SGLANG_BCG_FIXES="maybe")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SGLANG_BCGFIXES", "SGLANG_BCG_FIXES"),
        ("BCG_FIXES", "SGLANG_BCG_FIXES"),
        ("sglang_bcg_fixes", "SGLANG_BCG_FIXES"),
        ("SGLANG_BCGFIX_STALE_TABLE", "SGLANG_BCG_FIX_STALE_TABLE"),
        ("BCG_FIX_STALE_TABEL", "SGLANG_BCG_FIX_STALE_TABLE"),
        ("SGLANG-BCG-SELFCHECK", "SGLANG_BCG_SELFCHECK"),
        ("SGL_BCG_FIXES", "SGLANG_BCG_FIXES"),
    ],
)
def test_what_looks_like_a_flag_and_is_none_is_said(name: str, meant: str) -> None:
    said = flags.look_alikes([FIX], [KERNEL], {name: "off", "HOME": "/"})
    assert said == [f"{name} is set, and nobody reads it; did you mean {meant}?"]
    assert flags.look_alikes([FIX], [KERNEL], {name: ""}) == [], "an empty value is no value"


def test_what_only_sounds_alike_is_nobodys_business() -> None:
    others = ("SGLANG_DIFFUSION_BCG_MAX_ENTRIES", "SGLANG_CACHE_DIR", "BCG_VACCINE", "SGLANG_USE_BREAKABLE_CUDA_GRAPH")
    ours = ("BCG_FIXES_CUDA_ARCHS", "BCG_FIXES_SKIP_CUDA", "BCG_FIXES_VENV", "SGLANG_BCG_FIXES")
    assert flags.look_alikes([FIX], [KERNEL], dict.fromkeys([*others, *ours], "1")) == []
    [said] = flags.look_alikes([FIX], [KERNEL], {"SGLANG_BCGXYZ": "1"})
    assert said == "SGLANG_BCGXYZ is set, and nobody reads it; did you mean SGLANG_BCG?"


@pytest.mark.parametrize("version", [RELEASES[0], RELEASES[-1]])
def test_a_name_that_sglang_uses_itself_is_no_mistake(
    release_root: Callable[[str], pathlib.Path], version: str
) -> None:
    files = (release_root(version) / "sglang").rglob("*.py")
    names = {name for file in files for name in re.findall(r"SGLANG_BCG_\w+", file.read_text(errors="replace"))}
    assert read(**dict.fromkeys(names, "512")).mode == "auto"
    assert version == RELEASES[0] or names == {"SGLANG_BCG_TEXT_BUCKETS"}


def test_folders() -> None:
    assert flags.report_dir({"SGLANG_BCG_REPORT_DIR": "/a"}) == pathlib.Path("/a")
    assert flags.report_dir({"XDG_RUNTIME_DIR": "/run/me"}) == pathlib.Path("/run/me/sglang-bcg-fixes")
    assert flags.cache_dir({"XDG_CACHE_HOME": "/c"}) == pathlib.Path("/c/sglang-bcg-fixes")
    assert flags.cache_dir({"SGLANG_BCG_CACHE_DIR": "/d"}) == pathlib.Path("/d")


def test_the_table_holds_exactly_what_is_read() -> None:
    rows = flags.table([FIX, SHY, WATCHED], [KERNEL])
    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    for row in rows:
        value = (
            row.values.split("|")[0]
            if "|" in row.values
            else {"a number": "7", "names": FIX.id}.get(row.values, "some-folder")
        )
        flags.read([FIX, SHY, WATCHED], [KERNEL], {row.name: value})
