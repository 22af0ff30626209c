# SPDX-License-Identifier: Apache-2.0
"""Rarely a wrong cached prefix (MiniMax-M3 and Qwen4 with overlap scheduling)

Symptom: With default flags, the next turn of a chat, or another prompt with the same beginning, may rarely be answered
wrong: an end token was cached that had attended to slots of another request. It takes a request whose end token fills
a page, and a prefill that is prepared while its last step runs. Nothing in the log.
Cause: The scheduler may write the table of slots once a step's reads have ended, which its attention backend declares.
The sparse backends of MiniMax-M3 and Qwen4 leave that to the default: once the graph has prepared its metadata. But
each sparse layer in the graph reads the table itself. The row of a request that ends goes to the next prefill at once,
while a step that was launched before still computes its end token.
Change: For these backends the reads end after the replay, as SGLang itself declares for DeepSeek-V4's verification.
What the scheduler then does on the device waits for that graph. Other backends keep what they declare.
Remove when: No release that has these backends leaves the default to them.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import DECODE_GRAPHS, MINIMAX_M3, OVERLAP, PREFIX_CACHE, named
from sglang_bcg_fixes.anatomy.read_done import BARRIER, DECLARED
from sglang_bcg_fixes.anatomy.runners import DECODE
from sglang_bcg_fixes.anatomy.workarounds import NO_OVERLAP
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

ATTENTION = "sglang.srt.layers.attention"
ENDS, DEFAULT = (f"{ATTENTION}.base_attn_backend:{name}" for name in ("SharedReadEnds", "AttentionBackend"))
DECLARE, EXECUTE = f"{DEFAULT}.shared_read_ends", f"{DECODE}.execute"
# a backend, and its method that reads the table in each layer
SPARSE = {
    f"{ATTENTION}.minimax_sparse_backend:MiniMaxSparseAttnBackend": "forward_decode",
    f"{ATTENTION}.qwen_sparse_attn_backend:QwenSparseAttnBackend": "_forward_paged_attention",
}
NAMES = frozenset(where.partition(":")[2] for where in SPARSE)


def probe(source: Source) -> Finding:
    if source.find(ENDS) is None and source.find(DECLARE) is None:
        return absent("no backend says where its reads end")
    default, execute = source.need(DECLARE), source.need(EXECUTE)
    here = [where for where in SPARSE if source.has_module(where.partition(":")[0])]
    layers = {where: source.need(f"{where}.{SPARSE[where]}") for where in here}
    read = (default, execute, source.need(BARRIER), *layers.values())
    silent = [where for where in here if source.find(f"{where}.shared_read_ends") is None]
    if not silent:
        return fixed("the sparse backends say where their reads end", *read)
    reading = all(layers[where].mentions("req_to_token") for where in silent)
    if reading and default.mentions("SharedReadEnds.IN_REPLAY") and execute.mentions(DECLARED):
        return affected("sparse layers read the table in the graph, after the default end of reads", *read)
    return drifted("sparse layers read the table", *read)


def after_the_replay(result: Any, self: Any, *_: Any, **__: Any) -> Any:
    ends = type(result)
    is_sparse = any(kind.__name__ in NAMES for kind in type(self).__mro__)
    return ends.POST_REPLAY if is_sparse and result is ends.IN_REPLAY else result


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((DECLARE,), How.AFTER, after_the_replay),),
    workarounds=NO_OVERLAP,
    concerns=wrong(OVERLAP, DECODE_GRAPHS, PREFIX_CACHE, MINIMAX_M3 | named("Qwen4*")),
)
