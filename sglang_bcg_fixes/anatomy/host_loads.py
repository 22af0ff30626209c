# SPDX-License-Identifier: Apache-2.0
"""Layers of a prefix that the host loads into a pool while the model runs."""

from __future__ import annotations

from typing import Any

WAIT = "sglang.srt.managers.cache_controller:LayerDoneCounter.wait_until"
# on an event of the host's stream, so that the host goes on
WAITS = "self.events[self.consumer_index].wait(threshold)"


def wait_for_the_last_layer(pool: Any) -> None:
    """Keep what this stream is given from now on behind the load that the batch has been given, if there is one."""
    counter: Any = getattr(pool, "layer_transfer_counter", None)
    # counters of other caches have no index
    if getattr(counter, "consumer_index", -1) >= 0:
        counter.wait_until(counter.num_layers - 1)


def wait_for_every_layer(pool: Any) -> None:
    """Do the same, and wait for layer after layer where a counter loads one when that before it is waited for."""
    counter: Any = getattr(pool, "layer_transfer_counter", None)
    if counter is None or hasattr(counter, "consumer_index"):
        wait_for_the_last_layer(pool)
        return
    for layer in range(getattr(counter, "num_layers", 0)):
        counter.wait_until(layer)
