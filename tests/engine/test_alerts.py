# SPDX-License-Identifier: Apache-2.0
"""The alerts that travel with the package, against what a process really shows to Prometheus."""

from __future__ import annotations

import operator
import pathlib
import re
from collections.abc import Callable, Iterator

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import sglang_bcg_fixes
from sglang_bcg_fixes.model import Action
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.process import report
from tests import processes, wheels
from tests.engine import test_plugin
from tests.engine.test_metrics import with_metrics
from tests.engine.test_plugin import AFFECTED, UNKNOWN, Extra

extra = test_plugin.extra
RULES = pathlib.Path(sglang_bcg_fixes.__file__).with_name("prometheus_rules.yml")
# a selector compared with a number, which is all that these rules are made of
EXPRESSION = re.compile(r"(?P<name>\w+)\{(?P<matchers>.*)\} == (?P<value>\d+)")
MATCHER = re.compile(r'(?P<label>\w+)(?P<operator>=~|!~|!=|=)"(?P<text>[^"]*)"(?:, |$)')
# Prometheus anchors its expressions at both ends
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "=~": lambda value, text: re.fullmatch(text, value) is not None,
    "!~": lambda value, text: re.fullmatch(text, value) is None,
}


def rules() -> dict[str, str]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def firing(exposition: str) -> Iterator[tuple[str, str]]:
    """Each alert that fires, and for which fix."""
    samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]
    for alert, expression in rules().items():
        selector = EXPRESSION.fullmatch(expression)
        assert selector, expression
        matchers = MATCHER.findall(selector["matchers"])
        assert "".join(f'{label}{op}"{text}", ' for label, op, text in matchers)[:-2] == selector["matchers"]
        for sample in samples:
            is_meant = all(MATCHES[op](sample.labels.get(label, ""), text) for label, op, text in matchers)
            if sample.name == selector["name"] and is_meant and sample.value == float(selector["value"]):
                yield alert, sample.labels["fix"]


def test_the_rules_name_every_kernel_and_no_state_that_is_none() -> None:
    operations = "|".join(kernel.op for kernel in registry.discover().kernels)
    assert f'fix!~"{operations}"' in rules()["BcgFixMissing"]
    assert set(rules()) == {"BcgSelfCheckWrong", "BcgFixLost", "BcgFixMissing"}
    dashboard = RULES.with_name("grafana_dashboard.json").read_text().replace('\\"', '"')
    named = re.findall(r'state=~?"([^"]*)"', " ".join(rules().values()) + dashboard)
    shown = {report.APPLIED, report.PENDING, *report.MISSING, *(action.value for action in Action)} - {"unknown"}
    assert {state for states in named for state in states.split("|")} - {"right", "wrong"} <= shown, named


# the process has to have something that is looked at again
ANOTHER = f""", Fix(id="good_fix", doc="Good.", upstream=(), probe=lambda source: {AFFECTED}, known={{}}, patches=(
    PatchPoint(("sglang.srt.target:Thing.static",), How.AROUND, "tests.engine.bodies:around"),))]
"""


@pytest.mark.parametrize(
    ("probe", "second", "change", "alerts"),
    [
        (AFFECTED, "Thing.method", "none", []),
        (AFFECTED, "Thing.method", "replaced function", ["BcgFixLost"]),
        (AFFECTED, "Thing.gone", "none", ["BcgFixLost"]),
        (UNKNOWN, "Thing.method", "none", ["BcgFixMissing"]),
    ],
    ids=["applied", "lost", "failed", "unread"],
)
def test_an_alert_fires_for_a_fix_that_is_not_there(
    extra: Extra, tmp_path: pathlib.Path, probe: str, second: str, change: str, alerts: list[str]
) -> None:
    site = extra(probe, second, test_plugin.EXTRA.removesuffix("]\n") + ANOTHER)
    done = with_metrics(site, tmp_path, "everything", change)
    shown = processes.result(done)
    assert [alert for alert, fix in firing(shown) if fix == "extra_fix"] == alerts, shown
    # kernels that do not know this source leave it SGLang's own code, which is no news
    assert {fix for _, fix in firing(shown)} <= {"extra_fix"}


@pytest.mark.parametrize(("fixes", "alerts"), [("off", [("BcgSelfCheckWrong", "selfcheck")]), ("auto", [])])
def test_an_alert_fires_for_graphs_that_the_self_check_finds_wrong(fixes: str, alerts: list[tuple[str, str]]) -> None:
    found, _ = processes.beside(
        wheels.unpacked("0.5.12.post1"),
        *("-m", "tests.releases.selfcheck_run", "qwen3next", "--freed-memory", "kept", "--metrics"),
        SGLANG_BCG_SELFCHECK="warn",
        SGLANG_BCG_FIXES=fixes,
    )
    verdict = "wrong" if alerts else "right"
    assert found["selfcheck"]["verdict"] == verdict
    assert f'fix="selfcheck",process="MainProcess",state="{verdict}"' in found["metrics"]
    assert list(firing(found["metrics"])) == alerts


def test_an_alert_fires_for_graphs_that_the_canary_finds_wrong() -> None:
    options = ("--no-check", "--prefills", "3", "--freed-memory", "kept", "--metrics")
    found, _ = processes.beside(
        wheels.unpacked("0.5.12.post1"),
        *("-m", "tests.releases.selfcheck_run", "qwen3next", *options),
        SGLANG_BCG_FIXES="off",
        SGLANG_BCG_CANARY="1",
    )
    assert found["selfcheck afterwards"]["verdict"] == "wrong", found
    assert list(firing(found["metrics"])) == [("BcgSelfCheckWrong", "selfcheck")], found["metrics"]
