# SPDX-License-Identifier: Apache-2.0
"""`doctor` for one launch: what it says first, when it says go, and what it refuses to judge."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cpu_sglang import architectures
from sglang_bcg_fixes.cli import for_launch, main, model_config, promises, server_command
from sglang_bcg_fixes.source import releases, served
from tests import mutated, processes, wheels

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
WINDOWED = {**LLAMA, "sliding_window": 4096}
DEEPSEEK_V4 = {"architectures": ["DeepseekV4ForCausalLM"], "kv_lora_rank": 512}
LLAMA_4 = {"architectures": ["Llama4ForConditionalGeneration"], "attention_chunk_size": 8192}
UNBROKEN = ["--cuda-graph-backend-prefill", "full"]
HYBRID = {**LLAMA, "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 64}
GRAPH_BREAK = "sglang/srt/model_executor/runner_backend_utils/breakable_cuda_graph/breakable_cuda_graph.py"


def folder(tmp_path: pathlib.Path, config: Mapping[str, Any], name: str = ".") -> str:
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    return str(tmp_path / name)


def doctor(*words: str, status: int = 0, environment: Mapping[str, str] | None = None) -> str:
    done = processes.python("-m", "sglang_bcg_fixes", "doctor", *words, environment=dict(environment or {}))
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def root(release: str) -> tuple[str, str]:
    return "--root", str(wheels.unpacked(release))


def run_line(said: str) -> str:
    [line] = re.findall(r"^run: (.*)$", said, re.MULTILINE)
    return str(line)


def fixed_line(said: str) -> str:
    [line] = re.findall(r"^fixed by the plugin .*$", said, re.MULTILINE)
    return str(line)


def test_what_is_not_fixed_comes_first_and_the_command_to_run_avoids_it(tmp_path: pathlib.Path) -> None:
    command = f"python -m sglang.launch_server --model-path {folder(tmp_path, WINDOWED)}"
    said = doctor(*root("0.5.11"), "--", *command.split(), status=1).splitlines()
    assert said[1] == "1 NOT FIXED" and said[2].startswith("NOT FIXED wrong answers     schedule_writes_unfenced: ")
    assert "avoided in `run:` by --disable-overlap-schedule" in said[3]
    assert run_line("\n".join(said)).startswith(f"{command} --disable-overlap-schedule ")
    avoided = doctor(*root("0.5.11"), "--", *command.split(), "--disable-overlap-schedule")
    assert "schedule_writes" not in avoided and avoided.splitlines()[1].startswith("nothing to do")


def test_what_the_changed_command_meets_is_said_too(tmp_path: pathlib.Path) -> None:
    command = ["python", "-m", "sglang.launch_server", "--model-path", folder(tmp_path, HYBRID)]
    said = doctor(*root("0.5.17"), "--", *command, *UNBROKEN, status=1)
    assert "avoided in `run:` by --cuda-graph-backend-prefill breakable" in said
    assert "ssm_mixer_captured" in fixed_line(said)
    assert "tried on 0.5.17 with prefill graphs: on a GPU, prefills right: stock 0 of 99" in said
    # and nothing of what it says of that command is left out
    as_run = doctor(*root("0.5.17"), "--", *run_line(said).partition("   #")[0].split())
    fixed_as_run, fixed = ({*re.findall(r"\b\w+_\w+\b", fixed_line(text))} for text in (as_run, said))
    assert fixed_as_run and fixed_as_run <= fixed


@pytest.mark.parametrize("release", ["0.5.11", "0.5.13.post1"])
def test_a_race_is_called_where_it_may_do_harm(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, release: str
) -> None:
    def judge(config: Mapping[str, Any], *words: str) -> str:
        status = int(config != LLAMA or bool(words))
        return judged(capsys, "--model", folder(tmp_path, config), "--", *words, status=status, release=release)

    assert judge(LLAMA).splitlines()[1].startswith("nothing to do")
    for said in (judge(WINDOWED), judge(HYBRID), judge(LLAMA, "--disaggregation-mode", "decode")):
        assert "NOT FIXED wrong answers     schedule_writes_unfenced: " in said


def test_what_is_only_slower_waits_for_the_gpu_and_changes_no_command(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    latent = {**LLAMA, "architectures": ["KimiK25ForConditionalGeneration"], "kv_lora_rank": 512}
    words = ("--model", folder(tmp_path, latent))
    of_any = judged(capsys, *words)
    assert of_any.splitlines()[1] == "1 UNDECIDED" and "give --gpu" in of_any and "avoid it" not in of_any
    assert "ragged_attention_lost" not in judged(capsys, *words, "--gpu", "h200")
    of_blackwell = judged(capsys, *words, "--gpu", "b200")
    assert "avoid it: --cuda-graph-backend-prefill disabled" in of_blackwell
    assert run_line(of_any) == run_line(of_blackwell) and "disabled" not in run_line(of_any)
    judged(capsys, *words, "--gate", "any", status=1)


@pytest.mark.parametrize(
    ("config", "words", "chip", "named", "unnamed"),
    [
        ({"architectures": ["DeepseekV41ForCausalLM"]}, [], "h200", "sparse_read_done_early", ""),
        (DEEPSEEK_V4 | {"model_type": "deepseek_v41"}, [], "h200", "sparse_read_done_early", ""),
        (DEEPSEEK_V4 | {"model_type": "deepseek_v4"}, [], "h200", "", "sparse_read_done_early"),
        (DEEPSEEK_V4 | {"model_type": "deepseek_v41"}, [], "b200", "", "sparse_read_done_early"),
        (LLAMA_4, UNBROKEN, "h200", "local_attention_captured", "flashinfer_window_capture"),
        (LLAMA_4, UNBROKEN, "b200", "", "local_attention_captured"),
        (LLAMA_4, [*UNBROKEN, "--prefill-attention-backend", "flashinfer"], "h200", "flashinfer_window_capture", ""),
    ],
)
def test_a_model_is_known_by_what_sglang_makes_of_it(
    config: Mapping[str, Any], words: list[str], chip: str, named: str, unnamed: str, tmp_path: pathlib.Path
) -> None:
    status = int(named == "flashinfer_window_capture")
    model = folder(tmp_path, config)
    said = doctor(*root(wheels.NEWEST), "--model", model, "--gpu", chip, "--", *words, status=status)
    assert named in said and (not unnamed or unnamed not in said)


def test_what_the_plugin_fixes_takes_one_line(tmp_path: pathlib.Path) -> None:
    said = doctor(*root("0.5.15.post1"), "--model", folder(tmp_path, HYBRID), "--", "--tp-size", "2").splitlines()
    assert len(said) <= 10 and said[1] == "nothing to do"
    [fixed] = [line for line in said if line.startswith("fixed by the plugin")]
    assert "ssm_mixer_captured" in fixed and fixed.startswith(f"fixed by the plugin ({len(fixed.split(', '))}): ")
    everything = doctor(*root("0.5.15.post1"), "--model", str(tmp_path), "-v")
    assert re.search(r"^fixed     wrong answers     ssm_mixer_captured: ", everything, re.MULTILINE)
    assert "possible" in everything and "possible" not in "\n".join(said) and for_launch.NOT_CHECKED in everything


@pytest.mark.parametrize("release", ["0.5.11", "0.5.23"])
def test_schedulers_of_ray_are_not_said_to_have_the_plugin(release: str, tmp_path: pathlib.Path) -> None:
    model = folder(tmp_path, HYBRID)
    said = doctor(*root(release), "--model", model, "--", "--use-ray", status=1)
    assert "the plugin is not active" in said.splitlines()[1] and "not fixed until the plugin is active (" in said
    assert "its schedulers load none with --use-ray; start without that flag" in said
    assert "--use-ray" not in run_line(said)
    (tmp_path / "ray.yaml").write_text("use-ray: true\n")
    said = doctor(*root(release), "--model", model, "--", "--config", str(tmp_path / "ray.yaml"), status=1)
    assert "start without that flag" in said and "\nrun:" not in said


@pytest.mark.parametrize(
    ("release", "module"), [("0.5.16", "sglang.bench_one_batch"), (wheels.NEWEST, "sglang.benchmark.one_batch")]
)
def test_a_benchmark_that_loads_no_plugins_is_run_by_our_command(
    release: str, module: str, tmp_path: pathlib.Path
) -> None:
    said = doctor(*root(release), "--", "python3", "-m", module, "--model-path", folder(tmp_path, HYBRID), status=1)
    assert "the plugin is not active" in said.splitlines()[1] and "not fixed until the plugin is active (" in said
    assert f"{module} loads none; `run:` does" in said
    command = run_line(said).partition("   #")[0]
    assert command.startswith(f"python3 -m sglang_bcg_fixes -- {module} --model-path ")
    assert "fixed by the plugin (" in doctor(*root(release), "--", *command.split())
    several = doctor(*root(release), "--", *command.split(), "--tp", "2", status=1)
    assert "try it with one rank" in several
    own = doctor(*root(release), "--", *command.split(), "--batch-size", "1", status=2)
    assert "leave out the benchmark's own flags" in own


@pytest.mark.parametrize("module", ["sglang.bench_offline_throughput", "sglang.bench_one_batch_server"])
def test_benchmarks_that_start_schedulers_have_the_plugin(module: str, tmp_path: pathlib.Path) -> None:
    words = ("python3", "-m", module, "--model-path", folder(tmp_path, HYBRID))
    assert "fixed by the plugin (" in doctor(*root("0.5.16"), "--", *words)


def judged(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0, release: str = wheels.NEWEST) -> str:
    """The answer of a `doctor` in this process, which reads each source once."""
    code = main.main(["doctor", *root(release), *words])
    said = capsys.readouterr()
    assert code == status, said
    return said.out + said.err


@pytest.mark.parametrize(
    "program",
    [
        "python3 -m vllm.entrypoints.openai.api_server",
        "python3 -u -X dev -m sglang_router.launch_server",
        "docker run --gpus all image python3 -m sglang.bench_serving",
        "numactl -m 0 python3.11 -m torch.distributed.run",
    ],
)
def test_a_module_that_is_not_known_to_be_sglangs_is_not_judged(
    program: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--", *program.split(), "--model", folder(tmp_path, HYBRID))
    said = judged(capsys, *words, status=2)
    assert f"{program.split()[-1]} is not known to be SGLang's server; give the command that starts SGLang" in said


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("python3 my_engine.py", "my_engine.py"),
        ("docker run --gpus all image python3 -u /app/my_engine.py", "/app/my_engine.py"),
        ("torchrun my_engine.py", "my_engine.py"),
        ("my-launcher", "my-launcher"),
        ("", ""),
        ("docker run --gpus all image python3 -m sglang.launch_server", ""),
        ("kubectl exec deploy/sglang -- python -m sglang.launch_server", ""),
        ("env A=1 numactl -m 0 sglang serve", ""),
        ("torchrun --nproc-per-node 1 -m sglang.launch_server", ""),
    ],
)
def test_another_program_is_said_to_be_read_as_sglangs_server(
    program: str, named: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = judged(capsys, "--", *program.split(), "--model-path", folder(tmp_path, HYBRID))
    assert re.findall(r"^(.*) is read as if it were SGLang's server$", said, re.MULTILINE) == ([named] if named else [])


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("mine/sglang:v0.5.11", "0.5.11"),
        ("registry:5000/mine/sglang:v0.5.12.post1-cu130-runtime", "0.5.12.post1"),
        (f"mine/sglang:v{wheels.NEWEST}-cu130", wheels.NEWEST),
        ("mine/sglang:latest", wheels.NEWEST),
    ],
)
def test_an_image_of_another_release_is_not_judged(
    image: str, release: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = ("--", "docker", "run", "--gpus", "all", image)
    words = (*prefix, "python3", "-m", "sglang.launch_server", "--model-path", folder(tmp_path, HYBRID))
    said = judged(capsys, *words, status=0 if release == wheels.NEWEST else 2)
    refused = f"the image is {release}, and {wheels.NEWEST} was judged: give --release {release}"
    assert (refused in said) == (release != wheels.NEWEST)


@pytest.mark.parametrize(
    "prefix", ["docker run --gpus all image", "sudo kubectl exec deploy/sglang --", "numactl -N 0"]
)
def test_an_image_has_to_contain_the_plugin(
    prefix: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_container = not prefix.startswith("numactl")
    command = ("--", *prefix.split(), "sglang", "serve", "--model-path")
    said = judged(capsys, *command, folder(tmp_path, HYBRID))
    assert (for_launch.IN_IMAGE in said.splitlines()) == is_container
    assert ("   #" in run_line(said)) != is_container
    # nothing is fixed for this one, so nothing has to be there
    assert for_launch.IN_IMAGE not in judged(
        capsys, *command, folder(tmp_path, LLAMA), "--cuda-graph-backend-prefill", "disabled"
    )


@pytest.mark.parametrize(
    ("prefix", "is_without"),
    [
        ("docker run lmsysorg/sglang:latest", True),
        ("docker run index.docker.io/lmsysorg/sglang@sha256:abc", True),
        ("docker run -v /plugin:/plugin -e PYTHONPATH=/plugin lmsysorg/sglang:latest", False),
        ("docker run lmsysorg/sglang-router:latest", False),
        ("kubectl exec deploy/sglang --", False),
    ],
)
def test_sglangs_own_image_comes_without_the_plugin(
    prefix: str, is_without: bool, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("--", *prefix.split(), "sglang", "serve", "--model-path", folder(tmp_path, HYBRID))
    said = judged(capsys, *command, status=int(is_without))
    assert ("comes without it" in said) == is_without == (for_launch.IN_IMAGE not in said.splitlines())


@pytest.mark.parametrize(
    ("architecture", "counts"),
    [
        ("KimiLinearForCausalLM", "stock 3 of 99, with the plugin 71 (see docs/answers.md)"),
        ("FalconH1ForCausalLM", "stock 0 of 99, with the plugin 99;"),
    ],
)
def test_answers_that_are_not_right_with_the_plugin_either_have_their_page(
    architecture: str, counts: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**architectures.CONFIGURATIONS[architecture].config, "architectures": [architecture]}
    words = ("--model", folder(tmp_path, config), "--gpu", "h100", "--", "--cuda-graph-backend-prefill", "breakable")
    assert counts in judged(capsys, *words)


@pytest.mark.parametrize(
    ("before", "inner"),
    [
        (["bash", "-c"], "sglang serve falcon --tp 2"),
        (["docker", "run", "--gpus", "all", "image", "sh", "-c"], "exec python3 -m sglang.launch_server --model a"),
        ([], "sglang serve falcon"),
    ],
)
def test_a_command_inside_quotes_is_asked_for(
    before: list[str], inner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"give the inner command: {inner}" in judged(capsys, "--", *before, inner, status=2)


def test_a_source_that_nobody_has_read_is_no_wrong_answer(tmp_path: pathlib.Path) -> None:
    fork = forked(tmp_path)
    model = folder(tmp_path, {**HYBRID, **architectures.CONFIGURATIONS["FalconH1ForCausalLM"].config}, "model")
    said = doctor("--root", str(fork), "--model", model, status=3)
    assert re.search(r"^NOT READ  wrong answers ", said, re.MULTILINE) and "NOT FIXED" not in said
    assert "(it looks affected: " in said and "tried: nothing" in said and "newer than" not in said
    said = doctor("--root", str(fork), "--model", model, "--gate", "any", status=3)
    (fork / "sglang" / "_version.py").unlink()
    (fork / "sglang" / "_version.py").write_text('__version__ = "9.9.9"\n')
    newer = doctor("--root", str(fork), "--model", model, status=3)
    assert "your SGLang is newer than this plugin knows (0.5.11 to " in newer


def forked(tmp_path: pathlib.Path) -> pathlib.Path:
    """The newest release with one more statement in a function that many probes read."""
    start = "if enable is False:"
    mutated.write(wheels.unpacked(wheels.NEWEST), GRAPH_BREAK, start, f"drifted = True\n    {start}", tmp_path / "fork")
    return tmp_path / "fork"


def test_strict_and_a_named_kernel_that_let_no_server_start_are_said(tmp_path: pathlib.Path) -> None:
    fork = forked(tmp_path)
    model = folder(tmp_path, LLAMA, "model")
    strict = {"SGLANG_BCG_FIXES": "strict"}
    said = doctor("--root", str(fork), "--model", model, status=1, environment=strict)
    assert "does not start: the plugin refuses to, without SGLANG_BCG_FIX_" in said and "run:" not in said
    # in the command itself it counts as well
    words = ["SGLANG_BCG_FIXES=strict", "sglang", "serve", model]
    assert "does not start: " in doctor("--root", str(fork), "--", *words, status=1)


def test_what_somebody_has_switched_off_counts_and_what_is_off_by_default_does_not(tmp_path: pathlib.Path) -> None:
    model = ("--model", folder(tmp_path, HYBRID))
    off = {"SGLANG_BCG_OFF": "ssm_mixer_captured"}
    said = doctor(*root(wheels.NEWEST), *model, status=1, environment=off)
    assert "OFF       wrong answers     ssm_mixer_captured: " in said
    assert "it is off: SGLANG_BCG_OFF=ssm_mixer_captured" in said
    drafts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
    words = ("--model", folder(tmp_path, drafts, "drafts"), "-v", "--gate", "any", "--")
    said = doctor(*root(wheels.NEWEST), *words, "--speculative-algorithm", "NEXTN")
    assert re.search(r"^off by default slower +draft_states_dropped", said, re.MULTILINE)


def test_a_gate_for_wrong_answers_lets_a_server_pass_that_does_not_start(tmp_path: pathlib.Path) -> None:
    words = (*root(wheels.NEWEST), "--model", folder(tmp_path, LLAMA))
    launch = ("--", "SGLANG_MEMORY_SAVER_CUDA_GRAPH=1", "sglang", "serve", str(tmp_path), "--enable-memory-saver")
    assert "NOT FIXED crash or no start memory_saver_refused" in doctor(*words, *launch, status=1)
    doctor(*words, "--gate", "wrong", *launch)


@pytest.mark.parametrize(("value", "status"), [("0", 0), ("1", 1)])
def test_a_variable_of_the_command_decides(value: str, status: int, tmp_path: pathlib.Path) -> None:
    command = ("--", f"SGLANG_MEMORY_SAVER_CUDA_GRAPH={value}", "sglang", "serve", folder(tmp_path, LLAMA))
    doctor(*root(wheels.NEWEST), *command, "--enable-memory-saver", status=status)


def test_json_has_the_same(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCG_FIXES", "off")
    said = json.loads(doctor(*root("0.5.15.post1"), "--model", folder(tmp_path, HYBRID), "--json"))
    states = {each["id"]: (each["harm"], each["state"]) for each in said["concerns"]}
    assert said["format"] == 2 and said["status"] == 0 and said["architectures"] == ["FalconH1ForCausalLM"]
    assert len(said["look_alikes"]) == 1 and said["retired"] == [] and said["not_checked"]
    assert states["ssm_mixer_captured"] == ("wrong answers", "fixed") and "sparse_attention_captured" not in states
    assert states["break_input_lifetime"] == ("possible", "fixed")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--model", "nowhere/at-all"],
            "`curl -fLO https://huggingface.co/nowhere/at-all/resolve/main/config.json`, then --model config.json",
        ),
        (["--model", "/nowhere/at/all"], "; name another"),
        (["--model", ""], "--model is empty"),
        (["--gpu", "h200"], "no model is named: give --model"),
        (["--model", "here", "--gpu", "h9"], "--gpu h9 is not one of h100"),
        (["--model", "here", "--gpu", "mi300x"], "AMD is not covered"),
        (
            ["--mdel", "here"],
            "unrecognized arguments: --mdel; did you mean --model?; put the server's own flags behind",
        ),
        (["--model", "here", "--gpus=h100"], "--gpus=h100; did you mean --gpu?"),
        (
            ["--model", "here", "--tp-size", "2"],
            "unrecognized arguments: --tp-size; put the server's own flags behind `--`",
        ),
        (["--model", "here", "--", "--tp-size", "banana"], "argument --tp-size/--tensor-parallel-size: invalid int"),
        (["--model", "here", "--", "--tp-size"], "expected one argument"),
        (["--model", "here", "--", "--no-such-flag", "3"], "unrecognized arguments: --no-such-flag 3"),
        (["--model", "here", "--", "--attention-backend", "fa9"], "invalid choice: 'fa9'"),
        (["--model", "here", "--", "--config", "none.yaml"], "--config none.yaml cannot be read"),
        (["--model", "unknown"], "SGLang 0.5.23 has no model FooBarForCausalLM"),
        (["--model", "llamma"], "did you mean LlamaForCausalLM?"),
        (["--model", "none"], "without a list of `architectures`"),
        (["--model", "numbers"], "without a list of `architectures`"),
        (["--model", "pipeline"], "a diffusers pipeline"),
        (["--model", "here", "--", "--model-path", "hybrid"], "leave one of them out"),
    ],
)
def test_what_cannot_be_answered_says_what_to_do(words: list[str], said: str, tmp_path: pathlib.Path) -> None:
    made: dict[str, Mapping[str, Any]] = {
        "here": LLAMA,
        "hybrid": HYBRID,
        "unknown": {"architectures": ["FooBarForCausalLM"]},
        "llamma": {"architectures": ["LlammaForCausalLM"]},
        "none": {"model_type": "llama"},
        "numbers": {"architectures": [1, 2]},
        "pipeline": {"_class_name": "FluxPipeline"},
    }
    given = [folder(tmp_path, made[word], word) if word in made else word for word in words]
    assert said in doctor(*root(wheels.NEWEST), *given, status=2)


def test_a_model_of_another_package_is_judged_where_sglang_is_given_one(tmp_path: pathlib.Path) -> None:
    words = (*root(wheels.NEWEST), "--model", folder(tmp_path, {"architectures": ["FooBarForCausalLM"]}))
    said = doctor(*words, environment={"SGLANG_EXTERNAL_MODEL_PACKAGE": "mine"}, status=2)
    # of another machine only the command's own variables are known
    assert "has no model FooBarForCausalLM" in said
    doctor(*words, "--", "SGLANG_EXTERNAL_MODEL_PACKAGE=mine", "sglang", "serve", str(tmp_path))


def test_a_gpu_is_taken_in_any_case(tmp_path: pathlib.Path) -> None:
    assert ", h100: " in doctor(*root(wheels.NEWEST), "--model", folder(tmp_path, LLAMA), "--gpu", "H100")


def test_what_needs_no_source_is_said_before_one_is_fetched(tmp_path: pathlib.Path) -> None:
    assert "name another" in doctor("--release", "0.5.23", "--model", str(tmp_path / "none"), status=2)


def test_the_command_stays_the_users_own(tmp_path: pathlib.Path) -> None:
    model = folder(tmp_path, HYBRID)
    typed = ["A=b c", "sglang", "serve", model, "--tp", "2", "--json-model-override-args", '{"a": 1}']
    said = run_line(doctor(*root("0.5.16"), "--", *typed))
    assert said.startswith(f"""A='b c' sglang serve {model} --tp 2 --json-model-override-args '{{"a": 1}}'""")
    assert "no model is named" in doctor(*root("0.5.16"), "--", "sglang", "serve", status=2)


def test_a_configuration_alone_names_its_folder_or_no_model(tmp_path: pathlib.Path) -> None:
    file = f"{folder(tmp_path, HYBRID)}/config.json"
    assert f"--model-path {tmp_path} " in run_line(doctor(*root("0.5.15.post1"), "--model", file))
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    words = (*root("0.5.15.post1"), "--model", str(tmp_path / "other.json"))
    assert "--model-path MODEL " in run_line(doctor(*words))
    assert "--model-path org/name" in run_line(doctor(*words, "--", "--model-path", "org/name"))


def test_a_shortened_option_counts_as_the_whole(tmp_path: pathlib.Path) -> None:
    words = ("--tp", "2", "--disable-overlap-s", "--json-model-override-args", "{ }")
    assert "schedule_writes" not in doctor(*root("0.5.11"), "--model", folder(tmp_path, WINDOWED), "--", *words)


def test_the_settings_of_a_file_count(tmp_path: pathlib.Path) -> None:
    model = folder(tmp_path, WINDOWED)
    file = tmp_path / "server.yaml"
    file.write_text("disable-overlap-schedule: true\ntp-size: 2\n")
    words = (*root("0.5.11"), "--model", model, "--", "--config", str(file))
    assert "schedule_writes" not in doctor(*words)
    file.write_text("disable-overlap-schedule: false\n")
    assert "schedule_writes" in doctor(*words, status=1)
    file.write_text("tp-size: many\n")
    assert "invalid int value: 'many'" in doctor(*words, status=2)
    file.write_text("- a list\n")
    assert "holds no settings by name" in doctor(*words, status=2)


def test_a_refused_setting_of_a_file_is_said_to_be_the_files(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--", "sglang", "serve", "--config")
    for setting, refused in (
        ("bogus: 3", "unrecognized arguments: --bogus 3"),
        ("tp-size: many", "argument --tp-size/--tensor-parallel-size: invalid int value: 'many'"),
    ):
        file = tmp_path / f"{setting.partition(':')[0]}.yaml"
        file.write_text(f"{setting}\nmodel-path: {folder(tmp_path, LLAMA)}\n")
        assert judged(capsys, *words, str(file), status=2).endswith(f"{refused} (from {file})\n")
    file = tmp_path / "good.yaml"
    file.write_text(f"model-path: {folder(tmp_path, LLAMA)}\n")
    said = judged(capsys, *words, str(file), "--bogus", "3", status=2)
    assert said.endswith("unrecognized arguments: --bogus 3\n")


def test_a_workaround_that_is_not_known_to_work_is_not_said_to_be_applied(tmp_path: pathlib.Path) -> None:
    words = ("--model", folder(tmp_path, WINDOWED), "--", "--enable-breakable-cuda-graph")
    said = doctor(*root("0.5.13"), *words, status=1)
    assert "avoid it: --piecewise-cuda-graph-tokens 512" in said and "--piecewise" not in run_line(said)
    assert "avoided in `run:` by --disable-overlap-schedule" in said


FULL = '{"prefill":{"backend":"full"}}'


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--cuda-graph-config", FULL), 1, "avoided in `run:` by --cuda-graph-backend-prefill breakable"),
        (("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-config", FULL), 1, "hybrid_full_capture"),
        (("--cuda-graph-config", FULL.replace("full", "breakable")), 0, "nothing to do"),
        (("--cuda-graph-config", "{bad"), 2, "--cuda-graph-config must be JSON: Expecting property name"),
        (("--cuda-graph-config", FULL.replace("full", "fast")), 2, "[prefill].backend='fast' not allowed"),
    ],
)
def test_the_json_for_all_graphs_is_read(
    words: Sequence[str], status: int, said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("sglang", "serve", folder(tmp_path, HYBRID))
    answer = judged(capsys, "--gpu", "h100", "--", *command, *words, status=status, release="0.5.17")
    assert said in answer
    if status == 1:
        # SGLang would take it, and not the flag
        assert FULL not in run_line(answer)


def test_no_faster_prefill_is_promised_to_a_server_that_only_decodes(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**LLAMA, "architectures": ["Qwen3NextForCausalLM"], "linear_num_value_heads": 4}
    command = ("--gpu", "h100", "--", "sglang", "serve", folder(tmp_path, config))
    of_prefill = ("gdn_extend", "linear_tail_uninitialised")
    said = judged(capsys, *command, release="0.5.17")
    assert all(name in said for name in of_prefill)
    said = judged(capsys, *command, "--disaggregation-mode", "decode", release="0.5.17")
    assert not any(name in said for name in of_prefill)


LARGE = {**LLAMA, "hidden_size": 2048, "num_attention_heads": 16}
NEXT = {**LARGE, "architectures": ["Qwen3NextForCausalLM"], "linear_num_value_heads": 4}
FASTER = re.compile("^faster .*attention_extend: .*", re.MULTILINE)
BRANCHES = ("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "4")
# what stays open: on Hopper FA3 is the default of most models
OPEN = ["the fa3 attention backend", "breakable CUDA graphs for prefill"]


@pytest.mark.parametrize(
    ("config", "words", "left_open"),
    [
        (LARGE, (), OPEN),
        (LARGE, ("--attention-backend", "fa3"), OPEN[1:]),
        (LARGE, ("--kv-cache-dtype", "bfloat16"), OPEN),
        # a digit, and no number
        (LARGE, ("--context-length", "²"), OPEN),
        (LARGE, ("--tp-size", "1"), OPEN),
        (LARGE, ("--page-size", "64"), OPEN),
        (LARGE, ("--prefill-attention-backend", "fa3"), OPEN),
        (LARGE, ("--prefill-attention-backend", "fa3", "--decode-attention-backend", "fa3"), OPEN[1:]),
        (LARGE, ("--attention-backend", "fa3", *BRANCHES), OPEN[1:]),
        ({**LARGE, "sliding_window": 4096, "decoder_sparse_step": 1, "final_logit_softcapping": 30.0}, (), OPEN),
        ({**NEXT, "mamba_ssm_dtype": "float32", "linear_key_head_dim": 64}, (), OPEN),
        ({**LLAMA, "text_config": {"head_dim": 256}}, (), OPEN),
        ({**LARGE, "text_config": "llama"}, (), OPEN),
        ({**LARGE, "attn_logit_softcapping": None}, (), OPEN),
        ({**LARGE, "num_attention_heads": 32}, (), None),
        ({**LARGE, "head_dim": [64, 128]}, (), None),
        ({**LARGE, "hidden_size": "2048"}, (), None),
        ({**LARGE, "hidden_size": True, "num_attention_heads": True}, (), None),
        ({**LARGE, "num_attention_heads": [16, 16]}, (), None),
        ({**LARGE, "num_attention_heads": 0}, (), None),
        ({**LARGE, "head_dim": {"text": 128}}, (), None),
        ({**LARGE, "head_dim": 128.0}, (), None),
        ({**LARGE, "text_config": {}}, (), None),
        ({**LARGE, "max_position_embeddings": "4096"}, (), None),
        ({**LARGE, "max_position_embeddings": 10_485_760}, (), None),
        ({**LARGE, "head_dim": 192, "v_head_dim": 128}, (), None),
        ({**LARGE, "v_head_dim": 256}, (), None),
        ({**LARGE, "global_head_dim": 256}, (), None),
        ({**LARGE, "attn_logit_softcapping": 50.0}, (), None),
        ({**LARGE, "kv_lora_rank": 512}, (), None),
        ({**LARGE, "quantization_config": {"kv_cache_quant_algo": "FP8"}}, (), None),
        ({**LARGE, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, (), None),
        ({**LARGE, "attention_chunk_size": 8192}, (), None),
        ({**LARGE, "dual_chunk_attention_config": {"chunk_size": 8192}}, (), None),
        ({**LARGE, "sparse_config": {"topk": 64}}, (), None),
        ({**LARGE, "index_topk": 64}, (), None),
        ({**LARGE, "use_bidirectional_attention": True}, (), None),
        ({**NEXT, "mamba_ssm_dtype": "bfloat16"}, (), None),
        ({**NEXT, "mamba_ssm_dtype": ["float32"]}, (), None),
        ({**LARGE, "architectures": ["Gemma2ForCausalLM"]}, (), None),
        ({**LARGE, "architectures": ["Llama4ForCausalLM"]}, (), None),
        ({**LARGE, "architectures": ["MllamaForConditionalGeneration"]}, (), None),
        ({**LARGE, "architectures": ["Qwen3ForSequenceClassification"]}, (), None),
        (LARGE, ("--is-embedding",), None),
        (LARGE, ("--tp-size", "2"), None),
        (LARGE, ("--tp-size", "+2"), None),
        (LARGE, ("--pp-size", "2"), None),
        (LARGE, ("--pp-size", "+2"), None),
        (LARGE, ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"), None),
        (LARGE, ("--attn-cp-size", "2"), None),
        (LARGE, ("--attn-cp-size", "+2"), None),
        (LARGE, ("--attn-dp-size", "+2"), None),
        (LARGE, ("--enable-prefill-cp",), None),
        (LARGE, ("--moe-a2a-backend", "deepep"), None),
        (LARGE, ("--enable-paged-experts",), None),
        (LARGE, ("--page-size", "48"), None),
        (LARGE, ("--context-length", "10000000"), None),
        (LARGE, ("--device", "cpu", "--cuda-graph-backend-prefill", "breakable"), None),
        (LARGE, ("--model-impl", "transformers"), None),
        (LARGE, ("--quantization", "modelopt_fp8"), None),
        (LARGE, ("--modelopt-quant", "fp8"), None),
        (NEXT, ("--mamba-ssm-dtype", "bfloat16"), None),
        (NEXT, ("--enable-page-major-kv-layout",), None),
        (LARGE, ("--dtype", "float32"), None),
        (LARGE, ("--kv-cache-dtype", "fp8_e4m3"), None),
        (LARGE, ("--attention-backend", "triton"), None),
        (LARGE, ("--attention-backend", "triton", "--speculative-draft-attention-backend", "fa3"), None),
        (LARGE, ("--prefill-attention-backend", "fa3", "--decode-attention-backend", "flashinfer"), None),
        (LARGE, ("--attention-backend", "fa3", "--decode-attention-backend", "triton"), None),
        (LARGE, BRANCHES, None),
        (LARGE, ("--speculative-adaptive",), None),
        (LARGE, ("--dllm-algorithm", "LowConfidence"), None),
        (LARGE, ("--enable-deterministic-inference",), None),
        (LARGE, ("--rl-on-policy-target", "fsdp"), None),
        (LARGE, ("--enable-two-batch-overlap",), None),
        (LARGE, ("--enable-hierarchical-cache",), None),
        (LARGE, ("--enable-unified-memory",), None),
        (LARGE, ("--enable-kv-cache-sharding",), None),
        (LARGE, ("--enable-flexkv",), None),
        (LARGE, ("--enable-lmcache",), None),
        (LARGE, ("--disaggregation-mode", "prefill"), None),
        (LARGE, ("--cuda-graph-bs-prefill", "1024", "2048"), None),
        (LARGE, ("--cuda-graph-backend-prefill", "disabled"), None),
    ],
)
def test_attention_inside_is_promised_where_nothing_stands_against_it(
    config: dict[str, Any], words: tuple[str, ...], left_open: list[str] | None, tmp_path: pathlib.Path
) -> None:
    source, command = releases.in_folder(wheels.unpacked(wheels.NEWEST)), server_command.read(words)
    launch, _ = for_launch.read(source, folder(tmp_path, config), command, "h200", {})
    assert (promises.PROMISE.undecided(launch) if promises.PROMISE.touches(launch) else None) == left_open
    launch, _ = for_launch.read(source, folder(tmp_path, config), command, "b200", {})
    assert not promises.PROMISE.touches(launch)


@pytest.mark.parametrize(
    ("config", "release", "is_promised"),
    [
        (LARGE, wheels.NEWEST, True),
        (LARGE, "0.5.16", True),
        (LARGE, "0.5.18", False),
        # a hybrid, with a kernel for its linear layers and without
        (NEXT, wheels.NEWEST, True),
        (NEXT, "0.5.14", False),
        ({**LARGE, "architectures": ["MiniCPMSALAForCausalLM"], "lightning_nh": 4}, wheels.NEWEST, False),
    ],
)
def test_attention_inside_is_promised_where_it_is_on_and_no_other_break_is_left(
    config: dict[str, Any],
    release: str,
    is_promised: bool,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--model", folder(tmp_path, config), "--gpu", "h200", "--", "--cuda-graph-backend-prefill", "breakable")
    assert bool(FASTER.search(judged(capsys, *words, release=release))) == is_promised


def test_the_configuration_is_taken_as_a_flag_changes_it(tmp_path: pathlib.Path) -> None:
    source = releases.in_folder(wheels.unpacked(wheels.NEWEST))
    name = folder(tmp_path, {**LLAMA, "text_config": {"a": 1}})
    given = ["--json-model-override-args", '{"architectures": ["FalconH1ForCausalLM"], "text_config": {"b": 2}}']
    launch, _ = for_launch.read(source, name, server_command.read(given), "", {})
    assert launch.architectures == ["FalconH1ForCausalLM"] and launch.config["text_config"] == {"a": 1, "b": 2}
    for wrong_word in ("{", "[]"):
        with pytest.raises(model_config.ModelError, match="is no JSON"):
            for_launch.read(source, name, server_command.read([given[0], wrong_word]), "", {})


def test_a_file_that_is_no_configuration_is_named_and_a_mark_at_its_beginning_is_none(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert f"{tmp_path}/config.json is no JSON" in doctor(*root(wheels.NEWEST), "--model", str(tmp_path), status=2)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    doctor(*root(wheels.NEWEST), "--model", str(tmp_path))


def test_a_name_is_looked_up_in_the_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    file = tmp_path / "models--org--name" / "snapshots" / "1" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(LLAMA))
    assert model_config.config_of("org/name") == LLAMA
    assert main.parser().parse_args(["doctor", "--", "--tp", "2"]).launch == ["--tp", "2"]


@pytest.mark.parametrize(
    ("release", "architecture", "graphs"),
    [
        (wheels.NEWEST, "LlamaForCausalLM", served.BY_DEFAULT),
        (wheels.NEWEST, "GPT2LMHeadModel", served.NEVER),
        (wheels.NEWEST, "KimiLinearForCausalLM", served.IF_ASKED_FOR),
        ("0.5.12", "NoSuchModel", ""),
        ("0.0.1", "LlamaForCausalLM", ""),
    ],
)
def test_what_is_recorded_of_graphs_is_found(release: str, architecture: str, graphs: str) -> None:
    assert served.graphs(release, [architecture]) == graphs


PAGE = processes.REPOSITORY / "docs" / "doctor.md"
TOUR = re.compile(r"^```\n\$ bcg-fixes (doctor .+)\n((?:(?!```|\$).+\n)*)\$ echo \$\?\n(\d)\n```$", re.MULTILINE)
TOURS = TOUR.findall(PAGE.read_text())
# a tiny model of the same kind stands in for the published one: of its sizes only that of the heads plays a part
MODELS = {
    "Qwen/Qwen3.5-35B-A3B": ("Qwen3_5MoeForConditionalGeneration", 256),
    "tiiuae/Falcon-H1-7B-Instruct": ("FalconH1ForCausalLM", 128),
}


def test_the_page_has_its_tours() -> None:
    assert len(TOURS) == 3 and all(len(answer.splitlines()) <= 12 for _, answer, _ in TOURS)


@pytest.mark.parametrize(("command", "answer", "status"), TOURS)
def test_the_page_shows_what_is_said(command: str, answer: str, status: str, tmp_path: pathlib.Path) -> None:
    for name, (architecture, head) in MODELS.items():
        file = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "1" / "config.json"
        file.parent.mkdir(parents=True)
        config = json.dumps({**architectures.CONFIGURATIONS[architecture].config, "architectures": [architecture]})
        file.write_text(re.sub(r'"head_dim": \d+', f'"head_dim": {head}', config))
    words = command.split()
    if "--release" in words:
        at = words.index("--release")
        words[at : at + 2] = root(words[at + 1])
    else:
        fork = forked(tmp_path)
        words[words.index("--root") + 1] = str(fork)
    done = processes.python("-m", "sglang_bcg_fixes", *words, environment={"HF_HUB_CACHE": str(tmp_path)})
    # the page does not name a folder of somebody's
    assert re.sub(r": /\S+$", ": ...", done.stdout, count=1, flags=re.MULTILINE) == answer, done.stderr
    assert done.returncode == int(status)
