# SPDX-License-Identifier: Apache-2.0
"""Rarely a wrong cached prefix (MiniMax-M3, Qwen4 and DeepSeek-V4.1 with overlap scheduling)

Symptom: With default flags, the next turn of a chat, or another prompt with the same beginning, may rarely be answered
wrong: an end token was cached that had attended to slots of another request. It takes a request whose end token fills
a page, and a prefill that is prepared while its last step runs. Nothing in the log.
Cause: The scheduler may write the table of slots once a step's reads have ended, which its attention backend declares.
The sparse backends of MiniMax-M3 and Qwen4 leave that to the default: once the graph has prepared its metadata. But
each sparse layer in the graph reads the table itself. The row of a request that ends goes to the next prefill at once,
while a step that was launched before still computes its end token. DeepSeek-V4.1, from 0.5.21, leaves its decodes to
the default, too. Before Blackwell DeepGEMM does not score for its indexer, which then reads the table in each layer.
Change: For these backends the reads end after the replay, as SGLang itself declares for DeepSeek-V4's verification.
What the scheduler then does on the device waits for that graph. Other backends keep what they declare, and so does
DeepSeek-V4 without such an indexer. V4.1's verification with DSPARK declares this end itself; that is not fixed.
Remove when: No release that has these backends leaves the default to them.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import DECODE_GRAPHS, MINIMAX_M3, ON_HOPPER, OVERLAP, PREFIX_CACHE, named
from sglang_bcg_fixes.anatomy.read_done import BARRIER, DECLARED
from sglang_bcg_fixes.anatomy.runners import DECODE
from sglang_bcg_fixes.anatomy.workarounds import NO_OVERLAP
from sglang_bcg_fixes.concern import Condition, Launch
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

ATTENTION = "sglang.srt.layers.attention"
ENDS, DEFAULT = (f"{ATTENTION}.base_attn_backend:{name}" for name in ("SharedReadEnds", "AttentionBackend"))
DECLARE, EXECUTE = f"{DEFAULT}.shared_read_ends", f"{DECODE}.execute"
# a backend, and its method that reads the table in each layer
SPARSE = {
    f"{ATTENTION}.minimax_sparse_backend:MiniMaxSparseAttnBackend": "forward_decode",
    f"{ATTENTION}.qwen_sparse_attn_backend:QwenSparseAttnBackend": "_forward_paged_attention",
}
INDEXER = f"{ATTENTION}.dsv4.v41_indexer"
SCORES = f"{INDEXER}.scoring:decode_scores"
SELECT = f"{INDEXER}.full_topk:FullTopKIndexer.topk_decode"
OF_DEEPSEEK = f"{ATTENTION}.deepseek_v4_backend:DeepseekV4AttnBackend.shared_read_ends"
NAMES = frozenset(where.partition(":")[2] for where in SPARSE)


def probe(source: Source) -> Finding:
    if source.find(ENDS) is None and source.find(DECLARE) is None:
        return absent("no backend says where its reads end")
    default, execute = source.need(DECLARE), source.need(EXECUTE)
    here = [where for where in SPARSE if source.has_module(where.partition(":")[0])]
    layers = {where: source.need(f"{where}.{SPARSE[where]}") for where in here}
    read = [default, execute, source.need(BARRIER), *layers.values()]
    silent = [where for where in here if source.find(f"{where}.shared_read_ends") is None]
    if not silent:
        return fixed("the sparse backends say where their reads end", *read)
    reading = all(layers[where].mentions("req_to_token") for where in silent)
    if source.has_module(f"{INDEXER}.scoring"):
        scores, select, declared = map(source.need, (SCORES, SELECT, OF_DEEPSEEK))
        read += [scores, select, declared]
        by_default = declared.mentions("super().shared_read_ends(fm)") and not declared.mentions("is_decode")
        scored_here = scores.mentions("req_to_token[") and select.mentions("if self.use_deep_gemm_decode")
        reading = reading and by_default and scored_here
    if reading and default.mentions("SharedReadEnds.IN_REPLAY") and execute.mentions(DECLARED):
        return affected("sparse layers read the table in the graph, after the default end of reads", *read)
    return drifted("sparse layers read the table", *read)


def after_the_replay(result: Any, self: Any, *_: Any, **__: Any) -> Any:
    ends = type(result)
    return ends.POST_REPLAY if result is ends.IN_REPLAY and reads_in_each_layer(self) else result


def reads_in_each_layer(backend: Any) -> bool:
    if any(kind.__name__ in NAMES for kind in type(backend).__mro__):
        return True
    # of DeepSeek-V4; without the low ratios of V4.1 no layer asks it
    indexer = getattr(backend, "full_topk_indexer", None)
    return indexer is not None and bool(getattr(backend, "low_ratios", ())) and not indexer.use_deep_gemm_decode


def is_deepseek_v41(launch: Launch) -> bool | None:
    """SGLang gives it the architecture of V4."""
    return "deepseek_v41" in launch.values("model_type") if launch.architectures else None


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((DECLARE,), How.AFTER, after_the_replay),),
    workarounds=NO_OVERLAP,
    concerns=(
        *wrong(OVERLAP, DECODE_GRAPHS, PREFIX_CACHE, MINIMAX_M3 | named("Qwen4*")),
        *wrong(OVERLAP, DECODE_GRAPHS, PREFIX_CACHE, Condition("DeepSeek-V4.1", is_deepseek_v41), ON_HOPPER),
    ),
)
