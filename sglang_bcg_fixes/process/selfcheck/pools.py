# SPDX-License-Identifier: Apache-2.0
"""Each layer's slots in SGLang's pools: keys and values by token, recurrent states by request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

# sample size per tensor: large enough to expose a wrong layer, small enough to hold
SAMPLED_SLOTS, SAMPLED_VALUES = 256, 2**18
# where requests have the slots of their checkpoints, in the releases that have such
CHECKPOINTS = "req_index_to_mamba_ping_pong_track_buffer_mapping"


@dataclasses.dataclass(frozen=True)
class Place:
    """The slots of one layer's tensor that some requests write to."""

    layer: int
    kind: str
    tensor: Any
    slots: Any

    def sample(self) -> Any:
        """A copy of some values of some slots, the first and the last slot among them."""
        import torch

        count = len(self.slots)
        chosen = torch.linspace(0, count - 1, min(count, SAMPLED_SLOTS), device=self.slots.device).round().long()
        found = indexable(self.tensor)[self.slots[chosen]].flatten(1)
        return found[:, :: 1 + found.numel() // SAMPLED_VALUES].clone().view(self.tensor.dtype)

    def copy(self) -> Any:
        return indexable(self.tensor)[self.slots]

    def put_back(self, copied: Any) -> None:
        indexable(self.tensor)[self.slots] = copied

    def empty(self) -> None:
        indexable(self.tensor)[self.slots] = 0


def indexable(tensor: Any) -> Any:
    """The narrowest types have no indexing everywhere; their bytes have."""
    import torch

    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def places(model_runner: Any, slots: Any, states: Any) -> list[Place]:
    """In the order of the layers: keys and values of tokens with these slots, and the states with those."""
    found = [*keys_and_values(model_runner, slots), *states_of(model_runner, states)]
    return sorted(found, key=lambda place: place.layer)


def keys_and_values(model_runner: Any, slots: Any) -> Iterator[Place]:
    pool = model_runner.token_to_kv_pool
    windowed = getattr(pool, "layers_mapping", {})
    for layer in attention_layers(model_runner):
        its_own = slots
        if windowed and windowed[layer][1]:
            # layers with a sliding window have a pool and slots of their own
            its_own = model_runner.token_to_kv_pool_allocator.translate_loc_from_full_to_swa(slots)
        for kind, tensor in zip(("keys", "values"), pool.get_kv_buffer(layer), strict=True):
            yield Place(layer, kind, tensor, its_own.long())


def can_be_read(model_runner: Any) -> bool:
    """Tell whether the pool hands out the keys and values of a layer; those of DeepSeek-V4 have none to hand out."""
    try:
        for layer in attention_layers(model_runner)[:1]:
            model_runner.token_to_kv_pool.get_kv_buffer(layer)
    except NotImplementedError:
        return False
    return True


def attention_layers(model_runner: Any) -> list[int]:
    """Those that have keys; a hybrid model's pool knows them, and of another model it is all."""
    mapping = getattr(model_runner.token_to_kv_pool, "full_attention_layer_id_mapping", None)
    if mapping is not None:
        return sorted(mapping)
    return sorted({layer.layer_id for layer in model_runner.attention_layers})


def states_of(model_runner: Any, slots: Any) -> Iterator[Place]:
    pool = model_runner.req_to_token_pool
    for layer in getattr(pool, "mamba_map", ()):
        cache = pool.mamba2_layer_cache(layer)
        for convolution in cache.conv:
            yield Place(layer, "convolution state", convolution, slots)
        yield Place(layer, "recurrent state", cache.temporal, slots)


def state_slots(model_runner: Any, requests: Any) -> Any:
    """The state slots of the requests with these rows of the table; None if no layer has states."""
    pool = model_runner.req_to_token_pool
    return pool.get_mamba_indices(requests).long() if hasattr(pool, "mamba_map") else None


def checkpoint_slots(model_runner: Any, requests: Any) -> Any:
    mapping = getattr(model_runner.req_to_token_pool, CHECKPOINTS, None)
    return None if mapping is None else mapping[requests].flatten().long()


@dataclasses.dataclass(frozen=True)
class Requests:
    """Requests by their rows in the table of slots, and how many tokens each has there."""

    rows: Any
    lengths: tuple[int, ...]

    def first(self, count: int) -> Requests:
        return Requests(self.rows[:count], self.lengths[:count])

    def slots(self, model_runner: Any) -> Any:
        import torch

        table = model_runner.req_to_token_pool.req_to_token
        return torch.cat([table[row, :length] for row, length in zip(self.rows, self.lengths, strict=True)])

    def places(self, model_runner: Any) -> list[Place]:
        return places(model_runner, self.slots(model_runner), state_slots(model_runner, self.rows))

    def empty(self, model_runner: Any) -> None:
        """Zero all they wrote, so that it cannot pass for what a later run fails to write."""
        checkpoints = checkpoint_slots(model_runner, self.rows)
        if checkpoints is not None:
            for place in states_of(model_runner, checkpoints):
                place.empty()
        for place in self.places(model_runner):
            place.empty()
        model_runner.req_to_token_pool.req_to_token[self.rows] = 0
