"""Sparse layers in a prefill graph: the real layer, runner, capture and replay round a backend that reads the batch."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes
from tests.wheels import NEWEST

CAPTURED = ("0.5.16", "0.5.21")
BROKEN_OUT = (NEWEST,)

CODE = """
from cpu_sglang import graphs, one_batch, prefill
from tests.fixes import small_llama

loaded = small_llama.load()
runner = loaded.model_runner
import torch
from sglang.srt.layers.radix_attention import RadixAttention

layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
dense, seen = runner.attn_backend.forward, []

def attend(q, k, v, layer, forward_batch, save_kv_cache=True, idx_q=None, idx_k=None, idx_v=None, **rest):
    "Each token sees the mean of its request's values: like a real one it is planned for the lengths of its batch."
    if idx_q is None:
        return dense(q, k, v, layer, forward_batch, save_kv_cache, **rest)
    seen.append([len(q), len(idx_q), len(idx_k), len(forward_batch.out_cache_loc), save_kv_cache])
    values, start = v.view(len(v), -1), 0
    groups = q.shape[1] // values.shape[1]
    output = torch.empty_like(q)
    for length in forward_batch.extend_seq_lens_cpu:
        of_request = values[start : start + length].float().cumsum(0)
        counted = torch.arange(1, len(of_request) + 1)[:, None]
        output[start : start + length] = (of_request / counted).to(q.dtype).repeat(1, groups)
        start += length
    return (idx_q.flatten(1) if idx_v is not None else None), output

class Sparse(torch.nn.Module):
    "What a sparse model calls its attention with; for the runner it is that attention."
    def __init__(self, layer):
        super().__init__()
        self.inner = layer

    def __getattr__(self, name):
        inner = super().__getattr__("inner")
        return inner if name == "inner" else getattr(inner, name)

    def forward(self, q, k, v, forward_batch):
        index = q.view(len(q), -1, self.head_dim)
        index_output, output = self.inner(q, k, v, forward_batch,
            idx_q=index, idx_k=index[:, :1].contiguous(), idx_v=index[:, :1].contiguous())
        return output + index_output

runner.attn_backend.forward = attend
for layer in runner.model.model.layers:
    layer.self_attn.attn = Sparse(layer.self_attn.attn)

BATCHES = [[6, 5], [9], [3, 4], [6, 5]]
def answers():
    return [one_batch.generate(loaded, prefill._prompts(lengths), 1)[1] for lengths in BATCHES]

eager = answers()

def captured_and_replayed():
    prefill.capture_prefill(runner, (16, 8))
    seen.clear()
    before = graphs.counters.replays
    equal = [bool((one == other).all()) for one, other in zip(eager, answers(), strict=True)]
    return {"equal": equal, "replays": graphs.counters.replays - before, "seen": list(seen)}

def act():
    found = captured_and_replayed()
    assert not any("forward" in vars(layer) for layer in layers), "a layer is SGLang's own outside of the capture"
    return found

small_llama.tell_with_and_without(act, layers=len(layers))
"""


@pytest.mark.parametrize("release", (*CAPTURED, *BROKEN_OUT))
def test_sparse_layers_attend_to_the_requests_of_the_replay(
    release_root: Callable[[str], pathlib.Path], release: str
) -> None:
    only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_SPARSE_ATTENTION_CAPTURED": "on"}
    found = processes.beside(release_root(release), "-c", CODE, **only)[0]
    assert found["applied"] == ["sparse_attention_captured"] * (release in CAPTURED)
    real = [[count] * 4 + [True] for count in (11, 9, 7, 11) for _ in range(found["layers"])]
    right = {"equal": [True] * 4, "seen": real}
    # what was captured is one request: a request alone is one, too
    wrong = {"equal": [False, True, False, False], "seen": []}
    for arm, expected in {"with": right, "without": wrong if release in CAPTURED else right}.items():
        assert found[arm].pop("replays") > 0
        assert found[arm] == expected, arm
