# SPDX-License-Identifier: Apache-2.0
"""`make dist`: what it builds is complete, the same each time, and described by its SBOM."""

from __future__ import annotations

import email
import email.message
import hashlib
import importlib.resources
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator

import jsonschema
import pytest
import referencing
import sbom
from packaging.requirements import Requirement

from tests import processes

IN_CHECKOUT = (processes.REPOSITORY / ".git").exists()
NEEDS_GIT = pytest.mark.skipif(not IN_CHECKOUT, reason="what is tracked is known in a checkout only")
SECONDS = 1_700_000_000
LARGE = 50_000
MADE_UP = "https://forge.example/somebody/sglang-bcg-fixes"
# a project of one module
SETUP = "import setuptools; setuptools.setup(name='tiny', version='1', py_modules=['tiny'], description={})"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def git(folder: pathlib.Path, *arguments: str) -> str:
    date = f"{SECONDS} +0000"
    who = {name: value for role in ("AUTHOR", "COMMITTER") for name, value in signature(role, date)}
    environment = processes.environment_of([], who)
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


def signature(role: str, date: str) -> Iterator[tuple[str, str]]:
    yield f"GIT_{role}_NAME", "somebody"
    yield f"GIT_{role}_EMAIL", "somebody@example.org"
    yield f"GIT_{role}_DATE", date


def committed(folder: pathlib.Path) -> pathlib.Path:
    git(folder, "init", "--quiet")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", "all")
    return folder


def dist(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "tools" / "dist.py")]
    # machine code is never published, whatever the builder has set
    environment = processes.environment_of([], {"BCG_FIXES_CUDA_ARCHS": "90a"})
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def tracked() -> list[str]:
    names = git(processes.REPOSITORY, "ls-files", "-z").split("\0")
    # one that is deleted and not committed yet is tracked still
    return [name for name in names if (processes.REPOSITORY / name).is_file()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Everything that is tracked, as it is now, in a checkout of its own; it has been built there."""
    folder = tmp_path_factory.mktemp("whole")
    for name in tracked():
        original = processes.REPOSITORY / name
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(original, folder / name)
        if name.startswith("benchmarks/") and original.stat().st_size > LARGE:
            # packed four times, and the name tells whether it is there
            (folder / name).write_bytes(b"")
    done = dist(committed(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def only(folder: pathlib.Path, pattern: str) -> pathlib.Path:
    (file,) = (folder / "dist").glob(pattern)
    return file


def metadata_of(wheel: pathlib.Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith("/METADATA"))
        return email.message_from_string(packed.read(name).decode())


@NEEDS_GIT
def test_a_source_distribution_has_everything_that_is_tracked_and_nothing_else(checkout: pathlib.Path) -> None:
    with tarfile.open(only(checkout, "*.tar.gz")) as packed:
        members = {member.name.partition("/")[2]: member for member in packed if member.isfile()}
    made = {name for name in members if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert members.keys() - made == set(tracked())
    assert not [name for name in members if name.endswith((".whl", ".so", ".cubin", ".pyc"))]
    assert {member.mtime for member in members.values()} == {SECONDS}
    assert members[".ci/run"].mode == 0o755 and members["setup.py"].mode == 0o644


@NEEDS_GIT
def test_a_wheel_is_pure_and_has_the_time_of_the_commit(checkout: pathlib.Path) -> None:
    wheel = only(checkout, "*.whl")
    assert wheel.name.endswith("-py3-none-any.whl") and "+" not in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        assert {member.date_time for member in packed.infolist()} == {(2023, 11, 14, 22, 13, 20)}
        modes = {member.filename: member.external_attr >> 16 & 0o777 for member in packed.infolist()}
        # setuptools writes RECORD itself, with a mode of its own
        assert {mode for name, mode in modes.items() if not name.endswith("/RECORD")} == {0o644}
        assert "sglang_bcg_fixes/csrc/gdn_extend/gdn_extend.cuh" in packed.namelist()
        assert not [name for name in packed.namelist() if not name.startswith("sglang_bcg_fixes")]


@NEEDS_GIT
def test_checksums_are_those_of_all_files(checkout: pathlib.Path) -> None:
    lines = [line.split("  ") for line in only(checkout, "SHA256SUMS").read_text().splitlines()]
    said = {name: digest for digest, name in lines}
    there = {file.name for file in (checkout / "dist").iterdir()}
    assert said.keys() == there - {"SHA256SUMS"} and len(said) == 3
    for name, digest in said.items():
        assert hashlib.sha256((checkout / "dist" / name).read_bytes()).hexdigest() == digest


@NEEDS_GIT
def test_on_an_index_page_no_link_is_relative(checkout: pathlib.Path) -> None:
    page = str(metadata_of(only(checkout, "*.whl")).get_payload())
    code = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
    links = LINK.findall(code.sub("", page))
    assert links and not [link for link in links if not link.startswith("https://")]
    assert "Links to other pages are left out here" in page.split("\n\n")[1]
    # nothing but links and pictures is lost
    readme = re.sub(r"!\[[^]]*\]\([^)]*\)", "", (processes.REPOSITORY / "README.md").read_text())
    assert code.findall(page) == code.findall(readme)
    assert len(page.split()) > 0.95 * len(LINK.sub("]", readme).split())


@NEEDS_GIT
def test_on_an_index_page_links_lead_to_the_repository_once_that_is_known(
    checkout: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(checkout, tmp_path / "copy", ignore=shutil.ignore_patterns("benchmarks", "tests", "dist", ".git"))
    settings = tmp_path / "copy" / "pyproject.toml"
    settings.write_text(settings.read_text().replace('repository = ""', f'repository = "{MADE_UP}"'))
    (tmp_path / "copy" / "README.md").write_text(
        "# Title\n\n[a](docs/a.md#b) [`c`](#d) [e](https://e.org) `[f](g)` ![h](i.png)\n"
    )
    code = "import setup; print(setup.index_page())"
    code = f"import setuptools; setuptools.setup = lambda **given: print(given); {code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "copy", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = f"{MADE_UP}/blob/v0.1.0"
    page = f"# Title\n\n[a]({folder}/docs/a.md#b) [`c`]({folder}/README.md#d) [e](https://e.org) `[f](g)`"
    assert page in done.stdout and f"'project_urls': {{'Source': '{MADE_UP}'}}" in done.stdout


def schema_of_boms() -> jsonschema.Draft7Validator:
    """CycloneDX's own schema, and the two that it refers to."""
    folder = importlib.resources.files("cyclonedx") / "schema" / "_res"
    found = {
        name: json.loads((folder / f"{name}.SNAPSHOT.schema.json").read_text())
        for name in ("bom-1.6", "spdx", "jsf-0.82")
    }
    resources = [(schema["$id"], referencing.Resource.from_contents(schema)) for schema in found.values()]
    registry: referencing.Registry[object] = referencing.Registry().with_resources(resources)
    return jsonschema.Draft7Validator(found["bom-1.6"], registry=registry)


@NEEDS_GIT
def test_the_sbom_is_one_and_says_what_the_wheel_needs(checkout: pathlib.Path) -> None:
    found = json.loads(only(checkout, "*.cdx.json").read_text())
    schema_of_boms().validate(found)
    assert not schema_of_boms().is_valid({**found, "components": [{"type": "libary", "name": "pluggy"}]})
    itself, wheel = found["metadata"]["component"], only(checkout, "*.whl")
    assert itself["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    assert itself["licenses"] == [{"expression": "Apache-2.0"}]
    assert itself["purl"] == f"pkg:pypi/sglang-bcg-fixes@{metadata_of(wheel)['Version']}"
    said = {each["name"]: (each["scope"], each["properties"][0]["value"]) for each in found["components"]}
    assert said == {"pluggy": ("required", "pluggy>=1.2")}
    assert found["dependencies"][0]["dependsOn"] == ["pkg:pypi/pluggy"]
    assert sbom.component(Requirement('one; extra == "more"'))["scope"] == "optional"
    assert sbom.made(wheel) == found, "the same wheel has the same bill"


@pytest.fixture
def tiny(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "tools").mkdir()
    for name in ("dist.py", "sbom.py"):
        shutil.copy(processes.REPOSITORY / "tools" / name, tmp_path / "tools")
    (tmp_path / "tiny.py").write_text("")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    return tmp_path


def test_builds_that_differ_are_not_published(tiny: pathlib.Path) -> None:
    (tiny / "setup.py").write_text(SETUP.format("__import__('uuid').uuid4().hex"))
    (tiny / "dist").mkdir()
    done = dist(committed(tiny))
    assert done.returncode == 1 and "tiny-1.tar.gz: two builds differ" in done.stderr, done.stderr
    assert not list((tiny / "dist").iterdir())


@pytest.mark.parametrize(
    ("setup", "change", "said"),
    [
        (SETUP.format("'fine'"), "new.txt", "changes that are not committed; commit or remove them:\n?? new.txt"),
        ("1 / 0", "", "build_sdist fails:"),
    ],
)
def test_what_cannot_be_built_is_an_error(tiny: pathlib.Path, setup: str, change: str, said: str) -> None:
    (tiny / "setup.py").write_text(setup)
    committed(tiny)
    if change:
        (tiny / change).write_text("")
    done = dist(tiny)
    assert done.returncode == 1 and said in done.stderr, done.stderr


def test_without_git_it_says_where_to_run_it(tiny: pathlib.Path) -> None:
    done = dist(tiny)
    assert done.returncode == 1 and "run this in a checkout" in done.stderr
