# SPDX-License-Identifier: Apache-2.0
"""`doctor` for one model and one server's flags: what it rules out, what it leaves open, and what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.anatomy import launches
from sglang_bcg_fixes.cli import doctor as examination
from sglang_bcg_fixes.cli import for_launch, server_command
from sglang_bcg_fixes.concern import Concern, Condition, Harm, Launch, slower, wrong
from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.kernels.gdn_extend import declaration as gdn_extend
from sglang_bcg_fixes.kernels.mamba2_extend import declaration as mamba2_extend
from sglang_bcg_fixes.model import Kernel
from sglang_bcg_fixes.planning.registry import Registry, declared_in
from sglang_bcg_fixes.source import releases
from tests import processes, wheels

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
HYBRID = {**LLAMA, "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 64}
TRUE, FALSE = Condition("a", lambda launch: True), Condition("b", lambda launch: False)
OPEN = Condition("c", lambda launch: None)
WITH_EXPERTS = " with experts"
COMMANDS = (
    "--tp 2 --tp-size 4",
    "--tp-size 4 --tp=2",
    "--tp 2 --tensor-parallel-size 4 --tp 8",
    "--tensor-p 2 --data-parallel-size 2 --dp 4",
    "--model a --model-path b --page-size 16",
    "--enable-lora --lora-paths a=b",
    "--lora-paths a=b c=d --enable-lora --lora-paths e=f",
    "--speculative-algo EAGLE --speculative-algorithm NGRAM --speculative-eagle-topk 4",
    "--attention-backend fa3 --attention-back triton",
    "--disable-overlap-s --disable-overlap-schedule",
    "--cuda-graph-backend-prefill breakable --cuda-graph-backend-prefill=disabled",
    "--mamba-radix-cache-strategy no_buffer --mamba-radix extra_buffer",
    "--no-lora-strict-loading --lora-strict-loading",
)
# that release has several flags for one value
OLDER = (
    "--cuda-graph-backend-prefill full --enable-breakable-cuda-graph",
    "--enable-breakable-cuda-graph --disable-piecewise-cuda-graph",
    "--disable-piece --cuda-graph-backend-prefill full",
    "--mamba-scheduler-strategy no_buffer --mamba-radix-cache-strategy extra_buffer",
    "--cuda-graph-bs-prefill 4 8 --piecewise-cuda-graph-tokens 6 12",
)


def launch(words: str = "", config: Mapping[str, Any] = LLAMA, chip: str = "", release: str = wheels.NEWEST) -> Launch:
    source = releases.in_folder(wheels.unpacked(release))
    return Launch(source, config, server_command.options_in(source, words.split()), chip)


@pytest.mark.parametrize(
    ("condition", "words", "holds"),
    [
        ("PREFILL_GRAPHS", "", None),
        ("PREFILL_GRAPHS", "--cuda-graph-backend-prefill breakable", True),
        ("PREFILL_GRAPHS", "--cuda-graph-backend-prefill=disabled", False),
        ("PREFILL_GRAPHS", "--disable-cuda-graph", False),
        ("PREFILL_GRAPHS", "--cuda-graph-config {}", None),
        ("PREFILL_GRAPHS", "--device cpu", False),
        ("PREFILL_GRAPHS", "--device cuda:0", None),
        ("ASKED_FOR", "", False),
        ("ASKED_FOR", "--enable-breakable-cuda-graph", True),
        ("ASKED_FOR", "--config server.yaml", None),
        ("FULL_PREFILL_GRAPHS", "--cuda-graph-backend-prefill full", True),
        ("FULL_PREFILL_GRAPHS", "", False),
        ("COMPILED_PREFILL_GRAPHS", "--cuda-graph-backend-prefill tc_piecewise", True),
        ("COMPILED_PREFILL_GRAPHS", "--cuda-graph-backend-prefill breakable", False),
        ("DECODE_GRAPHS", "", True),
        ("DECODE_GRAPHS", "--cuda-graph-backend-decode disabled", False),
        ("OVERLAP", "", None),
        ("OVERLAP", "--disable-overlap-schedule", False),
        ("EXTRA_BUFFERS", "", None),
        ("EXTRA_BUFFERS", "--mamba-radix-cache-strategy extra_buffer", True),
        ("EXTRA_BUFFERS", "--mamba-scheduler-strategy no_buffer", False),
        ("EXTRA_BUFFERS", "--disable-radix-cache", False),
        ("LAZY_BUFFERS", "--mamba-radix-cache-strategy extra_buffer_lazy", True),
        ("MIXED_CHUNKS", "--config server.yaml", None),
        ("MIXED_CHUNKS", "", False),
        ("LORA", "--lora-paths a=b", True),
        ("DECODE_CONTEXT", "--dcp-size 2", True),
        ("DECODE_CONTEXT", "--dcp-size 1", False),
        ("HOST_CACHE", "--enable-hicache", True),
        ("PREFILL_SIZES", "--piecewise-cuda-graph-tokens 6 12", True),
        ("PREFILL_GRAPHS", "--disable-piecewise-cuda-graph", False),
        ("MEGAMOE", "--moe-runner-backend megamoe", True),
        ("MEGAMOE", "--moe-a2a-backend deepep", False),
        ("MEGAMOE", "--config server.yaml", None),
        ("LINEAR_INSIDE", "", True),
        ("LINEAR_INSIDE", "--moe-a2a-backend none --pp-size 1", True),
        ("LINEAR_INSIDE", "--config server.yaml", None),
        ("LINEAR_INSIDE", "--moe-a2a-backend deepep", False),
        ("LINEAR_INSIDE", "--moe-dense-tp-size 1", False),
        ("LINEAR_INSIDE", "--enable-hierarchical-cache", False),
        ("LINEAR_INSIDE", "--pp-size 2", False),
        ("LINEAR_INSIDE", "--enable-dp-attention", False),
        ("LAZY_BUFFERS", "", False),
        ("LAZY_BUFFERS", "--config server.yaml", None),
        ("EMBEDDINGS", "--is-embedding", True),
        ("EMBEDDINGS", "--config server.yaml", None),
        ("SPECULATION", "", False),
        ("EAGLE", "--speculative-algorithm eagle3", True),
        ("EAGLE", "--speculative-algorithm NGRAM", False),
        ("BRANCHES", "--speculative-algorithm EAGLE", None),
        ("BRANCHES", "--speculative-algorithm EAGLE --speculative-eagle-topk 1", False),
        ("BRANCHES", "--speculative-algorithm NGRAM --speculative-eagle-topk 1", None),
        ("DRAFT_MODEL", "--speculative-algorithm STANDALONE", True),
        ("PAGES", "", None),
        ("PAGES", "--page-size 1", False),
        ("PAGES_OF_128", "--page-size 64", False),
        ("PAGES_OF_128", "--page-size 64 --attention-backend cutlass_mla", None),
        ("PAGES_OF_128", "--page-size 64 --attention-backend fa3", False),
        ("FLASH_ATTENTION", "--attention-backend fa4", True),
        ("FLASH_ATTENTION", "--attention-backend triton", False),
        ("FA3", "--attention-backend fa3", True),
        ("FA3", "--attention-backend triton", False),
        ("FA3", "--attention-backend triton --prefill-attention-backend fa3", True),
        ("TRTLLM", "", None),
        ("UNEVEN_GROUP", "--tp 8 --dp 2", False),
        ("UNEVEN_GROUP", "--tp-size 16 --dp-size 2", True),
        ("UNEVEN_GROUP", "--tp-size 16", None),
        ("UNEVEN_GROUP", "--tp-size 6 --dp-size 2", True),
        ("UNEVEN_GROUP", "--tp-size 16 --attn-dp-size 2", True),
        ("DP_ATTENTION", "--dp-size 2", False),
        ("DP_ATTENTION", "--dp-size 2 --enable-dp-attention", True),
        ("DP_ATTENTION", "--attn-dp-size 2", True),
        ("DP_ATTENTION", "--attn-dp-size 1", False),
        ("DP_ATTENTION", "--enable-prefill-cp", None),
        ("DP_ATTENTION", "--enable-nsa-prefill-context-parallel", None),
    ],
)
def test_flags_decide_a_condition_or_leave_it_open(condition: str, words: str, holds: bool | None) -> None:
    assert getattr(launches, condition).holds(launch(words)) is holds


@pytest.mark.parametrize(
    ("release", "words", "holds"),
    [
        ("0.5.11", "--speculative-algorithm NGRAM", False),
        ("0.5.13", "--speculative-algorithm NGRAM", False),
        ("0.5.14", "--speculative-algorithm NGRAM", None),
        ("0.5.13", "--speculative-algorithm EAGLE", None),
        ("0.5.14", "--pp-size 2", False),
        ("0.5.13", "--pp-size 1", None),
        (wheels.NEWEST, "--pp-size 2 --speculative-algorithm NGRAM", None),
    ],
)
def test_overlap_is_off_where_the_release_turns_it_off(release: str, words: str, holds: bool | None) -> None:
    assert launches.OVERLAP.holds(launch(words, release=release)) is holds


@pytest.mark.parametrize(
    ("condition", "config", "holds"),
    [
        ("HYBRID", LLAMA, False),
        ("HYBRID", HYBRID, True),
        ("HYBRID", {"architectures": ["New"], "layer_types": ["full_attention", "something_else"]}, True),
        ("HYBRID", {"text_config": {"linear_num_value_heads": 4}}, True),
        ("HYBRID", {"architectures": ["ZayaForCausalLM"], "cca": True}, True),
        ("HYBRID", {"architectures": ["MiniCPMSALAForCausalLM"], "mixer_types": ["lightning"]}, True),
        ("LIGHTNING_LAYERS", {"architectures": ["BailingMoeV2_5ForCausalLM"]}, True),
        ("LIGHTNING_LAYERS", {"architectures": ["JetNemotronForCausalLM"], "efficient_attention_config": {}}, False),
        ("LIGHTNING_LAYERS", {"architectures": ["ZayaForCausalLM"], "cca": True}, False),
        ("LIGHTNING_LAYERS", {}, None),
        ("MAMBA2", HYBRID, True),
        ("GATED_DELTA", HYBRID, False),
        ("LATENT", {"kv_lora_rank": None}, False),
        ("LATENT", {"language_config": {"kv_lora_rank": 512}}, True),
        ("IMAGES", {"vision_config": {"depth": 2}}, True),
        ("FALCON_H1", HYBRID, True),
        ("FALCON_H1", {}, None),
        ("MODEL_OF_YOUR_OWN", LLAMA, False),
        ("MODEL_OF_YOUR_OWN", {"architectures": ["MineForCausalLM"]}, None),
        ("EMBEDDINGS", LLAMA, False),
        ("EMBEDDINGS", {"architectures": ["BertModel"]}, None),
        ("WINDOW", {**LLAMA, "sliding_window": 4096}, True),
        ("WINDOW", {**LLAMA, "sliding_window": 131072, "use_sliding_window": False}, False),
        ("WINDOW", {**LLAMA, "layer_types": ["linear_attention", "full_attention"]}, False),
        ("WINDOW", {**LLAMA, "layer_types": ["sliding_attention", "full_attention"]}, True),
        ("QUANTISED", LLAMA, None),
        ("QUANTISED", {**LLAMA, "quantization_config": {"quant_method": "fp8"}}, True),
    ],
)
def test_a_configuration_decides_a_condition(condition: str, config: dict[str, Any], holds: bool | None) -> None:
    name = {"MAMBA2": "MAMBA2_LAYERS"}.get(condition, condition)
    assert getattr(launches, name).holds(launch(config=config)) is holds


@pytest.mark.parametrize("kernel", [gdn_extend.KERNEL, mamba2_extend.KERNEL], ids=lambda kernel: kernel.op)
def test_no_launch_is_called_faster_with_a_kernel_that_leaves_its_layers_alone(kernel: Kernel) -> None:
    config = {"architectures": ["GraniteMoeHybridForCausalLM"], "linear_num_value_heads": 32}
    breakable = "--cuda-graph-backend-prefill breakable"
    assert for_launch.worst(kernel.concerns, launch(breakable, config)) is not None
    assert for_launch.worst(kernel.concerns, launch(f"{breakable} --moe-a2a-backend deepep", config)) is None


@pytest.mark.parametrize(
    ("release", "architecture", "words", "chip", "is_left"),
    [
        (wheels.NEWEST, "GraniteMoeHybridForCausalLM", "", launches.HOPPER, False),
        (wheels.NEWEST, f"GraniteMoeHybridForCausalLM{WITH_EXPERTS}", "", launches.HOPPER, True),
        # nobody has said which GPU it is
        (wheels.NEWEST, "GraniteMoeHybridForCausalLM", "", "", False),
        (wheels.NEWEST, "GraniteMoeHybridForCausalLM", "", launches.BLACKWELL, True),
        (wheels.NEWEST, "GraniteMoeHybridForCausalLM", "--enable-dp-attention --dp-size 2", launches.HOPPER, True),
        (wheels.NEWEST, "GraniteMoeHybridForCausalLM", "--tp 2", launches.HOPPER, True),
        (wheels.NEWEST, "GraniteMoeHybridForCausalLM", "--enable-memory-saver", launches.HOPPER, True),
        (wheels.NEWEST, "Lfm2ForCausalLM", "", launches.HOPPER, True),
        (wheels.NEWEST, "Lfm2MoeForCausalLM", "", launches.HOPPER, True),
        (wheels.NEWEST, "BailingMoeV2_5ForCausalLM", "", launches.HOPPER, True),
        ("0.5.20", "GraniteMoeHybridForCausalLM", "", launches.HOPPER, True),
    ],
)
def test_a_fix_for_speed_is_called_off_where_it_leaves_a_launch_alone(
    release: str, architecture: str, words: str, chip: str, is_left: bool
) -> None:
    fix = declared_in(hybrids_without_graphs)
    known = Registry((fix,), ())

    def states(**environ: str) -> list[str]:
        source = releases.in_folder(wheels.unpacked(release))
        examined = examination.examine(known, flags.read([fix], [], environ), source, installed=False)
        config = {"architectures": [architecture.removesuffix(WITH_EXPERTS)], "kv_lora_rank": 512}
        config["num_local_experts"] = 62 if architecture.endswith(WITH_EXPERTS) else 0
        asked = launch(words, config, chip, release)
        return [item.state for item in for_launch.answer(examined, asked, "").items]

    left = for_launch.OFF_BY_DEFAULT if is_left else for_launch.FIXED
    assert states() == states(**{fix.flag: "auto"}) == [left]
    assert states(**{fix.flag: "on"}) == [for_launch.FIXED]


def test_before_0515_there_are_no_graphs_unless_asked_for() -> None:
    assert launches.PREFILL_GRAPHS.holds(launch(release="0.5.13")) is False
    assert launches.PREFILL_GRAPHS.holds(launch("--enable-breakable-cuda-graph", release="0.5.13")) is True


@pytest.mark.parametrize(
    ("words", "holds"),
    [
        ("--cuda-graph-backend-prefill breakable --disable-piecewise-cuda-graph", False),
        ("--disable-piecewise-cuda-graph --cuda-graph-backend-prefill breakable", True),
        ("--cuda-graph-backend-prefill=disabled --enable-breakable-cuda-graph", True),
        ("--enable-breakable-cuda-graph --cuda-graph-backend-prefill disabled", False),
        ("--enforce-piecewise-cuda-graph", False),
    ],
)
def test_where_two_flags_choose_the_graphs_the_last_one_does(words: str, holds: bool) -> None:
    assert launches.PREFILL_GRAPHS.holds(launch(words, release="0.5.17")) is holds


@pytest.mark.parametrize(("release", "commands"), [(wheels.NEWEST, COMMANDS), ("0.5.17", COMMANDS + OLDER)])
def test_a_command_is_read_as_sglang_reads_it(release: str, commands: Sequence[str]) -> None:
    root = wheels.unpacked(release)
    source = releases.in_folder(root)
    taken = {words: server_command.options_in(source, words.split()) for words in commands}
    flat = [[part for option, given in options.items() for part in (option, *given)] for options in taken.values()]
    arguments = json.dumps([*(words.split() for words in commands), *flat])
    done = processes.on_cpu(root, "-m", "tests.scenarios.parsed_commands", arguments, cold=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = said["read"][len(commands) :], said["read"][: len(commands)]
    assert ours == theirs and all(theirs)
    for options, read in zip(taken.values(), theirs, strict=True):
        # one option for each value that is set, and none for another
        assert sorted(map(source.value_of, options)) == sorted(read), options
    assert {name: source.value_of(name) for name in said["options"]} == said["options"]
    assert all(map(source.has_option, said["options"])) and not source.has_option("--custom-sigquit-handler")


# what stands in this JSON wins over every flag, and a flag for one phase over those for all
@pytest.mark.parametrize(
    ("condition", "words", "holds"),
    [
        ("FULL_PREFILL_GRAPHS", "--cuda-graph-backend-prefill disabled --cuda-graph-config FULL", True),
        ("FULL_PREFILL_GRAPHS", "--cuda-graph-config FULL --disable-cuda-graph --enable-breakable-cuda-graph", True),
        ("FULL_PREFILL_GRAPHS", "--cuda-graph-backend-prefill full --cuda-graph-config BREAKABLE", False),
        ("FULL_PREFILL_GRAPHS", "--cuda-graph-backend-prefill full --cuda-graph-config {}", True),
        ("PREFILL_GRAPHS", "--cuda-graph-config FULL --enable-breakable-cuda-graph", False),
        ("PREFILL_GRAPHS", "--cuda-graph-config BREAKABLE --disable-piecewise-cuda-graph", True),
        ("PREFILL_GRAPHS", "--cuda-graph-config BREAKABLE --disaggregation-mode decode", True),
        ("ASKED_FOR", "--cuda-graph-config={}", False),
        ("COMPILED_PREFILL_GRAPHS", '--cuda-graph-config {"prefill":{"backend":"tc_piecewise"}}', True),
        ("PREFILL_SIZES", '--cuda-graph-config {"prefill":{"bs":[64,128]}}', True),
        ("PREFILL_SIZES", "--cuda-graph-config BREAKABLE", False),
        ("PREFILL_SIZES", '--cuda-graph-bs-prefill 64 --cuda-graph-config {"prefill":{"bs":null}}', False),
        ("DECODE_GRAPHS", '--cuda-graph-config {"decode":{"backend":"disabled"}}', False),
        ("DECODE_GRAPHS", '--disable-cuda-graph --cuda-graph-config {"decode":{"backend":"full"}}', True),
        ("DECODE_GRAPHS", "--disable-cuda-graph --cuda-graph-backend-decode full", True),
        ("DECODE_GRAPHS", "--disable-decode-cuda-graph --cuda-graph-config FULL", False),
        ("DECODE_PADDING", "--disable-cuda-graph --cuda-graph-backend-decode full", None),
        ("DECODE_PADDING", '--cuda-graph-config {"decode":{"backend":"disabled"}}', False),
    ],
)
def test_the_json_for_all_graphs_wins(condition: str, words: str, holds: bool | None) -> None:
    for name in ("full", "breakable"):
        words = words.replace(name.upper(), f'{{"prefill":{{"backend":"{name}"}}}}')
    assert getattr(launches, condition).holds(launch(words, release="0.5.17")) is holds


def test_a_running_server_that_has_not_resolved_its_settings_leaves_them_open() -> None:
    source = releases.in_folder(wheels.unpacked(wheels.NEWEST))
    unresolved = Launch(source, LLAMA, {"--cuda-graph-config": []})
    assert launches.PREFILL_GRAPHS.holds(unresolved) is launches.FULL_PREFILL_GRAPHS.holds(unresolved) is None


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_a_server_of_one_role_has_no_graphs_of_the_other_where_the_release_says_so(release: str) -> None:
    before = wheels.RELEASES.index(release) < wheels.RELEASES.index("0.5.16")
    prefill, decode = (launch(f"--disaggregation-mode {role}", release=release) for role in ("prefill", "decode"))
    ordinary = launches.PREFILL_GRAPHS.holds(launch(release=release))
    assert launches.PREFILL_GRAPHS.holds(prefill) is ordinary
    assert launches.PREFILL_GRAPHS.holds(decode) is (ordinary if before else False)
    assert launches.DECODE_GRAPHS.holds(prefill) is before and launches.DECODE_GRAPHS.holds(decode) is True
    # it makes decode graphs when it becomes a decode server
    both = launch("--disaggregation-mode prefill --enable-pd-role-switch", release=release)
    assert launches.DECODE_GRAPHS.holds(both) is True


def test_before_0515_compiled_graphs_are_the_default() -> None:
    condition = launches.COMPILED_PREFILL_GRAPHS
    assert condition.holds(launch(release="0.5.14")) is None
    assert condition.holds(launch("--enforce-piecewise-cuda-graph", release="0.5.11")) is True
    assert condition.holds(launch("--disable-piecewise-cuda-graph", release="0.5.14")) is False
    assert condition.holds(launch()) is False
    assert condition.holds(launch("--cuda-graph-config {}")) is False


def test_the_chip_decides_where_no_backend_is_named() -> None:
    assert launches.TRTLLM.holds(launch(chip=launches.HOPPER)) is False
    assert launches.FA3.holds(launch(chip=launches.BLACKWELL)) is False
    assert launches.FA3.holds(launch(chip=launches.HOPPER)) is None


def test_a_concern_is_ruled_out_by_one_condition_only() -> None:
    here = launch()
    assert [Concern(Harm.WRONG, (TRUE, one)).touches(here) for one in (TRUE, FALSE, OPEN)] == [True, False, True]
    assert Concern(Harm.WRONG, (TRUE, OPEN)).undecided(here) == ["c"]
    assert [(FALSE | one).holds(here) for one in (TRUE, FALSE, OPEN)] == [True, False, None]
    assert (FALSE | OPEN).left_open(here) == "c" and (FALSE | OPEN | TRUE).left_open(here) == ""


def test_the_worst_harm_that_a_launch_can_meet_counts() -> None:
    found = for_launch.worst(slower(OPEN) + wrong(TRUE), launch())
    assert found is not None and found.harm is Harm.WRONG
    found = for_launch.worst(wrong(FALSE) + slower(OPEN), launch())
    assert found is not None and found.harm is Harm.SLOWER
    assert for_launch.worst(wrong(FALSE), launch()) is None


def test_the_only_models_of_a_layer_signature_are_those_in_the_files_that_a_model_is_made_of() -> None:
    from sglang_bcg_fixes.fixes.stack_call_signature import has_such_layers

    assert has_such_layers(launch(config={"architectures": ["PhiForCausalLM"]})) is True
    assert has_such_layers(launch()) is False
    assert has_such_layers(launch(config={"architectures": ["MineForCausalLM"]})) is None


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("--tp", "--tp-size"),
        ("--speculative-algo", "--speculative-algorithm"),
        ("--enable-hierarchical-cache", "--enable-hierarchical-cache"),
        ("--speculative", "--speculative"),
        ("--nothing(like[it", "--nothing(like[it"),
    ],
)
def test_the_beginning_of_an_option_stands_for_it_where_only_one_begins_so(word: str, option: str) -> None:
    source = releases.in_folder(wheels.unpacked(wheels.NEWEST))
    assert source.option(word) == option
    assert source.has_option(word) is (word == "--enable-hierarchical-cache")


@pytest.mark.parametrize(("named", "read"), [(["A", "B"], ["A", "B"]), ("AB", ["AB"]), (7, []), (None, []), ([], [])])
def test_architectures_of_another_type_end_nothing(named: Any, read: list[str]) -> None:
    assert launch(config={"architectures": named}).architectures == read


def test_a_standalone_draft_has_the_defects_of_the_worker_that_it_shares_with_eagle() -> None:
    from sglang_bcg_fixes.fixes import draft_read_done_early, expand_table_overflow

    here = launch("--speculative-algorithm STANDALONE --speculative-eagle-topk 4 --page-size 2", chip=launches.HOPPER)
    for fix in (declared_in(draft_read_done_early), declared_in(expand_table_overflow)):
        assert for_launch.worst(fix.concerns, here) is not None


def test_a_setting_in_a_list_of_layers_counts() -> None:
    assert launches.HYBRID.holds(launch(config={**LLAMA, "layers": [{"mamba_d_state": 16}]})) is True
