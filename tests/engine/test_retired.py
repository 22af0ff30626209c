# SPDX-License-Identifier: Apache-2.0
"""A flag that is retired warns for two versions, and is a mistake with a reason after them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.model import Retired, series
from sglang_bcg_fixes.planning import registry
from tests import processes
from tests.engine import test_plugin
from tests.engine.test_flags import FIX, KERNEL, SHY, WATCHED
from tests.engine.test_plugin import OTHERS_OFF, Extra

extra = test_plugin.extra
KERNEL_THAT_WENT = "SGLANG_BCG_KERNEL_LIGHTNING_EXTEND"
OLD, RENAMED = "SGLANG_BCG_FIX_OLD_ONE", "SGLANG_BCG_FIX_STALE_TABEL"
SENTENCE = (
    f"{OLD} is set, and was retired in 0.2.0: no release needs it any more; nothing counts in its place, and from "
)


def made_up(version: str = "0.3.1") -> list[Retired]:
    return [
        Retired(OLD, "0.2.0", "0.4", "no release needs it any more", version=version),
        Retired(RENAMED, "0.2.0", "0.4", "its name was misspelt", now=FIX.flag, version=version),
    ]


def read(version: str = "0.3.1", **environ: str) -> flags.Settings:
    return flags.read([FIX, SHY, WATCHED], [KERNEL], environ, made_up(version))


def said(version: str = "0.3.1", **environ: str) -> list[str]:
    return flags.said_of(made_up(version), environ)


def fault(flag: Retired, known: set[str]) -> str | None:
    """Say what is wrong with an entry."""
    since, until = series(flag.since), series(flag.refused_from)
    warns_twice = until >= (since[0], since[1] + 2) if until[0] == since[0] else until >= (since[0] + 1, 1)
    if not warns_twice:
        return "two versions warn: that which retires it, and the next"
    if not flag.name.startswith(flags.PREFIX) or flag.name in known:
        return "it is a flag still, or never was one"
    return None if not flag.now or flag.now in known else "what it is called now is no flag"


def known_names() -> set[str]:
    known = registry.discover()
    return {row.name for row in flags.table(known.fixes, known.kernels)}


def test_every_retired_flag_warns_for_two_versions() -> None:
    known = known_names()
    assert [fault(flag, known) for flag in flags.RETIRED] == [None] * len(flags.RETIRED)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"refused_from": "0.3"}, "two versions warn"),
        ({"refused_from": "1.0"}, "two versions warn"),
        ({"refused_from": "1.1"}, None),
        ({"name": "SGLANG_BCG_FIXES"}, "it is a flag still"),
        ({"name": "BCG_FIXES"}, "or never was one"),
        ({"now": "SGLANG_BCG_FIX_NOBODY"}, "what it is called now is no flag"),
    ],
)
def test_an_entry_that_breaks_the_rules_is_found(changed: dict[str, Any], words: str | None) -> None:
    found = fault(dataclasses.replace(made_up()[0], **changed), known_names())
    assert found is None if words is None else words in str(found)


@pytest.mark.parametrize("version", ["0.2.0", "0.2.9", "0.3.0rc1", "0.3.7"])
def test_two_versions_warn_and_start(version: str) -> None:
    settings = read(version, **{OLD: "any value", "SGLANG_BCG_FIX_SHY_FIX": "on"})
    assert settings.fixes == {"stale_table": "auto", "shy_fix": "on"}
    assert said(version, **{OLD: "any value", "HOME": "/"}) == [f"{SENTENCE}0.4 on no server starts with it"]
    assert said(version, **{OLD: " "}) == [], "an empty value is no value"
    assert flags.look_alikes([FIX], [KERNEL], {OLD: "off"}) == [], "it is said once"


@pytest.mark.parametrize("version", ["0.4.0", "0.10.0", "1.0.0"])
def test_later_ones_refuse_and_say_why(version: str) -> None:
    with pytest.raises(flags.FlagError) as caught:
        read(version, **{OLD: "off", RENAMED: "off"})
    assert f"{OLD} was retired in 0.2.0: no release needs it any more; unset it" in str(caught.value)
    assert f"{RENAMED} was retired in 0.2.0: its name was misspelt; set {FIX.flag}" in str(caught.value)
    assert said(version, **{OLD: "off"}) == []


def test_a_renamed_flag_counts_unless_its_new_name_is_set() -> None:
    assert read(**{RENAMED: "off"}).fixes["stale_table"] == "off"
    assert f"it counts as {FIX.flag}" in said(**{RENAMED: "off"})[0]
    both = {RENAMED: "off", FIX.flag: "on"}
    assert read(**both).fixes["stale_table"] == "on"
    assert f"{FIX.flag} counts in its place" in said(**both)[0]
    with pytest.raises(flags.FlagError, match=f"{FIX.flag}=maybe is none of auto, off, on"):
        read(**{RENAMED: "maybe"})


def test_the_list_of_what_is_off_takes_a_retired_name_as_long() -> None:
    assert read(SGLANG_BCG_OFF="old_one, shy_fix").fixes == {"stale_table": "auto", "shy_fix": "off"}
    named = f"SGLANG_BCG_OFF names old_one, which {SENTENCE.partition('and ')[2]}"
    assert said(SGLANG_BCG_OFF="Old_One,shy_fix") == [f"{named}0.4 on no server starts with it"]
    renamed = read(SGLANG_BCG_OFF="stale_tabel")
    assert renamed.fixes["stale_table"] == "off" and renamed.off_by[FIX.flag] == "SGLANG_BCG_OFF=stale_tabel"
    assert f"it counts as {FIX.flag}=off, and" in said(SGLANG_BCG_OFF="stale_tabel")[0]
    with pytest.raises(flags.FlagError) as caught:
        read("0.4.0", SGLANG_BCG_OFF="old_one,stale_tabel")
    assert "names old_one, which was retired in 0.2.0: no release needs it any more; take it out" in str(caught.value)
    assert f"names stale_tabel, which was retired in 0.2.0: its name was misspelt; set {FIX.flag}=off" in str(
        caught.value
    )
    assert said("0.4.0", SGLANG_BCG_OFF="old_one") == []


@pytest.mark.parametrize(
    "environ",
    [{KERNEL_THAT_WENT: "seg_la"}, {KERNEL_THAT_WENT: "off"}, {"SGLANG_BCG_OFF": "lightning_extend"}],
    ids=str,
)
def test_a_server_that_names_the_retired_kernel_starts_and_is_told(environ: dict[str, str]) -> None:
    known = registry.discover()
    settings = flags.read(known.fixes, known.kernels, environ, known.retired)
    assert settings == flags.read(known.fixes, known.kernels, {}, known.retired)
    [sentence] = flags.said_of(known.retired, environ)
    assert "was retired in 0.1.0: no release ran this kernel by default" in sentence
    assert "nothing counts in its place, and from 0.3 on no server starts with it" in sentence


def test_any_other_name_is_a_mistake_as_ever() -> None:
    with pytest.raises(flags.FlagError, match="SGLANG_BCG_FIX_OLD is not a flag"):
        read(SGLANG_BCG_FIX_OLD="off")


def with_a_retired_flag(extra: Extra, reports: pathlib.Path, version: str, *command: str) -> tuple[int, str, str]:
    """Run a command, or load the plugin, where `OLD` was a flag until 0.2.0."""
    program = f"""
        import sys
        from sglang_bcg_fixes import flags, plugin
        from sglang_bcg_fixes.cli import main
        from sglang_bcg_fixes.model import Retired
        flags.RETIRED = [Retired({OLD!r}, "0.2.0", "0.4", "no release needs it any more", version={version!r})]
        plugin.load() if not sys.argv[1:] else sys.exit(main.main(sys.argv[1:]))
    """
    environment = {"FAKE_FORM": "enable", "SGLANG_BCG_REPORT_DIR": str(reports), OLD: "off", **OTHERS_OFF}
    done = processes.python(
        "-c", processes.code(program), *command, paths=[processes.FAKE_SGLANG, extra().site], environment=environment
    )
    return done.returncode, done.stdout, done.stderr


def test_a_server_starts_and_says_it_once(extra: Extra, tmp_path: pathlib.Path) -> None:
    code, _, log = with_a_retired_flag(extra, tmp_path / "reports", "0.3.0")
    assert code == 0 and log.count(f"bcg-fixes: {SENTENCE}") == 1, log


def test_a_later_server_does_not(extra: Extra, tmp_path: pathlib.Path) -> None:
    code, _, log = with_a_retired_flag(extra, tmp_path / "reports", "0.4.0")
    assert code == 1 and f"bcg-fixes refuses to start: {OLD} was retired in 0.2.0" in log, log


def test_doctor_tells_of_it(extra: Extra, tmp_path: pathlib.Path) -> None:
    code, shown, _ = with_a_retired_flag(extra, tmp_path / "reports", "0.3.0", "doctor", "--json")
    assert code == 0 and json.loads(shown)["retired"] == [f"{SENTENCE}0.4 on no server starts with it"]


def test_doctor_of_a_launch_tells_of_it_and_of_a_look_alike(
    extra: Extra, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.setenv("BCG_FIXES", "off")
    # the fake SGLang has no models
    command = ("doctor", "--", "SGLANG_EXTERNAL_MODEL_PACKAGE=mine", "sglang", "serve", str(tmp_path))
    _, shown, log = with_a_retired_flag(extra, tmp_path / "reports", "0.3.0", *command)
    assert not log
    lines = shown.splitlines()[2:]
    assert f"{SENTENCE}0.4 on no server starts with it" in lines
    assert "BCG_FIXES is set, and nobody reads it; did you mean SGLANG_BCG_FIXES?" in lines


def test_other_commands_warn(extra: Extra, tmp_path: pathlib.Path) -> None:
    code, _, log = with_a_retired_flag(extra, tmp_path / "reports", "0.3.0", "list")
    assert code == 0 and f"bcg-fixes list: warning: {SENTENCE}" in log, log


def test_the_page_names_the_table() -> None:
    page = " ".join((processes.REPOSITORY / "docs" / "flags.md").read_text().split())
    assert "`RETIRED` in `sglang_bcg_fixes/flags.py`" in page
    assert ("None is retired today." in page) is (not flags.RETIRED)
