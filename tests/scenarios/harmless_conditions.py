# SPDX-License-Identifier: Apache-2.0
"""Conditions that `sglang_bcg_fixes/cli/harmless.py` calls harmless, in parts of a release without the plugin."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from cpu_sglang import stand_ins
from tests.scenarios import named

ROWS, TOKENS = 4, 3


def idle_layers() -> dict[str, list[Any]]:
    stand_ins.install()
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.models import bailing_moe_linear, minicpm

    idle = types.SimpleNamespace(forward_mode=ForwardMode.IDLE)
    rows, layer = torch.zeros(0, 8), mock.MagicMock()
    # to 0.5.20 the residual goes along
    for step in ("prepare_attn", "prepare_mlp", "postprocess_layer"):
        getattr(layer.layer_communicator, step).return_value = (rows, rows)
    forward = bailing_moe_linear.BailingMoELinearDecoderLayer.forward
    given = {"hidden_states": rows, "positions": rows, "forward_batch": idle, "residual": rows, "zero_allocator": None}
    names = forward.__code__.co_varnames[1 : forward.__code__.co_argcount]
    forward(layer, **{name: given[name] for name in names})
    found: dict[str, list[Any]] = {"bailing": [layer.attention.called, layer.mlp.called]}
    if hasattr(minicpm, "MiniCPMLightningMixer"):
        mixer = mock.MagicMock(hidden_size=8)
        answer = minicpm.MiniCPMLightningMixer.forward(mixer, positions=rows, hidden_states=rows, forward_batch=idle)
        found["minicpm"] = [mixer.attn.called, list(answer.shape)]
    return found


def draft_rows() -> dict[str, dict[str, Any]]:
    """The padded row that a draft extend of three requests leaves behind one of four."""
    stand_ins.install()
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as single

    found = {"multi": padded(fill_multi)}
    if hasattr(single.EAGLEDraftExtendCudaGraphRunner, "replay"):
        found["single"] = padded(fill_single)
    return found


class Filled(Exception):
    """Leaves a runner that has filled its buffers and would replay."""


class Values(dict[str, torch.Tensor]):
    """Buffers that are asked for by attribute and, in earlier releases, by key."""

    __getattr__ = dict.__getitem__


def draft_buffers() -> Values:
    of_requests = ("seq_lens", "extend_seq_lens", "extend_start_loc", "req_pool_indices", "seq_lens_cpu")
    counted = ("num_accepted_drafts", "num_accepted_tokens", "num_correct_drafts", "num_accept_tokens", "select_index")
    of_tokens = ("input_ids", "out_cache_loc", "swa_out_cache_loc", "positions")
    rows = {name: torch.zeros(ROWS, dtype=torch.int64) for name in (*of_requests, *counted)}
    tokens = {name: torch.zeros(ROWS * TOKENS, dtype=torch.int64) for name in of_tokens}
    return Values(rows | tokens | {"hidden_states": torch.zeros(ROWS * TOKENS, 2)})


def draft_batch(count: int) -> Any:
    rows = torch.arange(1, count + 1)
    spec_info = types.SimpleNamespace(
        hidden_states=torch.ones(count * TOKENS, 2),
        num_accepted_drafts=rows - rows,
        num_accepted_tokens=rows,
        num_correct_drafts=rows - rows,
        num_accept_tokens=rows,
    )
    return types.SimpleNamespace(
        batch_size=count,
        input_ids=torch.ones(count * TOKENS, dtype=torch.int64),
        seq_lens=rows + 40,
        seq_lens_cpu=rows + 40,
        seq_lens_sum=0,
        extend_seq_lens=rows - rows + TOKENS,
        extend_seq_lens_cpu=[TOKENS] * count,
        extend_start_loc=(rows - 1) * TOKENS,
        req_pool_indices=rows,
        out_cache_loc=torch.arange(count * TOKENS) + 100,
        positions=torch.arange(count * TOKENS),
        spec_info=spec_info,
    )


def draft_runner(held: Values) -> Any:
    fake = mock.MagicMock(
        buffers=held,
        cuda_graph_buffers=held,
        capture_bs=[ROWS],
        num_tokens_per_bs=TOKENS,
        require_mlp_tp_gather=False,
        require_gathered_buffer=False,
        seq_len_fill_value=1,
        device="cpu",
        extend_seq_lens_cpu=[TOKENS] * ROWS,
    )
    fake.get_runner.return_value._pad_to_bucket.return_value = ROWS
    fake._replay.side_effect = Filled
    return fake


def fill_single(fake: Any, batch: Any) -> None:
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as single

    with contextlib.suppress(Filled):
        single.EAGLEDraftExtendCudaGraphRunner.replay(fake, batch)


def fill_multi(fake: Any, batch: Any) -> None:
    from sglang.srt.speculative import multi_layer_eagle_draft_extend_cuda_graph_runner as multi

    steps = multi.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner
    if hasattr(steps, "prepare"):
        steps.prepare(fake, batch)
        return
    steps.reset_buffers(fake, batch, types.SimpleNamespace(accept_lens=batch.req_pool_indices))
    of_step = multi.MultiLayerEagleDraftExtendCudaGraphRunner
    of_step.init_replay_state(fake, batch, ROWS, batch.batch_size, batch.batch_size * TOKENS)


def padded(fill: Callable[[Any, Any], None]) -> dict[str, Any]:
    held = draft_buffers()
    for count in (4, 3):
        fill(draft_runner(held), draft_batch(count))
    slots = held["out_cache_loc"].tolist()
    return {
        "request": int(held["req_pool_indices"][3]),
        "length": int(held["seq_lens"][3]),
        "host length": int(held["seq_lens_cpu"][3]),
        "slots": slots[3 * TOKENS :],
        "real": slots[: 3 * TOKENS],
    }


def mask_of_checkpoints() -> dict[str, list[bool]]:
    stand_ins.install()
    from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry

    registry = build_decode_registry(
        device=torch.device("cpu"),
        max_bs=4,
        max_num_token=4,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=True,
    )

    def fill(count: int, mask: torch.Tensor | None = None) -> list[bool]:
        fields = {**dict.fromkeys(registry.slot_names()), **({} if mask is None else {"mamba_track_mask": mask})}
        batch = mock.MagicMock(spec=[], **fields)
        registry.fill_from(batch, raw_bs=count, padded_bs=4, raw_num_tokens=count, padded_num_tokens=4)
        flags: list[bool] = registry.get_slot("mamba_track_mask").buffer.tolist()
        return flags

    mask = torch.tensor([True] * 4)
    return {"full": fill(4, mask), "idle": fill(0), "padded": fill(2, mask[:2])}


def indexer() -> list[str]:
    stand_ins.install()
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    backend = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
    backend.full_attn_layers = [1, 3]
    backend.full_attn_backend = types.SimpleNamespace(
        get_indexer_metadata=lambda layer_id, forward_batch: f"full {layer_id} {forward_batch}"
    )
    return [backend.get_indexer_metadata(layer, "batch") for layer in (1, 3, 7)]


if __name__ == "__main__":
    named.run(globals())
