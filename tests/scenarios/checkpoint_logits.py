# SPDX-License-Identifier: Apache-2.0
"""Tokens and logits of a checkpoint on a release. Arguments: its folder, and the prompts as JSON."""

from __future__ import annotations

import json
import sys

from cpu_sglang import one_batch
from tests.scenarios import telling


def main(folder: str, prompts: str) -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    loaded = one_batch.load(folder, load_format="auto", context_length=256)
    tokens, logits = one_batch.generate(loaded, json.loads(prompts), 3)
    telling.result([tokens, logits.tolist()])


if __name__ == "__main__":
    main(*sys.argv[1:])
