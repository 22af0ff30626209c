# SPDX-License-Identifier: Apache-2.0
"""Time that the plugin's Python adds to a server's step, by release and fix; `make harm` records it in speed.json.

python -m tests.harm.speed [--release RELEASE] [--again]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
from typing import Any

from sglang_bcg_fixes.model import flag_of_kernel
from sglang_bcg_fixes.planning import registry
from tests import wheels
from tests.harm import matrix

RECORDED = pathlib.Path(__file__).with_name("speed.json")
# one whose layers are all attention, and one with a linear layer before each
MODELS = ("LlamaForCausalLM", "Qwen3NextForCausalLM")
DEPTHS = (2, 4)
# of Qwen3-Next and Qwen3-30B
LAYERS = 48
# they stand in the place of SGLang's own code, and are measured on a GPU
KERNELS_OFF = dict.fromkeys((flag_of_kernel(kernel.op) for kernel in registry.discover().kernels), "off")
# microseconds of a step; what a mended layer takes beside
PREFILL, DECODE, LAYER = 50.0, 10.0, 10.0
# they do in each layer what SGLang leaves out: rows of nobody are cleared, a layer runs that would be captured
WORK_OF_A_LAYER = (
    *("attention_tail_uninitialised", "linear_tail_uninitialised", "fused_mla_tail_uninitialised"),
    *("linear_attention_captured", "ssm_mixer_captured", "break_positions_padded"),
)
# on 0.5.11 it replays in the place of SGLang's own method, so most of its time is the replay's
IN_SGLANGS_PLACE = ("single_request_capture",)
NOT_ADDED_TO_A_STEP = WORK_OF_A_LAYER + IN_SGLANGS_PLACE
# fix -> [calls in a step of a model of LAYERS layers, microseconds a call]
Step = dict[str, list[float]]


def job(architecture: str, depth: int) -> dict[str, Any]:
    made = matrix.job(architecture, matrix.PATCHED)
    of_depth = {"num_hidden_layers": depth}
    if "layer_types" in made["configuration"]:
        of_depth["layer_types"] = made["configuration"]["layer_types"] * (depth // 2)
    return {
        **made,
        "arm": "timed",
        "configuration": {**made["configuration"], **of_depth},
        "environment": {**made["environment"], **KERNELS_OFF},
    }


def measured(release: str) -> dict[str, dict[str, Step]]:
    """Measure the added time by model and step."""
    jobs = [job(model, depth) for model in MODELS for depth in DEPTHS]
    with tempfile.TemporaryDirectory() as folder:
        rows = list(matrix.served(release, jobs, pathlib.Path(folder, "rows.jsonl")))
    for row in rows:
        if "error" in row:
            raise RuntimeError(f"{release}, {row['architecture']}: {row['error']}")
    return {
        model: {step: at_full_depth(*(row["steps"][step] for row in pair)) for step in ("prefill", "decode")}
        for model, pair in zip(MODELS, zip(rows[::2], rows[1::2], strict=True), strict=True)
    }


def at_full_depth(shallow: Step, deep: Step) -> Step:
    found = {}
    for fix, (calls, microseconds) in sorted(deep.items()):
        of_a_layer = (calls - shallow.get(fix, [0.0])[0]) / (DEPTHS[1] - DEPTHS[0])
        found[fix] = [round(calls + of_a_layer * (LAYERS - DEPTHS[1])), round(microseconds, 2)]
    return found


def total(step: Step, without: tuple[str, ...] = ()) -> float:
    """Microseconds."""
    return sum(calls * each for fix, (calls, each) in step.items() if fix not in without)


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="append", choices=wheels.RELEASES, help="all; repeat")
    parser.add_argument("--again", action="store_true", help="also what was measured of this code already")
    options = parser.parse_args()
    table = recorded()
    for release in options.release or wheels.RELEASES:
        if options.again or table.get(release, {}).get("code") != matrix.code_of_the_package():
            table[release] = {"code": matrix.code_of_the_package(), "models": measured(release)}
            draft = RECORDED.with_suffix(".draft")
            draft.write_text(
                json.dumps({name: table[name] for name in wheels.RELEASES if name in table}, indent=1) + "\n"
            )
            os.replace(draft, RECORDED)
            print(f"{release} is measured", flush=True)


if __name__ == "__main__":
    main()
