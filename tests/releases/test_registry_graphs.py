# SPDX-License-Identifier: Apache-2.0
"""The recorded reasons why each architecture of the newest release has prefill graphs or none, against its wheel.

`python -m tests.releases.test_registry_graphs` writes `registry_graphs.json` anew, in a minute; read what changed.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
import tempfile

import pytest

from cpu_sglang import architectures
from tests import processes, wheels
from tests.harm import matrix
from tests.harm.matrix import PATCHED, STOCK
from tests.releases.registry_configs import (
    CAPTURED,
    DRAFT_OF,
    NEVER,
    NO_ATTENTION,
    NO_LAYERS,
    NO_MODEL,
    NOT_EXAMINED,
    OF_OTHER_LAYERS,
    READ,
    UNASKED,
)
from tests.releases.registry_graphs import Row
from tests.wheels import NEWEST

TABLE = pathlib.Path(__file__).with_name("registry_graphs.json")
PAGE = processes.REPOSITORY / "docs" / "graphs_by_model.md"
# the rest is of all releases
OF_NEWEST = PAGE.read_text().partition("\n## Does the plugin do harm?\n")[0]
AGAIN = "write the table anew and read the difference"
# one of each reason
SAMPLE = (
    *("LlamaForCausalLM", "Gemma3ForConditionalGeneration", "Qwen3VLForConditionalGeneration"),
    *("KimiLinearForCausalLM", "DeepseekV4ForCausalLM", "Lfm2ForCausalLM", "GraniteMoeHybridForCausalLM"),
    *("HrmTextForCausalLM", "GPT2LMHeadModel", "BertModel", "DeepseekV3ForCausalLMNextN", "Qwen3_5ForCausalLMMTP"),
    *("LlamaForCausalLMEagle3", "DFlashDraftModel", "VoxtralForConditionalGeneration", "MindSporeForCausalLM"),
    *("InklingForConditionalGeneration", "ZayaForCausalLM", "NemotronHForCausalLM"),
)
LOGGED = {
    "not a language model": NO_MODEL,
    "does not have a 'layers' attribute": NO_LAYERS,
    "some layers do not apply Standard GQA": NO_ATTENTION,
}
ROOT = wheels.unpacked(NEWEST)


def decided(*names: str) -> dict[str, Row]:
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        done = processes.on_cpu(
            ROOT,
            *("-m", "tests.releases.registry_graphs", str(report), *names),
            environment={"SGLANG_PLUGINS": "__none__"},
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Row] = json.loads(report.read_text())
        return found


def table() -> dict[str, Row]:
    loaded = json.loads(TABLE.read_text())
    assert loaded["release"] == NEWEST, f"{AGAIN}: the newest release is {NEWEST}"
    rows: dict[str, Row] = loaded["architectures"]
    return rows


def test_the_table_has_the_registry() -> None:
    names = matrix.names_in(NEWEST)
    assert table().keys() == names, f"{AGAIN}: {sorted(table().keys() ^ names)}"


def test_the_page_has_the_registry() -> None:
    words = set(re.findall(r"\w+", re.sub("[¹²]", " ", OF_NEWEST)))
    assert matrix.names_in(NEWEST) <= words
    classes = {word for word in words if re.search(r"For(CausalLM|ConditionalGeneration|SequenceClassification)", word)}
    assert classes <= matrix.names_in(NEWEST)


def test_each_reason_is_decided_again() -> None:
    rows = table()
    assert decided(*SAMPLE) == {name: rows[name] for name in SAMPLE}, AGAIN
    whole = {(row["by default"], row.get("asked for") if "read" not in row else "read") for row in rows.values()}
    sampled = {
        (row["by default"], row.get("asked for") if "read" not in row else "read")
        for name, row in rows.items()
        if name in SAMPLE
    }
    # what a tower or a name adds to these is the same rule twice
    assert {pair[0] for pair in whole} == {pair[0] for pair in sampled}
    assert {pair[1] for pair in whole} == {pair[1] for pair in sampled}


def test_servers_that_ran_agree() -> None:
    """A recorded server of stock SGLang captured or was refused as the table says."""
    rows, compared = table(), 0
    for (name, arm), server in matrix.recorded(NEWEST).items():
        if arm == STOCK and "eager" in server and "read" not in rows[name] and name not in OF_OTHER_LAYERS:
            ends = "ends while it captures" in server.get("error", "")
            said = CAPTURED if ends or server["graphs"] else of_log(server["why no graphs"])
            assert rows[name]["asked for"] == said, name
            compared += 1
    assert compared > 150


def test_the_plugin_gives_no_graphs_to_what_is_refused() -> None:
    servers = matrix.recorded(NEWEST)
    refused = {name for (name, arm), server in servers.items() if arm == STOCK and server.get("graphs") == {}}
    assert len(refused) > 30
    assert not [name for name in refused if servers[name, PATCHED]["graphs"]], "the page says otherwise"


def of_log(line: str) -> str:
    return next(answer for words, answer in LOGGED.items() if words in line)


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_there(name: str) -> None:
    read, names = READ[name], matrix.names_in(NEWEST)
    assert read.line in (ROOT / "sglang" / "srt" / "models" / read.file).read_text()
    assert read.answer in {CAPTURED, NO_MODEL, NO_LAYERS, NO_ATTENTION} | names
    assert (read.answer == NO_ATTENTION) == bool(read.layers_of)


def test_only_one_worker_asks_for_the_graphs_of_a_draft() -> None:
    asking = [
        path.name
        for path in (ROOT / "sglang" / "srt").rglob("*.py")
        if "init_prefill_cuda_graph(force_for_draft_worker=True)" in path.read_text(encoding="utf-8-sig")
    ]
    assert asking == ["eagle_worker_v2.py"]
    rows = table()
    assert {name for name, row in rows.items() if row.get("asked for") == NEVER} == UNASKED


def test_trtllm_mla_switches_the_graphs_of_one_architecture_off() -> None:
    hook = (ROOT / "sglang" / "srt" / "arg_groups" / "cuda_graph_hook.py").read_text()
    rule = hook.partition("def disable_prefill_cuda_graph_for_deepseek_trtllm_mla")[2].partition("\ndef ")[0]
    assert '"DeepseekV3ForCausalLM"' in rule and '"trtllm_mla"' in rule and "Backend.DISABLED" in rule


def test_an_exception_of_the_page_is_recorded() -> None:
    """Ling 2.5 without latent attention, whose configuration another table has."""
    stacks = json.loads(TABLE.with_name("layer_stacks.json").read_text())[NEWEST]
    assert stacks["BailingMoeV2_5ForCausalLM"] == "model"
    assert stacks["BailingMoeV2_5ForCausalLM mla"] == table()["BailingMoeV2_5ForCausalLM"]["asked for"] == NO_ATTENTION


def test_feed_forward_layers_cost_nemotron_its_graphs_where_the_page_says_so() -> None:
    """The recorded servers are of mixers and attention alone; the other table's models have feed-forward layers too."""
    stacks = json.loads(TABLE.with_name("layer_stacks.json").read_text())
    assert table()["NemotronHForCausalLM"]["asked for"] == stacks[NEWEST]["NemotronHForCausalLM"] == NO_ATTENTION
    assert sorted(OF_OTHER_LAYERS) == ["NemotronHForCausalLM"]
    assert matrix.recorded(NEWEST)["NemotronHForCausalLM", STOCK]["graphs"]
    refusing = [release for release in stacks if stacks[release]["NemotronHForCausalLM"] == NO_ATTENTION]
    assert refusing == [
        release for release in stacks if wheels.RELEASES.index(release) >= wheels.RELEASES.index("0.5.19")
    ]


def test_who_is_a_text_model_without_a_flag_is_in_the_source() -> None:
    source = (ROOT / "sglang" / "srt" / "configs" / "model_config.py").read_text()
    listed = source.partition("mm_disabled_models = [")[2].partition("]")[0]
    assert 'MIMO_V2_MULTIMODAL_ARCHS = ("MiMoV2ForCausalLM",)' in source
    text = {name for name, row in table().items() if "as multimodal" in row}
    # Inkling has another graph
    assert text == set(re.findall(r"\w+", listed)) - {"InklingForConditionalGeneration"} | {"MiMoV2ForCausalLM"}


def test_every_name_has_one_source() -> None:
    sources = [set(READ), set(NOT_EXAMINED), UNASKED, set(DRAFT_OF)]
    assert sum(map(len, sources)) == len(set().union(*sources)) <= len(matrix.names_in(NEWEST))
    assert not set(NOT_EXAMINED) & set(architectures.SAME_CODE), "built as the other one"


def test_what_cannot_be_built_says_so() -> None:
    name = "InternS1ProForConditionalGeneration"
    quoted = NOT_EXAMINED[name].partition("`")[2].rstrip("`")
    assert matrix.recorded(NEWEST)[name, STOCK]["error"] == f"does not start: TypeError: {quoted}"


def main() -> None:
    names = sys.argv[1:] or sorted(matrix.names_in(NEWEST))
    TABLE.write_text(json.dumps({"release": NEWEST, "architectures": decided(*names)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
