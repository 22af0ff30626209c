# SPDX-License-Identifier: Apache-2.0
"""Tokens of models in several environments, eager. Arguments: the environments by name, as JSON, and the models."""

from __future__ import annotations

import json
import sys

from cpu_sglang import one_batch
from tests.scenarios import debugged, telling


def main(arms: str, *models: str) -> None:
    debugged.show()
    # only to share the import with scenarios that capture
    one_batch.import_sglang(with_graphs=True)
    telling.result(one_batch.tokens_of(json.loads(arms), models, steps=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
