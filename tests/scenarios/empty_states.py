# SPDX-License-Identifier: Apache-2.0
"""A prefix on the host, of Ling 2.5, a hybrid model whose convolution has a state without elements.

A release's own scheduler, prefix trees, pools and HiCache. Copies between host and device are written in torch, or, for
`--hicache-io-backend kernel` of states, byte by byte as SGLang's kernel does it, and with what that one refuses.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from cpu_sglang import mamba, one_batch, scheduler
from sglang_bcg_fixes.fixes import empty_states_copied as fix
from tests.releases import kinds_of_request
from tests.scenarios import host_hits, telling, trees, warm_answers

MODEL = "bailing_full"
SLOTS, LAYERS = 6, 2
# of a state in one slot
SHAPES = {"empty": (3, 0), "of nothing": (0, 0), "whole": (2, 4)}


def refuse_nothing_to_copy(item_size: int) -> None:
    if item_size <= 0:
        raise RuntimeError("transfer_mamba: item_size must be positive")


def write_bytes(
    src_ptrs: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int, dst_layout_dim: int, num_layers: int
) -> None:
    refuse_nothing_to_copy(item_size)
    for source, target in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
        for layer, pointer in enumerate(src_ptrs.tolist()):
            to = dst.data_ptr() + target * dst_layout_dim + layer * item_size
            ctypes.memmove(to, pointer + source * item_size, item_size)


def load_bytes(
    src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, item_size: int, src_layout_dim: int
) -> None:
    refuse_nothing_to_copy(item_size)
    for source, target in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
        begin = src.data_ptr() + source * src_layout_dim + layer_id * item_size
        ctypes.memmove(dst.data_ptr() + target * item_size, begin, item_size)


def host_pool() -> Any:
    """The class, of a release that has it in one module or the other."""
    modules = [pool.partition(":")[0] for pool in fix.POOLS]
    module = next(name for name in modules if importlib.util.find_spec(name))
    return importlib.import_module(module).MambaPoolHost


def copy_states_with(pool: Any, io_backend: str) -> None:
    """Have states alone be copied so, whatever keys and values are copied with."""
    for name in ("backup_from_device_all_layer", "load_to_device_per_layer"):
        setattr(pool, name, with_backend(getattr(pool, name), io_backend))


def with_backend(method: Callable[..., None], io_backend: str) -> Callable[..., None]:
    signature = inspect.signature(method)

    def copy(*args: Any, **named: Any) -> None:
        given = signature.bind(*args, **named)
        given.arguments["io_backend"] = io_backend
        method(*given.args, **given.kwargs)

    return copy


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def there_and_back(pool: Any, io_backend: str, shape: tuple[int, ...]) -> str:
    """Copy slots of this shape from the host, then to the host and back, and tell what comes of it."""
    device = torch.rand(LAYERS, SLOTS, *shape)
    pointers = torch.tensor([layer.data_ptr() for layer in device], dtype=torch.uint64)
    host, back = torch.zeros(SLOTS, LAYERS, 1, *shape), torch.zeros_like(device)
    slots, pages = torch.tensor([4, 1]), torch.tensor([0, 5])
    try:
        for layer in range(LAYERS):
            pool._copy_tensor_pf_lf(host, back[layer], pages, slots, layer, LAYERS, io_backend)
        pool._copy_tensor_all_layers_lf_pf(device, host, slots, pages, LAYERS, io_backend, pointers)
        for layer in range(LAYERS):
            pool._copy_tensor_pf_lf(host, back[layer], pages, slots, layer, LAYERS, io_backend)
    except (RecursionError, RuntimeError) as error:
        return said(error)
    same = torch.equal(back[:, slots], device[:, slots])
    return "right" if same and int(back.count_nonzero()) == back[:, slots].numel() else "wrong"


def main(io_backend: str) -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    kinds_of_request.forget_pinned_memory()
    host_hits.install_copies()
    pool = host_pool()
    module: Any = importlib.import_module(pool.__module__)
    module.transfer_kv_mamba_lf_pf, module.transfer_kv_mamba_pf_lf = write_bytes, load_bytes
    copy_states_with(pool, io_backend)
    backend = one_batch.ATTENTION_BACKENDS[MODEL]
    given: dict[str, Any] = {**host_hits.SERVER, **mamba.allow_extra_buffer(), "attention_backend": backend}
    environ: Any = importlib.import_module("sglang.srt.environ")
    # as the model's type, and written to with that
    environ.envs.SGLANG_MAMBA_CONV_DTYPE.set(given["dtype"])
    source = random.Random(MODEL)
    prompt = [source.randrange(3, 120) for _ in range(host_hits.FIRST + host_hits.ADDED)]

    def program(served: scheduler.Scheduler) -> dict[str, Any]:
        def ask(number: int) -> scheduler.Answer:
            return served.answer({"asked": prompt[:number]}, 1)["asked"]

        def served_from_the_host() -> list[Any]:
            """Tell whether the host had a part, how much was found, and whether the answer is the cold one."""
            served.forget()
            cold = ask(len(prompt))
            served.forget()
            ask(host_hits.FIRST)
            held = host_hits.leave_the_device(served)
            # other requests have had the slots since
            warm_answers.poison(served)
            warm = ask(len(prompt))
            rounding = warm_answers.ROUNDING[given["dtype"]]
            return [held, warm.found, bool(torch.allclose(warm.logits[0], cold.logits[0], atol=rounding, rtol=0))]

        def act() -> dict[str, Any]:
            copied = {name: there_and_back(pool, io_backend, shape) for name, shape in SHAPES.items()}
            try:
                return {**copied, "served": served_from_the_host()}
            except (RecursionError, RuntimeError) as error:
                return {**copied, "served": said(error)}

        shapes = [list(state.shape[2:]) for state in warm_answers.states_of(served.scheduler)]
        return {"shapes": shapes, **telling.given_with_and_perhaps_without(act)}

    telling.result(trees.the_same(trees.given_by_each(program, MODEL, **given)))


if __name__ == "__main__":
    main(*sys.argv[1:])
