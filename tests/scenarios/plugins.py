# SPDX-License-Identifier: Apache-2.0
"""The beginning of a scenario beside a release that runs no model, so that it imports of SGLang only what it names."""

from __future__ import annotations

from cpu_sglang import one_batch, stand_ins


def load() -> None:
    """Load the plugins through SGLang's own loader."""
    stand_ins.install()
    one_batch.load_plugins()
