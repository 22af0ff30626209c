# SPDX-License-Identifier: Apache-2.0
"""examples/own_fixes: installed by pip, found, named as the owner, and applied to the fork that it is for."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from sglang_bcg_fixes.cli import status
from tests import processes
from tests.engine.test_plugin import DEBUGGED, OTHERS_OFF

EXAMPLE = processes.REPOSITORY / "examples" / "own_fixes"
OWNER, FIX = "acme-bcg-fixes", "acme_router_counts_once"
ROUTER = """
class AcmeRouter:
    def scale(self, weights):
        if not hasattr(self, "tokens"):
            self.tokens = len(weights)
        return [weight / self.tokens for weight in weights]
"""
MENDED = """
class AcmeRouter:
    def scale(self, weights):
        return [weight / len(weights) for weight in weights]
"""
ROUTE = """
    from sglang.srt.models.acme import AcmeRouter
    router = AcmeRouter()
    print(json.dumps([router.scale([2.0, 2.0]), router.scale([4.0])]))
"""
LOAD = "import json\nfrom sglang_bcg_fixes import plugin\nprocess = plugin.load()\n"
# which shows the model
A_BATCH = """
    from sglang.srt.model_executor.model_runner import ModelRunner
    ModelRunner().forward(1)
"""
REPORTED = """
    [row] = [row for row in process.report.as_dict()["fixes"] if row["id"] == FIX]
    print(json.dumps(row))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder that pip has installed the example into."""
    folder = tmp_path_factory.mktemp("own_fixes")
    # setuptools leaves a build folder in what it builds
    shutil.copytree(EXAMPLE, folder / "copy")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", folder / "site", folder / "copy"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def fork(folder: pathlib.Path, router: str) -> pathlib.Path:
    """A fake SGLang with one more model."""
    shutil.copytree(processes.FAKE_SGLANG, folder / "fork", ignore=shutil.ignore_patterns("__pycache__"))
    models = folder / "fork" / "sglang" / "srt" / "models"
    models.mkdir()
    (models / "__init__.py").write_text("")
    (models / "acme.py").write_text(router)
    return folder / "fork"


def run(*arguments: str, paths: list[pathlib.Path], **environ: str) -> subprocess.CompletedProcess[str]:
    done = processes.python(*arguments, paths=paths, environment={"FAKE_FORM": "enable", **OTHERS_OFF, **environ})
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def command(*arguments: str, paths: list[pathlib.Path]) -> str:
    return run("-m", "sglang_bcg_fixes", *arguments, paths=paths).stdout


def test_doctor_finds_the_defect_of_the_fork_and_names_the_package(site: pathlib.Path, tmp_path: pathlib.Path) -> None:
    paths = [fork(tmp_path, ROUTER), site]
    text = command("doctor", "--all", paths=paths)
    assert f"affected  {FIX}: AcmeRouter keeps the number of tokens of the batch that was captured\n" in text
    block = text.partition(FIX)[2].split("\nkernel ")[0].splitlines()[1:6]
    assert block[0].split() == ["package", OWNER] and "scale keeps the number of tokens" in block[1], block
    rows = {row["id"]: row for row in json.loads(command("doctor", "--json", paths=paths))["defects"]}
    assert (rows[FIX]["owner"], rows[FIX]["action"]) == (OWNER, "apply")
    assert {row["owner"] for row in rows.values() if row["id"] != FIX} == {"sglang-bcg-fixes"}
    assert text.count("package    ") == 1


def test_list_and_explain_name_the_package(site: pathlib.Path) -> None:
    paths = [processes.FAKE_SGLANG, site]
    lines = [line for line in command("list", paths=paths).splitlines() if f"({OWNER})" in line]
    assert len(lines) == 1 and f" {FIX}: " in lines[0]
    defects = json.loads(command("list", "--json", paths=paths))["defects"]
    assert [row["id"] for row in defects if row["owner"] != "sglang-bcg-fixes"] == [FIX]
    page = command("explain", FIX, paths=paths)
    assert "Our fork counts tokens in each call." in page and page.endswith(f"\nPackage: {OWNER}\n")
    assert "Package: " not in command("explain", "no_bucket_fits", paths=paths)


def test_it_is_applied_to_the_fork_and_reported_with_its_package(site: pathlib.Path, tmp_path: pathlib.Path) -> None:
    paths = [fork(tmp_path, ROUTER), site]
    reports = str(tmp_path / "reports")
    stock = run("-c", "import json" + processes.code(ROUTE), paths=paths)
    assert json.loads(stock.stdout) == [[1.0, 1.0], [2.0]], "stock is wrong"
    code = f"FIX = {FIX!r}" + processes.code(ROUTE) + processes.code(REPORTED)
    mended, row = run("-c", LOAD + code, paths=paths, SGLANG_BCG_REPORT_DIR=reports).stdout.splitlines()
    assert json.loads(mended) == [[1.0, 1.0], [4.0]]
    said = json.loads(row)
    assert (said["owner"], said["state"]) == (OWNER, "applied")
    assert list(status.further_words(said)) == [f"package {OWNER}"]
    assert not [*status.further_words({"owner": "sglang-bcg-fixes"}), *status.further_words({})]


@pytest.mark.parametrize(
    ("router", "said", "answer"),
    [
        (MENDED, f"unread {FIX}", [[1.0, 1.0], [4.0]]),
        (ROUTER.replace("len(weights)", "len(weights) or 1"), f"unread {FIX}", [[1.0, 1.0], [2.0]]),
    ],
    ids=["mended", "drifted"],
)
def test_a_form_that_nobody_has_read_is_left_alone_and_the_package_is_to_be_told(
    site: pathlib.Path, tmp_path: pathlib.Path, router: str, said: str, answer: list[list[float]]
) -> None:
    paths = [fork(tmp_path, router), site]
    code = DEBUGGED + LOAD + processes.code(ROUTE) + processes.code(A_BATCH)
    done = run("-c", code, paths=paths, SGLANG_BCG_REPORT_DIR=str(tmp_path / "reports"))
    assert json.loads(done.stdout) == answer and said in done.stderr, done.stderr
    assert f"bcg-fixes: {FIX} of {OWNER} is not applied (unread): " in done.stderr
    assert f"please report it to {OWNER} " in done.stderr


RETIRED = "SGLANG_BCG_FIX_ACME_ROUTER_KEEPS_TOKENS"
SAID = f"{RETIRED} is set, and was retired in acme-bcg-fixes 1.0: it says what the fix does now; it counts as "


def test_a_flag_that_the_package_has_renamed_counts_and_warns(site: pathlib.Path, tmp_path: pathlib.Path) -> None:
    paths = [fork(tmp_path, ROUTER), site]
    off = {RETIRED: "off", "SGLANG_BCG_REPORT_DIR": str(tmp_path / "reports")}
    done = run("-c", LOAD + processes.code(ROUTE), paths=paths, **off)
    assert json.loads(done.stdout) == [[1.0, 1.0], [2.0]] and f"bcg-fixes: {SAID}" in done.stderr
    [said] = json.loads(run("-m", "sglang_bcg_fixes", "doctor", "--json", paths=paths, **off).stdout)["retired"]
    assert said == f"{SAID}SGLANG_BCG_FIX_ACME_ROUTER_COUNTS_ONCE, and from 1.2 on no server starts with it"
    assert SAID in run("-m", "sglang_bcg_fixes", "list", paths=paths, **off).stderr


def test_a_later_version_of_the_package_refuses_it(site: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(site, tmp_path / "site")
    (info,) = (tmp_path / "site").glob("*.dist-info")
    (info / "METADATA").write_text((info / "METADATA").read_text().replace("\nVersion: 1.0\n", "\nVersion: 1.2\n"))
    done = processes.python(
        *("-m", "sglang_bcg_fixes", "doctor"),
        paths=[processes.FAKE_SGLANG, tmp_path / "site"],
        environment={RETIRED: "off"},
    )
    assert done.returncode == 2 and f"{RETIRED} was retired in acme-bcg-fixes 1.0: it says" in done.stderr
    assert "; set SGLANG_BCG_FIX_ACME_ROUTER_COUNTS_ONCE" in done.stderr


def test_it_leaves_any_other_sglang_alone(site: pathlib.Path) -> None:
    text = command("doctor", "--all", paths=[processes.FAKE_SGLANG, site])
    assert f"absent    {FIX}" in text and "this SGLang is not our fork" in text
