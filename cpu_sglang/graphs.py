# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on a machine without a GPU: capture writes a tape of operations, replay runs the tape.

Code that a real graph gets wrong must come out wrong here, and code that it gets right must come out right.

The tape records every aten operation (seen through TorchDispatchMode), every kernel run by Triton's interpreter
and every function marked `opaque`. Tensors are remembered as addresses, everything else by its value at capture; so, as
on a GPU, Python does not run at replay, and new inputs arrive only through the captured memory.

Reading the device while capturing raises CUDA's error. All tensors are CPU tensors here, so the rule for what
counts as host memory is: a tensor that Python builds from Python values while capturing (`torch.tensor(3)`), anything
computed from such tensors alone, and tensors declared with `host()`. Everything else is device memory.

Memory is modelled at its worst:
- A block of a graph's pool that nothing holds may be given to a later capture in the same pool. Replaying that later
  capture therefore fills the block with garbage: before the replay if the block was free when the capture began, after
  it if the block was freed during the capture.
- An uninitialised tensor (`torch.empty`) made while capturing holds garbage at each replay, until something writes it.
- A block of the ordinary allocator (eager code, the breaks between two segments) that a tape or a weak reference
  mentions, and that nothing holds, holds garbage once it was found free, and again after each replay of any graph:
  eager code may have been given it.
Garbage is NaN in floating point and 0x7f in every byte of an integer, far outside any index range. An interpreted
kernel that is replayed and touches anything but the tensors it was given raises "illegal memory access".
A tape and a weak reference (`weak_ref_tensors`) do not hold memory in this sense; a Python reference does.
`freed_memory_is_garbage = False` models luck instead: freed memory keeps what was last written to it.

A collective of torch.distributed is one operation: a replay waits until the other ranks take part (see ranks.py).

Streams have an identity, and forks and joins are followed: an operation on a stream that takes no part in the capture
is not recorded, and a fork that is not joined when the capture ends raises.

Not modelled: kernels run at capture too, a GPU would only record them; garbage written through a stale address into
memory that another tensor now owns; kernels that follow pointers stored in tensors (refused at replay, see above); the
order of kernels on different streams; H2D copies (a tensor made from Python values may be captured here, CUDA refuses
that for a device tensor); `.to("cpu")`, which looks like a copy within the device; pinned memory; random number
generator states; more than one device or thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.abc
import importlib.machinery
import itertools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import stand_ins

WEAK_REF_MODULES = (
    "sglang.srt.compilation.weak_ref_tensor",
    "sglang.srt.model_executor.runner_backend_utils.weak_ref_tensor",
)
BREAKABLE_GRAPH_MODULES = (
    "sglang.srt.model_executor.breakable_cuda_graph.breakable_cuda_graph",
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph",
)

# operations that wait for the device for a value or a shape
READS_THE_DEVICE = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::_unique",
        "aten::_unique2",
        "aten::bincount",
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_select",
        "aten::nonzero",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::unique_dim_consecutive",
    }
)
ALLOCATES_WITHOUT_WRITING = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
_FILL_BYTE = 0x7F


@dataclass
class Counters:
    captures: int = 0
    operations: int = 0
    replays: int = 0
    poisoned: int = 0


counters = Counters()
freed_memory_is_garbage = True


def _not_permitted(what: str) -> RuntimeError:
    return RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")


class _Block:
    """The memory of one storage, kept mapped for as long as a tape or a weak reference mentions it."""

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype, pool: _Pool | None):
        self.storage = storage
        self.dtype = dtype
        self.pool = pool
        self.was_free = False

    def is_free(self) -> bool:
        # one use is self.storage; nothing else in this module keeps a tensor on the storage between two operations
        return torch._C._storage_Use_Count(self.storage._cdata) <= 1

    def poison(self) -> None:
        if _is_host(self.storage) or not freed_memory_is_garbage:
            return
        counters.poisoned += 1
        if self.dtype.is_floating_point or self.dtype.is_complex:
            values = torch.empty(0, dtype=self.dtype).set_(self.storage)
            values.fill_(float("nan"))
        else:
            torch.empty(0, dtype=torch.uint8).set_(self.storage).fill_(_FILL_BYTE)


class _Pool:
    def __init__(self, identity: tuple[int, int]):
        self.identity = identity
        self.blocks: weakref.WeakSet[_Block] = weakref.WeakSet()

    def free_blocks(self) -> set[_Block]:
        return {block for block in self.blocks if block.is_free()}


# a block's address cannot be reused while the block exists, because the block holds the storage
_blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
_pools: weakref.WeakValueDictionary[tuple[int, int], _Pool] = weakref.WeakValueDictionary()
_pool_numbers = itertools.count(1)


def host(tensor: torch.Tensor) -> torch.Tensor:
    """Declare a tensor as host memory: it may be read while capturing, and no graph writes it."""
    vars(tensor.untyped_storage())["is_host_memory"] = True
    return tensor


def _is_host(storage: torch.UntypedStorage) -> bool:
    # torch keeps the Python object of a storage, and so this attribute, for as long as the storage lives
    return getattr(storage, "is_host_memory", False)


class _Address(NamedTuple):
    """A tensor as a graph knows it: an address and a layout, without ownership."""

    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(self.block.storage, self.offset, self.size, self.stride)


def _block_of(tensor: torch.Tensor, pool: _Pool | None) -> _Block:
    storage = tensor.untyped_storage()
    block = _blocks.get(storage.data_ptr())
    if block is None:
        block = _blocks[storage.data_ptr()] = _Block(storage, tensor.dtype, pool)
        if pool is not None:
            pool.blocks.add(block)
    return block


def _address_of(tensor: torch.Tensor, pool: _Pool | None = None) -> _Address | torch.Tensor:
    # no memory, no address: nothing can go stale
    if tensor.untyped_storage().nbytes() == 0:
        return tensor.detach()
    block = _block_of(tensor, pool)
    return _Address(block, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _poison_ordinary_blocks(only_newly_free: bool) -> None:
    for block in list(_blocks.values()):
        if block.pool is not None or not block.is_free():
            continue
        if not only_newly_free or not block.was_free:
            block.poison()
        block.was_free = True


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor over the same memory that does not own it."""
    if tensor.untyped_storage().nbytes() == 0:
        return tensor
    block = _block_of(tensor, None)
    memory: Any = (ctypes.c_char * block.storage.nbytes()).from_address(block.storage.data_ptr())
    # keeps the pages mapped, as a GPU does; does not count as holding the block
    memory.block = block
    with _unrecorded():
        not_owned = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(not_owned, *layout)


def weak_ref_tensors(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return weak_ref_tensor(tensors)
    if isinstance(tensors, (list, tuple)):
        return type(tensors)(weak_ref_tensor(tensor) for tensor in tensors)
    raise ValueError(f"weak_ref_tensors takes a tensor, or a list or tuple of tensors, not {type(tensors).__name__}")


_stream_numbers = itertools.count(1)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id = self.cuda_stream = next(_stream_numbers)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if _capture is not None:
            _capture.wait(self, event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        if _capture is not None:
            raise _not_permitted("Stream.synchronize")

    def query(self) -> bool:
        self.synchronize()
        return True

    def __enter__(self) -> Stream:
        self._entered = use_stream(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)


class Event:
    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        self.is_recorded = False
        # set only where the event was recorded on a stream that took part in a capture
        self.capture: _Capture | None = None
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        self.is_recorded = True
        self.capture = _capture if _capture is not None and stream in _capture.seen_by else None
        self.seen = dict(self.capture.seen_by[stream]) if self.capture is not None else {}

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        if _capture is not None:
            raise _not_permitted("Event.synchronize")

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, end: Event) -> float:
        return 0.0


_default_stream = Stream()
_stream = _default_stream


def current_stream(device: Any = None) -> Stream:
    return _stream


def set_stream(stream: Stream) -> None:
    global _stream
    _stream = stream


@contextlib.contextmanager
def use_stream(stream: Stream | None) -> Iterator[Stream | None]:
    previous = _stream
    set_stream(previous if stream is None else stream)
    try:
        yield stream
    finally:
        set_stream(previous)


def synchronize(device: Any = None) -> None:
    if _capture is not None:
        raise _not_permitted("synchronize")


def is_current_stream_capturing() -> bool:
    return _capture is not None and _stream in _capture.seen_by


# bounds of the memory passed to the replayed kernel, in ascending order
_reachable: tuple[numpy.ndarray, numpy.ndarray] | None = None


@contextlib.contextmanager
def _only_reaching(blocks: Iterable[_Block]) -> Iterator[None]:
    global _reachable
    ranges = sorted({(block.storage.data_ptr(), block.storage.nbytes()) for block in blocks})
    begins = numpy.array([begin for begin, _ in ranges], dtype=numpy.uint64)
    _reachable = (begins, begins + numpy.array([size for _, size in ranges], dtype=numpy.uint64))
    try:
        yield
    finally:
        _reachable = None


def _check_reach(pointers: numpy.ndarray, mask: numpy.ndarray | None) -> None:
    if _reachable is None:
        return
    if mask is not None:
        # the interpreter keeps some masks as integers, which would be taken for positions
        pointers = pointers[numpy.broadcast_to(mask, pointers.shape).astype(bool)]
    touched = pointers.astype(numpy.uint64)
    if not touched.size:
        return
    begins, ends = _reachable
    position = numpy.searchsorted(begins, touched, side="right").astype(numpy.int64) - 1
    if not begins.size or (position < 0).any() or (touched >= ends[position]).any():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _capture_interpreted_kernels() -> None:
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        _check_reach(ptrs.data, mask.data)
        return load(self, ptrs, mask, *rest)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check_reach(ptrs.data, mask.data)
        return store(self, ptrs, value, mask, *rest)

    def checked_rmw(self: Any, operation: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check_reach(ptr.data, mask.data)
        return rmw(self, operation, ptr, value, mask, *rest)

    def checked_cas(self: Any, ptr: Any, *rest: Any) -> Any:
        _check_reach(ptr.data, None)
        return cas(self, ptr, *rest)

    _replace(builder, "create_masked_load", checked_load)
    _replace(builder, "create_masked_store", checked_store)
    _replace(builder, "create_atomic_rmw", checked_rmw)
    _replace(builder, "create_atomic_cas", checked_cas)
    _replace(interpreter.GridExecutor, "__call__", opaque(interpreter.GridExecutor.__call__))


@dataclass
class _Operation:
    function: Callable[..., Any]
    arguments: list[Any]
    structure: Any
    # position in the flattened results, and the address that a replay writes that result to
    results: list[tuple[int, _Address]]

    def replay(self) -> None:
        arguments = [value.tensor() if isinstance(value, _Address) else value for value in self.arguments]
        args, kwargs = tree_unflatten(arguments, self.structure)
        with _only_reaching(value.block for value in self.arguments if isinstance(value, _Address)):
            results = tree_flatten(self.function(*args, **kwargs))[0]
        for position, address in self.results:
            if results[position].shape != address.size:
                raise RuntimeError(
                    f"{self.function} made {tuple(address.size)} at capture and {tuple(results[position].shape)} at "
                    "replay: a graph cannot hold a shape that depends on the data"
                )
            address.tensor().copy_(results[position])


@dataclass
class _Garbage:
    """Memory content after replaying an allocation without a write."""

    block: _Block

    def replay(self) -> None:
        self.block.poison()


class _Capture:
    """A capture in progress: the tape, and a vector clock for each participating stream."""

    def __init__(self, pool: _Pool, origin: Stream):
        self.pool = pool
        self.origin = origin
        self.tape: list[_Operation | _Garbage] = []
        # vector clock: stream -> {stream: number of its operations that come before}
        self.seen_by: dict[Stream, dict[Stream, int]] = {origin: {origin: 0}}
        self.free_at_begin = pool.free_blocks()
        self.freed_during: set[_Block] = set()

    def wait(self, stream: Stream, event: Event) -> None:
        if event.capture is not self:
            if stream in self.seen_by and event.is_recorded:
                raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")
            return
        # a stream that joins counts as one operation, so that an empty fork has to be joined too
        seen = self.seen_by.setdefault(stream, {stream: 1})
        for other, operations in event.seen.items():
            seen[other] = max(seen.get(other, 0), operations)

    def unjoined_streams(self) -> list[Stream]:
        seen_by_origin = self.seen_by[self.origin]
        return [stream for stream, seen in self.seen_by.items() if seen_by_origin.get(stream, 0) < seen[stream]]

    def record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
        if _stream not in self.seen_by:
            return
        arguments, structure = tree_flatten((args, kwargs))
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        fresh = [
            (position, result)
            for position, result in enumerate(tree_flatten(results)[0])
            if isinstance(result, torch.Tensor)
            and result.untyped_storage().nbytes()
            and result.untyped_storage().data_ptr() not in memory
        ]
        schema = getattr(function, "_schema", None)
        if schema is not None:
            if tensors and all(_is_host(tensor.untyped_storage()) for tensor in tensors):
                for _, result in fresh:
                    host(result)
                return
            if not fresh and not schema.is_mutable:
                # a view: it computes nothing
                return
        self.seen_by[_stream][_stream] += 1
        counters.operations += 1
        # what is fresh has memory, and so an address
        addresses: list[tuple[int, Any]] = [(position, _address_of(result, self.pool)) for position, result in fresh]
        if schema is not None and schema.name in ALLOCATES_WITHOUT_WRITING:
            self.tape.extend(_Garbage(address.block) for _, address in addresses)
            return
        arguments = [_address_of(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        self.tape.append(_Operation(function, arguments, structure, addresses))


_capture: _Capture | None = None


def _refuse_to_read_the_device(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = function._schema.name
    values = tree_flatten((args, kwargs))[0]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if all(_is_host(tensor.untyped_storage()) for tensor in tensors):
        return
    if name in READS_THE_DEVICE:
        raise _not_permitted(name)
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        raise _not_permitted(name)
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        is_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        # torch turns writing one value under a mask into masked_fill, which needs no shape
        fills = name != "aten::index" and args[2].numel() == 1 and not (len(args) > 3 and args[3])
        if is_mask and not fills:
            raise _not_permitted(f"{name} with a mask")


class _Recorder(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, tensor_types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _capture is None:
            return function(*args, **kwargs)
        name = function._schema.name
        python_function = stand_ins.custom_ops.get(name)
        if python_function is not None:
            # a graph records the kernels inside a custom operator
            with self:
                return python_function(*args, **kwargs)
        if _stream in _capture.seen_by:
            _refuse_to_read_the_device(function, args, kwargs)
        if name.startswith("c10d::"):
            function = _awaited(function)
        results = function(*args, **kwargs)
        if name == "aten::lift_fresh":
            host(results)
        _capture.record(function, args, kwargs, results)
        return results


def _awaited(collective: Any) -> Callable[..., Any]:
    """A kernel that ends when the collective has: what comes next in a graph waits for it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        results = collective(*args, **kwargs)
        for result in tree_flatten(results)[0]:
            if not isinstance(result, torch.Tensor):
                result.wait()
        return results

    return call


def _unrecorded_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what gloo copies while it is waited for from the tape: the collective there waits by itself."""

    @functools.wraps(wait)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _unrecorded():
            return wait(*args, **kwargs)

    return call


# one object for all captures: a break inside a custom operator exits and enters it out of order
_recorder = _Recorder()


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    global _capture
    capture, _capture = _capture, None
    try:
        yield
    finally:
        _capture = capture


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as a kernel: it goes on the tape as a whole, and may read memory as a kernel may."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _capture is None:
            return function(*args, **kwargs)
        with _unrecorded():
            results = function(*args, **kwargs)
        _capture.record(function, args, kwargs, results)
        return results

    return call


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_pool_numbers))


def memory_snapshot(*_: Any, **__: Any) -> list[dict[str, Any]]:
    """Segments of the pools; as with the real allocator, memory not listed lies outside them."""
    return [
        {
            "address": block.storage.data_ptr(),
            "total_size": block.storage.nbytes(),
            "segment_pool_id": pool.identity,
        }
        for pool in _pools.values()
        for block in pool.blocks
    ]


class CUDAGraph:
    def __init__(self, keep_graph: bool = False):
        self._pool: _Pool | None = None
        self._captured: _Capture | None = None

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        global _capture
        if _capture is not None:
            raise _not_permitted("capture_begin")
        if _stream is _default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        identity = graph_pool_handle() if pool is None or pool == (0, 0) else (pool[0], pool[1])
        self._pool = _pools.setdefault(identity, _Pool(identity))
        _capture = self._captured = _Capture(self._pool, _stream)
        _recorder.__enter__()
        counters.captures += 1

    def capture_end(self) -> None:
        global _capture
        capture, _capture = self._captured, None
        _recorder.__exit__(None, None, None)
        assert capture is not None and self._pool is not None, "capture_end comes after capture_begin"
        if capture.unjoined_streams():
            self._captured = None
            raise RuntimeError("CUDA error: capturing stream has unjoined work")
        capture.freed_during = self._pool.free_blocks() - capture.free_at_begin

    def replay(self) -> None:
        if self._captured is None or self._captured is _capture:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if _capture is not None:
            raise _not_permitted("CUDAGraph.replay")
        counters.replays += 1
        with torch.no_grad():
            _poison_ordinary_blocks(only_newly_free=True)
            for block in self._captured.free_at_begin:
                block.poison()
            for operation in self._captured.tape:
                operation.replay()
            for block in self._captured.freed_during:
                block.poison()
            _poison_ordinary_blocks(only_newly_free=False)

    def reset(self) -> None:
        self._captured = None

    def pool(self) -> tuple[int, int]:
        assert self._pool is not None, "a graph has a pool from capture_begin on"
        return self._pool.identity

    def instantiate(self) -> None:
        pass

    def enable_debug_mode(self) -> None:
        pass

    def register_generator_state(self, generator: Any) -> None:
        pass


class graph:
    _capture_stream: Stream | None = None

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: tuple[int, int] | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
        **_: Any,
    ) -> None:
        if stream is None and graph._capture_stream is None:
            graph._capture_stream = Stream()
        self._graph = cuda_graph
        self._pool = pool
        self._stream = use_stream(graph._capture_stream if stream is None else stream)

    def __enter__(self) -> None:
        self._stream.__enter__()
        self._graph.capture_begin(self._pool)

    def __exit__(self, *exception: Any) -> None:
        self._graph.capture_end()
        self._stream.__exit__(*exception)


_ABSENT = object()
# replaced by install(): owner, name and original
_replaced: list[tuple[Any, str, Any]] = []


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name, _ABSENT)))
    setattr(owner, name, value)


def _refused_while_capturing(name: str) -> Callable[..., Any]:
    # these read a CPU tensor's memory without an operation that a dispatch mode could see
    read = getattr(torch.Tensor, name)

    @functools.wraps(read)
    def checked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_current_stream_capturing() and not _is_host(tensor.untyped_storage()):
            raise _not_permitted(f"Tensor.{name}")
        return read(tensor, *args, **kwargs)

    return checked


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder for GPU-only modules: SGLang's weak references, and the CUDA runtime bindings."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in WEAK_REF_MODULES:
            # some releases have none
            found = any(os.path.exists(os.path.join(folder, "weak_ref_tensor.py")) for folder in path or ())
            return importlib.machinery.ModuleSpec(name, self) if found else None
        if name in ("cuda", "cuda.bindings", "cuda.bindings.runtime"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        if module.__name__ in WEAK_REF_MODULES:
            module.weak_ref_tensor = weak_ref_tensor
            module.weak_ref_tensors = weak_ref_tensors
        elif module.__name__ == "cuda.bindings.runtime":
            # SGLang asks whether a side stream takes part in the capture
            module.cudaError_t = types.SimpleNamespace(cudaSuccess=0)
            module.cudaStreamCaptureStatus = types.SimpleNamespace(
                cudaStreamCaptureStatusNone=0, cudaStreamCaptureStatusActive=1
            )
            module.cudaStreamGetCaptureInfo = _stream_capture_info


def _stream_capture_info(stream_number: int) -> tuple[int, int, int]:
    takes_part = _capture is not None and any(stream.cuda_stream == stream_number for stream in _capture.seen_by)
    # error code (none), status, and capture id
    return 0, int(takes_part), 0


_finder = _Finder()


def install() -> None:
    """Call before sglang is imported. Calling it again does nothing."""
    if _replaced:
        return
    for module in (torch.cuda, torch.cpu):
        for name, value in (
            ("CUDAGraph", CUDAGraph),
            ("graph", graph),
            ("graph_pool_handle", graph_pool_handle),
            ("memory_snapshot", memory_snapshot),
            ("Stream", Stream),
            ("Event", Event),
            ("stream", use_stream),
            ("set_stream", set_stream),
            ("current_stream", current_stream),
            ("default_stream", lambda device=None: _default_stream),
            ("synchronize", synchronize),
            ("is_current_stream_capturing", is_current_stream_capturing),
            ("empty_cache", lambda: None),
            ("mem_get_info", lambda device=None: (1 << 34, 1 << 34)),
        ):
            _replace(module, name, value)
    _replace(torch.cuda, "current_device", lambda: 0)
    _replace(torch.cpu, "current_device", lambda: "cpu")
    _replace(torch.cuda.graphs, "CUDAGraph", CUDAGraph)
    _replace(torch.cuda.graphs, "graph", graph)
    for name in ("cpu", "numpy", "tolist"):
        _replace(torch.Tensor, name, _refused_while_capturing(name))
    _replace(torch.distributed.Work, "wait", _unrecorded_wait(torch.distributed.Work.wait))
    sys.meta_path.insert(0, _finder)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _capture_interpreted_kernels()


def uninstall() -> None:
    """Undo install(); modules imported in the meantime keep the replacements."""
    sys.meta_path.remove(_finder)
    while _replaced:
        owner, name, previous = _replaced.pop()
        if previous is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, previous)


class _OnDevice(torch.Tensor):
    """The same tensor as SGLang's code would see it on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def _weak_references_of_device_tensors(module: Any) -> None:
    """Allow weak references: from 0.5.20 SGLang takes none to CPU tensors, and all tensors here are."""
    take_weak_reference = module._weak_ref_if_tensor

    @functools.wraps(take_weak_reference)
    def weak_ref_if_tensor(value: Any) -> Any:
        if not torch.is_tensor(value) or _is_host(value.untyped_storage()):
            return take_weak_reference(value)
        on_device = value.as_subclass(_OnDevice)
        reference = take_weak_reference(on_device)
        return value if reference is on_device else reference

    module._weak_ref_if_tensor = weak_ref_if_tensor


def _lengths_on_the_host(batch_type: Any) -> None:
    """Declare a batch's `seq_lens_cpu` as host memory, which attention may read while capturing."""
    make = batch_type.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if torch.is_tensor(self.seq_lens_cpu):
            host(self.seq_lens_cpu)

    batch_type.__init__ = made


def after_import() -> None:
    """Call once sglang is importable, before plugins are loaded: a plugin may replace what this wraps."""
    import sglang

    for name in BREAKABLE_GRAPH_MODULES:
        path_in_package = os.path.join(*name.split(".")[1:]) + ".py"
        if os.path.exists(os.path.join(sglang.__path__[0], path_in_package)):
            _weak_references_of_device_tensors(importlib.import_module(name))
    # the native mixture of experts loops over experts in Python; a GPU runs one kernel
    from sglang.srt.layers.moe import fused_moe_native

    fused_moe_native.moe_forward_native = opaque(fused_moe_native.moe_forward_native)
    from sglang.srt.model_executor import forward_batch_info

    _lengths_on_the_host(forward_batch_info.ForwardBatch)
