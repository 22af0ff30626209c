# SPDX-License-Identifier: Apache-2.0
"""A draft model's prefill, with the hidden states of its target, on a released SGLang's real ModelRunner.

Its target knows nothing of the draft: the states are random, so that a missing one shows.
"""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from . import graphs, one_batch, prefill

BUCKETS = (8, 16)
# an EAGLE3 draft gets the states of as many layers of the target
LAYERS = {"EAGLE": 1, "EAGLE3": 3}


class Draft:
    """A draft, one per process, from 0.5.16; comes after import_sglang(with_graphs=True), load_plugins()."""

    def __init__(self, target: str, folder: pathlib.Path, algorithm: str = "EAGLE") -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.loaded = one_batch.load(target)
        beside = self.loaded.model_runner
        self.config = ModelConfig.from_server_args(beside.server_args, model_path=str(folder), is_draft_model=True)
        self.width = self.config.hidden_size * LAYERS[algorithm]
        alone = {"tp_rank": 0, "tp_size": 1, "moe_ep_rank": 0, "moe_ep_size": 1, "pp_rank": 0, "pp_size": 1}
        known = inspect.signature(ModelRunner.__init__).parameters
        self.runner = ModelRunner(
            model_config=self.config,
            mem_fraction_static=0.5,
            gpu_id=0,
            nccl_port=beside.dist_port,
            server_args=beside.server_args,
            is_draft_worker=True,
            req_to_token_pool=beside.req_to_token_pool,
            token_to_kv_pool_allocator=beside.token_to_kv_pool_allocator,
            memory_pool_config=beside.memory_pool_config,
            **{name: value for name, value in alone.items() if name in known},
            **({"ps": beside.ps} if "ps" in known else {}),
        )
        # settings are per process; the target's have no speculation, which makes a hybrid one allocate states on a GPU
        self.runner.spec_algorithm = getattr(SpeculativeAlgorithm, algorithm)
        self.runner.alloc_memory_pool()
        self.runner.init_attention_backends()
        self.runner.init_cuda_graphs(capture_decode_cuda_graph=False)
        one_batch.randomize(beside.model)
        one_batch.randomize(self.runner.model, seed=1)

    def capture(self) -> None:
        """Capture as SGLang's worker does, once the draft has the target's embeddings."""
        phase = prefill._graph_config(self.runner).prefill
        phase.backend, phase.bs = "breakable", list(BUCKETS)
        self.runner.init_prefill_cuda_graph(force_for_draft_worker=True)

    def prefill(self, lengths: Sequence[int], has_images: bool = False) -> tuple[torch.Tensor, int]:
        """Prefill prompts of these lengths; return the draft's output and the count of replayed segments."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

        random = torch.Generator().manual_seed(sum(lengths))
        states, images = (torch.randn(sum(lengths), width, generator=random).half() for width in (self.width, 64))
        batch = self.scheduled(lengths)
        batch.spec_info = input_of_a_draft()(
            hidden_states=states, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
        )
        given = ForwardBatch.init_new(
            batch, self.runner, capture_hidden_mode=CaptureHiddenMode.LAST, return_hidden_states_before_norm=False
        )
        if has_images:
            given.mm_inputs = [Image() for _ in lengths]
            given.mm_input_embeds = images
        before = graphs.counters.replays
        with torch.no_grad():
            answer = self.runner.forward(given).logits_output
        return torch.cat([answer.next_token_logits, answer.hidden_states], -1), graphs.counters.replays - before

    def scheduled(self, lengths: Sequence[int]) -> Any:
        """Batch of these prompts as the scheduler has it, allocated and prefilled by the target."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        batches, make = [], ForwardBatch.init_new

        def remember(batch: Any, *rest: Any, **options: Any) -> Any:
            batches.append(batch)
            return make(batch, *rest, **options)

        ForwardBatch.init_new = remember
        try:
            one_batch.generate(self.loaded, prefill._prompts(list(lengths)), 1)
        finally:
            ForwardBatch.init_new = make
        return batches[0]


class Image:
    """Image attributes of a request."""

    def contains_image_inputs(self) -> bool:
        return True

    def contains_audio_inputs(self) -> bool:
        return False

    contains_video_inputs = contains_audio_inputs


def input_of_a_draft() -> Any:
    from sglang.srt.speculative import eagle_info

    return getattr(eagle_info, "EagleDraftExtendInput", eagle_info.EagleDraftInput)
