"""Packaging: the metadata, and the entry points from entry_points.toml."""

from __future__ import annotations

import pathlib
import re

import setuptools

try:
    import tomllib
except ModuleNotFoundError:
    # python 3.10; pyproject.toml asks for tomli there
    import tomli as tomllib

HERE = pathlib.Path(__file__).parent


def version() -> str:
    text = (HERE / "sglang_bcg_fixes" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    assert found, "sglang_bcg_fixes/__init__.py has no __version__"
    return found.group(1)


def entry_points() -> dict[str, list[str]]:
    groups = tomllib.loads((HERE / "entry_points.toml").read_text())
    return {group: [f"{name} = {target}" for name, target in names.items()] for group, names in groups.items()}


setuptools.setup(
    name="sglang-bcg-fixes",
    version=version(),
    description="Fixes for breakable CUDA graphs in released SGLang, as a plugin that says what it patched",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    install_requires=["pluggy>=1.2"],
    extras_require={"bench": ["matplotlib"]},
    packages=setuptools.find_packages(include=["sglang_bcg_fixes", "sglang_bcg_fixes.*"]),
    entry_points=entry_points(),
)
