# SPDX-License-Identifier: Apache-2.0
"""Packaging: the metadata, the entry points from entry_points.toml, and the CUDA sources from csrc/.

Nothing is compiled by default: the plugin compiles at first use, with the compiler that torch brings. Where that is not
wanted, BCG_FIXES_CUDA_ARCHS="90a;100a" compiles with nvcc into the wheel; BCG_FIXES_SKIP_CUDA=1 forbids it again.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import setuptools
from setuptools.command.build_py import build_py

try:
    import tomllib
except ModuleNotFoundError:
    # python 3.10; pyproject.toml asks for tomli there
    import tomli as tomllib

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from sglang_bcg_fixes.kernels.cuda import cubins, nvrtc, program  # noqa: E402


def version() -> str:
    text = (HERE / "sglang_bcg_fixes" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    assert found, "sglang_bcg_fixes/__init__.py has no __version__"
    return found.group(1)


def entry_points() -> dict[str, list[str]]:
    groups = tomllib.loads((HERE / "entry_points.toml").read_text())
    return {group: [f"{name} = {target}" for name, target in names.items()] for group, names in groups.items()}


def headers() -> list[pathlib.Path]:
    return sorted((HERE / "csrc").glob("*/*.cuh"))


def program_of(header: pathlib.Path) -> program.Program:
    found: program.Program = importlib.import_module(f"sglang_bcg_fixes.kernels.{header.stem}.program").PROGRAM
    return found


def architectures() -> list[str]:
    """Such as ["sm_90a"]."""
    if os.environ.get("BCG_FIXES_SKIP_CUDA", "") not in ("", "0"):
        return []
    return [f"sm_{name.strip()}" for name in os.environ.get("BCG_FIXES_CUDA_ARCHS", "").split(";") if name.strip()]


def compile_ahead(header: pathlib.Path, architecture: str, target: pathlib.Path) -> None:
    nvcc = shutil.which("nvcc")
    if not nvcc:
        raise SystemExit(
            "BCG_FIXES_CUDA_ARCHS asks for machine code, and no nvcc is on the PATH; unset it: the plugin then "
            "compiles at first use, without nvcc"
        )
    real, virtual = f"code={architecture}", f"arch={architecture.replace('sm_', 'compute_')}"
    command = [nvcc, "-cubin", "-x", "cu", *nvrtc.OPTIONS, f"-gencode={virtual},{real}", str(header), "-o", str(target)]
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)
    target.write_bytes(cubins.seal(cubins.key(header.read_bytes(), architecture), target.read_bytes()))


class BuildWithKernels(build_py):
    """The package with csrc/ inside it; an editable install finds it beside the package instead."""

    def run(self) -> None:
        # a fix that was deleted since the last build would be packed, found and applied
        package = pathlib.Path(self.build_lib) / "sglang_bcg_fixes"
        if package.exists() and not self.editable_mode:
            shutil.rmtree(package)
        super().run()
        if self.editable_mode:
            return
        for header in headers():
            target = pathlib.Path(self.build_lib) / "sglang_bcg_fixes" / header.relative_to(HERE)
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(header), str(target))
            for architecture in filter(program_of(header).runs_on, architectures()):
                compile_ahead(header, architecture, target.with_suffix(f".{architecture}.cubin"))


setuptools.setup(
    name="sglang-bcg-fixes",
    version=version(),
    description="Fixes for breakable CUDA graphs in released SGLang, as a plugin that says what it patched",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="sglang cuda-graphs inference llm plugin",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    install_requires=["pluggy>=1.2"],
    extras_require={"bench": ["matplotlib"]},
    packages=setuptools.find_packages(include=["sglang_bcg_fixes", "sglang_bcg_fixes.*"]),
    package_data={
        "sglang_bcg_fixes": [
            "py.typed",
            "prometheus_rules.yml",
            "grafana_dashboard.json",
            "source/*.json",
            "kernels/*.json",
        ]
    },
    entry_points=entry_points(),
    cmdclass={"build_py": BuildWithKernels},
)
