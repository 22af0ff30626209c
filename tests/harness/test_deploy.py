# SPDX-License-Identifier: Apache-2.0
"""examples/deploy: files that the schemas of their formats allow, a gate that opens and shuts, and known flags."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jsonschema
import kubernetes_validate
import pytest
import yaml

from sglang_bcg_fixes.source import releases
from tests import processes, wheels
from tests.engine.test_plugin import OTHERS_OFF

DEPLOY = processes.REPOSITORY / "examples" / "deploy"
RULES = processes.REPOSITORY / "sglang_bcg_fixes" / "prometheus_rules.yml"
UNIT = (DEPLOY / "sglang-bcg.service").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
# the oldest and the newest that the schemas are there for
KUBERNETES = ("1.25", "1.37")
ENVIRONMENT = "/opt/sglang/bin/"
# what systemd puts there for a system service
SPECIFIERS = {"%t": "/run", "%C": "/var/cache"}


class Deployment(NamedTuple):
    """The commands of one way to run a server, with their settings."""

    gate: list[str]
    server: list[str]
    environ: dict[str, str]
    # of the folders, those that it makes
    writable: list[str]


def lines_of_unit(key: str) -> list[str]:
    return [value.strip() for name, _, value in (line.partition("=") for line in whole_lines()) if name == key]


def whole_lines() -> list[str]:
    return UNIT.replace("\\\n", " ").splitlines()


def of_systemd() -> Deployment:
    [gate], [server] = lines_of_unit("ExecStartPre"), lines_of_unit("ExecStart")
    environ = dict(line.split("=", 1) for line in lines_of_unit("Environment"))
    for short, folder in SPECIFIERS.items():
        environ = {name: value.replace(short, folder) for name, value in environ.items()}
    [run], [cache] = lines_of_unit("RuntimeDirectory"), lines_of_unit("CacheDirectory")
    return Deployment(words(gate), words(server), environ, [f"/run/{run}", f"/var/cache/{cache}"])


def words(line: str) -> list[str]:
    return [word.removeprefix(ENVIRONMENT) for word in shlex.split(line)]


def of_compose() -> Deployment:
    gate, server = COMPOSE["services"]["doctor"], COMPOSE["services"]["sglang"]
    assert gate["environment"] == server["environment"] and gate["build"] == server["build"]
    named = [volume.rsplit(":", 1)[1] for volume in server["volumes"] if volume.split(":")[0] in COMPOSE["volumes"]]
    return Deployment(gate["command"], server["command"], server["environment"], [*server["tmpfs"], *named])


def of_kubernetes() -> Deployment:
    settings, deployment, _ = MANIFESTS
    pod = deployment["spec"]["template"]["spec"]
    [gate], [server] = pod["initContainers"], pod["containers"]
    assert gate["image"] == server["image"] and gate["envFrom"] == server["envFrom"]
    assert server["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    volumes = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    mounts = [mount["mountPath"] for mount in server["volumeMounts"] if mount["name"] in volumes]
    return Deployment(gate["command"], server["command"], settings["data"], mounts)


WAYS = {"systemd": of_systemd, "compose": of_compose, "kubernetes": of_kubernetes}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
Way = Callable[[], Deployment]


def gate_of(deployment: Deployment, folder: pathlib.Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the gate with the deployment's settings, its folders under this one, and the fake SGLang."""
    program, *arguments = deployment.gate
    assert program == "bcg-fixes"
    environ = {name: moved(value, folder) for name, value in deployment.environ.items()}
    whole = {"FAKE_FORM": "enable", **OTHERS_OFF, **environ, **more}
    return processes.python("-m", "sglang_bcg_fixes", *arguments, paths=[processes.FAKE_SGLANG], environment=whole)


def moved(value: str, folder: pathlib.Path) -> str:
    return f"{folder}{value}" if value.startswith("/") else value


@each_way
def test_the_gate_opens_for_a_server_that_gets_what_it_wants(way: Way, tmp_path: pathlib.Path) -> None:
    done = gate_of(way(), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@each_way
@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ({"SGLANG_PLUGINS": "bcg-fixes"}, 1, "SGLang will NOT load the plugin"),
        ({"SGLANG_BCG_FIXES": "strickt"}, 2, "did you mean strict?"),
    ],
)
def test_the_gate_shuts(way: Way, tmp_path: pathlib.Path, more: dict[str, str], code: int, said: str) -> None:
    done = gate_of(way(), tmp_path, **more)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stdout + done.stderr


@each_way
def test_a_server_reports_into_the_folder_that_it_is_given(way: Way, tmp_path: pathlib.Path) -> None:
    deployment = way()
    for folder in deployment.writable:
        made = pathlib.Path(moved(folder, tmp_path))
        made.mkdir(parents=True)
        # systemd makes them private; a tmpfs and an emptyDir are for everybody
        made.chmod(0o700 if way is of_systemd else 0o777)
    environ = {name: moved(value, tmp_path) for name, value in deployment.environ.items()}
    reports = environ["SGLANG_BCG_REPORT_DIR"]
    code = "import os; from sglang_bcg_fixes import plugin; plugin.load(); print(os.listdir(os.sys.argv[1]))"
    done = processes.python(
        *("-c", code, reports),
        paths=[processes.FAKE_SGLANG],
        environment={"FAKE_FORM": "enable", **OTHERS_OFF, **environ},
    )
    assert re.fullmatch(r"\['\d+\.json'\]\n", done.stdout) and "will not see" not in done.stderr, done.stderr
    # the caches, too, are in what outlives the process
    assert all(any(value.startswith(given) for given in deployment.writable) for value in folders(deployment))


def folders(deployment: Deployment) -> list[str]:
    found = [value for name, value in deployment.environ.items() if name.endswith("_DIR")]
    assert len(found) == 2
    return found


@each_way
@pytest.mark.parametrize("release", wheels.RELEASES)
def test_every_release_knows_the_servers_flags(
    way: Way, release: str, release_root: Callable[[str], pathlib.Path]
) -> None:
    python, dash, module, *arguments = way().server
    assert python.startswith("python") and dash == "-m"
    source = releases.in_folder(release_root(release))
    assert source.has_module(module)
    flags = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    assert "--enable-metrics" in flags and len(flags) == 4
    assert [flag for flag in flags if not source.has_option(flag)] == []


def schema_of_compose() -> Any:
    # found and not imported: the schema is all that is needed of it
    found = importlib.util.find_spec("check_jsonschema")
    assert found and found.origin
    file = pathlib.Path(found.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(file.read_text())
    return jsonschema.validators.validator_for(schema)(schema)


def test_the_compose_file_is_one() -> None:
    schema_of_compose().validate(COMPOSE)


@pytest.mark.parametrize(
    ("service", "change"),
    [
        ("sglang", {"depend_on": ["doctor"]}),
        ("sglang", {"depends_on": {"doctor": {"condition": "service_ended"}}}),
        ("doctor", {"command": {"bcg-fixes": "doctor"}}),
    ],
)
def test_a_wrong_compose_file_is_none(service: str, change: dict[str, Any]) -> None:
    wrong = copy.deepcopy(COMPOSE)
    wrong["services"][service] |= change
    assert not schema_of_compose().is_valid(wrong)


def test_compose_starts_the_server_behind_the_gate() -> None:
    depends = COMPOSE["services"]["sglang"]["depends_on"]
    assert depends == {"doctor": {"condition": "service_completed_successfully"}}
    assert not {"restart", "ports", "deploy"} & COMPOSE["services"]["doctor"].keys()


def test_prometheus_asks_the_server_and_knows_the_alerts() -> None:
    found, services = yaml.safe_load((DEPLOY / "prometheus.yml").read_text()), COMPOSE["services"]
    mounted = dict(volume.split(":")[:2] for volume in services["prometheus"]["volumes"])
    files = {pathlib.PurePath(inside).name: (DEPLOY / outside).resolve() for outside, inside in mounted.items()}
    assert [files[name] for name in found["rule_files"]] == [RULES]
    assert files["prometheus.yml"] == DEPLOY / "prometheus.yml"
    [scrape] = found["scrape_configs"]
    [target] = scrape["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services and f"--port={port}" in services[host]["command"]
    # Prometheus itself says so where it is installed
    if shutil.which("promtool"):
        command = ["promtool", "check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_manifests_are_what_kubernetes_knows(version: str) -> None:
    assert [manifest["kind"] for manifest in MANIFESTS] == ["ConfigMap", "Deployment", "Service"]
    for manifest in MANIFESTS:
        assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "template", "spec", "initContainer"), []),
        (("spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"), "http"),
        (("spec", "template", "spec", "containers", 0, "startupProbe", "failuresAllowed"), 3),
    ],
)
def test_a_wrong_manifest_is_refused(path: tuple[str | int, ...], value: object) -> None:
    wrong = copy.deepcopy(MANIFESTS[1])
    place: Any = wrong
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[0], strict=True)


def test_in_kubernetes_the_names_and_ports_belong_together() -> None:
    _, deployment, service = MANIFESTS
    template = deployment["spec"]["template"]
    [server] = template["spec"]["containers"]
    labels = template["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    [port], [open_port] = service["spec"]["ports"], server["ports"]
    assert port["targetPort"] == open_port["name"] == server["readinessProbe"]["httpGet"]["port"]
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(open_port["containerPort"])
    assert f"--port={open_port['containerPort']}" in server["command"]
    mounted = {mount["name"] for mount in server["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}


def verified(folder: pathlib.Path, unit: str) -> list[str]:
    """Have systemd judge a unit whose programs are there."""
    for name in ("bcg-fixes", "python"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    file = folder / "example.service"
    file.write_text(unit.replace(ENVIRONMENT, f"{folder}/"))
    command = ["systemd-analyze", "verify", "--man=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    return [line for line in (done.stdout + done.stderr).splitlines() if "example.service" in line]


# the other tests read the unit without systemd
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", ""),
        ("ExecStartPre=", "ExecStartPree=", "Unknown key"),
        ("RestartSec=15s", "RestartSec=15q", "Failed to parse"),
        (f"ExecStartPre={ENVIRONMENT}bcg-fixes", f"ExecStartPre={ENVIRONMENT}bcg_fixes", "is not executable"),
    ],
)
def test_systemd_knows_the_unit(tmp_path: pathlib.Path, old: str, new: str, said: str) -> None:
    assert old in UNIT
    found = verified(tmp_path, UNIT.replace(old, new) if old else UNIT)
    assert not found if not said else any(said in line.replace("lvalue", "key") for line in found), found


def test_the_unit_says_what_it_is_made_of() -> None:
    """Read as systemd does: sections, and each key once but for those that may be repeated."""
    sections: dict[str, list[str]] = {}
    for line in whole_lines():
        if line.startswith("["):
            keys = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            keys.append(line.partition("=")[0])
    assert list(sections) == ["Unit", "Service", "Install"]
    repeated = {key for keys in sections.values() for key in keys if keys.count(key) > 1}
    assert repeated == {"Environment"}
    # at most three starts, however long the gate takes
    assert {"StartLimitIntervalSec", "StartLimitBurst"} <= set(sections["Unit"])
    assert lines_of_unit("RuntimeDirectoryMode") == ["0700"], "a folder for others is refused"


def test_an_image_has_all_that_the_package_is_built_from(tmp_path: pathlib.Path) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *names, target = line.split()
        inside = tmp_path / pathlib.PurePath(target).relative_to("/tmp")
        for name in names:
            original = processes.REPOSITORY / name
            if original.is_dir():
                shutil.copytree(original, inside, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                inside.mkdir(exist_ok=True)
                shutil.copy(original, inside)
    code = "from setuptools import build_meta; build_meta.build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "sglang-bcg-fixes", capture_output=True)
    assert done.returncode == 0 and len(list(tmp_path.glob("*.whl"))) == 1, done.stderr
    # nobody can know which image that is
    assert re.search(r"^ARG SGLANG_IMAGE\nFROM \$\{SGLANG_IMAGE\}$", text, re.MULTILINE)
