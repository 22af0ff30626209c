# SPDX-License-Identifier: Apache-2.0
"""Models that have graphs on trtllm_mla by default, and the verdict on a source whose rule is for all of them."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.fixes import ragged_attention_lost as fix
from sglang_bcg_fixes.source.finding import Verdict
from tests import processes, wheels
from tests.fixes import alone
from tests.wheels import NEWEST

RULES = "sglang/srt/arg_groups/cuda_graph_hook.py"
BACKEND = "sglang/srt/layers/attention/trtllm_mla_backend.py"
MODELS = ("KimiK25ForConditionalGeneration", "Glm4MoeLiteForCausalLM", "MiniCPM3ForCausalLM")
RULE = '        "DeepseekV3ForCausalLM"\n        not in model_config_of(server_args).hf_config.architectures\n'
# of a form that is read: only this condition differs
EVERY_MODEL = "        not model_config_of(server_args).hf_config.architectures\n"


@pytest.mark.parametrize("release", ["0.5.22", NEWEST])
def test_only_deepseek_has_no_graphs_by_default(release: str) -> None:
    scenario = ("-m", "tests.scenarios.tensorrt_prefill", "by_default", fix.DEEPSEEK, *MODELS)
    found, _ = processes.beside(wheels.unpacked(release), *scenario, SGLANG_PLUGINS="__none__")
    assert found == {fix.DEEPSEEK: "disabled", **dict.fromkeys(MODELS, "breakable")}


@pytest.mark.parametrize(
    ("file", "old", "new", "verdict"),
    [
        (RULES, RULE, RULE, Verdict.AFFECTED),
        (RULES, RULE, EVERY_MODEL, Verdict.FIXED),
        (BACKEND, "                or is_in_breakable_cuda_graph()\n", "", Verdict.ABSENT),
    ],
)
def test_only_a_rule_for_one_model_is_told_of(file: str, old: str, new: str, verdict: Verdict) -> None:
    assert alone.verdict("ragged_attention_lost", NEWEST, file, old, new) is verdict
