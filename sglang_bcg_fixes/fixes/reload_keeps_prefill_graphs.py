# SPDX-License-Identifier: Apache-2.0
"""Answers from old weights, or a crash, after a reload with recapture_cuda_graph

Symptom: From 0.5.19 on, /update_weights_from_disk with "recapture_cuda_graph": true ends the server: the next request
meets "illegal memory access". That takes no certain model, and no prefill graphs: it was seen with Qwen3 on 0.5.22 and
0.5.23. On older releases replayed prefills answer from the old weights, or from whatever has been written to their
memory since. That takes a model whose weights get new storage when they are loaded, as those of GPT-OSS in MXFP4 do.
Cause: The update captures the decode graphs anew, and leaves the prefill graphs, which read the storage of parameters
that were replaced and freed. With torch 2.13 the end of a graph frees cuBLAS's workspace of its stream, and from 0.5.19
on all graphs share one. The old decode graphs are in reference cycles, which SGLang keeps from Python's garbage
collector until the new ones are captured. The new ones and the prefill graphs go on writing to the freed workspace.
Change: An update with that option also captures the breakable prefill graphs anew, through SGLang's own initialiser.
The buffers that it captures with are zeroed first, as at start-up: a capture runs the model, and would write to the KV
slots of the last batch. From 0.5.16 on, old graphs of both kinds end before any is captured. One of each stays until
the next update, for torch refuses to capture into a pool that no graph uses. If the prefill graphs cannot be captured,
prefill runs eagerly, and one error says why. So does the prefill of a draft model: its graphs are captured in contexts
of its worker, which an update has left. The memory of a draft's graphs, and of graphs whose capture failed, is not
given back. Updates without the option, updates that fail, and graphs of other kinds are left as they are. From 0.5.19
on a server that has such graphs may still end, or answer wrongly: prefill graphs without breaks, decode graphs with
them, and those of speculative decoding. Start it again in place of a reload.
Remove when: Every release that has to be served captures both kinds anew.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DECODE_GRAPHS, PREFILL_GRAPHS, RELOADED_WEIGHTS
from sglang_bcg_fixes.anatomy.runners import EXECUTOR
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Workaround
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, possible

MODEL_RUNNER = f"{EXECUTOR}.model_runner:ModelRunner"
UPDATER = f"{EXECUTOR}.model_runner_components.weight_updater:WeightUpdater"
# newer location first
UPDATES = (f"{UPDATER}.update_weights_from_disk", f"{MODEL_RUNNER}.update_weights_from_disk")
# attribute of the model runner -> its method that fills it
INITIALISERS = {
    "prefill_cuda_graph_runner": "init_prefill_cuda_graph",
    "piecewise_cuda_graph_runner": "init_piecewise_cuda_graphs",
}
HANDED_OVER = re.compile(r"recapture_cuda_graph=self\.(\w+)")
CAPTURES = re.compile(r"self\.((?:re)?(?:init|capture)_\w*graphs?)\(")
CAPTURES_PREFILL = {*INITIALISERS.values(), "init_cuda_graphs"}
# owners of breakable graphs, by release
OWNERS = ("BreakableCudaGraphRunner", "BreakableCudaGraphBackend")
DECODE_OWNER = "FullCudaGraphBackend"
SHARED_STREAM = "sglang.srt.model_executor.runner_utils.pool:get_or_create_global_graph_capture_stream"
OFF = "SGLANG_BCG_FIX_RELOAD_KEEPS_PREFILL_GRAPHS=off"
DRAFT_IS_EAGER = (
    "bcg-fixes reload_keeps_prefill_graphs: the draft model has new weights and its prefill graphs read the old ones. "
    "Its prefill runs eagerly from now on; start the server again to capture it. %s keeps the old graphs"
)
PREFILL_IS_EAGER = (
    "bcg-fixes reload_keeps_prefill_graphs: the weights are reloaded, but the prefill graphs could not be captured "
    "anew. Prefill runs eagerly from now on; start the server again, with a lower --mem-fraction-static if memory ran "
    "out. %s keeps the graphs of the old weights"
)

logger = logging.getLogger("sglang_bcg_fixes")
# of the last reload: it keeps the graphs' pool in use
kept_for_the_pool: list[Any] = []
# of all reloads: it must not end after a capture on its stream
never_ended: list[Any] = []


def probe(source: Source) -> Finding:
    update = source.need(*UPDATES)
    if "recapture_cuda_graph" not in update.parameters:
        return absent("an update of the weights captures nothing", update)
    read = [update]
    if update.where == UPDATES[0]:
        read.append(source.need(f"{MODEL_RUNNER}.init_weight_updater"))
        to_follow = HANDED_OVER.findall(read[-1].text) if "self.recapture_cuda_graph" in update.calls else []
    else:
        to_follow = CAPTURES.findall(update.text)
    if not to_follow:
        return drifted("the graphs are captured anew", *read)
    # grows on the way
    for name in to_follow:
        read.append(source.need(f"{MODEL_RUNNER}.{name}"))
        to_follow += [called for called in CAPTURES.findall(read[-1].text) if called not in to_follow]
    if CAPTURES_PREFILL.intersection(to_follow):
        return fixed("an update captures decode and prefill graphs anew", *read)
    read.append(source.need(*(f"{MODEL_RUNNER}.{name}" for name in INITIALISERS.values())))
    return affected("an update captures the decode graphs anew, and keeps the prefill graphs", *read)


def update_weights(
    original: Callable[..., tuple[bool, str]],
    self: Any,
    model_path: str,
    load_format: str,
    weight_name_filter: Callable[[str], bool] | None = None,
    recapture_cuda_graph: bool = False,
) -> tuple[bool, str]:
    if not recapture_cuda_graph:
        return original(self, model_path, load_format, weight_name_filter, recapture_cuda_graph)
    if hasattr(self, "get_model_runner"):

        def capture() -> None:
            replace_graphs(self.get_model_runner(), self.recapture_cuda_graph)

        # it is frozen
        updater = dataclasses.replace(self, recapture_cuda_graph=capture)
        return original(updater, model_path, load_format, weight_name_filter, recapture_cuda_graph)
    succeeded, message = original(self, model_path, load_format, weight_name_filter, recapture_cuda_graph)
    if succeeded:
        # decode graphs are new by now, and have a stream of their own
        replace_graphs(self)
    return succeeded, message


def replace_graphs(model_runner: Any, capture_decode: Callable[[], None] | None = None) -> None:
    """End the old graphs, have the decode graphs captured where they are not yet, and capture the prefill graphs."""
    replaced, owners = {}, []
    for attribute in INITIALISERS:
        old = getattr(model_runner, attribute, None)
        owner = getattr(old, "backend", old)
        # after a failed self-check it refuses every batch; a new one would not
        if type(owner).__name__ not in OWNERS or {"can_run", "can_run_graph"}.intersection(vars(old)):
            continue
        replaced[attribute] = old
        owners.append(owner)
        setattr(model_runner, attribute, None)
    decode = getattr(getattr(model_runner, "decode_cuda_graph_runner", None), "backend", None)
    if capture_decode and type(decode).__name__ == DECODE_OWNER:
        owners.append(decode)
    if model_runner.is_draft_worker:
        # the other model's new graphs share their stream
        never_ended.extend(owners)
    else:
        kept_for_the_pool[:] = [graph for owner in owners for graph in all_but_one_ended(owner)]
    if capture_decode:
        capture_decode()
    for attribute, old in replaced.items():
        if model_runner.is_draft_worker:
            logger.warning(DRAFT_IS_EAGER, OFF)
            continue
        zero_buffers(old)
        try:
            getattr(model_runner, INITIALISERS[attribute])()
        except Exception as error:
            setattr(model_runner, attribute, None)
            # its traceback has those that were captured
            never_ended.append(error)
            logger.exception(PREFILL_IS_EAGER, OFF)


def zero_buffers(runner: Any) -> None:
    """Forget the last batch; other runners share these buffers, and fill them before each replay."""
    import torch

    # 0.5.11 and 0.5.12 have no registry, and 0.5.13 has nothing else
    if hasattr(runner, "buffer_registry"):
        buffers = [runner.buffer_registry.get_slot(name).buffer for name in runner.buffer_registry.slot_names()]
    else:
        buffers = list(vars(runner.buffers).values())
    for buffer in buffers:
        if isinstance(buffer, torch.Tensor):
            buffer.zero_()


def all_but_one_ended(owner: Any) -> list[Any]:
    """Drop the graphs, which reference cycles would keep, and return one of them."""
    graphs = owner._graphs if hasattr(owner, "_graphs") else owner.graphs
    kept = [graphs.popitem()[1]] if graphs else []
    if hasattr(owner, "cleanup"):
        owner.cleanup()
    else:
        graphs.clear()
        owner.output_buffers.clear()
    return kept


def shares_a_stream(source: Source) -> bool:
    return source.find(SHARED_STREAM) is not None


FIX = Fix(
    probe=probe,
    patches=(PatchPoint(UPDATES, How.AROUND, update_weights),),
    workarounds=(
        Workaround(
            flags="--cuda-graph-backend-prefill disabled --cuda-graph-backend-decode disabled",
            option="--cuda-graph-backend-prefill",
            effect="a reload has no graphs to replace; slower. Or start the server again in place of a reload",
        ),
        PREFILL_GRAPHS_OFF[1],
    ),
    verify=("llama_prefix_cache",),
    concerns=possible(PREFILL_GRAPHS | DECODE_GRAPHS.where(shares_a_stream), RELOADED_WEIGHTS),
)
