# SPDX-License-Identifier: Apache-2.0
"""A server of `verify` without a GPU: one batch at a time through the real ModelRunner, prefill graphs on a tape.

It stands in the place of sglang_bcg_fixes.lab.verify.server and reads the same job, whose buckets it captures. A model
that was made is served with the job's attention backend, or with SGLang's choice on Hopper where the job names none.
One that was not made is a Qwen3-Next.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from cpu_sglang import one_batch, prefill
from sglang_bcg_fixes.lab.verify import server


def main(arguments: list[str]) -> None:
    job = json.loads(pathlib.Path(arguments[0]).read_text())
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    engine = job["engine"]
    folder = engine["model_path"]
    if pathlib.Path(folder).is_dir():
        loaded = one_batch.load(folder, attention_backend=engine.get("attention_backend", "fa3"))
    else:
        loaded = one_batch.load("qwen3next")
    one_batch.randomize(loaded.model_runner.model)
    prefill.BUCKETS = engine.get("cuda_graph_bs_prefill") or engine["piecewise_cuda_graph_tokens"]
    prefill.capture_prefill(loaded.model_runner)

    def generate(input_ids: list[list[int]], sampling_params: dict[str, Any], **_: Any) -> list[dict[str, Any]]:
        tokens, logits = one_batch.generate(loaded, input_ids, sampling_params["max_new_tokens"])
        logprobs = logits.log_softmax(-1)
        return [
            {
                "output_ids": row,
                "meta_info": {
                    "output_token_logprobs": [[logprobs[index, step, token].item()] for step, token in enumerate(row)]
                },
            }
            for index, row in enumerate(tokens)
        ]

    server.run(job, generate, 0.0)


if __name__ == "__main__":
    main(sys.argv[1:])
