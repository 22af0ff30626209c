# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that decode graphs of a hybrid model leave in the pool of states, beside those of an eager decode.

A small model, the argument, on a release's real decode runner, with batches of the real scheduler's type. Every decode
step runs twice from the same states: replayed and eagerly.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from typing import Any

import numpy
import torch

from cpu_sglang import graphs, mamba, one_batch, prefill
from tests.releases import kinds_of_request
from tests.scenarios import telling

GRAPHS = (1, 3, 5, 6)
# a request is at a boundary in the decode step that makes it this long
INTERVAL = 16
AT_ONCE, LATER, NEVER = INTERVAL - 1, INTERVAL - 2, 3
BATCHES = {
    "one": [AT_ONCE],
    "two in three": [AT_ONCE, LATER],
    "three": [AT_ONCE] * 3,
    "as many as the largest graph": [AT_ONCE] * 6,
    "one after six": [LATER],
    "four in five": [AT_ONCE, NEVER, LATER, AT_ONCE],
    "five": [LATER] * 5,
    "none at a boundary": [NEVER] * 3,
}
STEPS = 2
# from products of other sizes, where the graph has more rows than the batch; two requests differ by far more
ROUNDING = 1e-5


class Decodes:
    """A model's decode steps, each of them replayed and then run eagerly from where the replay began."""

    def __init__(self, loaded: one_batch.LoadedModel) -> None:
        self.loaded, self.runner = loaded, loaded.model_runner
        self.eager = self.runner.forward
        self.runner.forward = self.forward
        self.steps: list[dict[str, Any]] = []

    def capture(self) -> None:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

        phase = prefill._graph_config(self.runner).decode
        phase.backend, phase.bs = "full", [*GRAPHS]
        outputs = "sglang.srt.model_executor.graph_shared_output"
        if importlib.util.find_spec(outputs):
            shared: Any = importlib.import_module(outputs)
            self.runner.graph_shared_output = shared.GraphSharedOutput.create_for_model_runner(self.runner)
        with torch.no_grad():
            self.graphs = DecodeCudaGraphRunner(self.runner)

    def states(self) -> list[torch.Tensor]:
        """States of all layers by slot, which comes second."""
        cache = self.runner.req_to_token_pool.mamba_pool.mamba_cache
        # lightning attention has no convolution, and its state is there for the interface
        return [state for state in (*cache.conv, cache.temporal) if state.numel()]

    def forward(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_decode():
            return self.eager(batch, *args, **kwargs)
        before, replays = [state.clone() for state in self.states()], graphs.counters.replays
        # eager preparation changes the batch
        to_replay = copy.copy(batch)
        assert self.graphs.can_run_graph(to_replay)
        self.graphs.execute(to_replay)
        assert graphs.counters.replays == replays + 1
        replayed = [state.clone() for state in self.states()]
        for state, value in zip(self.states(), before, strict=True):
            state.copy_(value)
        output = self.eager(batch, *args, **kwargs)
        self.steps.append(self.compared(batch, replayed))
        return output

    def compared(self, batch: Any, replayed: list[torch.Tensor]) -> dict[str, Any]:
        own = self.runner.req_to_token_pool.get_mamba_indices(batch.req_pool_indices)[batch.mamba_track_mask]
        told = batch.mamba_track_indices[batch.mamba_track_mask]
        apart = [
            max(float((eager - other).abs().max()) for eager, other in zip(*of_slot, strict=True))
            for of_slot in zip(by_slot(self.states()), by_slot(replayed), strict=True)
        ]
        allowed = 0 if batch.batch_size in GRAPHS else ROUNDING
        return {
            # by request at a boundary: the replay has copied its state, bitwise, to where the scheduler looks for it
            "saved": [
                all(torch.equal(state[:, slot], state[:, wanted]) for state in replayed)
                for slot, wanted in zip(own.tolist(), told.tolist(), strict=True)
            ],
            "wrong slots": [slot for slot, difference in enumerate(apart) if not difference <= allowed],
        }

    def run(self, lengths: list[int]) -> list[dict[str, Any]]:
        self.steps.clear()
        prompts = [numpy.array(prompt, dtype=numpy.int32) for prompt in prefill._prompts(lengths)]
        with torch.no_grad():
            self.loaded.runner.clear()
            for state in self.states():
                state.zero_()
            requests = self.loaded.benchmark.prepare_synthetic_inputs_for_latency_test(
                len(prompts), max(lengths), prompts
            )
            tokens, _, batch = self.loaded.runner.extend(requests)
            for _ in range(STEPS):
                tokens, _ = self.loaded.runner.decode(tokens, batch)
        return [*self.steps]


def by_slot(states: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(state.unbind(1) for state in states), strict=True))


def leave_out_full_attention() -> None:
    """Let the last layer attend to nothing while it decodes: its stand-in cannot be captured, and it has no state."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    def forward_decode(
        self: Any, q: torch.Tensor, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)

    FlashAttentionBackend.forward_decode = forward_decode


def main(model: str = "falcon_h1") -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    kinds_of_request.forget_pinned_memory()
    loaded = one_batch.load(
        model,
        dtype="float32",
        **({"attention_backend": "triton"} if model == "falcon_h1" else {}),
        # kernels are slow here, and attention is not what is compared
        triton_attention_num_kv_splits=1,
        max_running_requests=max(GRAPHS),
        max_mamba_cache_size=32,
        mamba_track_interval=INTERVAL,
        # some releases make room for no longer prefill, also an eager one
        chunked_prefill_size=128,
        disable_radix_cache=False,
        **mamba.allow_extra_buffer(),
    )
    one_batch.randomize(loaded.model_runner.model)
    if model == "bailing_full":
        leave_out_full_attention()
    decodes = Decodes(loaded)

    def act() -> dict[str, Any]:
        decodes.capture()
        return {name: decodes.run(lengths) for name, lengths in BATCHES.items()}

    telling.with_and_perhaps_without(act)


if __name__ == "__main__":
    main(*sys.argv[1:])
