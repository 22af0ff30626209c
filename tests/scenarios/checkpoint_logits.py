# SPDX-License-Identifier: Apache-2.0
"""Tokens and logits of a checkpoint on a release, its prefill replayed if there is a size to capture.

Arguments: its folder, the prompts as JSON, the size, and the kernel whose fallbacks are told.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pathlib
import sys

from cpu_sglang import graphs, one_batch, prefill
from sglang_bcg_fixes.kernels import active
from tests.releases import kinds_of_request
from tests.scenarios import telling

RUNNERS = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"


def main(folder: str, prompts: str, size: str = "", op: str = "") -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    options = {"load_format": "auto", "context_length": 256, "chunked_prefill_size": 256}
    is_latent = "kv_lora_rank" in json.loads((pathlib.Path(folder) / "config.json").read_text())
    if is_latent:
        options["attention_backend"] = "fa3"
    with prefill.built_for_graphs([int(size)]) if size else contextlib.nullcontext():
        loaded = one_batch.load(folder, **options)
    breaks = {}
    if size:
        # from 0.5.22 on, captured delta attention asks for it
        kinds_of_request.forget_pinned_memory()
        if is_latent:
            # as on an NVIDIA GPU: elsewhere 0.5.17 and later take captures of latent attention for the expanded form
            importlib.import_module(RUNNERS).is_cuda = lambda: True  # type: ignore[attr-defined]
        captured = prefill.captured_graphs(prefill.capture_prefill(loaded.model_runner, [int(size)]))
        breaks = {bucket: len(graph._break_fns) for bucket, graph in captured.items()}
    before = graphs.counters.replays
    tokens, logits = one_batch.generate(loaded, json.loads(prompts), 3)
    telling.result(
        {
            "tokens": tokens,
            "logits": logits.tolist(),
            "breaks": breaks,
            "replayed": graphs.counters.replays - before,
            "left": dict(active.selected(op).fallbacks) if active.is_used(op) else None,
        }
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
