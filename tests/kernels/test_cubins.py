# SPDX-License-Identifier: Apache-2.0
"""The cache of machine code: nothing but what was put there by this user, whole, comes out of it."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib

import pytest

from sglang_bcg_fixes.kernels.cuda import cubins
from tests import processes

CUBIN = b"\x7fELF" + bytes(range(256)) * 40
NAME = cubins.key("source", "sm_90a")


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "cache" / "cubins"


def test_what_is_kept_comes_back_and_belongs_to_this_user_alone(folder: pathlib.Path) -> None:
    assert cubins.read(folder, NAME) is None
    cubins.keep(folder, NAME, CUBIN)
    assert cubins.read(folder, NAME) == CUBIN
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in folder.iterdir()] == [NAME]
    assert (folder / NAME).stat().st_mode & 0o777 == 0o600


def test_a_name_stands_for_everything_that_the_code_depends_on() -> None:
    parts: list[bytes | str] = ["header", b"source", "--std=c++17", "13.0 13000"]
    names = {cubins.key(*parts)}
    for place in range(len(parts)):
        names.add(cubins.key(*parts[:place], "other", *parts[place + 1 :]))
    names |= {cubins.key("ab", "c"), cubins.key("a", "bc"), cubins.key("abc")}
    assert len(names) == 1 + len(parts) + 3


@pytest.mark.parametrize("length", [0, 1, len(cubins.MAGIC), len(cubins.MAGIC) + 32, len(CUBIN) - 1])
def test_a_file_that_is_cut_off_is_not_loaded(folder: pathlib.Path, length: int) -> None:
    cubins.keep(folder, NAME, CUBIN)
    (folder / NAME).write_bytes((folder / NAME).read_bytes()[:length])
    with pytest.raises(cubins.CacheError, match="is damaged"):
        cubins.read(folder, NAME)
    cubins.keep(folder, NAME, CUBIN)
    assert cubins.read(folder, NAME) == CUBIN


@pytest.mark.parametrize("place", [0, len(cubins.MAGIC), len(cubins.MAGIC) + 32, -1])
def test_one_changed_byte_is_seen(folder: pathlib.Path, place: int) -> None:
    cubins.keep(folder, NAME, CUBIN)
    content = bytearray((folder / NAME).read_bytes())
    content[place] ^= 1
    (folder / NAME).write_bytes(content)
    with pytest.raises(cubins.CacheError, match="is damaged"):
        cubins.read(folder, NAME)


def test_code_for_something_else_is_not_loaded_under_this_name(folder: pathlib.Path) -> None:
    other = cubins.key("source", "sm_80")
    cubins.keep(folder, other, CUBIN)
    (folder / other).rename(folder / NAME)
    with pytest.raises(cubins.CacheError, match="is damaged"):
        cubins.read(folder, NAME)


@pytest.mark.parametrize("mode", [0o660, 0o606, 0o666])
def test_a_file_that_others_can_write_is_not_loaded(folder: pathlib.Path, mode: int) -> None:
    cubins.keep(folder, NAME, CUBIN)
    (folder / NAME).chmod(mode)
    with pytest.raises(cubins.CacheError, match="can be written by other users"):
        cubins.read(folder, NAME)


def test_another_users_file_or_folder_is_not_used(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubins.keep(folder, NAME, CUBIN)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(cubins.CacheError, match="belongs to the user with the number"):
        cubins.read(folder, NAME)
    with pytest.raises(cubins.CacheError, match="belongs to the user with the number"):
        cubins.keep(folder, NAME, CUBIN)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_nothing_is_kept_where_others_can_write(folder: pathlib.Path, mode: int) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(cubins.CacheError, match="can be written by other users"):
        cubins.keep(folder, NAME, CUBIN)
    assert not list(folder.iterdir())


def test_links_pipes_and_folders_are_not_files(folder: pathlib.Path) -> None:
    cubins.keep(folder, "real", CUBIN)
    (folder / NAME).symlink_to(folder / "real")
    with pytest.raises(cubins.CacheError, match="cannot be read"):
        cubins.read(folder, NAME)
    (folder / NAME).unlink()
    # a pipe that nobody writes to must not hold the server up
    os.mkfifo(folder / NAME)
    with pytest.raises(cubins.CacheError, match="is not a file"):
        cubins.read(folder, NAME)
    (folder / NAME).unlink()
    (folder / NAME).mkdir()
    with pytest.raises(cubins.CacheError, match="cannot be read"):
        cubins.read(folder, NAME)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    with pytest.raises(cubins.CacheError, match=r"nothing can be kept in .*cubins"):
        cubins.keep(tmp_path / "cache" / "cubins", NAME, CUBIN)
    (tmp_path / "cubins").symlink_to(tmp_path)
    with pytest.raises(cubins.CacheError, match="is not a folder"):
        cubins.keep(tmp_path / "cubins", NAME, CUBIN)


def test_a_full_disk_leaves_no_draft_behind(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(cubins.CacheError, match="No space left on device"):
        cubins.keep(folder, NAME, CUBIN)
    assert not list(folder.iterdir())


def test_processes_that_write_at_once_never_read_a_mixture(folder: pathlib.Path) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        race = ("-m", "tests.scenarios.cubin_race", str(folder))
        done = list(pool.map(lambda letter: processes.python(*race, letter), "abc"))
    assert [run.returncode for run in done] == [0, 0, 0], [run.stderr for run in done]
    # they did meet
    assert sum(int(run.stdout) for run in done) > 0
    assert [file.name for file in folder.iterdir()] == ["name"]


def test_it_imports_nothing_but_the_standard_library() -> None:
    # setup.py seals with it, before anything is installed
    program = "import sys; from sglang_bcg_fixes.kernels.cuda import cubins, nvrtc; print(*sys.modules)"
    done = processes.python("-c", program)
    assert done.returncode == 0, done.stderr
    tops = {name.partition(".")[0] for name in done.stdout.split()}
    assert not tops & {"torch", "triton", "numpy", "pluggy", "sglang"}
