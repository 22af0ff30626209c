# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose Kimi delta attention is captured, as in a server started with breakable prefill graphs."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

from cpu_sglang import architectures, graphs, one_batch, prefill
from sglang_bcg_fixes import plugin
from tests.harm import forked_rows, steps
from tests.releases import kinds_of_request, layer_stacks, registry_graphs
from tests.scenarios import named

# the last batches have padding, several requests, and one behind the padding of another
BATCHES = ([11], [8], [6, 5], [9], [1])


def answers(model: str) -> dict[str, Any]:
    """Distance of each batch's replay from its eager answer, and the breaks of each graph."""
    one_batch.import_sglang(with_graphs=True)
    configuration = architectures.CONFIGURATIONS[model]
    loaded = forked_rows.load(
        {"configuration": {**configuration.config, "architectures": [model]}, "server_args": configuration.server_args}
    )
    runner = loaded.model_runner
    forked_rows.prepare(runner.model)
    kinds_of_request.forget_pinned_memory()
    eager = [steps.answer(loaded, lengths)[0] for lengths in BATCHES]
    before = {"graphs": prefill._graph_config(runner).prefill.backend, "captures": graphs.counters.captures}
    made, _ = forked_rows.captured(runner, forked_rows.Said())
    replays = graphs.counters.replays
    replayed = [steps.answer(loaded, lengths)[0] for lengths in BATCHES]
    return {
        "before": before,
        "differences": [forked_rows.difference(*pair) for pair in zip(eager, replayed, strict=True)],
        "replays": graphs.counters.replays - replays,
        "report": plugin.load().report.state("kda_raw_beta"),
        "breaks": {size: breaks for size, (_, breaks) in made.items()},
        "in graph": runner.attn_backend.use_captured_forward_metadata_for_breakable_cuda_graph,
    }


def by_default(*models: str) -> dict[str, dict[str, str]]:
    """The prefill backend that SGLang chooses without flags, as it is and with one of its rules left out."""
    one_batch.import_sglang(with_graphs=True)
    from sglang.srt.configs import model_config

    said = layer_stacks.Said()
    logging.getLogger().addHandler(said)
    logging.getLogger("sglang").setLevel(logging.INFO)
    found = {"as it is": {model: registry_graphs.by_default(model, said) for model in models}}
    with mock.patch.object(model_config, "uses_kda_attention", lambda config: False):
        return {**found, "without the rule": {model: registry_graphs.by_default(model, said) for model in models}}


if __name__ == "__main__":
    named.run(globals())
