# SPDX-License-Identifier: Apache-2.0
"""The few-shot task, the model that is trained on it, and how its answers are counted: benchmarks/accuracy."""

from __future__ import annotations

import argparse
import asyncio
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

from sglang_bcg_fixes.lab.verify import servers
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.releases import in_folder
from tests import processes
from tests.wheels import NEWEST

ACCURACY = processes.REPOSITORY / "benchmarks" / "accuracy"
sys.path.append(str(ACCURACY))

import ablate  # noqa: E402
import evaluate  # noqa: E402
import hybrid  # noqa: E402
import task  # noqa: E402

CHECKPOINT = ACCURACY / "checkpoint"
SHAPE = hybrid.Shape(
    hidden=64,
    head_dim=32,
    linear_dim=16,
    linear_key_heads=2,
    linear_value_heads=4,
    experts=2,
    expert_inner=32,
    shared_inner=64,
)
COMPARED_RELEASES = ("0.5.11", "0.5.12.post1", "0.5.15.post1")
SERVED_RELEASES = (*COMPARED_RELEASES, "0.5.17", NEWEST)


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


def test_the_questions_are_the_same_on_every_machine() -> None:
    assert task.digest(task.test_problems()) == "1bb21122"


def test_a_prompt_tells_its_answer_and_the_examples_do_not() -> None:
    problems = task.test_problems()
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


def operands(length: int, keys: int = 8, values: int = 6) -> list[torch.Tensor]:
    torch.manual_seed(length)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 3, length, keys, dtype=torch.double), dim=-1) for _ in "qk")
    v = torch.randn(2, 3, length, values, dtype=torch.double)
    g, beta = -3 * torch.rand(2, 3, length, dtype=torch.double), torch.rand(2, 3, length, dtype=torch.double)
    return [x.requires_grad_() for x in (q, k, v, g, beta, torch.randn(2, 3, keys, values, dtype=torch.double))]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_the_chunked_delta_rule_is_the_recurrent_one(length: int) -> None:
    inputs = operands(length)
    gradients = []
    for rule in (hybrid.recurrent_delta_rule, hybrid.chunked_delta_rule):
        output, state = rule(*inputs)
        loss = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum() + state.square().sum()
        gradients.append([output, state, *torch.autograd.grad(loss, inputs)])
    for recurrent, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, recurrent, rtol=1e-9, atol=1e-9)


def test_the_gradient_is_that_of_finite_differences() -> None:
    inputs = [x.detach()[:1, :1].requires_grad_() for x in operands(6, keys=3, values=2)]
    assert torch.autograd.gradcheck(functools.partial(hybrid.chunked_delta_rule, chunk=4), inputs)


def test_a_sequence_in_parts_is_the_whole_sequence() -> None:
    torch.manual_seed(0)
    model = hybrid.Hybrid(SHAPE).double()
    tokens = torch.randint(0, task.VOCABULARY, (2, 150))
    with torch.no_grad():
        whole = model(tokens)[0]
        past, parts = None, []
        for part in tokens.split([70, 1, 2, 77], 1):
            logits, past = model(part, past)
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


def test_training_learns_and_writes_what_it_says(tmp_path: pathlib.Path) -> None:
    command = [str(ACCURACY / "train.py"), "--small", "--out", str(tmp_path), "--workers", "1", "--longest", "70"]
    command += [
        "--rate",
        "1e-2",
        "--tokens",
        "1000",
        "--steps",
        "60",
        "--every",
        "20",
        "--held-out",
        "8",
        "--test",
        "8",
    ]
    done = processes.python(*command, environment={"OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(line.split(",")[2]) for line in (tmp_path / "loss.csv").read_text().splitlines()[1:]]
    # it starts from ln(128) = 4.85 and, as it goes, knows which tokens an answer is made of
    assert len(losses) == 3 and losses[0] < 5.2 and losses[-1] < 3
    about = json.loads((tmp_path / "training.json").read_text())
    assert about["test"]["questions"] == 8
    assert about["parameters"] == sum(p.numel() for p in hybrid.load(tmp_path).parameters())


def test_the_checkpoint_answers_by_its_state() -> None:
    """Whoever damages the state of the linear layers loses the answers; that is what makes it a test of servers."""
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 8e6
    problems = [problem for problem in task.test_problems() if len(problem.prompt) < 130][:40]
    before_question, before_answer = ablate.ablate(hybrid.load(CHECKPOINT), problems).values()
    assert before_question["nothing"] == before_answer["nothing"] >= 0.95
    assert before_question["recurrent state zero"] < 0.2
    assert before_question["recurrent state of another prompt"] < 0.2
    # an answer's first token comes from the prompt, and some have only that and an end
    assert max(share for damage, share in before_answer.items() if damage != "nothing") < 0.5


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Random weights, norms and decays too, so that no tensor could be left out or in another's place unseen."""
    torch.manual_seed(1)
    model = hybrid.Hybrid(SHAPE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.normal_()
            elif parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("exported")
    hybrid.save(model, folder, end=task.END, start=task.START)
    return folder


# the longer prompt takes two chunks
PROMPTS = [list(range(5, 12)), list(range(50, 116))]
# its activations are rounded to 11 bits some dozens of times, so about 2e-3 of logits whose spread is 1
TOLERANCE = 0.02


@pytest.mark.parametrize("release", COMPARED_RELEASES)
def test_sglang_computes_the_same_logits(
    release_root: Callable[[str], pathlib.Path], exported: pathlib.Path, release: str
) -> None:
    done = processes.on_cpu(
        release_root(release),
        *("-m", "tests.scenarios.checkpoint_logits", str(exported), json.dumps(PROMPTS)),
        environment={"SGLANG_PLUGINS": "__none__"},
        timeout=600,
    )
    found = processes.result(done)
    model = hybrid.load(exported)
    for prompt, tokens, logits in zip(PROMPTS, *found, strict=True):
        with torch.no_grad():
            ours = model(torch.tensor([prompt + tokens[:-1]]))[0][0, len(prompt) - 1 :]
        assert ours.std() > 0.9
        torch.testing.assert_close(torch.tensor(logits), ours, rtol=0, atol=TOLERANCE)


def test_a_tensor_in_anothers_place_would_be_seen(exported: pathlib.Path) -> None:
    model, tokens = hybrid.load(exported), torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        right = model(tokens)[0]
        for name, parameter in model.named_parameters():
            kept = parameter.clone()
            parameter.copy_(kept.roll(1, 0) if len(kept) > 1 else -kept)
            assert (model(tokens)[0] - right).abs().max() > 3 * TOLERANCE, name
            parameter.copy_(kept)


@pytest.mark.parametrize("arm", sorted(set(evaluate.ARMS)))
@pytest.mark.parametrize("release", SERVED_RELEASES)
def test_the_release_knows_every_argument(release_root: Callable[[str], pathlib.Path], release: str, arm: str) -> None:
    source = in_folder(release_root(release))
    arguments = evaluate.engine_arguments(source, arm, CHECKPOINT)
    assert not [name for name in arguments if not source.has_option(f"--{name.replace('_', '-')}")]
    graphs = [name for name in arguments if "breakable" in name or arguments[name] == "breakable"]
    assert len(graphs) == (arm != "eager")


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
