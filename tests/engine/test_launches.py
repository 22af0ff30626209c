# SPDX-License-Identifier: Apache-2.0
"""`doctor` for one model and one server's flags: what it rules out, what it leaves open, and what it says."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cpu_sglang import architectures
from sglang_bcg_fixes import flags
from sglang_bcg_fixes.anatomy import launches
from sglang_bcg_fixes.cli import doctor as examination
from sglang_bcg_fixes.cli import for_launch, main
from sglang_bcg_fixes.concern import Concern, Condition, Harm, Launch, slower, wrong
from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.kernels.gdn_extend import declaration as gdn_extend
from sglang_bcg_fixes.kernels.mamba2_extend import declaration as mamba2_extend
from sglang_bcg_fixes.model import Kernel
from sglang_bcg_fixes.planning.registry import Registry
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
    return Launch(source, config, for_launch.options_in(source, words.split()), chip)


@pytest.mark.parametrize(
    ("condition", "words", "holds"),
    [
        ("PREFILL_GRAPHS", "", None),
        ("PREFILL_GRAPHS", "--cuda-graph-backend-prefill breakable", True),
        ("PREFILL_GRAPHS", "--cuda-graph-backend-prefill=disabled", False),
        ("PREFILL_GRAPHS", "--disable-cuda-graph", False),
        ("PREFILL_GRAPHS", "--cuda-graph-config {}", None),
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
        ("EMBEDDINGS", {"architectures": ["BertModel"]}, True),
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
    fix = hybrids_without_graphs.FIX
    known = Registry((fix,), ())

    def states(**environ: str) -> list[str]:
        source = releases.in_folder(wheels.unpacked(release))
        examined = examination.examine(known, flags.read([fix], [], environ), source, installed=False)
        config = {"architectures": [architecture.removesuffix(WITH_EXPERTS)], "kv_lora_rank": 512}
        config["num_local_experts"] = 62 if architecture.endswith(WITH_EXPERTS) else 0
        asked = launch(words, config, chip, release)
        return [item.state for item in for_launch.answer(examined, asked, "", False).items]

    assert states() == states(**{fix.flag: "auto"}) == [for_launch.OFF if is_left else for_launch.MENDED]
    assert states(**{fix.flag: "on"}) == [for_launch.MENDED]


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
    taken = {words: for_launch.options_in(source, words.split()) for words in commands}
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


def test_before_0515_compiled_graphs_are_the_default() -> None:
    condition = launches.COMPILED_PREFILL_GRAPHS
    assert condition.holds(launch(release="0.5.14")) is None
    assert condition.holds(launch("--enforce-piecewise-cuda-graph", release="0.5.11")) is True
    assert condition.holds(launch("--disable-piecewise-cuda-graph", release="0.5.14")) is False
    assert condition.holds(launch()) is False
    assert condition.holds(launch("--cuda-graph-config {}")) is None


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


def folder(tmp_path: pathlib.Path, config: Mapping[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def doctor(*words: str, status: int = 0) -> str:
    done = processes.python("-m", "sglang_bcg_fixes", "doctor", *words)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def root(release: str) -> tuple[str, str]:
    return "--root", str(wheels.unpacked(release))


def test_what_concerns_a_model_is_said_in_ten_lines_the_worst_first(tmp_path: pathlib.Path) -> None:
    said = doctor(*root("0.5.15.post1"), "--model", folder(tmp_path, HYBRID), "--", "--tp-size", "2").splitlines()
    assert len(said) <= 10
    assert said[0].startswith("FalconH1ForCausalLM on SGLang 0.5.15.post1: /")
    assert said[2].startswith("wrong answers") and "ssm_mixer_captured" in "".join(said[2:8])
    assert said[-1].endswith(f"launch_server --model-path {tmp_path} --tp-size 2")


def test_a_whole_command_can_be_given_and_what_is_not_mended_is_an_exit_status(tmp_path: pathlib.Path) -> None:
    command = f"python -m sglang.launch_server --model-path {folder(tmp_path, LLAMA)}"
    said = doctor(*root("0.5.11"), "--", *command.split(), status=1)
    assert "NOT MENDED schedule_writes_unfenced" in said and "avoid it: --disable-overlap-schedule" in said
    assert "schedule_writes" not in doctor(*root("0.5.11"), "--", *command.split(), "--disable-overlap-schedule")


def test_a_fix_that_is_off_is_named_with_the_flag_that_turns_it_on(tmp_path: pathlib.Path) -> None:
    model = ("--model", folder(tmp_path, {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}))
    said = doctor(*root(wheels.NEWEST), *model, "--", "--speculative-algorithm", "NEXTN", status=1)
    assert "SGLANG_BCG_FIX_DRAFT_STATES_DROPPED=on mends it" in said


def test_json_has_the_same(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCG_FIXES", "off")
    said = json.loads(doctor(*root("0.5.15.post1"), "--model", folder(tmp_path, HYBRID), "--json"))
    ids = [each["id"] for each in said["concerns"]]
    assert said["format"] == 1 and said["good"] and said["architectures"] == ["FalconH1ForCausalLM"]
    assert len(said["look_alikes"]) == 1 and said["retired"] == []
    assert "ssm_mixer_captured" in ids and "sparse_attention_captured" not in ids


def test_many_things_to_notice_leave_room_for_defects(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["BCGFIXES", "BCG_FIXES", "BCG_KERNELS"]
    for name in names:
        monkeypatch.setenv(name, "off")
    words = (*root("0.5.15.post1"), "--model", folder(tmp_path, HYBRID))
    three = doctor(*words).splitlines()
    assert len(three) <= 10 and [line.split()[0] for line in three[-4:-1]] == names
    four = doctor(*words, "--", "--nowhere").splitlines()
    assert len(four) <= 10 and four[2].startswith("wrong answers")
    assert four[-4].startswith("--nowhere is no option") and four[-3].startswith("BCGFIXES")
    assert four[-2] == "and 2 more options and settings that are not as they should be: -v"
    assert set(names) <= {line.split()[0] for line in doctor(*words, "-v", "--", "--nowhere").splitlines()}


def test_an_option_that_the_release_does_not_have_is_named(tmp_path: pathlib.Path) -> None:
    said = doctor(
        *root("0.5.13"), "--model", folder(tmp_path, LLAMA), "--", "--cuda-graph-backend-prefill", "full", status=1
    )
    assert "--cuda-graph-backend-prefill is no option of this release" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--model", "nowhere/at-all"],
            "`curl -fLO https://huggingface.co/nowhere/at-all/resolve/main/config.json`, then --model config.json",
        ),
        (["--model", "/nowhere/at/all"], "; name another"),
        (["--gpu", "h200"], "name the model with --model"),
        (["--model", "here", "--gpu", "h9"], "--gpu h9 is not one of h100"),
    ],
)
def test_what_cannot_be_answered_says_what_to_do(words: list[str], told: str, tmp_path: pathlib.Path) -> None:
    given = [folder(tmp_path, LLAMA) if word == "here" else word for word in words]
    assert told in doctor(*root(wheels.NEWEST), *given, status=2)


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


def test_what_is_said_of_a_shortened_option_is_what_is_said_of_the_whole(tmp_path: pathlib.Path) -> None:
    words = ("--tp", "2", "--disable-overlap-s", "--json-model-override-args", "{ }")
    said = doctor(*root("0.5.11"), "--model", folder(tmp_path, LLAMA), "--", *words)
    assert "no option" not in said and "schedule_writes" not in said


def test_a_configuration_alone_is_no_model_to_start(tmp_path: pathlib.Path) -> None:
    file = f"{folder(tmp_path, HYBRID)}/config.json"
    assert doctor(*root("0.5.15.post1"), "--model", file).endswith("launch_server --model-path MODEL\n")
    said = doctor(*root("0.5.15.post1"), "--model", file, "--", "--model-path", "org/name")
    assert said.endswith("launch_server --model-path org/name\n")


def test_the_model_of_sglang_serve_needs_no_flag(tmp_path: pathlib.Path) -> None:
    model = folder(tmp_path, HYBRID)
    said = doctor(*root("0.5.16"), "--", "sglang", "serve", model, "--tp", "2")
    assert said.startswith("FalconH1ForCausalLM") and said.endswith(f"--model-path {model} --tp-size 2\n")
    assert "give its server's flags with --model-path" in doctor(*root("0.5.16"), "--", "sglang", "serve", status=2)
    source = releases.in_folder(wheels.unpacked(wheels.NEWEST))
    both = for_launch.options_in(source, ["serve", "a", "--model", "b"])
    assert both == {"--model": ["b"]}


def test_the_command_to_run_is_quoted_for_a_shell(tmp_path: pathlib.Path) -> None:
    model = ("--model", folder(tmp_path, HYBRID))
    said = doctor(*root("0.5.15.post1"), *model, "--", "--json-model-override-args", '{"a": 1}')
    assert said.endswith("""--json-model-override-args '{"a": 1}'\n""")


@pytest.mark.parametrize(("named", "read"), [(["A", "B"], ["A", "B"]), ("AB", ["AB"]), (7, []), (None, []), ([], [])])
def test_architectures_of_another_type_end_nothing(named: Any, read: list[str]) -> None:
    assert launch(config={"architectures": named}).architectures == read


def test_a_standalone_draft_has_the_defects_of_the_worker_that_it_shares_with_eagle() -> None:
    from sglang_bcg_fixes.fixes import draft_read_done_early, expand_table_overflow

    here = launch("--speculative-algorithm STANDALONE --speculative-eagle-topk 4 --page-size 2", chip=launches.HOPPER)
    for fix in (draft_read_done_early.FIX, expand_table_overflow.FIX):
        assert for_launch.worst(fix.concerns, here) is not None


def test_a_setting_in_a_list_of_layers_counts() -> None:
    assert launches.HYBRID.holds(launch(config={**LLAMA, "layers": [{"mamba_d_state": 16}]})) is True


def test_the_configuration_is_taken_as_a_flag_changes_it(tmp_path: pathlib.Path) -> None:
    source = releases.in_folder(wheels.unpacked(wheels.NEWEST))
    name = folder(tmp_path, {**LLAMA, "text_config": {"a": 1}})
    given = ["--json-model-override-args", '{"architectures": ["FalconH1ForCausalLM"], "text_config": {"b": 2}}']
    read = for_launch.read(source, name, given, None)
    assert read.architectures == ["FalconH1ForCausalLM"] and read.config["text_config"] == {"a": 1, "b": 2}
    for wrong_word in ("{", "[]"):
        with pytest.raises(for_launch.LaunchError, match="is no JSON"):
            for_launch.read(source, name, [given[0], wrong_word], None)


def test_a_file_that_is_no_configuration_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert f"{tmp_path}/config.json is no JSON" in doctor(*root(wheels.NEWEST), "--model", str(tmp_path), status=2)


def test_a_name_is_looked_up_in_the_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    file = tmp_path / "models--org--name" / "snapshots" / "1" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(LLAMA))
    assert for_launch.config_of("org/name") == LLAMA
    assert main.parser().parse_args(["doctor", "--", "--tp", "2"]).launch == ["--tp", "2"]


PAGE = processes.REPOSITORY / "docs" / "launches.md"
EXAMPLES = re.findall(r"^```\n\$ bcg-fixes (doctor .+)\n((?:(?!```).+\n)*)```$", PAGE.read_text(), re.MULTILINE)
# sizes play no part: a tiny model of the same kind stands in for the published one
MODELS = {
    "Qwen/Qwen3.5-35B-A3B": "Qwen3_5MoeForConditionalGeneration",
    "tiiuae/Falcon-H1-7B-Instruct": "FalconH1ForCausalLM",
    "openai/gpt-oss-120b": "GptOssForCausalLM",
    "meta-llama/Llama-3.1-8B-Instruct": "LlamaForCausalLM",
}


def test_the_page_has_its_examples() -> None:
    assert len(EXAMPLES) == len(MODELS)


@pytest.mark.parametrize(("command", "answer"), EXAMPLES)
def test_the_page_shows_what_is_said(command: str, answer: str, tmp_path: pathlib.Path) -> None:
    for name, architecture in MODELS.items():
        file = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "1" / "config.json"
        file.parent.mkdir(parents=True)
        config = architectures.CONFIGURATIONS[architecture].config
        file.write_text(json.dumps({**config, "architectures": [architecture]}))
    words = command.split()
    at = words.index("--release")
    words[at : at + 2] = root(words[at + 1])
    done = processes.python("-m", "sglang_bcg_fixes", *words, environment={"HF_HUB_CACHE": str(tmp_path)})
    # the page does not name a folder of somebody's
    assert re.sub(r": /\S+$", ": ...", done.stdout, count=1, flags=re.MULTILINE) == answer, done.stderr
    assert done.returncode == ("NOT MENDED" in answer)
