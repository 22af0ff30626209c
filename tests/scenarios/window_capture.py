# SPDX-License-Identifier: Apache-2.0
"""The capture of a full prefill graph by FlashInfer's backend, before decode graphs are set up."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import torch

from cpu_sglang import stand_ins
from tests.scenarios import named


def capture() -> dict[str, str]:
    """Prepare a capture for a cache without a window and for one with it; return how each ends."""
    stand_ins.install()
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch: Any = mock.MagicMock(
        forward_mode=ForwardMode.EXTEND, batch_size=1, out_cache_loc=torch.zeros(8), spec_info=None
    )
    found = {}
    for kind, window in (("plain", False), ("window", True)):
        backend: Any = FlashInferAttnBackend.__new__(FlashInferAttnBackend)
        backend.use_sliding_window_kv_pool = window
        backend._prepare_cuda_graph_metadata = lambda *_: None
        backend.indices_updater_prefill = mock.MagicMock()
        backend.full_cg_prefill_wrappers = []
        # one of these says where the slots are, by release
        backend._swa_kv_pool = backend.kv_index_translator = backend.kv_read_tables = mock.MagicMock()
        backend.forward_metadata = types.SimpleNamespace()
        try:
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            found[kind] = "prepared"
        except AttributeError as error:
            found[kind] = str(error)
    return found


if __name__ == "__main__":
    named.run(globals())
