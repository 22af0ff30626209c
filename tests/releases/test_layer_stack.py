# SPDX-License-Identifier: Apache-2.0
"""The layers of real models, found by structure and by SGLang's names; `layer_stacks.json` has what the names find.

`python -m tests.releases.test_layer_stack` writes that table anew; read what changed against the
releases' source.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes, wheels
from tests.releases.layer_stacks import MODELS, NO_NAME, REFUSED, WHOLE_MODEL
from tests.wheels import NEWEST

TABLE = pathlib.Path(__file__).with_name("layer_stacks.json")
RELEASES = ("0.5.11", "0.5.12.post1", "0.5.14", "0.5.15.post1", "0.5.16", "0.5.19", NEWEST)
FP8_ONLY = "wants weights in FP8, whose kernels need a GPU"
NOT_BUILT = {
    ("0.5.11", "Gemma3nForConditionalGeneration"): "reads what the transformers that it pins no longer has",
    ("0.5.12.post1", "Gemma3nForConditionalGeneration"): "reads what the transformers that it pins no longer has",
    ("0.5.12.post1", "DeepseekV4ForCausalLM"): "imports tilelang",
    ("0.5.14", "Ministral3ForCausalLM"): "takes a name for its quantization: nobody can build it",
    **{(release, "DeepseekV4ForCausalLM"): FP8_ONLY for release in ("0.5.14", "0.5.15.post1", "0.5.16", "0.5.19")},
}
Table = dict[str, dict[str, str]]


def examined(root: pathlib.Path, *models: str, **environ: str) -> dict[str, dict[str, Any]]:
    """Examine models in a process of the release; without our plugin unless the environment asks for it."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        done = processes.on_cpu(
            root,
            *("-m", "tests.releases.layer_stacks", str(report), *models),
            environment={"SGLANG_PLUGINS": "__none__", **environ},
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, dict[str, Any]] = json.loads(report.read_text())
        return found


def by_name(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {model: row["by name"] for model, row in found.items() if "by name" in row}


def table() -> Table:
    loaded: Table = json.loads(TABLE.read_text())
    return loaded


@pytest.mark.parametrize("release", RELEASES)
def test_structure_finds_the_layers(release: str, release_root: Callable[[str], pathlib.Path]) -> None:
    found = examined(release_root(release))
    not_built = {model: row["not built"] for model, row in found.items() if "not built" in row}
    assert set(not_built) == {model for of, model in NOT_BUILT if of == release}, not_built
    for model, row in found.items():
        if model not in not_built:
            path, answer = MODELS[model].path, row["by structure"]
            assert answer == path if path else answer.startswith(REFUSED), f"{model}: {answer}"
    assert by_name(found) == table()[release], "write the table anew and read the difference"


@pytest.mark.parametrize(("release", "model"), NOT_BUILT)
def test_a_model_that_cannot_be_built_here(release: str, model: str) -> None:
    pytest.skip(f"{model} of {release} {NOT_BUILT[release, model]}")


def test_names_and_structure_differ_where_we_know_it() -> None:
    """Look at releases that make a prefill runner that captures the layers."""
    answers = {(release, model): answer for release, row in table().items() for model, answer in row.items()}
    others = {
        key: answer
        for key, answer in answers.items()
        if answer not in (WHOLE_MODEL, MODELS[key[1]].path) and (answer == NO_NAME or not answer.startswith(REFUSED))
    }
    # in MuseSpark a module with an attribute `layers` does nothing but pass its arguments on to the layers
    assert others == {
        ("0.5.12.post1", "Gemma4ForConditionalGeneration"): NO_NAME,
        ("0.5.14", "Gemma4ForConditionalGeneration"): NO_NAME,
        ("0.5.16", "Qwen3OmniMoeForConditionalGeneration"): NO_NAME,
        ("0.5.16", "DotsOCRForCausalLM"): NO_NAME,
        ("0.5.23", "MuseSparkForConditionalGeneration"): "model",
    }


def main() -> None:
    rows = {release: by_name(examined(wheels.unpacked(release))) for release in RELEASES}
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
