# SPDX-License-Identifier: Apache-2.0
"""docs/schema describes the JSON of `bcg-fixes doctor`, for programs that read it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jsonschema
import pytest

from tests import processes, wheels

SCHEMAS = processes.REPOSITORY / "docs" / "schema"
HYBRID = {"architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 64}


def checker(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / name).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def doctor(release: str, *words: str) -> Any:
    arguments = ("-m", "sglang_bcg_fixes", "doctor", "--json", "--root", str(wheels.unpacked(release)))
    return json.loads(processes.python(*arguments, *words).stdout)


@pytest.mark.parametrize("release", [wheels.RELEASES[0], wheels.NEWEST])
def test_doctor_says_what_the_schema_describes(release: str) -> None:
    checker("doctor.json").validate(doctor(release))


@pytest.mark.parametrize("words", ["", "--speculative-algorithm EAGLE --enable-mixed-chunk"])
@pytest.mark.parametrize("release", [wheels.RELEASES[0], "0.5.15.post1", wheels.NEWEST])
def test_doctor_of_a_launch_says_what_the_schema_describes(release: str, words: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    said = doctor(release, "--model", str(tmp_path), "--gpu", "h200", "--", *words.split())
    checker("doctor-launch.json").validate(said)
    assert said["concerns"]


def test_a_schema_refuses_what_it_does_not_describe(tmp_path: pathlib.Path) -> None:
    said = doctor(wheels.NEWEST)
    for wrong in ({**said, "format": 1}, {name: said[name] for name in said if name != "defects"}):
        assert not checker("doctor.json").is_valid(wrong)
    said["defects"][0]["verdict"] = "perhaps"
    assert not checker("doctor.json").is_valid(said)
