# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources travel into a wheel, with machine code where it was asked for."""

from __future__ import annotations

import ast
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from sglang_bcg_fixes import __version__
from sglang_bcg_fixes.planning import registry
from tests import processes

HEADERS = (
    *(f"csrc/{operation}/{operation}.cuh" for operation in ("fa_metadata", "gdn_extend", "mamba2_extend")),
    "csrc/hopper.cuh",
    "csrc/linear_extend.cuh",
)
HEADER = f"sglang_bcg_fixes/{HEADERS[0]}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy, since setuptools leaves a build folder behind."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("csrc", "sglang_bcg_fixes"):
        shutil.copytree(processes.REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "entry_points.toml", "MANIFEST.in", "README.md"):
        shutil.copy(processes.REPOSITORY / name, copy)
    return copy


def built(
    checkout: pathlib.Path, folder: pathlib.Path, *, fails: bool = False, again: bool = False, **environment: str
) -> str:
    """A wheel into the folder, unpacked there too; what pip said."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-v", "-w", str(folder)]
    if not again:
        shutil.rmtree(checkout / "build", ignore_errors=True)
    ours = {"BCG_FIXES_CUDA_ARCHS", "BCG_FIXES_SKIP_CUDA"}
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [*command, str(checkout)], env={**inherited, **environment}, capture_output=True, text=True, check=False
    )
    assert bool(done.returncode) is fails, done.stdout + done.stderr
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder / "installed")
    return done.stdout + done.stderr


def asked(installed: pathlib.Path) -> str:
    # python looks into the folder that it is started in first
    command = [sys.executable, "-m", "tests.scenarios.packed_program"]
    environment = {**os.environ, "PYTHONPATH": str(processes.REPOSITORY)}
    return subprocess.run(command, cwd=installed, env=environment, check=True, capture_output=True, text=True).stdout


def cubins(folder: pathlib.Path) -> list[str]:
    return sorted(file.name for file in folder.glob("installed/**/*.cubin"))


def test_a_wheel_carries_the_header_and_nothing_compiled(checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    built(checkout, tmp_path)
    for header in HEADERS:
        packed = tmp_path / "installed" / "sglang_bcg_fixes" / header
        assert packed.read_bytes() == (checkout / header).read_bytes()
    assert not cubins(tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert f'["{tmp_path / "installed" / HEADER}", true, null]' in asked(tmp_path / "installed")


def test_machine_code_is_built_ahead_and_found(checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc here; CI has one")
    built(checkout, tmp_path, BCG_FIXES_CUDA_ARCHS="90a; 80")
    # the others have instructions of one architecture only
    of_hopper = [f"{operation}.sm_90a.cubin" for operation in ("fa_metadata", "gdn_extend", "mamba2_extend")]
    assert cubins(tmp_path) == ["fa_metadata.sm_80.cubin", *of_hopper]
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"sglang_bcg_fixes-{__version__}+sm90a.sm80-py3-none-any.whl"
    assert "sm_90a, from " in asked(tmp_path / "installed")
    # the same checkout, and the header is another one now
    header = tmp_path / "installed" / HEADER
    header.write_text(header.read_text() + "// changed\n")
    assert "null]" in asked(tmp_path / "installed")


def test_what_an_earlier_build_has_left_is_not_packed(checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    stale = checkout / "build" / "lib" / "sglang_bcg_fixes" / "fixes" / "zz_old_fix.py"
    shutil.rmtree(checkout / "build", ignore_errors=True)
    stale.parent.mkdir(parents=True)
    stale.write_text("FIX = 1 / 0\n")
    (stale.parents[1] / "csrc" / "old").mkdir(parents=True)
    (stale.parents[1] / "csrc" / "old" / "old.cuh").write_text("")
    built(checkout, tmp_path, again=True)
    packed = tmp_path / "installed" / "sglang_bcg_fixes"
    assert not (packed / "fixes" / "zz_old_fix.py").exists() and not (packed / "csrc" / "old").exists()
    there = {file.relative_to(checkout) for file in (checkout / "sglang_bcg_fixes" / "fixes").rglob("*.py")}
    assert {file.relative_to(packed.parent) for file in (packed / "fixes").rglob("*.py")} == there
    for name in ("prometheus_rules.yml", "grafana_dashboard.json"):
        assert (packed / name).is_file(), "what docs/selfcheck.md tells to load"


def test_beside_a_kernel_lies_nothing_that_only_tests_and_benchmarks_use() -> None:
    package = processes.REPOSITORY / "sglang_bcg_fixes"
    needed = {impl.module for kernel in registry.discover().kernels for impl in kernel.impls}
    needed |= {str(point.body).partition(":")[0] for kernel in registry.discover().kernels for point in kernel.patches}
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                needed |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = [file.relative_to(package.parent) for file in (package / "kernels").rglob("*.py")]
    modules = {".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert len(modules) > 15 and not modules - needed


def test_the_license_names_the_authors_of_this_package(checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copy(processes.REPOSITORY / "LICENSE", checkout)
    built(checkout, tmp_path)
    [packed] = tmp_path.glob("installed/sglang_bcg_fixes-*.dist-info/**/LICENSE")
    owners = [line.strip() for line in packed.read_text().splitlines() if line.startswith("   Copyright ")]
    assert owners == ["Copyright the sglang-bcg-fixes authors"]


def test_the_switch_forbids_it(checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    built(checkout, tmp_path, BCG_FIXES_CUDA_ARCHS="90a", BCG_FIXES_SKIP_CUDA="1")
    assert not cubins(tmp_path) and [wheel.name for wheel in tmp_path.glob("*+*")] == []


def test_machine_code_without_a_compiler_is_an_error_that_says_how(
    checkout: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    log = built(checkout, tmp_path, fails=True, BCG_FIXES_CUDA_ARCHS="90a", PATH="/nowhere")
    assert "no nvcc is on the PATH; unset it" in log


def test_a_checkout_has_the_header_beside_the_package(checkout: pathlib.Path) -> None:
    assert f'["{checkout / HEADERS[0]}", true, null]' in asked(checkout)
    assert not (checkout / "sglang_bcg_fixes" / "csrc").exists()
