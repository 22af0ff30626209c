# SPDX-License-Identifier: Apache-2.0
"""A prefix in the GPU's cache and one on the host, of a hybrid model that keeps something beside keys and states.

A release's own scheduler, prefix trees, pools and HiCache. A tiny model's pools are made as those of the models named
below are; beside each prompt, a stand-in for their layers reads and writes what is kept there. Copies between host and
device are written in torch, as SGLang has kernels for a GPU alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from cpu_sglang import mamba, one_batch, scheduler
from tests.releases import kinds_of_request
from tests.scenarios import telling, trees, warm_answers

PAGE, FIRST, ADDED = 64, 150, 30
CACHE = "sglang.srt.mem_cache"
CONFIGURATOR = f"{CACHE}.kv_cache_configurator"
SERVER = {
    **warm_answers.SERVER,
    "attention_backend": "triton",
    "dtype": "float16",
    "page_size": PAGE,
    "max_total_tokens": 1024,
    "context_length": 256,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
}


def copy_by_layer(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """Copy pages of the host, which hold every layer, to one layer of the device."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        pages = source[:, layer_id][src_indices[::page_size] // page_size]
        target[dst_indices] = pages.reshape(-1, *target.shape[1:])


def copy_layers(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Copy the other way, all layers at once."""
    each = len(src_ptrs) // len(dst_ptrs)
    for number, target in enumerate(dst_ptrs):
        for layer, source in enumerate(src_ptrs[number * each : (number + 1) * each]):
            pages = source[src_indices].reshape(-1, *target.shape[2:])
            target[dst_indices[::page_size] // page_size, layer] = pages


def copy_rows(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def install_copies() -> None:
    common = importlib.import_module(f"{CACHE}.pool_host.common")
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        setattr(common, name, lambda *_, **__: None)
    for name in ("pool_host.mha", "pool_host.mla", "pool_host.mamba", "pool_host.dsa", "memory_pool_host"):
        # some pools have had a module of their own since 0.5.18
        if importlib.util.find_spec(f"{CACHE}.{name}") is None:
            continue
        module: Any = importlib.import_module(f"{CACHE}.{name}")
        module.transfer_kv_per_layer_direct_pf_lf = copy_by_layer
        module.transfer_kv_all_layer_direct_lf_pf = copy_layers
        module.transfer_kv_direct = copy_rows


class States:
    """Those of Qwen3.8-Flash-Next's n-gram embeddings: one number that depends on all tokens of a prompt."""

    model = "qwen3next"

    @contextmanager
    def made(self) -> Iterator[None]:
        pools: Any = importlib.import_module(f"{CACHE}.memory_pool").HybridReqToTokenPool
        make = pools._init_mamba_pool

        def made(*args: Any, **kwargs: Any) -> Any:
            return make(*args, **{**kwargs, "ngram_context_len": 2})

        with mock.patch.object(pools, "_init_mamba_pool", made):
            yield

    def look(self, running: Any, batch: Any, prompt: list[int]) -> bool:
        pool, slots = running.req_to_token_pool, running.req_to_token_pool.req_index_to_mamba_index_mapping
        slot, known = slots[batch.req_pool_indices], len(prompt) - len(batch.input_ids)
        return bool(pool.ngram_pool.get_context(slot)[0, 0] == state_of(prompt[:known]))

    def write(self, running: Any, batch: Any, prompt: list[int]) -> None:
        pool = running.req_to_token_pool
        slot = pool.req_index_to_mamba_index_mapping[batch.req_pool_indices]
        pool.ngram_pool.set_context(slot, torch.tensor([[state_of(prompt)] * 2]))
        # as the recurrence's own state of the last page, in the slot for the prefix cache
        if batch.mamba_track_mask is not None and bool(batch.mamba_track_mask[0]):
            reached = int(batch.mamba_track_seqlens[0]) // PAGE * PAGE
            pool.ngram_pool.set_context(batch.mamba_track_indices, torch.tensor([[state_of(prompt[:reached])] * 2]))

    def forget(self, running: Any) -> None:
        running.req_to_token_pool.ngram_pool.context.fill_(-1)


def state_of(tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        state = (31 * state + token + 1) % 10007
    return state


class Keys:
    """Index keys, one byte a token."""

    def rows(self, running: Any) -> tuple[Any, int]:
        raise NotImplementedError

    def look(self, running: Any, batch: Any, prompt: list[int]) -> bool:
        known = len(prompt) - len(batch.input_ids)
        slots = running.req_to_token_pool.req_to_token[batch.req_pool_indices[0], :known].long()
        buffer, each = self.rows(running)
        return bool(torch.equal(buffer[slots // each, slots % each].long(), torch.tensor(prompt[:known]).long()))

    def write(self, running: Any, batch: Any, prompt: list[int]) -> None:
        buffer, each = self.rows(running)
        slots = batch.out_cache_loc.long()
        buffer[slots // each, slots % each] = batch.input_ids.to(buffer.dtype)

    def forget(self, running: Any) -> None:
        self.rows(running)[0].zero_()


class CompressedKeys(Keys):
    """Those of Qwen3.8-Flash-Next (QSA)."""

    model = "qwen3next"

    @contextmanager
    def made(self) -> Iterator[None]:
        config: Any = importlib.import_module("sglang.srt.layers.attention.qsa.config")
        profile = config.QSAProfile(n_heads=1, kv_heads=1, head_dim=16, budget=2048, compress_ratio=4)
        with where_pools_are_made(config, parse_qsa_profile=lambda *_: profile):
            yield

    def rows(self, running: Any) -> tuple[Any, int]:
        pool = running.token_to_kv_pool_allocator.get_kvcache()
        return pool.qsa_compressed_k_buffer_pool[0][:, 0], pool.qsa_compress_ratio


class SparseKeys(Keys):
    """Those of GLM-5.3-Flash (DSA)."""

    model = "kimi_linear"

    @contextmanager
    def made(self) -> Iterator[None]:
        module: Any = importlib.import_module(CONFIGURATOR)
        answers: dict[str, Callable[..., Any]] = {
            "is_deepseek_dsa": lambda *_: True,
            "get_dsa_index_head_dim": lambda *_: 128,
            "get_dsa_index_kpool": lambda *_: 1,
            "get_dsa_index_kpool_compress": lambda *_: False,
            "dsa_layer_skips_topk": lambda *_: False,
            "calculate_mla_kv_cache_dim": lambda **given: (
                given["model_config"].kv_lora_rank + given["model_config"].qk_rope_head_dim
            ),
        }
        with where_pools_are_made(module, **answers):
            yield

    def rows(self, running: Any) -> tuple[Any, int]:
        pool = running.token_to_kv_pool_allocator.get_kvcache()
        return pool.full_kv_pool.index_k_with_scale_buffer[0], PAGE


class Nothing:
    """A hybrid model that has nothing beside."""

    model = "qwen3next"

    @contextmanager
    def made(self) -> Iterator[None]:
        yield

    def look(self, running: Any, batch: Any, prompt: list[int]) -> bool:
        return True

    def write(self, running: Any, batch: Any, prompt: list[int]) -> None: ...

    def forget(self, running: Any) -> None: ...


KINDS: dict[str, Any] = {"states": States, "qsa": CompressedKeys, "dsa": SparseKeys, "nothing": Nothing}


@contextmanager
def where_pools_are_made(module: Any, **answers: Any) -> Iterator[None]:
    """Have these functions answer so for the pools alone: the tiny model's attention is its own."""
    makes: Any = importlib.import_module(CONFIGURATOR).KVCacheConfigurator
    make = makes._build_hybrid_linear_kv_pool

    def made(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.multiple(module, **answers):
            return make(*args, **kwargs)

    with mock.patch.object(makes, "_build_hybrid_linear_kv_pool", made):
        yield


class Beside:
    """The stand-in: it looks whether what is kept for a prompt's prefix is the prefix's own."""

    def __init__(self, kind: Any, served: scheduler.Scheduler) -> None:
        self.kind, self.running = kind, served.scheduler
        self.prompt: list[int] = []
        self.right = False
        self.forward = served.model.forward
        served.model.forward = self._forward

    def _forward(self, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        answered = self.forward(input_ids, positions, forward_batch, *args, **kwargs)
        if forward_batch.forward_mode.is_extend():
            self.right = self.kind.look(self.running, forward_batch, self.prompt)
            self.kind.write(self.running, forward_batch, self.prompt)
        return answered


def leave_the_device(served: scheduler.Scheduler) -> bool:
    """Evict all there is, once it has been copied; tell whether the host then holds a part."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree = served.scheduler.tree_cache
    tree.check_hicache_events()
    tree.evict(EvictParams(num_tokens=1 << 20, mamba_num=1 << 20))
    pool = tree.cache_controller.mem_pool_host
    return bool(pool.available_size() < pool.size)


def main(name: str, server_args: str = "{}") -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    kinds_of_request.forget_pinned_memory()
    install_copies()
    kind = KINDS[name]()
    given = {**SERVER, **mamba.allow_extra_buffer(), **json.loads(server_args)}
    environ: Any = importlib.import_module("sglang.srt.environ")
    # bfloat16 whatever the model's type is, and written to with that
    environ.envs.SGLANG_MAMBA_CONV_DTYPE.set(given["dtype"])
    source = random.Random(name)
    prompt = [source.randrange(3, 120) for _ in range(FIRST + ADDED)]

    def program(served: scheduler.Scheduler) -> dict[str, Any]:
        beside = Beside(kind, served)

        def ask(number: int) -> tuple[scheduler.Answer, bool]:
            beside.prompt = prompt[:number]
            return served.answer({"asked": beside.prompt}, 1)["asked"], beside.right

        def warm(cold: scheduler.Answer) -> list[Any]:
            """Tell how much was found, whether what is beside it is its own, and whether the answer is the cold one."""
            answer, right = ask(FIRST + ADDED)
            rounding = warm_answers.ROUNDING[given["dtype"]]
            return [answer.found, right, bool(torch.allclose(answer.logits[0], cold.logits[0], atol=rounding, rtol=0))]

        def act() -> dict[str, Any]:
            served.forget()
            cold, _ = ask(FIRST + ADDED)
            served.forget()
            ask(FIRST)
            device, held = warm(cold), leave_the_device(served)
            # other requests have had the slots since
            warm_answers.poison(served)
            kind.forget(served.scheduler)
            return {"device": device, "on the host": held, "host": warm(cold)}

        return telling.given_with_and_perhaps_without(act)

    with ExitStack() as stack:
        stack.enter_context(kind.made())
        given_by_each = trees.given_by_each(program, kind.model, **given)
    telling.result({"trees": [*given_by_each], **trees.the_same(given_by_each)})


if __name__ == "__main__":
    main(*sys.argv[1:])
