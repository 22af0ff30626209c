# SPDX-License-Identifier: Apache-2.0
"""A process that captures its prefill graphs for a minute; it ends in order on SIGTERM where it is told to."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from cpu_sglang import prefill
from tests.scenarios import released


def main(how: str) -> None:
    if how == "in order":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    loaded = released.load("llama")
    layers = loaded.model_runner.model.model
    plain = layers.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        print("capturing", flush=True)
        time.sleep(60)
        return plain(*args, **kwargs)

    layers.forward = slow
    prefill.capture_prefill(loaded.model_runner)


if __name__ == "__main__":
    main(*sys.argv[1:])
