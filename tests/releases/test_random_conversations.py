# SPDX-License-Identifier: Apache-2.0
"""Random conversations with every fix on: no turn's answer from a warm prefix cache is another than the cold one.

To repeat a failure, or to look further: BCG_FIXES_SEED=7 pytest tests/releases/test_random_conversations.py.
200 turns of each release, or of those named, into random_conversations.json, which keeps what it has from other seeds:

    BCG_FIXES_SEED=7 python -m tests.releases.test_random_conversations 0.5.19
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes, wheels
from tests.wheels import NEWEST, RELEASES

SEED = int(os.environ.get("BCG_FIXES_SEED", "1"))
RECORD = pathlib.Path(__file__).with_name("random_conversations.json")
# of each setting with `--everything`, and otherwise of each server
TURNS, FEW_TURNS = 34, 16
OVERLAPPED = {"disable_overlap_schedule": False}
TRITON = OVERLAPPED | {"attention_backend": "triton"}
HELD: list[tuple[str, str, dict[str, Any]]] = [
    *(("falcon_h1", release, TRITON) for release in ("0.5.14", "0.5.16", "0.5.20", NEWEST)),
    ("qwen3next", NEWEST, TRITON | {"dtype": "float16"}),
    ("bailing_full", "0.5.16", OVERLAPPED),
]
# Triton's interpreter takes the most time, so attention is torch's, and layers and heads are few. All experts answer:
# where they change places, rounding shows as much as a wrong state
NATIVE = {"attention_backend": "torch_native"}
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
MODELS: dict[str, dict[str, Any]] = {
    # Mamba2, gated delta net, lightning attention and Kimi delta attention
    "falcon_h1": NATIVE | {"model": {"num_hidden_layers": 1, **FEW_HEADS}},
    "qwen3next": NATIVE
    | {"dtype": "float16", "model": {"num_hidden_layers": 2, **FEW_HEADS, "num_experts_per_tok": 4}},
    "bailing_full": {},
    "KimiLinearForCausalLM": {
        "attention_backend": "fa3",
        "dtype": "float16",
        "model": {"num_experts_per_token": 4, "num_experts_per_tok": 4},
    },
}
# before that there is no lazy strategy, and lightning attention fails with extra buffers
RUN = tuple(release for release in RELEASES if RELEASES.index(release) >= RELEASES.index("0.5.13"))
# their models cannot be imported here, or have no extra buffers yet
UNABLE = {
    "bailing_full": ("0.5.15", "0.5.15.post1"),
    "KimiLinearForCausalLM": ("0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1"),
}


def strategy(name: str) -> dict[str, str]:
    """Before 0.5.16, and since."""
    return dict.fromkeys(("mamba_scheduler_strategy", "mamba_radix_cache_strategy"), name)


SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": OVERLAPPED,
    "pieces16": {"disable_overlap_schedule": True, "page_size": 16, "chunked_prefill_size": 128},
    "mixed": OVERLAPPED | {"enable_mixed_chunk": True, "chunked_prefill_size": 128},
    "page64small": OVERLAPPED | {"page_size": 64, "chunked_prefill_size": 192, "max_mamba_cache_size": 20},
    "lazy": OVERLAPPED | {"chunked_prefill_size": 256, **strategy("extra_buffer_lazy")},
    "nobuf": {"disable_overlap_schedule": True, **strategy("no_buffer")},
}


def plan(release: str) -> list[tuple[str, str]]:
    """Model and setting: each setting once, and the models in turn; Falcon-H1 stands in for those that cannot run."""
    models = ["falcon_h1" if release in UNABLE.get(model, ()) else model for model in MODELS]
    first = RELEASES.index(release)
    return [(models[(first + number) % len(models)], setting) for number, setting in enumerate(SETTINGS)]


def hold(root: pathlib.Path, model: str, server: dict[str, Any], seed: int, turns: int, **switches: str) -> Any:
    given = json.dumps(server | {"seed": seed, "turns": turns})
    arguments = ("-m", "tests.scenarios.random_conversations", model, given)
    # kernels have tests of their own, and are slow where none compiles
    environment = {"SGLANG_BCG_KERNELS": "off", **switches}
    return processes.beside(root, *arguments, environment=environment, timeout=1800)[0]


def hold_planned(root: pathlib.Path, model: str, setting: str) -> Any:
    return hold(root, model, MODELS[model] | SETTINGS[setting], SEED, TURNS)


@pytest.mark.parametrize(("model", "release", "server"), HELD)
def test_every_warm_answer_is_the_cold_one(
    release_root: Callable[[str], pathlib.Path], model: str, release: str, server: dict[str, Any]
) -> None:
    found = hold(release_root(release), model, server, SEED, FEW_TURNS)
    assert found["wrong"] == [] and found["hits"] >= found["turns"] / 4, found


@pytest.mark.parametrize("release", RUN)
def test_two_hundred_turns(release_root: Callable[[str], pathlib.Path], release: str, everything: bool) -> None:
    if not everything:
        pytest.skip("minutes a release, for `make test-all`")
    for model, setting in plan(release):
        found = hold_planned(release_root(release), model, setting)
        assert found["wrong"] == [] and found["hits"] >= found["turns"] / 4, (model, setting, found)


def test_a_wrong_checkpoint_is_found(release_root: Callable[[str], pathlib.Path]) -> None:
    off = {"SGLANG_BCG_FIX_MAMBA2_CHECKPOINT_GRID": "off"}
    found = hold(release_root("0.5.16"), "falcon_h1", TRITON, 1, 30, **off)
    assert found["wrong"] and "mamba2_checkpoint_grid" not in found["applied"], found


def test_the_record_has_no_wrong_answer() -> None:
    rows = json.loads(RECORD.read_text())
    assert rows and all(row["wrong"] == [] for row in rows)
    assert all((row["model"], row["setting"]) in plan(row["release"]) for row in rows)


def record(releases: list[str]) -> None:
    rows = {key(row): row for row in json.loads(RECORD.read_text())}
    for release in releases:
        for model, setting in plan(release):
            found = hold_planned(wheels.unpacked(release), model, setting)
            del found["applied"]
            row = {"release": release, "model": model, "setting": setting, **found}
            rows[key(row)] = row
            print(json.dumps(row), flush=True)
            write(list(rows.values()))


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return RELEASES.index(row["release"]), row["model"], row["setting"], row["seed"]


def write(rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(row) for row in sorted(rows, key=key))
    RECORD.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    record(sys.argv[1:] or list(RUN))
