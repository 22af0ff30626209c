"""A tiny DeepSeek under breakable graphs of the release that prepares its replays wrongly."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

CODE = """
import json, sys
from sglang_on_cpu import one_batch, prefill
one_batch.import_sglang(with_graphs=True)
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

PROMPTS = [[5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]]
loaded = one_batch.load("deepseek_v2", attention_backend="fa3")
model = loaded.model_runner.model
one_batch.randomize(model)
# the absorbed weights are made from the others
model.post_load_weights()
tokens, logits = one_batch.generate(loaded, PROMPTS, 3)
if sys.argv[1] == "without":
    PrefillCudaGraphRunner._restore_mha_capture_state = staticmethod(lambda forward_batch: None)
prefill.capture_prefill(loaded.model_runner, (8, 16))
try:
    again, replayed = one_batch.generate(loaded, PROMPTS, 3)
    found = {"same": again == tokens, "off": (replayed - logits).abs().max().item()}
except RuntimeError as error:
    found = {"error": str(error)}
print("RESULT", json.dumps(found))
"""


@pytest.fixture
def run(release_root: Callable[[str], pathlib.Path]) -> Callable[[str], dict]:
    return lambda how: processes.beside(release_root("0.5.17"), "-c", CODE, how, SGLANG_PLUGINS="__none__")[0]


def test_the_first_replay_ends_the_server(run: Callable[[str], dict]) -> None:
    assert "is invalid for input of size" in run("stock")["error"]


def test_it_is_that_preparation(run: Callable[[str], dict]) -> None:
    # the two forms round differently, in float16 and with logits of about 2
    found = run("without")
    assert found["same"] and found["off"] < 0.005, found
