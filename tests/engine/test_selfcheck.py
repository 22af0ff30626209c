# SPDX-License-Identifier: Apache-2.0
"""The self-check's trials and verdicts, without a model."""

from __future__ import annotations

import contextlib
import math
import pathlib
import signal
import subprocess
import sys
import time
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.anatomy import layer_stack, ranks
from sglang_bcg_fixes.process import this_server
from sglang_bcg_fixes.process.selfcheck import batches, bookkeeping, canary, check, judge, pools
from tests import processes


def test_the_batches_cover_every_way_and_cost_little_first() -> None:
    found = batches.chosen([512, 4, 8, 256, 1024], most=600)
    assert [batch.name for batch in found] == [
        "smallest bucket",
        "middle bucket",
        "several requests",
        "padded",
        "behind a prefix",
        "largest bucket",
        "smallest bucket again",
    ]
    assert {batch.bucket for batch in found} == {4, 256, 512}
    padded = next(batch for batch in found if batch.name == "padded")
    assert 8 < sum(padded.lengths) < 256 and padded.padding == 256 - sum(padded.lengths)
    several = next(batch for batch in found if batch.name == "several requests")
    assert len(set(several.lengths)) == 3 and 1 in several.lengths and several.padding == 0
    assert all(batch.prefix + batch.bucket <= 600 for batch in found)


@pytest.mark.parametrize(("buckets", "count"), [([], 0), ([16], 0), ([1], 3), ([4], 5), ([1, 2], 4)])
def test_few_buckets_leave_fewer_batches(buckets: list[int], count: int) -> None:
    found = batches.chosen(buckets, most=10)
    assert len(found) == count
    assert all(min(batch.lengths) > 0 and batch.padding >= 0 for batch in found)


def observed(*values: float, layer: int = 0, dtype: torch.dtype = torch.float32) -> list[judge.Observation]:
    return [judge.Observation(layer, "keys", torch.tensor(values).to(dtype))]


@pytest.mark.parametrize(
    ("eager", "again", "replayed", "is_wrong"),
    [
        ((1, 2), (1, 2), (1, 2), False),
        ((1, 2), (1, 2), (2, 1), True),
        ((1, 2), (1, 2), (0, 0), True),
        ((0, 0), (0, 0), (0, 0), False),
        ((1, 2), (1, 2), (1, math.nan), True),
        ((1, 2), (1, 2), (1, math.inf), True),
        # eager code that differs from itself allows as much, and four times of it
        ((1.0, 2.0), (1.01, 2.0), (1.0, 2.03), False),
        ((1.0, 2.0), (1.0, 2.0), (1.0, 2.03), True),
        # and never more than a fifth
        ((1.0, 2.0), (1.3, 2.0), (2.0, 1.0), True),
    ],
)
def test_a_difference_counts_against_what_eager_runs_differ_by(
    eager: tuple[float, ...], again: tuple[float, ...], replayed: tuple[float, ...], is_wrong: bool
) -> None:
    [found] = judge.differences(observed(*eager), observed(*again), observed(*replayed), torch.float32)
    assert found.is_too_large == is_wrong, found


def test_rounding_grows_with_depth_and_with_the_type() -> None:
    def most(layer: int, dtype: torch.dtype, of_model: torch.dtype = torch.float32) -> float:
        return judge.allowed(judge.Observation(layer, "keys", torch.ones(1, dtype=dtype)), 0.0, of_model)

    assert most(0, torch.float32) < most(0, torch.float16) < most(0, torch.bfloat16) < most(8, torch.bfloat16)
    assert most(0, torch.float8_e4m3fn) == judge.MOST == most(10**6, torch.bfloat16)
    # of a few tokens, one of which may go to another expert
    assert judge.allowed(judge.Observation(0, judge.LOGITS, torch.ones(1)), 0.0, torch.float32) == judge.MOST
    # a state that is kept in fp32 is made of products in the model's type
    assert most(3, torch.float32, torch.bfloat16) == most(3, torch.bfloat16)


def test_behind_experts_only_what_no_rounding_explains_counts() -> None:
    def is_wrong(layer: int, replayed: float) -> bool:
        eager, other = observed(1, 2, layer=layer), observed(1, replayed, layer=layer)
        [found] = judge.differences(eager, eager, other, torch.float32, routed=1)
        return found.is_too_large

    assert is_wrong(0, 2.1) and is_wrong(1, 2.1), "these are computed before a token is sent anywhere"
    assert not is_wrong(2, 2.1) and is_wrong(2, 3)


def test_the_first_layer_of_experts_is_found_by_its_name() -> None:
    def layer(*names: str) -> torch.nn.Module:
        return torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({name: torch.nn.Identity() for name in names})})

    layers = torch.nn.ModuleList(
        [layer("gate_up_proj"), layer("shared_expert"), layer("experts", "gate"), layer("experts")]
    )
    model = torch.nn.ModuleDict({"language_model": torch.nn.ModuleDict({"layers": layers})})
    assert layer_stack.first_layer_of_experts(model) == 2
    assert layer_stack.first_layer_of_experts(layers[0]) == math.inf


def test_a_run_that_wrote_nothing_is_not_called_right() -> None:
    logits = judge.Observation(0, judge.LOGITS, torch.ones(3))
    assert judge.is_blind([*observed(0, 0), logits]) and not judge.is_blind([*observed(0, 1), logits])


@pytest.mark.parametrize(
    ("replays", "values", "verdict"),
    [
        ({False: 0, True: 1}, (1, 2), "right"),
        ({False: 0, True: 0}, (1, 2), "not replayed"),
        # a replay agrees with a replay, whatever both have read
        ({False: 1, True: 1}, (1, 2), "inconclusive"),
        ({False: 1, True: 1}, (2, 1), "wrong"),
    ],
)
def test_only_a_replay_beside_eager_runs_can_be_right(
    replays: dict[bool, int], values: tuple[float, float], verdict: str
) -> None:
    checked = check.Check.__new__(check.Check)
    checked.switch = check.Switch(None, types.SimpleNamespace(can_run=None))
    checked.model_runner, checked.routed = types.SimpleNamespace(dtype=torch.float32), math.inf
    for is_on in (False, False, True):
        with checked.switch.on(is_on):
            checked.switch.replays.count += replays[is_on]
    assert checked.verdict(observed(1, 2), observed(1, 2), observed(*values))[0] == verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_places_are_sampled_emptied_and_put_back_in_every_type(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 25).reshape(6, 4).float().to(dtype)
    before = tensor.clone()
    place = pools.Place(0, "keys", tensor, torch.tensor([4, 1]))
    copied = place.copy()
    assert place.sample().float().tolist() == [tensor[4].float().tolist(), tensor[1].float().tolist()]
    place.empty()
    assert not tensor[[1, 4]].float().any() and tensor[[0, 2, 3, 5]].float().all()
    place.put_back(copied)
    assert (tensor.float() == before.float()).all()


def test_a_sample_is_small_and_has_both_ends() -> None:
    tensor = torch.arange(5000.0)[:, None].repeat(1, 2000)
    found = pools.Place(0, "keys", tensor, torch.arange(10, 4990)).sample()
    assert found.numel() <= pools.SAMPLED_VALUES and found[0, 0] == 10 and found[-1, 0] == 4989


class Pool:
    """A pool like SGLang's: numbers, lists and tensors."""

    __module__ = "sglang.srt.mem_cache.some_pool"

    def __init__(self) -> None:
        self.free = torch.arange(5)
        self.names = ["a"]
        self.table = {1: 2}
        self.size = 5
        self.other: Pool | None = None


def test_books_are_put_back_in_place_and_for_every_pool_that_a_pool_has() -> None:
    pool, inner = Pool(), Pool()
    pool.other = inner
    free, names = inner.free, inner.names
    books = bookkeeping.Bookkeeping(pool)
    inner.free = inner.free[2:]
    free[3] = 99
    names.append("b")
    inner.table.clear()
    inner.size = 3
    inner.new = True  # type: ignore[attr-defined]
    books.restore()
    assert inner.free is free and free.tolist() == [0, 1, 2, 3, 4]
    assert inner.names is names and names == ["a"] and inner.table == {1: 2} and inner.size == 5
    assert not hasattr(inner, "new")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SGLANG_BCG_SELFCHECK", "strickt", "did you mean strict"),
        ("SGLANG_BCG_CANARY", "often", "is not a number of prefills"),
        ("SGLANG_BCG_CANARY", "-1", "is not a number of prefills"),
    ],
)
def test_a_mistake_in_its_flags_is_told(name: str, value: str, words: str) -> None:
    with pytest.raises(flags.FlagError, match=words):
        flags.read([], [], {name: value})


def test_its_flags_are_read() -> None:
    settings = flags.read([], [], {"SGLANG_BCG_SELFCHECK": "Strict", "SGLANG_BCG_CANARY": "100"})
    assert (settings.selfcheck, settings.canary) == ("strict", 100)
    assert (flags.read([], [], {}).selfcheck, flags.read([], [], {}).canary) == ("warn", 0)


def test_ranks_agree_and_do_not_wait_for_one_that_died(tmp_path: pathlib.Path) -> None:
    paths = {"PYTHONPATH": str(processes.REPOSITORY), "PATH": "/usr/bin:/bin"}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.scenarios.dying_rank", "checked", str(rank), str(tmp_path / "meeting")],
            stderr=subprocess.PIPE,
            text=True,
            env=paths,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in both]
    # as it ends, torch's own threads may abort over a connection that is gone
    assert both[1].returncode == 3 and both[0].returncode in (1, -signal.SIGABRT), said
    assert "bcg-fixes refuses to serve: the self-check ended in " in said[0], said[0]
    assert "SGLANG_BCG_SELFCHECK=off" in said[0] and "the other rank is dead" not in said[0]


def test_where_one_rank_cannot_begin_none_does(tmp_path: pathlib.Path) -> None:
    paths = {"PYTHONPATH": str(processes.REPOSITORY), "PATH": "/usr/bin:/bin"}
    words = [sys.executable, "-m", "tests.scenarios.dying_rank", "checked"]
    both = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "meeting"), "cannot begin"], stdout=subprocess.PIPE, text=True, env=paths
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0].splitlines()[0] for rank in both]
    assert [rank.returncode for rank in both] == [0, 0]
    own = "it could not begin: LookupError: nothing runs one batch"
    assert said == ["self-check: not checked: another rank could not begin", f"self-check: not checked: {own}"]


def test_a_pool_that_shows_no_keys_is_not_read() -> None:
    def refuse(layer: int) -> None:
        raise NotImplementedError

    for get, answer in ((refuse, False), (lambda layer: (None, None), True)):
        pool = types.SimpleNamespace(full_attention_layer_id_mapping={3: 0}, get_kv_buffer=get)
        assert pools.can_be_read(types.SimpleNamespace(token_to_kv_pool=pool)) is answer


def test_a_pool_is_asked_only_where_all_layers_are_here_and_once_by_the_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    stages = [2]
    state = types.ModuleType("parallel_state")
    state.get_pp_group = lambda: types.SimpleNamespace(world_size=stages[0])  # type: ignore[attr-defined]
    distributed = types.ModuleType("sglang.srt.distributed")
    distributed.parallel_state = state  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", distributed)
    monkeypatch.setattr(check, "attends_in_parallel", lambda arguments: False)

    def can_be_read(runner: Any) -> bool:
        asked.append(runner)
        return True

    monkeypatch.setattr(pools, "can_be_read", can_be_read)
    replays = types.SimpleNamespace(can_run=lambda batch: True)
    monkeypatch.setattr(check, "graph_runner", lambda runner: replays)
    runner = types.SimpleNamespace(
        server_args=None,
        is_draft_worker=False,
        is_generation=True,
        model_config=types.SimpleNamespace(is_encoder_decoder=False),
    )
    batch = types.SimpleNamespace(forward_mode=types.SimpleNamespace(is_extend=lambda: True))
    found = canary.Canary(1, lambda mine: mine)
    assert found.runner_that_replays(runner, batch) is None and asked == []
    stages[0] = 1
    assert [found.runner_that_replays(runner, batch) for _ in range(3)] == [replays] * 3 and asked == [runner]


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ({}, 4),
        ({"attn_dp_size": 1, "dllm_algorithm": None}, 4),
        ({"attn_dp_size": 2}, None),
        ({"dp_size": 2}, None),
        ({"nnodes": 2}, None),
        # which has no stages, whatever is asked for
        ({"dllm_algorithm": "LowConfidence"}, None),
    ],
)
def test_schedulers_are_counted_where_arguments_tell_their_number(
    arguments: dict[str, Any], number: int | None
) -> None:
    given = {"tp_size": 2, "pp_size": 2, "dp_size": 1, "nnodes": 1, **arguments}
    assert this_server.schedulers_of(types.SimpleNamespace(**given)) == number


@pytest.mark.parametrize(
    ("given", "resolved", "answer"),
    [
        ({"enable_dp_attention": True}, None, True),
        ({"enable_dp_attention": False}, None, False),
        # from 0.5.22 on
        ({"enable_dp_attention": False, "attn_dp_size": 2}, 1, True),
        ({"enable_dp_attention": False, "attn_dp_size": 1}, 2, True),
        ({"enable_dp_attention": False, "attn_dp_size": None}, 1, False),
    ],
)
def test_ranks_that_attend_to_their_own_batches_are_known(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, object], resolved: int | None, answer: bool
) -> None:
    context: Any = types.ModuleType("sglang.srt.runtime_context")
    if resolved is not None:
        context.get_parallel = lambda: types.SimpleNamespace(attn_dp_size=resolved)
    monkeypatch.setattr(ranks, "runtime_context", lambda: context)
    assert ranks.attends_in_parallel(types.SimpleNamespace(**given)) is answer


def test_the_canary_compares_no_answer_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def counted(replays: check.Replays) -> Iterator[None]:
        replays.count = 1
        yield

    monkeypatch.setattr(check, "counted", counted)
    monkeypatch.setattr(pools, "state_slots", lambda *given: None)
    monkeypatch.setattr(pools, "states_of", lambda *given: ())
    one = canary.Canary(1, lambda mine: mine)
    monkeypatch.setattr(one, "runner_that_replays", lambda *given: "a runner")
    canaries: Any = types.SimpleNamespace(of=lambda model_runner: one)
    output = types.SimpleNamespace(logits_output=types.SimpleNamespace(next_token_logits=None))
    batch = types.SimpleNamespace(req_pool_indices=None)
    assert canary.around_forward(canaries, lambda *given: output, None, batch) is output
    assert (one.admitted, one.pending, one.is_told) == (0, None, True)


def seconds(clock: check.Clock) -> tuple[float, float]:
    return round(clock.spent, 6), round(clock.compiling, 6)


def test_what_runs_compile_is_not_taken_from_the_time_for_batches() -> None:
    clock, batch = check.Clock(), batches.Batch("one", (10,), 10)
    clock.compiled(30.0)
    # the first run of this size compiles, and so does its replay
    clock.ran(batch, 0.1, 8.1, 0.1, 2.1)
    assert seconds(clock) == (0.3, 40.0) and clock.expects(batch) == pytest.approx(0.1)
    assert clock.allows(batch, check.RUNS) and clock.allows(batches.Batch("ten", (100,), 100), 2)
    assert not clock.allows(batches.Batch("large", (1000,), 1000))
    # which ends: a start takes a bounded time whatever is compiled
    clock.compiled(check.SECONDS_TO_COMPILE)
    assert not clock.allows(batch)


def test_the_time_for_batches_ends_too() -> None:
    clock, batch = check.Clock(), batches.Batch("one", (10,), 10)
    for _ in range(3):
        clock.ran(batch, 0.3, 0.3, 0.3, 0.3)
    assert seconds(clock) == (2.7, 0.0) and clock.allows(batch) and not clock.allows(batch, check.RUNS)
    # a small batch costs more than its tokens, and tells little of a large one
    clock.ran(batches.Batch("large", (1000,), 1000), 0.1)
    assert clock.expects(batch) == pytest.approx(0.001)


class Slow(check.Check):
    """A check whose runs take what a list says, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runs: list[float]) -> None:
        self.now, self.runs = 0.0, iter(runs)
        self.batches = [batches.Batch(name, (4,), 4) for name in "abcdefg"]
        self.model_runner = types.SimpleNamespace(device="cpu")
        self.any_rank = bool
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def observe(self, *_: object, **__: object) -> list[judge.Observation]:
        self.now += next(self.runs)
        return []

    def verdict(self, *_: object) -> tuple[str, None]:
        return check.RIGHT, None

    def checked(self) -> list[str]:
        books: typing.Any = None
        return [case.batch.name for case in self.cases(books)]


# seconds of the runs of each batch: eagerly twice, and its replay
WARM = [0.05, 0.05, 0.05]


@pytest.mark.parametrize(
    ("runs", "checked"),
    [
        ([0.05, *7 * WARM], "abcdefg"),
        # nothing is in the cache of Triton: the first run of each size compiles
        ([20.0, *WARM, *6 * [5.0, 0.05, 0.05]], "abcdefg"),
        ([20.0, *WARM, *6 * [1.0, 0.05, 4.0]], "abcdefg"),
        # it never ends: 120 seconds, and the batch that is begun
        ([20.0, *WARM, *6 * [60.0, 0.05, 0.05]], "abc"),
        ([500.0, *WARM], "a"),
        # a large model, whose runs are long each time
        ([0.5, *3 * 3 * [0.4]], "ab"),
    ],
    ids=["warm", "cold", "cold replays", "endless", "endless at once", "large"],
)
def test_a_cold_start_leaves_out_no_batch_and_never_hangs(
    monkeypatch: pytest.MonkeyPatch, runs: list[float], checked: str
) -> None:
    slow = Slow(monkeypatch, runs)
    assert "".join(slow.checked()) == checked
    assert slow.now <= max(check.SECONDS_TO_COMPILE + 30, runs[0] + 1)


@pytest.mark.parametrize(
    ("backend", "kind", "reason"),
    [
        ("FullCudaGraphBackend", check.Unchecked, "full prefill graphs: only breakable ones are compared"),
        ("TcPiecewiseCudaGraphBackend", check.NoGraphs, "there are no breakable prefill graphs"),
    ],
)
def test_graphs_without_breaks_are_named(backend: str, kind: type[check.Unchecked], reason: str) -> None:
    runner = types.SimpleNamespace(backend=type(backend, (), {})())
    with pytest.raises(check.Unchecked, match=reason) as found:
        check.graph_runner(types.SimpleNamespace(prefill_cuda_graph_runner=runner))
    assert found.type is kind
