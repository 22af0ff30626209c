# SPDX-License-Identifier: Apache-2.0
"""Wrong answers after the first tokens with NGRAM speculation (hybrid models)

Symptom: Hybrid models (Qwen3.5, Qwen3-Next) with --speculative-algorithm NGRAM answer wrong after the first few tokens,
with HTTP 200: no recurrent layer sees more than the prompt and the tokens that are just being verified.
Cause: A verification leaves the state after each of its tokens aside, because only some of the tokens will be accepted.
Other algorithms then copy the state after the last accepted token to the request's slot. This one does not, so each
verification starts from the state after the prompt. Nor is a state saved for the prefix cache where the accepted tokens
pass a multiple of --mamba-track-interval, which the scheduler counts on with the extra-buffer strategy.
Change: Once it is known which tokens are accepted, their states are copied as for the other algorithms. Models without
recurrent layers are left alone.
Remove when: No release before 0.5.14 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import HYBRID, NGRAM
from sglang_bcg_fixes.model import Workaround
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, wrong

WORKER = "sglang.srt.speculative.ngram_worker:NGRAMWorker.forward_batch_generation"
VERIFY = "sglang.srt.speculative.ngram_info:NgramVerifyInput"
UPDATE = (
    "sglang.srt.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend.update_mamba_state_after_mtp_verify"
)


def probe(source: Source) -> Finding:
    work = source.need(WORKER)
    if "commit_mamba_states_after_verify" in work.calls:
        return fixed("the states of accepted tokens are kept after a verification", work)
    if work.mentions("mamba"):
        return drifted("states are kept", work)
    read = [work, source.need(f"{VERIFY}.verify"), source.need(f"{VERIFY}._fill_requests"), source.need(UPDATE)]
    return affected("no states are kept after a verification", *read)


def generate(original: Callable[..., Any], self: Any, batch: Any) -> Any:
    if batch.forward_mode.is_extend() or batch.forward_mode.is_idle() or self.model_runner.mambaish_config is None:
        return original(self, batch)
    slots = slots_for_cache(batch)
    before = batch.seq_lens.clone()
    result = original(self, batch)
    keep_states(self.model_runner, batch, before, slots)
    return result


def slots_for_cache(batch: Any) -> Any:
    """Name the slots that the prefix cache's next states go to, if any, and leave none to the verification."""
    import torch
    from sglang.srt.server_args import get_global_server_args

    # that of the prompt may be left
    batch.mamba_track_indices = batch.mamba_track_mask = batch.mamba_track_seqlens = None
    if not get_global_server_args().enable_mamba_extra_buffer():
        return None
    slots = [int(request.mamba_ping_pong_track_buffer[request.mamba_next_track_idx]) for request in batch.reqs]
    return torch.tensor(slots, dtype=torch.int64, device=batch.seq_lens.device)


def keep_states(runner: Any, batch: Any, before: Any, slots: Any) -> None:
    import torch
    from sglang.srt.server_args import get_global_server_args

    verified = batch.spec_info
    # accepted tokens of all requests, one request after another, by row of the verification
    rows = first_of(verified, "accept_indices", "accepted_indices").to(torch.int64)
    accepted = first_of(verified, "num_correct_drafts", "num_accepted_drafts").to(torch.int64) + 1
    offsets = torch.arange(len(accepted), device=rows.device) * verified.draft_token_num
    ends = accepted.cumsum(0)
    to_track = None
    if slots is not None:
        interval = get_global_server_args().mamba_track_interval
        boundary = (before + accepted) // interval * interval
        number = (boundary - before - 1).clamp(min=0)
        to_track = torch.where(boundary > before, rows[ends - accepted + number] - offsets, -1)
    # the names of these parameters differ between releases
    verifier(runner).update_mamba_state_after_mtp_verify(rows[ends - 1] - offsets, slots, to_track, runner.model)


def verifier(runner: Any) -> Any:
    """The backend that has verified: with two of them one may only prefill."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = runner.attn_backend
    choose = getattr(backend, "_select_backend", None)
    return choose(ForwardMode.TARGET_VERIFY) if choose else backend


def first_of(owner: Any, *names: str) -> Any:
    """The attribute of the first of these names, which differ between releases."""
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/26351",),
    probe=probe,
    patches=(PatchPoint((WORKER,), How.AROUND, generate),),
    workarounds=(
        Workaround(
            flags="(leave out) --speculative-algorithm NGRAM",
            option="--speculative-algorithm",
            effect="tokens are decoded one by one: correct, slower",
        ),
    ),
    verify=("qwen3_next_adaptive_speculation",),
    concerns=wrong(HYBRID, NGRAM),
)
