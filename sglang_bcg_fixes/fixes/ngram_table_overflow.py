# SPDX-License-Identifier: Apache-2.0
"""LongCat with n-gram embeddings answers wrongly or dies at --max-running-requests

Symptom: With as many requests as --max-running-requests allows, LongCat models with n-gram embeddings read and
overwrite memory outside their table: wrong answers, or "illegal memory access".
Cause: The table of each request's last tokens has one row per request, but requests are numbered from 1 and row 0 is
for padding: the last number is one past the end.
Change: The table gets as many rows as the table of the requests' slots, as in SGLang itself from 0.5.12. No flag of
SGLang does the same.
Remove when: No release before 0.5.12 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import LONGCAT
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, wrong

ALLOT = "sglang.srt.model_executor.model_runner:ModelRunner.maybe_init_ngram_embedding"
LATER = "sglang.srt.model_executor.model_runner_components.ngram_embedding_manager:NgramEmbeddingManager.from_model"


def probe(source: Source) -> Finding:
    allot = source.need(ALLOT, LATER)
    if allot.mentions("torch.empty(self.req_to_token_pool.size"):
        return affected("the table has no row for the last number that a request can have", allot)
    if allot.mentions("req_to_token_pool.req_to_token.shape[0]"):
        return fixed("the table has a row for every number that a request can have", allot)
    return drifted("the table is allocated", allot)


def add_the_last_row(result: None, self: Any) -> None:
    import torch

    if self.use_ngram_embedding:
        rows, columns = self.req_to_token_pool.req_to_token.shape[0], self.token_table.shape[1:]
        kind = {"dtype": self.token_table.dtype, "device": self.token_table.device}
        # two of them may not fit
        self.token_table = None
        self.token_table = torch.empty(rows, *columns, **kind)


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((ALLOT,), How.AFTER, add_the_last_row),),
    verify=("llama_prefix_cache",),
    concerns=wrong(LONGCAT),
)
