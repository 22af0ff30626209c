# SPDX-License-Identifier: Apache-2.0
"""The lightning attention of `linear_backend: minimax` beside the recurrence that it computes in blocks."""

from __future__ import annotations

import importlib

import torch

from cpu_sglang import stand_ins
from sglang_bcg_fixes.source import releases
from tests.scenarios import telling

MODULES = ("sglang.kernels.ops.attention.linear.lightning_attn", "sglang.srt.layers.attention.linear.lightning_attn")
BLOCK, HEAD, TOKENS, DECAY = 256, 64, 300, 0.3


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.empty_like(q)
    for token in range(len(q)):
        state = state * torch.exp(torch.tensor(-DECAY)) + torch.outer(k[token], v[token])
        output[token] = q[token] @ state
    return output, state


def main() -> None:
    stand_ins.install()
    source = releases.installed()
    assert source
    kernel = importlib.import_module(next(filter(source.has_module, MODULES))).lightning_attention
    # it asks for Ampere or later
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.manual_seed(0)
    q, k, v = (torch.randn(TOKENS, HEAD) * 0.3 for _ in range(3))
    nothing, something = torch.zeros(HEAD, HEAD), torch.randn(HEAD, HEAD) * 0.3

    def prefill(tokens: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (part[:tokens].view(1, 1, tokens, HEAD) for part in (q, k, v))
        output, states = kernel(*parts, torch.full((1, 1, 1), DECAY), kv_history=state.view(1, 1, HEAD, HEAD))
        return output[0, 0], states[0, 0, -1]

    def off(found: torch.Tensor, right: torch.Tensor) -> float:
        return float((found - right).abs().max())

    output, state = prefill(TOKENS, nothing)
    right, right_state = recurrence(q, k, v, nothing)
    after, _ = prefill(TOKENS - BLOCK, something)
    right_after, _ = recurrence(q[: TOKENS - BLOCK], k[: TOKENS - BLOCK], v[: TOKENS - BLOCK], something)
    share, right_share = (each[0] - right[0] for each in (after, right_after))
    telling.result(
        {
            "state": off(state, right_state),
            "first block, no state": off(output[:BLOCK], right[:BLOCK]),
            "second block": off(output[BLOCK:], right[BLOCK:]),
            "after a state": off(after, right_after),
            "history weighs": float(share @ right_share / (right_share @ right_share)),
            "one decay": float(torch.exp(torch.tensor(DECAY))),
        }
    )


if __name__ == "__main__":
    main()
