# SPDX-License-Identifier: Apache-2.0
"""A real release's Mamba2 under prefill graphs, its mixers captured with kernels of ours, on the CPU.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 SGLANG_BCG_KERNEL_MAMBA2_EXTEND=reference \\
        python -m tests.releases.mamba2_prefill SCENARIO MODEL

As tests.releases.gdn_prefill, which has the steps and what is compared.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pathlib
import tempfile
from typing import Any

from cpu_sglang import graphs, prefill
from sglang_bcg_fixes.kernels.linear_extend import serving
from tests.releases import gdn_prefill
from tests.releases.gdn_prefill import SHORT, Found, scenario

# as long as ours, so that a checkpoint may be inside an extend; by both names that configurations have
CHUNKS = {"mamba_chunk_size": 64, "chunk_size": 64}

# of the sizes that the CUDA source is written for: one has 128 states, the other 256, with what Falcon's configuration
# computes of its sizes before these take their place
OF_CUDA: dict[str, dict[str, Any]] = {
    "nemotron_h": {"mamba_num_heads": 2, "mamba_head_dim": 64, "ssm_state_size": 128},
    "falcon_h1": {
        **{"mamba_d_ssm": 64, "mamba_n_heads": 1, "mamba_d_head": 64, "mamba_d_state": 256},
        **{"mamba_expand": 1, "mamba_intermediate": 64},
    },
}

MUTANTS = {
    **gdn_prefill.OF_TABLES,
    "shares one layer's states": ("mamba2_layer_cache(layer_id)", "mamba2_layer_cache(0)"),
    "keeps the first weights": (
        "conv_weights=mixer.conv1d.weight.flatten(1)",
        "conv_weights=vars(self).setdefault('weights', mixer.conv1d.weight.flatten(1))",
    ),
    "takes the gate for x": (
        "gate, inputs, dt = torch.split(projected, [shape.inner, shape.channels,",
        "inputs, gate, dt = torch.split(projected, [shape.channels, shape.inner,",
    ),
    "returns what it was given": ("mixer.norm(output.flatten(1), gate)", "mixer.norm(gate, gate)"),
}
# of a model that has such a vector
OF_FALCON = {"forgets what the input is multiplied by": ("projected = projected * mup_vector", "pass")}


class World(gdn_prefill.World):
    module, op = "sglang_bcg_fixes.kernels.mamba2_extend.adapter", "mamba2_extend"

    overrides = CHUNKS

    def __init__(self, model: str, **server_args: Any) -> None:
        super().__init__(model, **{"dtype": "float16", **server_args})
        if model == "falcon_h1":
            # of the model's own configuration, which multiplies by one
            for layer in self.runner.model.model.layers:
                layer.mup_vector.copy_(1 + layer.mup_vector.new_ones(layer.mup_vector.shape).cumsum(-1) / 100)


class Scenarios(gdn_prefill.Scenarios):
    world = World

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.mistakes = {**MUTANTS, **(OF_FALCON if model == "falcon_h1" else {})}

    def few_programs(self, **server_args: Any) -> gdn_prefill.World:
        from sglang_bcg_fixes.kernels.mamba2_extend import triton
        from sglang_bcg_fixes.kernels.mamba2_extend.walks import Walk

        world = super().few_programs(**server_args)
        installed: Any = triton
        walk = Walk(programs=2, warps=4, stages=1, part=64)
        installed.tuning_for = lambda shape: triton.Tuning(
            walk, (walk,) * bool(walk.most_sequences(shape)), prepare_programs=2
        )
        return world

    def in_cuda(self) -> Found:
        """The CUDA source on the host, as if there were a driver."""
        from sglang_bcg_fixes.kernels.cuda import driver, nvrtc

        driver.library = nvrtc.is_installed = lambda *_: True  # type: ignore[assignment]
        world = self.few_programs(json_model_override_args=json.dumps(CHUNKS | OF_CUDA[self.model]))
        from sglang_bcg_fixes.kernels.mamba2_extend import cuda, triton
        from sglang_bcg_fixes.kernels.mamba2_extend.program import PROGRAM
        from tests.kernels.program_on_host import OnHost

        with tempfile.TemporaryDirectory() as folder:
            kernels = OnHost(cuda, PROGRAM).build(PROGRAM.file, pathlib.Path(folder))
        launched: collections.Counter[str] = collections.Counter()

        def counted(launch: Any, *fields: int) -> None:
            launched["advance"] += 1
            launch(*fields)

        advance = {kind: functools.partial(counted, launch) for kind, launch in kernels.advance.items()}
        implementation: Any = cuda
        implementation.on_device = lambda device: dataclasses.replace(kernels, advance=advance)
        implementation.tuning_for = triton.tuning_for
        launch = implementation.Call.advance

        def advance_again(scratch: dict[str, Any], **others: Any) -> None:
            launch(implementation.Call(scratch=implementation.Scratch(**scratch), **others))

        # the stand-in for graphs sees torch's and Triton's launches only, and tensors in no object of ours
        marked = graphs.opaque(advance_again)
        implementation.Call.advance = lambda self: marked(**{**vars(self), "scratch": vars(self.scratch)})
        serving.runs_on_the_host = lambda implementation: implementation == "cuda"
        return {**scenario(world, SHORT, prefill.BUCKETS), "launched": launched}

    def counted(self) -> Found:
        """Run where every batch has the numbers of tokens of all ranks, though no rank has tokens of its own."""
        import torch
        from sglang.srt.layers.attention import torch_native_backend

        world = self.start(moe_dense_tp_size=1)
        # SGLang brings neither to a CPU
        backend: Any = torch_native_backend.TorchNativeAttnBackend
        backend.get_cuda_graph_seq_len_fill_value = lambda self: 1
        make: Any = torch.tensor
        torch.tensor = lambda *given, pin_memory=False, **named: make(*given, **named)
        return scenario(world, [[[11]]], prefill.BUCKETS)

    def reduced_later(self) -> Found:
        """Run as on two ranks with equal shares, whose sum of few rows is left to the next layer's norm."""
        from sglang.srt.layers import communicator, linear
        from sglang.srt.models import nemotron_h_utils

        world = self.start()
        layers: Any = communicator.LayerCommunicator
        layers.should_fuse_mlp_allreduce_with_next_layer = lambda self, batch: (
            len(batch.input_ids) <= prefill.BUCKETS[0] and not self.is_last_layer
        )
        for module in (linear, nemotron_h_utils):
            installed: Any = module
            installed.tensor_model_parallel_all_reduce = lambda share: 2 * share
        for module in world.runner.model.modules():
            if isinstance(module, linear.RowParallelLinear):
                module.tp_size = 2
        return scenario(world, [[[11]], [[5]]], prefill.BUCKETS)

    def configured(self) -> Found:
        """Run in single precision, where the break is left as it is."""
        return gdn_prefill.configured_in(self.start(dtype="float32"))


if __name__ == "__main__":
    Scenarios.main()
