# SPDX-License-Identifier: Apache-2.0
"""Packaging: the metadata, the entry points from entry_points.toml, and the CUDA sources from csrc/.

Nothing is compiled by default: the plugin compiles at first use, with the compiler that torch brings. Where that is not
wanted, BCG_FIXES_CUDA_ARCHS="90a;100a" compiles with nvcc into the wheel, whose version then ends in +sm90a.sm100a;
BCG_FIXES_SKIP_CUDA=1 forbids it again. With SOURCE_DATE_EPOCH the same files give the same wheel and source
distribution, bit for bit.
"""

from __future__ import annotations

import gzip
import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

try:
    import tomllib
except ModuleNotFoundError:
    # python 3.10; pyproject.toml asks for tomli there
    import tomli as tomllib

HERE = pathlib.Path(__file__).parent
EPOCH = "SOURCE_DATE_EPOCH"
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
PICTURE = re.compile(r"!\[[^]]*\]\((?!https://)[^)\s]+\)\n*")
LINK = re.compile(r"\[([^][]*)\]\((?!https://)([^)\s]+)\)")
LEFT_OUT = "Links to other pages are left out here; the source distribution has those pages."
sys.path.insert(0, str(HERE))

from sglang_bcg_fixes.kernels.cuda import cubins, nvrtc, program  # noqa: E402


def version() -> str:
    text = (HERE / "sglang_bcg_fixes" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    assert found, "sglang_bcg_fixes/__init__.py has no __version__"
    # a wheel with machine code is not the one without it, which is the only one to be published
    built_in = ".".join(name.replace("_", "") for name in architectures())
    return f"{found.group(1)}+{built_in}" if built_in else found.group(1)


def repository() -> str:
    settings = tomllib.loads((HERE / "pyproject.toml").read_text())
    return str(settings["tool"]["sglang-bcg-fixes"]["repository"]).rstrip("/")


def index_page() -> str:
    """The README for a place that has none of the pages and pictures beside it."""
    if not (HERE / "README.md").exists():
        return ""
    code: list[str] = []

    def put_away(found: re.Match[str]) -> str:
        code.append(found.group())
        return f"\0{len(code) - 1}\0"

    def absolute(found: re.Match[str]) -> str:
        page = f"README.md{found[2]}" if found[2].startswith("#") else found[2]
        return f"[{found[1]}]({repository()}/blob/v{version()}/{page})"

    text = PICTURE.sub("", CODE.sub(put_away, (HERE / "README.md").read_text()))
    text = LINK.sub(absolute if repository() else r"\1", text)
    if not repository():
        text = text.replace("\n\n", f"\n\n{LEFT_OUT}\n\n", 1)
    return re.sub("\0(\\d+)\0", lambda found: code[int(found[1])], text)


def entry_points() -> dict[str, list[str]]:
    groups = tomllib.loads((HERE / "entry_points.toml").read_text())
    return {group: [f"{name} = {target}" for name, target in names.items()] for group, names in groups.items()}


def headers() -> list[pathlib.Path]:
    return sorted((HERE / "csrc").rglob("*.cuh"))


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
    source = program.text_of(header).encode()
    target.write_bytes(cubins.seal(cubins.key(source, architecture), target.read_bytes()))


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
            if header.parent == HERE / "csrc":
                # what those of operations include
                continue
            for architecture in filter(program_of(header).runs_on, architectures()):
                compile_ahead(header, architecture, target.with_suffix(f".{architecture}.cubin"))


class SameWheel(bdist_wheel):
    """A wheel whose bytes do not depend on the builder's umask."""

    def write_wheelfile(self, *args: object, **kwargs: object) -> None:
        super().write_wheelfile(*args, **kwargs)
        for file in pathlib.Path(self.bdist_dir).rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)


class SameSource(sdist):
    """A source distribution whose bytes do not depend on the builder, nor on the time where that is given."""

    def make_archive(self, base_name: str, format: str, *args: str | None, base_dir: str, **others: str | None) -> str:
        if EPOCH not in os.environ or format != "gztar":
            return str(super().make_archive(base_name, format, *args, base_dir=base_dir, **others))
        time = int(os.environ[EPOCH])

        def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = time
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            return member

        archive = f"{base_name}.tar.gz"
        with gzip.GzipFile(archive, "wb", 6, mtime=time) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(base_dir, filter=anonymous)
        return archive


setuptools.setup(
    name="sglang-bcg-fixes",
    version=version(),
    description="Fixes for breakable CUDA graphs in released SGLang, as a plugin that says what it patched",
    long_description=index_page(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    project_urls={"Source": repository()} if repository() else {},
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
    cmdclass={"bdist_wheel": SameWheel, "build_py": BuildWithKernels, "sdist": SameSource},
)
