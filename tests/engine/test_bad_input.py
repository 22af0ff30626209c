# SPDX-License-Identifier: Apache-2.0
"""Input that cannot be examined: one sentence names it and the next step, exit 2, no traceback."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import zipfile
from collections.abc import Callable

import pluggy
import pytest

from sglang_bcg_fixes.source import tree
from tests import processes, wheels

RELEASE = "0.5.12.post1"
NAME = f"sglang-{RELEASE}-py3-none-any.whl"
MODULE = "sglang/srt/layers/radix_linear_attention.py"


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return processes.python("-m", "sglang_bcg_fixes", "doctor", *arguments, environment=environ, timeout=120)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line, behind what was on its way before it."""
    assert done.returncode == 2 and done.stdout == "", done.stdout + done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("bcg-fixes doctor: ") and "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert word in line, line


@pytest.fixture
def wheel(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """A small wheel with one module of SGLang, whose content is given."""

    def make(content: bytes = b"x = 1\n", name: str = NAME, module: str = MODULE) -> pathlib.Path:
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(module, content)
        return tmp_path / name

    return make


def test_a_wheel_that_is_no_archive_is_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / NAME
    file.write_bytes(b"not a zip")
    refused(doctor("--wheel", str(file)), f"{file} cannot be read as a wheel", "fetch the wheel again")


def test_a_wheel_that_was_cut_off_is_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / NAME
    content = wheels.wheel(RELEASE).read_bytes()
    file.write_bytes(content[: len(content) // 2])
    refused(doctor("--wheel", str(file)), f"{file} cannot be read as a wheel", "fetch the wheel again")


def test_a_wheel_with_a_damaged_file_is_named_with_it(
    wheel: Callable[..., pathlib.Path], tmp_path: pathlib.Path
) -> None:
    file = wheel(os.urandom(4000))
    content = bytearray(file.read_bytes())
    content[2000] ^= 0xFF
    file.write_bytes(content)
    refused(doctor("--wheel", str(file)), f"{MODULE} in {file} cannot be unpacked (", "fetch the wheel again")


def test_a_file_that_no_source_has_is_not_read_into_memory(wheel: Callable[..., pathlib.Path]) -> None:
    file = wheel()
    with (
        zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("sglang/srt/server_args.py", "w", force_zip64=True) as member,
    ):
        for _ in range(600):
            member.write(bytes(1 << 20))
    command = ("with_little_memory", "doctor", "--wheel", str(file))
    done = processes.python("-m", "tests.scenarios.bare_machine", *command)
    refused(done, f"sglang/srt/server_args.py in {file} has 600 MiB", "fetch the wheel again")


@pytest.mark.parametrize("name", ["weird.whl", "sglang.whl", "sglang-0.5.12.zip", "sglang-0.5.12.whl"])
def test_a_wheel_with_another_name_is_refused_with_the_way_out(wheel: Callable[..., pathlib.Path], name: str) -> None:
    file = wheel(name=name)
    refused(doctor("--wheel", str(file)), f"{file} is not named as a wheel is", "with --root")


def test_a_wheel_of_something_else_is_refused(wheel: Callable[..., pathlib.Path]) -> None:
    file = wheel(name="requests-2.0-py3-none-any.whl", module="requests/__init__.py")
    refused(doctor("--wheel", str(file)), f"{file}: no sglang/srt in it; give a wheel of SGLang")


def test_a_folder_in_the_place_of_a_wheel_is_refused(tmp_path: pathlib.Path) -> None:
    refused(doctor("--wheel", str(tmp_path)), f"{tmp_path}: no such file; give a wheel of SGLang")


@pytest.mark.parametrize("kind", ["folder", "wheel"])
def test_a_file_that_is_no_text_is_named(wheel: Callable[..., pathlib.Path], tmp_path: pathlib.Path, kind: str) -> None:
    file = wheel(b"x = '\xff\xfe'\n")
    zipfile.ZipFile(file).extractall(tmp_path / "unpacked")
    where = tree.Wheel(file) if kind == "wheel" else tree.Folder(tmp_path / "unpacked")
    name = f"{MODULE} in {file}" if kind == "wheel" else str(tmp_path / "unpacked" / MODULE)
    with pytest.raises(tree.Unreadable) as caught:
        where.read(MODULE)
    assert str(caught.value).startswith(f"{name} is not UTF-8 text (") and "again" in str(caught.value)


def test_a_folder_whose_version_is_no_text_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    file = tmp_path / "sglang" / "_version.py"
    file.write_bytes(b"__version__ = '\xff'")
    refused(doctor("--root", str(tmp_path)), f"{file} is not UTF-8 text", "install or fetch this SGLang again")


@pytest.mark.parametrize(
    ("release", "hint"),
    [
        ("", "give one such as 0.5.12.post1"),
        ("*", "give one such as 0.5.12.post1"),
        ("0.5.1?", "give one such as 0.5.12.post1"),
        ("../0.5.12", "give one such as 0.5.12.post1"),
        ("latest", "give one such as 0.5.12.post1"),
        ("v0.5.12", "did you mean 0.5.12?"),
        ("0.5.12.POST1", "did you mean 0.5.12.post1?"),
        (" 0.5.12", "did you mean 0.5.12?"),
    ],
)
def test_what_is_no_release_is_not_asked_for(tmp_path: pathlib.Path, release: str, hint: str) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "sglang-0.5.18-cp311-cp311-x.whl").write_text("what a pattern would find")
    done = doctor("--release", release, SGLANG_BCG_CACHE_DIR=str(tmp_path))
    refused(done, f"'{release}' is not a release of SGLang; {hint}")
    assert "fetching" not in done.stderr


def test_a_release_that_is_there_is_not_fetched(tmp_path: pathlib.Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / wheels.wheel(RELEASE).name).symlink_to(wheels.wheel(RELEASE))
    done = doctor("--release", RELEASE, SGLANG_BCG_CACHE_DIR=str(tmp_path), PATH="/nowhere")
    assert done.returncode == 0 and f"SGLang {RELEASE} in " in done.stdout and done.stderr == "", done.stderr


def test_a_python_without_pip_says_what_to_do(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "pluggy").symlink_to(pathlib.Path(pluggy.__file__).parent)
    python = tmp_path / "venv" / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "sglang_bcg_fixes", "doctor", "--release", "0.5.12"],
        env={**processes.environment_of([tmp_path / "site"], {}), "SGLANG_BCG_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    refused(done, f"{python} has no pip to fetch sglang==0.5.12 with; install pip there", "with --wheel")


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    # nobody can make a folder there, not even root
    for folder in (tmp_path / "file", pathlib.Path("/proc/version")):
        done = doctor("--release", "0.5.12", SGLANG_BCG_CACHE_DIR=str(folder))
        refused(done, f"{folder / 'wheels'} cannot take the wheel of sglang==0.5.12", "set SGLANG_BCG_CACHE_DIR")


def test_a_cache_that_is_read_only_says_what_to_set(tmp_path: pathlib.Path) -> None:
    command = ("with_a_read_only_cache", "doctor", "--release", "0.5.12")
    done = processes.python(
        *("-m", "tests.scenarios.bare_machine", *command), environment={"SGLANG_BCG_CACHE_DIR": str(tmp_path)}
    )
    refused(done, f"{tmp_path / 'wheels'} cannot take the wheel", "Read-only file system", "set SGLANG_BCG_CACHE_DIR")
