# SPDX-License-Identifier: Apache-2.0
"""The few-shot task, the models that are trained on it, and how their answers are counted: benchmarks/accuracy."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import os
import pathlib
import random
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.kernels.gdn_extend import declaration as gdn_extend
from sglang_bcg_fixes.kernels.kda_extend import Shape as DeltaHeads
from sglang_bcg_fixes.kernels.kda_extend import declaration as kda_extend
from sglang_bcg_fixes.kernels.mamba2_extend import Shape as Heads
from sglang_bcg_fixes.kernels.mamba2_extend import declaration as mamba2_extend
from sglang_bcg_fixes.kernels.short_conv_extend import declaration as short_conv_extend
from sglang_bcg_fixes.lab.verify import servers
from sglang_bcg_fixes.model import Kernel
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.releases import in_folder
from tests import processes, warm
from tests.kernels import kda_reference, mamba2_reference
from tests.wheels import NEWEST

ACCURACY = processes.REPOSITORY / "benchmarks" / "accuracy"
sys.path.append(str(ACCURACY))

import ablate  # noqa: E402
import evaluate  # noqa: E402
import families  # noqa: E402
import granite  # noqa: E402
import hybrid  # noqa: E402
import kimi  # noqa: E402
import lfm2  # noqa: E402
import nemotron_h  # noqa: E402
import qwen3_next  # noqa: E402
import task  # noqa: E402
import train  # noqa: E402

CHECKPOINTS = {name: family.checkpoint for name, family in evaluate.FAMILIES.items()}
CHECKPOINT = CHECKPOINTS["qwen3_next"]
SHAPES: dict[str, Any] = {
    "qwen3_next": qwen3_next.Shape(
        hidden=64,
        head_dim=32,
        linear_dim=16,
        linear_key_heads=2,
        linear_value_heads=4,
        experts=2,
        expert_inner=32,
        shared_inner=64,
    ),
    "nemotron_h": nemotron_h.Shape(
        hidden=64, pattern="*-M-M", head_dim=32, mixer_heads=4, mixer_dim=16, groups=2, states=32, inner=96
    ),
    "granitemoehybrid": granite.Shape(
        hidden=64,
        kinds=("attention", "mamba", "mamba"),
        head_dim=32,
        mixer_heads=4,
        mixer_dim=32,
        groups=1,
        states=32,
        inner=96,
    ),
    "lfm2": lfm2.Shape(hidden=64, kinds=("conv", "full_attention", "conv"), head_dim=32, inner=96),
    "kimi_linear": kimi.Shape(
        hidden=64,
        delta_layers=(1, 3),
        full_layers=(2,),
        delta_heads=3,
        delta_dim=16,
        rank=32,
        shared=16,
        keys=32,
        values=32,
        inner=96,
    ),
}
FAMILIES = tuple(SHAPES)
COMPARED_RELEASES = {
    "qwen3_next": ("0.5.11", "0.5.12.post1", "0.5.15.post1"),
    "nemotron_h": ("0.5.12.post1", "0.5.15.post1", NEWEST),
    "granitemoehybrid": ("0.5.17", NEWEST),
    "lfm2": ("0.5.17", NEWEST),
    "kimi_linear": ("0.5.17", NEWEST),
}
KERNELS: dict[str, Kernel] = {
    "qwen3_next": gdn_extend.KERNEL,
    "nemotron_h": mamba2_extend.KERNEL,
    "granitemoehybrid": mamba2_extend.KERNEL,
    "lfm2": short_conv_extend.KERNEL,
    "kimi_linear": kda_extend.KERNEL,
}
# the last MLP is nothing, so nor is what goes into it
UNSEEN_IN_GRANITE = ("model.layers.2.post_attention_layernorm", "model.layers.2.shared_mlp")
SERVED_RELEASES = ("0.5.11", "0.5.12.post1", "0.5.15.post1", "0.5.17", NEWEST)


def solve(prompt: list[int]) -> tuple[list[int], set[int]]:
    """The answer as a reader of the prompt finds it, and the names in the examples."""
    parts, rest = [], [token for token in prompt[1:] if token not in task.NOISE]
    while task.END in rest:
        cut = rest.index(task.END)
        parts.append(rest[:cut])
        rest = rest[cut + 1 :]
    facts = {part[0]: part[2:] for part in parts[: -task.SHOTS]}
    assert all(part[1] == task.IS for part in parts[: -task.SHOTS])
    examples = parts[-task.SHOTS :]
    shown = {token for part in examples for token in part if token in task.NAMES}
    if task.PLUS not in rest:
        return [*facts[rest[0]], task.END], shown
    offsets = {(part[-1] - part[-2]) % len(task.DIGITS) for part in examples}
    assert len(offsets) == 1
    a, b = (facts[rest[place]][0] - task.DIGITS[0] for place in (0, 2))
    values = (a, b, a + b, a + b + offsets.pop())
    return [*(task.DIGITS[value % len(task.DIGITS)] for value in values), task.END], shown


@pytest.fixture(scope="module")
def problems() -> list[task.Problem]:
    """All questions, which take seconds to draw."""
    return task.test_problems()


def test_the_questions_are_the_same_on_every_machine(problems: list[task.Problem]) -> None:
    assert task.digest(problems) == "1bb21122"


def test_a_prompt_tells_its_answer_and_the_examples_do_not(problems: list[task.Problem]) -> None:
    assert len(problems) == 1319
    for problem in problems:
        answer, shown = solve(problem.prompt)
        assert answer == problem.answer
        assert not shown.intersection(problem.question)
        assert 2 <= len(answer) <= task.LONGEST_ANSWER
        assert max(problem.prompt + answer) < task.VOCABULARY
    lengths = sorted(len(problem.prompt) for problem in problems)
    assert lengths[0] < 70 and lengths[-1] > 850 and len(set(lengths)) > 400


def test_no_statement_is_for_training_and_for_tests() -> None:
    rng = random.Random(0)
    assert all(task.is_for_tests(problem.statement) for problem in task.test_problems(300))
    drawn = [task.draw(rng, length, for_tests=False) for length in range(60, 360)]
    assert not any(task.is_for_tests(problem.statement) for problem in drawn)


Operands = list[torch.Tensor]


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.double)


def of_delta_rule(length: int, batch: int = 2, heads: int = 3, keys: int = 8, values: int = 6) -> Operands:
    q, k = (torch.nn.functional.normalize(drawn(batch, heads, length, keys), dim=-1) for _ in "qk")
    g, beta = (torch.rand(batch, heads, length, dtype=torch.double) for _ in "gb")
    return [q, k, drawn(batch, heads, length, values), -3 * g, beta, drawn(batch, heads, keys, values)]


def of_delta_rule_by_key(length: int, values: int = 6, **sizes: int) -> Operands:
    q, k, v, _, beta, state = of_delta_rule(length, values=values, **sizes)
    # some keys are gone at once, and others hardly ever forget
    return [q, k, v, -(10 ** (6 * torch.rand_like(k) - 4)), beta, state]


def of_scan(length: int, batch: int = 2, groups: int = 2, heads: int = 6, size: int = 6, states: int = 8) -> Operands:
    step = torch.rand(batch, heads, length, dtype=torch.double)
    to_state, from_state = (drawn(batch, groups, length, states) for _ in "BC")
    a = -3 * torch.rand(heads, dtype=torch.double)
    return [drawn(batch, heads, length, size), step, a, to_state, from_state, drawn(batch, heads, size, states)]


def seeded(draw: Callable[..., Operands], length: int, **sizes: int) -> Operands:
    torch.manual_seed(length)
    return [operand.requires_grad_() for operand in draw(length, **sizes)]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@pytest.mark.parametrize(
    ("draw", "recurrent", "chunked"),
    [
        (of_delta_rule, qwen3_next.recurrent_delta_rule, qwen3_next.chunked_delta_rule),
        (of_delta_rule_by_key, kimi.recurrent_delta_rule, kimi.chunked_delta_rule),
        (of_scan, nemotron_h.recurrent_scan, nemotron_h.chunked_scan),
    ],
    ids=("delta_rule", "delta_rule_by_key", "scan"),
)
def test_the_chunked_form_is_the_recurrent_one(
    draw: Callable[..., Operands], recurrent: Callable[..., Any], chunked: Callable[..., Any], length: int
) -> None:
    inputs = seeded(draw, length)
    gradients = []
    for form in (recurrent, chunked):
        output, state = form(*inputs)
        loss = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum() + state.square().sum()
        gradients.append([output, state, *torch.autograd.grad(loss, inputs)])
    for wanted, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_the_gradient_is_that_of_finite_differences() -> None:
    few = seeded(of_delta_rule, 6, batch=1, heads=1, keys=3, values=2)
    assert torch.autograd.gradcheck(functools.partial(qwen3_next.chunked_delta_rule, chunk=4), few)
    few = seeded(of_delta_rule_by_key, 18, batch=1, heads=1, keys=2, values=2)
    assert torch.autograd.gradcheck(functools.partial(kimi.chunked_delta_rule, chunk=16), few)
    few = seeded(of_scan, 6, batch=1, groups=1, heads=2, size=2, states=3)
    assert torch.autograd.gradcheck(functools.partial(nemotron_h.chunked_scan, chunk=4), few)


def test_the_scan_is_that_of_the_kernels() -> None:
    """The same recurrence as mamba2_extend's reference, with the convolution before it."""
    torch.manual_seed(0)
    shape = SHAPES["nemotron_h"]
    mixer = nemotron_h.Mamba2(shape)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, 70, shape.hidden)
    kept: dict[str, torch.Tensor] = {}
    mixer.norm.register_forward_pre_hook(lambda _, given: kept.update(gated=given[0]))
    with torch.no_grad():
        _, (tail, state) = mixer(x, None)
        gate, inputs, dt = mixer.in_proj(x)[0].split([shape.mixer_inner, shape.channels, shape.mixer_heads], -1)
        wanted = mamba2_reference.recurrent(
            mamba2_reference.Inputs(
                [len(inputs)],
                Heads(shape.mixer_heads, shape.groups, shape.mixer_dim, shape.states, shape.conv_taps),
                inputs,
                dt,
                mixer.conv1d.weight.squeeze(1),
                -mixer.A_log.exp(),
                mixer.D,
                mixer.dt_bias,
                torch.zeros(1, shape.channels, shape.conv_taps - 1),
                torch.zeros_like(state),
                mixer.conv1d.bias,
            )
        )
    gated = wanted.output.flatten(-2) * torch.nn.functional.silu(gate)
    torch.testing.assert_close(kept["gated"][0], gated, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, wanted.state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tail.mT, wanted.conv)


def test_forgetting_fast_overflows_nowhere() -> None:
    """In the dtype of training, where exp(89) is too large."""
    torch.manual_seed(0)
    inputs = [operand.float().requires_grad_() for operand in of_delta_rule_by_key(130)]
    wanted, found = (form(*inputs) for form in (kimi.recurrent_delta_rule, kimi.chunked_delta_rule))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found[0].sum(), inputs))


def test_delta_attention_is_that_of_the_kernels() -> None:
    """The same recurrence as kda_extend's reference, with the convolutions and gates before it."""
    torch.manual_seed(0)
    shape = SHAPES["kimi_linear"]
    mixer = kimi.DeltaAttention(shape)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, 70, shape.hidden)
    kept: dict[str, torch.Tensor] = {}
    mixer.o_norm.register_forward_pre_hook(lambda _, given: kept.update(output=given[0]))
    with torch.no_grad():
        _, (tail, state) = mixer(x, None)
        mixed = mixer.mixed(x)[0]
        wanted = kda_reference.recurrent(
            kda_reference.Inputs(
                [len(mixed)],
                DeltaHeads(shape.delta_heads, shape.delta_dim, shape.delta_dim, shape.conv_taps),
                mixed,
                mixer.f_b_proj(mixer.f_a_proj(x))[0],
                mixer.b_proj(x)[0],
                mixer.taps.squeeze(1),
                mixer.A_log.flatten(),
                mixer.dt_bias,
                torch.zeros_like(tail.mT),
                torch.zeros_like(state.mT),
            )
        )
    torch.testing.assert_close(kept["output"][0], wanted.output, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.mT, wanted.state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tail.mT, wanted.conv)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_in_parts_is_the_whole_sequence(family: str) -> None:
    torch.manual_seed(0)
    model = families.FAMILIES[family](SHAPES[family]).double()
    tokens = torch.randint(0, task.VOCABULARY, (2, 150))
    with torch.no_grad():
        whole = model(tokens)[0]
        past, parts = None, []
        for part in tokens.split([70, 1, 2, 77], 1):
            logits, past = model(part, past)
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


def test_layers_are_chosen_where_the_family_has_a_choice() -> None:
    chosen = argparse.Namespace(family="nemotron_h", small=True, pattern="*MMM")
    assert train.shape_of(chosen) == dataclasses.replace(nemotron_h.NemotronH.small, pattern="*MMM")
    with pytest.raises(SystemExit, match="--pattern: qwen3_next has none; leave it out, or add --family nemotron_h"):
        train.shape_of(argparse.Namespace(family="qwen3_next", small=False, pattern="*MMM"))


@pytest.mark.parametrize("family", FAMILIES)
def test_training_learns_and_writes_what_it_says(tmp_path: pathlib.Path, family: str) -> None:
    command = ["--small", "--out", str(tmp_path), "--workers", "1", "--longest", "70", "--family", family]
    command += ["--rate", "1e-2", "--tokens", "500", "--steps", "60", "--every", "20", "--held-out", "8", "--test", "2"]
    # torch is there already, and its compiler, which the optimizer imports
    environment = processes.environment_of([ACCURACY], processes.ON_CPU)
    done = warm.starter(environment).run(("-m", "train", *command), environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(line.split(",")[2]) for line in (tmp_path / "loss.csv").read_text().splitlines()[1:]]
    # it starts from ln(128) = 4.85 and, as it goes, knows which tokens an answer is made of
    assert len(losses) == 3 and losses[0] < 5.2 and losses[-1] < 3
    about = json.loads((tmp_path / "training.json").read_text())
    assert about["test"]["questions"] == 2
    assert about["parameters"] == sum(p.numel() for p in families.load(tmp_path).parameters())


# a family that nobody has trained yet has none
@pytest.mark.parametrize("family", [name for name, folder in CHECKPOINTS.items() if folder.exists()])
def test_the_checkpoint_answers_by_its_state(problems: list[task.Problem], family: str) -> None:
    """Whoever damages the state of the linear layers loses the answers; that is what makes it a test of servers."""
    checkpoint = CHECKPOINTS[family]
    assert (checkpoint / "model.safetensors").stat().st_size <= 8e6
    short = [problem for problem in problems if len(problem.prompt) < 130][:20]
    before_question, before_answer = ablate.ablate(families.load(checkpoint), short).values()
    assert before_question["nothing"] == before_answer["nothing"] >= 0.95
    # what stood just before a question does not matter for it, and a short convolution keeps no more
    # Kimi's attention comes behind its delta layers, and finds some of the facts by itself
    most, most_of_answers = (0.7, 0.7) if family == "kimi_linear" else (0.2, 0.5)
    if family != "lfm2":
        assert before_question["recurrent state zero"] < most
        assert before_question["recurrent state of another prompt"] < most
    kept = "convolution" if family == "lfm2" else ("convolution", "recurrent")
    # an answer's first token comes from the prompt, and some have only that and an end
    assert max(share for damage, share in before_answer.items() if damage.startswith(kept)) < most_of_answers


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return export(request.param, tmp_path_factory.mktemp(request.param))


def export(family: str, folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Random weights, norms and decays too, so that no tensor could be left out or in another's place unseen."""
    torch.manual_seed(1)
    model = families.FAMILIES[family](dataclasses.replace(SHAPES[family], **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.normal_()
            elif parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
    hybrid.save(model, folder, end=task.END, start=task.START)
    # SGLang builds a product of Kimi-Linear in the folder's type, whatever the server's is, which is half here
    config = folder / "config.json"
    config.write_text(config.read_text().replace("bfloat16", "float16"))
    return folder


# the longer prompt takes two chunks
PROMPTS = [list(range(5, 12)), list(range(50, 116))]
# its activations are rounded to 11 bits some dozens of times, so about 2e-3 of logits whose spread is 1
TOLERANCE = 0.02


def asked(root: pathlib.Path, folder: pathlib.Path, *size: str, **environment: str) -> dict[str, Any]:
    """What a release says of the prompts."""
    done = processes.on_cpu(
        root,
        *("-m", "tests.scenarios.checkpoint_logits", str(folder), json.dumps(PROMPTS), *size),
        # as the model's own, which is in half precision here
        environment={"SGLANG_PLUGINS": "__none__", "SGLANG_MAMBA_CONV_DTYPE": "float16", **environment},
        timeout=600,
    )
    found: dict[str, Any] = processes.result(done)
    return found


def assert_ours(folder: pathlib.Path, found: dict[str, Any]) -> None:
    model = families.load(folder)
    for prompt, tokens, logits in zip(PROMPTS, found["tokens"], found["logits"], strict=True):
        with torch.no_grad():
            ours = model(torch.tensor([prompt + tokens[:-1]]))[0][0, len(prompt) - 1 :]
        assert ours.std() > 0.9
        torch.testing.assert_close(torch.tensor(logits), ours, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "release"), [(family, release) for family in FAMILIES for release in COMPARED_RELEASES[family]]
)
def test_sglang_computes_the_same_logits(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, family: str, release: str
) -> None:
    folder = export(family, tmp_path)
    assert_ours(folder, asked(release_root(release), folder))


@pytest.mark.parametrize(
    ("family", "release", "changes"),
    [
        # from 0.5.19 on, a layer without attention or mixer costs the model its prefill graphs
        ("nemotron_h", "0.5.15.post1", {}),
        ("nemotron_h", NEWEST, {"pattern": "*MM"}),
        *((family, release, {}) for family in ("granitemoehybrid", "lfm2") for release in COMPARED_RELEASES[family]),
        *(("kimi_linear", release, {}) for release in COMPARED_RELEASES["kimi_linear"]),
    ],
)
def test_so_does_the_kernel_inside_a_prefill_graph(
    release_root: Callable[[str], pathlib.Path],
    tmp_path: pathlib.Path,
    family: str,
    release: str,
    changes: dict[str, Any],
) -> None:
    folder, kernel = export(family, tmp_path, **changes), KERNELS[family]
    fixes = {f"SGLANG_BCG_FIX_{fix}": "on" for fix in evaluate.FAMILIES[family].fixes}
    turned = {"SGLANG_PLUGINS": "bcg_fixes", kernel.flag: "reference", **fixes}
    found = asked(release_root(release), folder, "80", kernel.op, **turned)
    # the attention's
    assert found["breaks"] == {"80": 1} and found["replayed"] == 2
    # from 0.5.22 on, SGLang has a kernel of its own for delta attention
    assert found["left"] == (None if (family, release) == ("kimi_linear", NEWEST) else {})
    assert_ours(folder, found)


def test_a_tensor_in_anothers_place_would_be_seen(exported: pathlib.Path) -> None:
    model, tokens = families.load(exported), torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        right = model(tokens)[0]
        for name, parameter in model.named_parameters():
            if isinstance(model, granite.Granite) and name.startswith(UNSEEN_IN_GRANITE):
                continue
            kept = parameter.clone()
            parameter.copy_(kept.roll(1, 0) if len(kept) > 1 else -kept)
            assert (model(tokens)[0] - right).abs().max() > 3 * TOLERANCE, name
            parameter.copy_(kept)


@pytest.mark.parametrize("arm", sorted(set(evaluate.ARMS)))
@pytest.mark.parametrize("release", SERVED_RELEASES)
def test_the_release_knows_every_argument(
    release_root: Callable[[str], pathlib.Path], exported: pathlib.Path, release: str, arm: str
) -> None:
    source = in_folder(release_root(release))
    arguments = evaluate.engine_arguments(source, arm, exported)
    assert not [name for name in arguments if not source.has_option(f"--{name.replace('_', '-')}")]
    graphs = [name for name in arguments if "breakable" in name or arguments[name] == "breakable"]
    assert len(graphs) == (arm != "eager")


@pytest.mark.parametrize(("family", "kernel"), KERNELS.items())
def test_one_arm_turns_the_kernel_on(family: str, kernel: Kernel) -> None:
    of_family = evaluate.FAMILIES[family]
    assert of_family.implementation in [impl.name for impl in kernel.impls]
    for arm in (*evaluate.ARMS, "kernels"):
        turned = evaluate.environment_of(arm, of_family)[kernel.flag]
        assert turned == (of_family.implementation if arm == "kernels" else "off"), arm


def test_only_what_is_mended_has_the_fixes_of_a_family() -> None:
    turned = {
        arm: evaluate.environment_of(arm, evaluate.FAMILIES["lfm2"])[declared_in(hybrids_without_graphs).flag]
        for arm in (*evaluate.ARMS, "kernels")
    }
    assert turned == {"reference": "on", "stock": "off", "patched": "on", "eager": "off", "kernels": "on"}


def test_a_model_that_nobody_has_trained_is_asked_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit, match=r"config\.json is not there: train the model first, with train\.py --out"):
        evaluate.family_of(tmp_path)


class Engine:
    """Answers rightly, and does not forget its prefix cache before it is asked twice."""

    def __init__(self, problems: list[task.Problem]) -> None:
        self.loop = asyncio.new_event_loop()
        self.answers = {tuple(problem.prompt): problem.answer for problem in problems}
        self.running = self.most = self.flushed = 0

    async def async_generate(self, input_ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        answer = self.answers.get(tuple(input_ids), [0])
        return {"output_ids": answer[: sampling_params["max_new_tokens"]], "meta_info": {"cached_tokens": 1}}

    def generate(self, **_: Any) -> None:
        pass

    def flush_cache(self) -> Any:
        self.flushed += 1
        return types.SimpleNamespace(success=self.flushed % 2 == 0)


def all_right(problems: list[task.Problem]) -> evaluate.Answers:
    return {phase: [problem.answer for problem in problems] for phase in evaluate.PHASES}


def test_every_phase_asks_every_question() -> None:
    problems = task.test_problems(100)
    engine = Engine(problems)
    lines: list[dict[str, Any]] = []
    evaluate.ask_everything(engine, problems, lambda **line: lines.append(line))
    engine.loop.close()
    assert engine.most == evaluate.CONCURRENCY
    assert engine.flushed == 6
    assert evaluate.answers_in(lines, len(problems)) == all_right(problems)
    assert [list(line) for line in lines if "phase" not in line] == [["first_token_ms"]]


@pytest.fixture
def stands_for_a_server(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have `evaluate` start a server of this kind in the place of its own."""

    def put(ending: str) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [processes.REPOSITORY, ACCURACY])))
        monkeypatch.setattr(evaluate, "SERVER", [sys.executable, "-m", "tests.scenarios.accuracy_server", ending])

    return put


def test_what_a_dead_server_did_not_answer_is_wrong(
    release_root: Callable[[str], pathlib.Path],
    stands_for_a_server: Callable[[str], None],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stands_for_a_server("dies")
    monkeypatch.setattr(releases, "installed", lambda: in_folder(release_root("0.5.12.post1")))
    options = argparse.Namespace(questions=4, arms="stock,eager,eager", jobs=3, model=CHECKPOINT)
    stock, eager, again = evaluate.evaluate(options, tmp_path / "servers")
    assert stock["ending"] == "ended with exit status 3 while it served"
    found = stock["phases"]["serial"]
    assert (found["right"], found["unanswered"], found["wrong"]) == (2, 1, {"1": "7", "3": None})
    assert found["differs_from"] == {"eager": 2}
    assert eager["ending"] == "finished" and eager["phases"]["serial"]["accuracy"] == 1
    assert eager["phases"]["serial"]["differs_from"] == {"stock": 2}
    assert again["phases"]["serial"]["differs_from"] == {"stock": 2, "eager": 0}
    assert stock["cached_tokens"]["serial"] == 6
    assert "| stock: ended with exit status 3 while it served | 50.0% | 0.0% |" in evaluate.summary([stock])


def test_what_was_answered_before_an_interrupt_is_kept(
    release_root: Callable[[str], pathlib.Path],
    stands_for_a_server: Callable[[str], None],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stands_for_a_server("hangs")
    monkeypatch.setattr(releases, "installed", lambda: in_folder(release_root("0.5.12.post1")))
    options = argparse.Namespace(questions=4, arms="eager,stock,stock", jobs=2, model=CHECKPOINT)
    say = servers.Progress.say

    def interrupt_after_the_first(progress: Any, line: str) -> None:
        say(progress, line)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(servers.Progress, "say", interrupt_after_the_first)
    eager, stock, never = evaluate.evaluate(options, tmp_path / "servers")
    assert eager["ending"] == "finished" and eager["phases"]["serial"]["accuracy"] == 1
    assert "interrupted" in stock["ending"] and "interrupted" in never["ending"]


@pytest.mark.parametrize(("differing", "times"), [(0, {"median": 5}), (1, None)])
def test_no_time_is_given_for_wrong_answers(differing: int, times: dict[str, float] | None) -> None:
    server = servers.Server("1 patched", pathlib.Path(), {"engine": {"model_path": "a/folder/checkpoint"}}, {})
    outcome = servers.Outcome(servers.FINISHED, 1.0, 0.5, [], [], [], [])
    phases = {"serial": {"differs_from": {"reference": differing}}}
    found = evaluate.result_of("patched", server, outcome, phases, [{"first_token_ms": {"median": 5}}])
    assert found["first_token_ms"] == times and found["engine"] == {"model_path": "checkpoint"}
