# SPDX-License-Identifier: Apache-2.0
"""The stand-in for CUDA graphs on cases whose outcome on a GPU is known, and its mutants, which must be noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from cpu_sglang import graphs
from tests import processes

NOT_PERMITTED = "operation not permitted when stream is capturing"


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    graphs.install()
    yield
    graphs.uninstall()


@contextlib.contextmanager
def captured(graph: graphs.CUDAGraph, pool: tuple[int, int] | None = None) -> Iterator[None]:
    with graphs.graph(graph, pool=pool):
        yield


def is_garbage(tensor: torch.Tensor) -> bool:
    if tensor.dtype.is_floating_point:
        return bool(tensor.isnan().all())
    return bool((tensor.contiguous().view(torch.uint8) == 0x7F).all())


def test_replay_sees_new_inputs_only_through_captured_memory() -> None:
    static, graph, factor, log = torch.tensor([1.0, 2.0]), graphs.CUDAGraph(), [10.0], []
    with captured(graph):
        result = static * factor[0] + 1
        log.append("python ran")
    static.copy_(torch.tensor([3.0, 4.0]))
    factor[0] = 100.0
    graph.replay()
    # the list was read at capture: its new value is not seen
    assert result.tolist() == [31.0, 41.0]
    static = torch.tensor([7.0, 7.0])
    graph.replay()
    assert log == ["python ran"]


def test_a_rebound_name_is_not_seen() -> None:
    static, graph = torch.tensor([1.0]), graphs.CUDAGraph()
    with captured(graph):
        result = static + 1
    kept, static = static, torch.tensor([50.0])
    graph.replay()
    assert result.item() == 2.0
    assert kept.item() == 1.0


def test_in_place_writes_and_views_are_replayed() -> None:
    state, step, graph = torch.zeros(4), torch.ones(2), graphs.CUDAGraph()
    with captured(graph):
        state[1:3].add_(step)
    state.zero_()
    step.fill_(5)
    graph.replay()
    graph.replay()
    assert state.tolist() == [0, 10, 10, 0]


def test_an_opaque_function_is_one_operation() -> None:
    @graphs.opaque
    def kernel(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # a kernel may look at what it computes
        target.fill_(sum(source.tolist()))
        return source * 2

    source, target, graph = torch.tensor([1.0, 2.0]), torch.zeros(1), graphs.CUDAGraph()
    before = graphs.counters.operations
    with captured(graph):
        doubled = kernel(source, target)
    assert graphs.counters.operations == before + 1
    source.fill_(4)
    graph.replay()
    assert (target.item(), doubled.tolist()) == (8.0, [8.0, 8.0])


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "bool": lambda t: bool(t[0]),
    "int": lambda t: int(t[0]),
    "index": lambda t: [1, 2, 3][t[0].long()],
    "nonzero": lambda t: t.nonzero(),
    "unique": lambda t: torch.unique(t),
    "masked_select": lambda t: t.masked_select(t > 1),
    "indexing with a mask": lambda t: t[t > 1],
    "writing tensors under a mask": lambda t: t.index_put_((t > 1,), torch.ones(2)),
    "repeat_interleave": lambda t: torch.repeat_interleave(t, t.long()),
    "equal": lambda t: torch.equal(t, t + 1),
    "synchronize": lambda t: torch.cuda.synchronize(),
    "stream.synchronize": lambda t: graphs.current_stream().synchronize(),
    "event.synchronize": lambda t: graphs.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("read", READS)
def test_reading_the_device_while_capturing_raises(read: str) -> None:
    device = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(RuntimeError, match=NOT_PERMITTED), captured(graphs.CUDAGraph()):
        READS[read](device)
    READS[read](device)


def test_host_memory_may_be_read_while_capturing() -> None:
    declared = graphs.host(torch.tensor([1, 2]))
    with captured(graphs.CUDAGraph()):
        assert declared.tolist() == [1, 2]
        assert torch.tensor([3, 4]).sum().item() == 7
        assert (declared * 2)[1].item() == 4


def test_what_a_mask_can_do_without_a_shape_is_captured() -> None:
    values, graph = torch.tensor([1.0, 2.0, 3.0]), graphs.CUDAGraph()
    with captured(graph):
        values[values > 1] = 0.0
    values.copy_(torch.tensor([5.0, 0.5, 6.0]))
    graph.replay()
    assert values.tolist() == [0.0, 0.5, 0.0]


def test_a_shape_that_depends_on_the_data_cannot_be_replayed() -> None:
    length = torch.tensor([2])

    @graphs.opaque
    def of_data_dependent_length() -> torch.Tensor:
        return torch.ones(int(length))

    graph = graphs.CUDAGraph()
    with captured(graph):
        of_data_dependent_length()
    length.fill_(3)
    with pytest.raises(RuntimeError, match="depends on the data"):
        graph.replay()


def pool_reuse(keep: bool) -> torch.Tensor:
    """A weak reference into a block that a second capture in the same pool may be given, unless somebody holds it."""
    pool, source, first, second = graphs.graph_pool_handle(), torch.ones(3), graphs.CUDAGraph(), graphs.CUDAGraph()
    with captured(first, pool):
        block = source + 1
    weak = graphs.weak_ref_tensor(block)
    if not keep:
        del block
    with captured(second, pool):
        source.mul(3)
    first.replay()
    assert weak.tolist() == [2, 2, 2]
    second.replay()
    return weak


def test_a_free_block_of_the_pool_is_reused_by_a_later_capture() -> None:
    assert is_garbage(pool_reuse(keep=False))
    assert pool_reuse(keep=True).tolist() == [2, 2, 2]


def test_a_block_freed_during_a_capture_is_garbage_after_its_replay() -> None:
    pool, source, first, second = graphs.graph_pool_handle(), torch.ones(3), graphs.CUDAGraph(), graphs.CUDAGraph()
    with captured(first, pool):
        block = source + 1
    weak = graphs.weak_ref_tensor(block)
    with captured(second, pool):
        result = block * 10
        del block
    first.replay()
    second.replay()
    # the second graph read the block before it was freed
    assert result.tolist() == [20, 20, 20]
    assert is_garbage(weak)


def test_pools_do_not_share_blocks() -> None:
    source, first, second = torch.ones(3), graphs.CUDAGraph(), graphs.CUDAGraph()
    with captured(first, graphs.graph_pool_handle()):
        block = source + 1
    weak = graphs.weak_ref_tensor(block)
    del block
    with captured(second, graphs.graph_pool_handle()):
        source.mul(3)
    first.replay()
    second.replay()
    assert weak.tolist() == [2, 2, 2]


def break_between_segments(hold: bool) -> torch.Tensor:
    """An eager tensor between two segments, that the second segment reads."""
    pool, source, first, second = graphs.graph_pool_handle(), torch.ones(2), graphs.CUDAGraph(), graphs.CUDAGraph()
    with captured(first, pool):
        before = source + 1
    eager = before * 2
    bridge = eager if hold else graphs.weak_ref_tensor(eager)
    with captured(second, pool):
        after = eager + 1
    del eager
    source.fill_(10)
    first.replay()
    bridge.copy_(before * 2)
    second.replay()
    assert after.tolist() == [23, 23]
    return bridge


def test_an_eager_tensor_known_only_through_a_weak_reference_goes_back_to_the_allocator() -> None:
    assert break_between_segments(hold=True).tolist() == [22, 22]
    # what the break copied reached the segment that follows at once, and then eager code was given the memory
    assert is_garbage(break_between_segments(hold=False))


def test_a_captured_input_that_nobody_holds_is_garbage() -> None:
    graph, lengths = graphs.CUDAGraph(), torch.tensor([1, 2])
    with captured(graph):
        result = lengths + 0
    graph.replay()
    assert result.tolist() == [1, 2]
    del lengths
    graph.replay()
    assert is_garbage(result)


def test_freed_memory_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "freed_memory_is_garbage", False)
    assert pool_reuse(keep=False).tolist() == [2, 2, 2]
    assert break_between_segments(hold=False).tolist() == [22, 22]


def test_an_uninitialised_tensor_is_garbage_until_written() -> None:
    graph, source = graphs.CUDAGraph(), torch.ones(2)
    with captured(graph):
        output = torch.empty(3)
        output[:2].copy_(source)
    graph.replay()
    assert output[:2].tolist() == [1, 1]
    assert output[2:].isnan().all()


def test_a_fork_must_be_joined() -> None:
    side, source = graphs.Stream(), torch.ones(1)
    with pytest.raises(RuntimeError, match="unjoined work"), captured(graphs.CUDAGraph()):
        side.wait_stream(graphs.current_stream())
    graph = graphs.CUDAGraph()
    with captured(graph):
        main = graphs.current_stream()
        side.wait_stream(main)
        with graphs.use_stream(side):
            assert graphs.is_current_stream_capturing()
            result = source + 1
        main.wait_event(side.record_event())
    source.fill_(4)
    graph.replay()
    assert result.item() == 5


def test_work_after_the_join_is_unjoined() -> None:
    side, source = graphs.Stream(), torch.ones(1)
    with pytest.raises(RuntimeError, match="unjoined work"), captured(graphs.CUDAGraph()):
        main = graphs.current_stream()
        side.wait_stream(main)
        main.wait_stream(side)
        with graphs.use_stream(side):
            source.add(1)


def test_another_stream_is_not_captured() -> None:
    side, source, graph = graphs.Stream(), torch.ones(1), graphs.CUDAGraph()
    with captured(graph), graphs.use_stream(side):
        assert not graphs.is_current_stream_capturing()
        result = source + 1
        assert result.item() == 2
    source.fill_(4)
    graph.replay()
    assert result.item() == 2


def test_a_capture_cannot_depend_on_work_outside() -> None:
    outside = graphs.Stream().record_event()
    with pytest.raises(RuntimeError, match="uncaptured work"), captured(graphs.CUDAGraph()):
        graphs.current_stream().wait_event(outside)


def test_the_default_stream_cannot_be_captured() -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        graphs.CUDAGraph().capture_begin()


def test_captures_do_not_nest_and_do_not_replay() -> None:
    done = graphs.CUDAGraph()
    with captured(done):
        torch.ones(1)
    with pytest.raises(RuntimeError, match=NOT_PERMITTED), captured(graphs.CUDAGraph()):
        graphs.CUDAGraph().capture_begin()
    with pytest.raises(RuntimeError, match=NOT_PERMITTED), captured(graphs.CUDAGraph()):
        done.replay()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graphs.CUDAGraph().replay()


def test_uninstall_restores_torch() -> None:
    graphs.uninstall()
    stream: object = torch.cuda.Stream
    assert stream is not graphs.Stream
    assert not hasattr(torch.cpu, "CUDAGraph")
    with captured(graphs.CUDAGraph()):
        assert torch.ones(2).tolist() == [1, 1]
    graphs.install()


def test_interpreted_kernels_are_captured_and_their_memory_is_checked() -> None:
    result = processes.python("-m", "tests.scenarios.captured_kernel", environment={"TRITON_INTERPRET": "1"})
    assert result.returncode == 0, result.stderr


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], object]]] = {
    "nothing is ever free": (
        lambda patch: patch.setattr(graphs._Block, "is_free", lambda self: False),
        test_a_free_block_of_the_pool_is_reused_by_a_later_capture,
    ),
    "a weak reference holds": (
        lambda patch: patch.setattr(graphs, "weak_ref_tensor", lambda tensor: tensor.detach()),
        test_an_eager_tensor_known_only_through_a_weak_reference_goes_back_to_the_allocator,
    ),
    "garbage is zero": (
        lambda patch: patch.setattr(graphs._Block, "poison", lambda self: None),
        test_an_uninitialised_tensor_is_garbage_until_written,
    ),
    "eager memory is never given back": (
        lambda patch: patch.setattr(graphs, "_poison_ordinary_blocks", lambda only_newly_free: None),
        test_a_captured_input_that_nobody_holds_is_garbage,
    ),
    "reads are allowed": (
        lambda patch: patch.setattr(graphs, "_refuse_to_read_the_device", lambda *_: None),
        lambda: test_reading_the_device_while_capturing_raises("nonzero"),
    ),
    "everything is host memory": (
        lambda patch: patch.setattr(graphs, "_is_host", lambda storage: True),
        lambda: test_reading_the_device_while_capturing_raises("tolist"),
    ),
    "replay does nothing": (
        lambda patch: patch.setattr(graphs._Operation, "replay", lambda self: None),
        test_replay_sees_new_inputs_only_through_captured_memory,
    ),
    "forks are not followed": (
        lambda patch: patch.setattr(graphs._Capture, "unjoined_streams", lambda self: []),
        test_a_fork_must_be_joined,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_stand_in_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, case = MUTANTS[mutant]
    case()
    mutate(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        case()
