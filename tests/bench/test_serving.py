# SPDX-License-Identifier: Apache-2.0
"""HTTP servers that are asked in turn by benchmarks/serving.py, and the published models that they serve."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import serving, serving_models
from benchmarks.bench import gdn_layer, hybrid_models, mamba2_model, rows, timing
from sglang_bcg_fixes.kernels.attention_extend.declaration import KERNEL
from sglang_bcg_fixes.lab.verify import environment, models
from tests import processes

ARMS = (serving.STOCK, serving.OURS, serving.NONE)
TINY = serving_models.Published(
    4, 64, 32, 2, 1, serving_models.Tower(1, 64, 128, 2), 2, 1, gdn_layer.Shape(3, 1, 2), words=50, vocabulary=64
)

Measure = Callable[[str], list[rows.Row]]


@pytest.fixture
def measure(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    monkeypatch.setenv("PYTHONPATH", str(processes.REPOSITORY))

    def benched(server: serving.Server, model: pathlib.Path, load: Any, seed: int, folder: pathlib.Path) -> Any:
        serving.first_token(server, {"input_ids": [1]})
        numbers = dict.fromkeys(("output_throughput", *serving.TAKEN), 1.0 + seed)
        return {"completed": load[-1], **numbers}

    monkeypatch.setattr(serving, "bench_serving", benched)
    launch = (sys.executable, "-m", "tests.bench.fake_http")
    plan = serving.Plan(tmp_path, ARMS, launch=launch, lengths=(9,), image_lengths=(300,), clients=(2,), words=50)
    plan = dataclasses.replace(plan, cached=(0, 40), workloads=(serving.CHAT, serving.TURNS), asks=3)

    def measure(misbehaviour: str) -> list[rows.Row]:
        monkeypatch.setenv("MISBEHAVIOUR", misbehaviour)
        return [row for some in serving.measure(plan, tmp_path, print) for row in some]

    return measure


def test_every_server_is_asked_in_every_round(measure: Measure) -> None:
    found = measure("")
    cases = [(serving.FIRST_TOKEN, 9), (serving.behind(40), 9), (serving.WITH_IMAGE, 300)]
    cases += [(serving.CHAT, 1024), (serving.TURNS, 64)]
    assert [(row.measured, row.tokens, row.arm) for row in found] == [(*case, arm) for case in cases for arm in ARMS]
    for row in found:
        assert row.verdict == "green" and row.median and len(row.details["rounds"]) == timing.LEAST_ROUNDS
        # each round and the one before them
        asked = (1 + serving.ASKED if row.unit == "ms" else 1) * (timing.LEAST_ROUNDS + timing.WARM_UP)
        if row.measured == serving.behind(40):
            # the prefix itself, once a round
            asked += timing.LEAST_ROUNDS + timing.WARM_UP
        if row.measured == serving.TURNS:
            # two chats: what the cache has of each, and three turns
            asked *= 2 * (1 + 3)
        none = row.arm == serving.NONE
        assert row.details["prefills"] == {"replayed": 0 if none else asked, "eager": asked if none else 0}
    throughput = [row for row in found if row.measured == serving.CHAT]
    assert {row.median for row in throughput} == {4.0}, "the seed is the number of the round, and the first is dropped"


def test_prompts_behind_a_prefix_are_new_and_the_prefix_is_asked_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    asked: list[list[int]] = []
    cases: list[object] = []

    def answered(server: object, request: dict[str, list[int]]) -> float:
        asked.append(request["input_ids"])
        return float(len(asked))

    def taken(every: object, plan: object, case: object, unit: str, take: Callable[..., object], say: object) -> None:
        # the median is of the prompts, without the prefix and the one that wakes the server
        cases.extend((case, take(None, 0), take(None, 1)))

    monkeypatch.setattr(serving, "first_token", answered)
    monkeypatch.setattr(serving, "measured", taken)
    serving.first_tokens([], serving.Plan(tmp_path, words=50), serving.FIRST_TOKEN, 9, print, cached=4096)
    name = "first token behind 4,096 cached"
    assert cases == [(name, 9, 1), {name: 5.0}, {name: 12.0}]
    prefix, in_a_round = asked[0], 2 + serving.ASKED
    assert len(prefix) == 4096 and asked[in_a_round] == prefix and len(asked) == 2 * in_a_round
    prompts = asked[1:in_a_round] + asked[in_a_round + 1 :]
    assert all(len(each) == 4105 and each[:4096] == prefix for each in prompts)
    assert len({tuple(each) for each in prompts}) == len(prompts)


def test_each_turn_of_a_chat_adds_to_what_the_server_has_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    asked: list[list[int]] = []

    class Answering:
        def generate(self, input_ids: list[int], sampling_params: dict[str, int]) -> None:
            one = sampling_params["max_new_tokens"] == 1
            assert one or sampling_params["ignore_eos"], (
                "else an answer may be shorter, and tokens a second of it wrong"
            )
            asked.append(input_ids)

    def taken(every: object, plan: object, case: object, unit: str, take: Callable[..., Any], say: object) -> None:
        assert case == (serving.TURNS, 64, 1) and take(Answering(), 0)["median_turn_ms"] >= 0
        take(Answering(), 1)

    monkeypatch.setattr(serving, "measured", taken)
    serving.turns([], serving.Plan(tmp_path, words=50, asks=2), 1, print)
    (cached, first, second), (again, other, _) = asked[:3], asked[3:]
    assert len(cached) == 4096 and again == cached, "the chat itself is asked for first, in each round"
    assert first[:4096] == cached and len(first) == 4096 + 64 and second[: 4096 + 64] == first
    assert len(second) == 4096 + 128 and other[:4096] == cached and other != first, "and what it adds is new"


def test_each_client_asks_as_often_as_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    loads = []

    def benched(server: object, model: object, load: tuple[int, ...], *_: object) -> dict[str, float]:
        loads.append(load)
        return {"completed": load[-1] - 1}

    def taken(every: object, plan: object, case: object, unit: str, take: Callable[..., object], say: object) -> None:
        take(None, 0)

    monkeypatch.setattr(serving, "bench_serving", benched)
    monkeypatch.setattr(serving, "measured", taken)
    with pytest.raises(serving.Wrong, match="completed 7 of 8"):
        serving.served([], serving.Plan(tmp_path, asks=4), serving.CHAT, 2, tmp_path, print)
    assert loads == [(1024, 256, 1, 2, 8)]


def test_flags_are_for_servers_that_have_the_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    given: dict[str, dict[str, str]] = {}

    def started(command: object, env: dict[str, str], **_: object) -> None:
        given[arm] = env

    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.setenv("SGLANG_BCG_FIX_OTHER", "on")
    plan = serving.Plan(tmp_path, flags={"SGLANG_BCG_FIX_SOME": "auto"})
    for arm in serving.ARMS:
        serving.start(plan, arm, tmp_path)
    has_it = {arm for arm, env in given.items() if env.get("SGLANG_BCG_FIX_SOME") == "auto"}
    assert (
        has_it == {arm for arm, env in given.items() if env["SGLANG_PLUGINS"] == "bcg_fixes"} == {*serving.ENVIRONMENTS}
    )
    assert not any("SGLANG_BCG_FIX_OTHER" in env for env in given.values())
    inside = {arm for arm, env in given.items() if env.get(KERNEL.flag) in {impl.name for impl in KERNEL.impls}}
    assert inside == {serving.INSIDE}


def test_copies_of_an_arm_are_started_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def popen(command: list[str], env: dict[str, str], **_: object) -> None:
        started.append((command, env))

    monkeypatch.setattr("subprocess.Popen", popen)
    monkeypatch.setattr(serving, "free_port", lambda: 20000)
    plan = serving.Plan(tmp_path, serving.copies(ARMS, 3), flags={"SGLANG_BCG_FIX_SOME": "auto"})
    servers = {arm: serving.start(plan, arm, tmp_path) for arm in plan.arms}
    assert [arm for arm in servers if serving.arm_of(arm) == serving.NONE] == [serving.NONE]
    assert len({server.log for server in servers.values()}) == len(servers) == 7
    for arm in (serving.STOCK, serving.OURS):
        same = [each for name, each in zip(servers, started, strict=True) if serving.arm_of(name) == arm]
        assert len(same) == 3 and all(each == same[0] for each in same)


def test_graphs_without_breaks_are_asked_of_one_server_only(tmp_path: pathlib.Path) -> None:
    plan = serving.Plan(tmp_path)
    commands = {arm: plan.command(arm, 20000) for arm in serving.ARMS}
    assert {arm for arm, command in commands.items() if "--cuda-graph-config" in command} == {serving.FULL}
    config = commands[serving.FULL][commands[serving.FULL].index("--cuda-graph-config") + 1]
    assert json.loads(config)["prefill"]["backend"] == "full"
    assert commands[serving.INSIDE] == commands[serving.OURS] == commands[serving.STOCK]


def test_arguments_are_for_every_server_and_in_the_header(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    commands: list[list[str]] = []
    cached: list[Any] = []

    def measured(plan: serving.Plan, *_: object) -> list[list[rows.Row]]:
        cached.append(plan.cached)
        commands.extend(plan.command(arm, 20000) for arm in plan.arms)
        return []

    monkeypatch.setattr(serving, "measure", measured)
    monkeypatch.setattr(environment, "look", lambda _: {})
    serving_models.make(TINY, tmp_path / "tiny")
    file = tmp_path / "x.jsonl"
    more = ["--tp-size=2", "--mem-fraction-static=0.5"]
    arguments = ["--model", str(tmp_path / "tiny"), "--jsonl", str(file), "--cached", "0,4096"]
    serving.main([*arguments, *(f"--server-argument={one}" for one in more)])
    assert cached == [[0, 4096]]
    # after our own, since the last of an option counts
    assert len(commands) == len(serving.ASKED_ARMS) and all(command[-2:] == more for command in commands)
    assert rows.read(file)[0]["server_arguments"] == more


def test_names_that_there_are_not_are_named_with_the_nearest(tmp_path: pathlib.Path) -> None:
    for option, name, nearest in (("--arms", "stok", "stock"), ("--workloads", "chat-lik", "chat-like")):
        with pytest.raises(SystemExit, match=f"{option}: there is no '{name}'.*{nearest}"):
            serving.main(["--model", "qwen3_5_4b", "--jsonl", str(tmp_path / "x.jsonl"), option, name])


@pytest.mark.parametrize(
    ("misbehaviour", "why"),
    [("wrong", "off by 5"), ("ends", "ended with exit status 3|no answer"), ("does not start", "it does not start")],
)
def test_a_server_that_misbehaves_has_no_times(measure: Measure, misbehaviour: str, why: str) -> None:
    found = measure(misbehaviour)
    ours = [row for row in found if row.arm == serving.OURS]
    assert ours and all(row.verdict == "red" and row.median is None for row in ours)
    assert any(word in ours[0].why for word in why.split("|")), ours[0].why
    assert all(row.verdict == "green" for row in found if row.arm != serving.OURS)


def test_only_one_server_runs_while_it_is_measured(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, signal.Signals]] = []
    send = serving.Server.signal

    def remembered(self: serving.Server, number: signal.Signals) -> None:
        sent.append((self.arm, number))
        send(self, number)

    monkeypatch.setattr(serving.Server, "signal", remembered)
    measure("")
    running: set[str] = set(ARMS)
    stopped_once = False
    for arm, number in sent:
        if number == signal.SIGSTOP:
            running.discard(arm)
        elif number == signal.SIGCONT:
            running.add(arm)
        stopped_once = stopped_once or not running
        assert not stopped_once or len(running) <= 1
    assert stopped_once


def test_no_server_outlives_the_measurement(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[serving.Server] = []
    start = serving.start

    def remembered(plan: serving.Plan, arm: str, folder: pathlib.Path) -> serving.Server:
        started.append(start(plan, arm, folder))
        return started[-1]

    monkeypatch.setattr(serving, "start", remembered)
    monkeypatch.setattr(serving, "judge", lambda *_: (_ for _ in ()).throw(serving.ServingError("ended early")))
    with pytest.raises(serving.ServingError, match="ended early"):
        measure("")
    assert len(started) == len(ARMS)
    for each in started:
        with pytest.raises(ProcessLookupError):
            os.kill(each.process.pid, 0)


def tokens_of(folder: pathlib.Path, text: str) -> list[int]:
    transformers = pytest.importorskip("transformers")
    found: list[int] = transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids
    return found


@pytest.mark.parametrize("of", [*serving_models.MODELS.values(), TINY])
def test_prompts_of_an_image_are_as_long_as_they_say(of: serving_models.Published, tmp_path: pathlib.Path) -> None:
    for name, content in {"config.json": serving_models.config(of), **serving_models.processors(of)}.items():
        (tmp_path / name).write_text(json.dumps(content))
    asked = serving.Prompts("test", of.words).with_image(300)
    tokens = tokens_of(tmp_path, asked["text"])
    assert len(tokens) - 1 + serving.IMAGE_TOKENS == 300
    start, end, image, _ = range(of.words, of.words + 4)
    assert tokens[:3] == [start, image, end] and max(tokens[3:]) < of.words
    assert asked["image_data"][0].startswith("data:image/png;base64,")
    assert serving.IMAGE_TOKENS == (serving.IMAGE_SIDE // (2 * models.PATCH)) ** 2


def test_a_checkpoint_has_every_layer_and_a_vocabulary_without_markers(tmp_path: pathlib.Path) -> None:
    serving_models.make(TINY, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    layers = {name.split(".")[3] for name in index if name.startswith("model.language_model.layers.")}
    assert layers == {"0", "1", "2", "3"}
    assert {name for name in index.values()} == {path.name for path in tmp_path.glob("*.safetensors")}
    assert serving.words_of(tmp_path) == TINY.words
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["image_token_id"] == TINY.words + 2 < TINY.vocabulary
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    assert [each["id"] for each in tokens] == [TINY.words + number for number in range(5)]


def test_a_hybrid_of_text_has_a_tokenizer_of_its_words_and_no_tower(tmp_path: pathlib.Path) -> None:
    of = hybrid_models.lfm2(mamba2_model.Sizes(64, 96, 4, 2, 16), "c*c")
    serving_models.make_text(of, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["layer_types"] == ["conv", "full_attention", "conv"]
    assert serving.words_of(tmp_path) == models.VOCABULARY - 1 and not serving.sees(tmp_path)
    assert tokens_of(tmp_path, f"5 1010 17 {serving_models.END}") == [5, 1010, 17, models.VOCABULARY - 1]


@pytest.mark.parametrize(
    ("of", "layers"),
    [
        (serving_models.qwen3(mamba2_model.Sizes(64, 96, 4, 2, 16), (0, 1, 0)), 3),
        (serving_models.gpt_oss(mamba2_model.Sizes(64, 96, 4, 2, 16), 4, 2, 2), 2),
    ],
)
def test_a_model_of_text_is_written_whole(of: models.Model, layers: int, tmp_path: pathlib.Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    serving_models.make_text(of, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == layers
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as written:
        names = set(written.keys())
    assert {f"model.layers.{layers - 1}.{name}" for name in of.layers[0]} <= names
    assert "model.norm.weight" in names


def test_a_model_of_text_can_be_made_without_weights(tmp_path: pathlib.Path) -> None:
    serving_models.main(str(tmp_path), "qwen3_0_6b", "--without-weights")
    assert (tmp_path / "model.safetensors").stat().st_size < 100
    assert serving.words_of(tmp_path) == models.VOCABULARY - 1 and not serving.sees(tmp_path)


def test_images_are_for_models_that_see(tmp_path: pathlib.Path) -> None:
    serving_models.make(TINY, tmp_path)
    assert serving.sees(tmp_path)


def test_published_sizes_are_those_of_the_layer_bench() -> None:
    for of in serving_models.MODELS.values():
        of_the_bench = gdn_layer.SHAPES["qwen3_5_4b"]
        assert (of.gdn.key_heads, of.gdn.value_heads) == (of_the_bench.key_heads, of_the_bench.value_heads)


def test_a_picture_is_drawn_of_what_was_measured(measure: Measure, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    file = rows.File(tmp_path / "serving.jsonl", {"gpu": "none"})
    file.add([dataclasses.replace(row) for row in measure("")])
    assert serving.draw(file.path).stat().st_size > 10_000


def test_a_model_that_is_neither_a_folder_nor_known_is_refused(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="--model qwen3_5_4: it is no folder of a model"):
        serving.model_of("qwen3_5_4", tmp_path)
    assert "did you mean qwen3_5_4b?" in capfd.readouterr().err
