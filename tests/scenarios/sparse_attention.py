# SPDX-License-Identifier: Apache-2.0
"""Sparse layers in a real prefill graph, with a backend that reads the lengths of its batch."""

from __future__ import annotations

from typing import Any

import torch

from cpu_sglang import graphs, one_batch, prefill
from tests.scenarios import released, telling

BATCHES = [[6, 5], [9], [3, 4], [6, 5]]


class Sparse(torch.nn.Module):
    """A sparse model's call of its attention; for the runner it is that attention."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def __getattr__(self, name: str) -> Any:
        inner = super().__getattr__("inner")
        return inner if name == "inner" else getattr(inner, name)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: Any) -> Any:
        index = q.view(len(q), -1, self.head_dim)
        key, value = (index[:, :1].contiguous() for _ in range(2))
        index_output, output = self.inner(q, k, v, forward_batch, idx_q=index, idx_k=key, idx_v=value)
        return output + index_output


class Backend:
    """Attention to the mean of the request's values, planned as a real one for the batch's lengths."""

    def __init__(self, dense: Any) -> None:
        self.dense = dense
        self.seen: list[list[Any]] = []

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        idx_q: torch.Tensor | None = None,
        idx_k: torch.Tensor | None = None,
        idx_v: torch.Tensor | None = None,
        **rest: Any,
    ) -> Any:
        if idx_q is None:
            return self.dense(q, k, v, layer, forward_batch, save_kv_cache, **rest)
        assert idx_k is not None
        self.seen.append([len(q), len(idx_q), len(idx_k), len(forward_batch.out_cache_loc), save_kv_cache])
        values, start = v.view(len(v), -1), 0
        groups = q.shape[1] // values.shape[1]
        output = torch.empty_like(q)
        for length in forward_batch.extend_seq_lens_cpu:
            of_request = values[start : start + length].float().cumsum(0)
            counted = torch.arange(1, len(of_request) + 1)[:, None]
            output[start : start + length] = (of_request / counted).to(q.dtype).repeat(1, groups)
            start += length
        return (idx_q.flatten(1) if idx_v is not None else None), output


def main() -> None:
    loaded = released.load("llama")
    runner = loaded.model_runner
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    backend = Backend(runner.attn_backend.forward)
    runner.attn_backend.forward = backend.forward
    for layer in runner.model.model.layers:
        layer.self_attn.attn = Sparse(layer.self_attn.attn)

    def answers() -> list[torch.Tensor]:
        return [one_batch.generate(loaded, prefill._prompts(lengths), 1)[1] for lengths in BATCHES]

    eager = answers()

    def captured_and_replayed() -> dict[str, Any]:
        prefill.capture_prefill(runner, (16, 8))
        backend.seen.clear()
        before = graphs.counters.replays
        equal = [bool((one == other).all()) for one, other in zip(eager, answers(), strict=True)]
        found = {"equal": equal, "replays": graphs.counters.replays - before, "seen": list(backend.seen)}
        assert not any("forward" in vars(layer) for layer in layers), "a layer is SGLang's own outside of the capture"
        return found

    telling.with_and_without(captured_and_replayed, layers=len(layers))


if __name__ == "__main__":
    main()
