# SPDX-License-Identifier: Apache-2.0
"""Code of SGLang that looks defective and is right, each with a test on real releases."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Harmless:
    """`test` is "file::function" in the repository; no probe looks for it, so no server pays."""

    id: str
    title: str
    releases: str
    reason: str
    test: str


TESTS = "tests/releases/test_harmless.py"

HARMLESS = (
    Harmless(
        "idle_linear_attention",
        "An idle batch looks as if it would crash linear layers (Bailing, MiniCPM)",
        "all",
        "the models that have such layers (Bailing, and MiniCPM from 0.5.19) do not call them for an idle batch",
        f"{TESTS}::test_an_idle_batch_reaches_no_linear_layer",
    ),
    Harmless(
        "draft_extend_rows_stale",
        "EAGLE's draft-extend graph looks as if its padding would spoil other requests",
        "0.5.11 to 0.5.15.post1 (from 0.5.13 the multi-layer one only)",
        "such a row has length 1 and stores to slot 0, which is nobody's; what it computes is cut off",
        f"{TESTS}::test_padded_rows_of_a_draft_extend_store_to_nobodys_slot",
    ),
    Harmless(
        "decode_registry_keeps_old_values",
        "Decode graphs look as if they would use values of the previous batch",
        "0.5.13 to 0.5.23",
        "where there is a buffer for checkpoints every decode batch has the mask, but an idle one, whose rows are all "
        "cleared as padding; what prefill keeps is mamba_tracking_stale",
        f"{TESTS}::test_an_idle_batch_clears_the_mask_of_checkpoints",
    ),
    Harmless(
        "states_after_warm_up",
        "First requests look as if they would start from what warm-up left (hybrid models)",
        "0.5.11 to 0.5.19",
        "a request begins without reading its slot, whatever is in it",
        f"{TESTS}::test_a_new_request_does_not_see_what_is_in_its_state_slot",
    ),
    Harmless(
        "pipeline_stages_without_a_rule",
        "Pipeline stages look as if their default prefill graphs would answer wrongly",
        "0.5.15 to 0.5.18",
        "a stage has fewer attention layers than the model, and the test for ordinary attention turns them off",
        f"{TESTS}::test_a_pipeline_stage_captures_no_prefill_graph",
    ),
    Harmless(
        "draft_extend_metadata_twice",
        "EAGLE's draft-extend step prepares its lists twice",
        "0.5.16 to 0.5.23",
        "both make the same lists from the same buffers; it costs one small launch",
        "tests/releases/test_draft_extend_extent.py::test_a_prefix_alone_gets_its_new_tokens_where_that_is_asked_for",
    ),
    Harmless(
        "bucket_larger_than_context",
        "A prefill graph larger than the context looks as if it would answer wrongly",
        "0.5.11 to 0.5.16",
        "attention is a break: what it reads in that run goes nowhere, and a replay asks for the batch's own lengths",
        f"{TESTS}::test_a_graph_larger_than_the_context_is_right_for_several_requests",
    ),
    Harmless(
        "padding_routed_to_experts",
        "Padding in prefill graphs looks as if it would change what the experts answer",
        "0.5.11 to 0.5.15.post1",
        "the mask changes the experts of padded rows only; without it they cost time and count in expert statistics",
        f"{TESTS}::test_the_mask_of_padding_changes_the_experts_of_padded_rows_only",
    ),
    Harmless(
        "indexer_metadata_twice",
        "Hybrid models with an indexer look as if some layers would get another's metadata",
        "0.5.20 to 0.5.23",
        "layers with an indexer have full attention; the other definition would answer None for a draft's, whose ids "
        "are not in the list",
        f"{TESTS}::test_a_layer_with_an_indexer_gets_the_metadata_of_full_attention",
    ),
)
