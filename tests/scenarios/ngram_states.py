# SPDX-License-Identifier: Apache-2.0
"""N-gram speculation by the real worker, its verification and the states' update, for a model that is a recurrence.

The next token depends on all tokens before it, through the one number that is the state. Trees of drafts hold a wrong
token beside the right one, and end with one that is right for some requests.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from cpu_sglang import one_batch
from tests.scenarios import telling

PROMPTS = [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1]
VOCABULARY, TOKENS, INTERVAL = 97, 20, 8
# each draft's parent, of which the first is the last token so far
PARENTS = (-1, 0, 0, 2)
NUMBER = len(PARENTS)


def after(state: int, token: int) -> int:
    return (31 * state + token + 1) % VOCABULARY


def state_of(tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        state = after(state, token)
    return state


class Request:
    """The part of a request that a verification reads and writes."""

    def __init__(self, number: int, prompt: list[int]) -> None:
        self.tokens, self.output_ids = [*prompt], [state_of(prompt)]
        self.rid = str(number)
        self.grammar = None
        self.require_reasoning = self.is_retracted = False
        self.spec_verify_ct = self.spec_num_correct_drafts = self.spec_accepted_drafts = 0
        self.kv_committed_len = self.kv_allocated_len = len(prompt)
        # slots of the pool: one of its own, and one for the prefix cache
        self.mamba_next_track_idx = 0
        self.mamba_ping_pong_track_buffer = torch.tensor([2 * number + 2])

    def finished(self) -> bool:
        return len(self.output_ids) >= TOKENS

    def sequence(self) -> list[int]:
        return [*self.tokens, *self.output_ids]

    def update_finish_state(self) -> None: ...

    check_finished = update_finish_state

    def update_spec_correct_drafts_histogram(self, number: int) -> None: ...

    update_spec_acceptance_histogram = update_spec_correct_drafts_histogram


class Model:
    """The recurrence, its pool of states, and the drafts for it."""

    mambaish_config = object()
    model = None

    def __init__(self, is_divided: bool) -> None:
        from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

        slots = 2 * len(PROMPTS) + 1
        self.states = torch.zeros(1, slots, 1, dtype=torch.int64)
        aside = torch.zeros(1, len(PROMPTS), NUMBER, 1, dtype=torch.int64)
        caches = SimpleNamespace(
            temporal=self.states,
            intermediate_ssm=aside,
            conv=[torch.zeros_like(self.states)],
            intermediate_conv_window=[torch.zeros_like(aside)],
        )
        self.aside = aside
        self.slots = torch.arange(1, slots, 2)
        for slot, prompt in zip(self.slots.tolist(), PROMPTS, strict=True):
            self.states[0, slot, 0] = state_of(prompt)
        self.attn_backend: Any = object.__new__(HybridLinearAttnBackend)
        self.attn_backend.linear_attn_backend = SimpleNamespace(
            forward_metadata=SimpleNamespace(mamba_cache_indices=self.slots),
            req_to_token_pool=SimpleNamespace(get_speculative_mamba2_params_all_layers=lambda: caches),
        )
        if is_divided:
            # another backend prefills
            both: Any = object.__new__(HybridAttnBackend)
            both.decode_backend, both.prefill_backend = self.attn_backend, None
            options = SimpleNamespace(speculative_attention_mode="decode")
            both.model_runner = SimpleNamespace(server_args=options)
            self.attn_backend = both

    def drafts(self, request: Request, number: int) -> list[int]:
        """The last token; a wrong draft, the right one, and one after it that is right in every other step."""
        tokens = request.sequence()
        right = state_of(tokens)
        second = state_of([*tokens, right])
        is_right = (len(tokens) + number) % 2
        return [tokens[-1], (right + 1) % VOCABULARY, right, second if is_right else (second + 1) % VOCABULARY]

    def forward_batch_generation(self, batch: Any, is_verify: bool) -> Any:
        rows = batch.spec_info.draft_token.view(-1, NUMBER).tolist()
        logits = torch.zeros(len(rows) * NUMBER, VOCABULARY)
        for number, tokens in enumerate(rows):
            reached: list[int] = []
            for row, (parent, token) in enumerate(zip(PARENTS, tokens, strict=True)):
                before = int(self.states[0, self.slots[number], 0]) if parent < 0 else reached[parent]
                reached.append(after(before, token))
                logits[number * NUMBER + row, reached[-1]] = 1
            self.aside[0, number, :, 0] = torch.tensor(reached)
        output = SimpleNamespace(next_token_logits=logits, hidden_states=None)
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=False)


def generate() -> list[dict[str, Any]]:
    return [request for is_divided in (False, True) for request in generate_with(is_divided)]


def generate_with(is_divided: bool) -> list[dict[str, Any]]:
    """Tokens of each request next to the recurrence's own, and the state that is there for the prefix cache."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    model = Model(is_divided)
    worker: Any = object.__new__(NGRAMWorker)
    worker.target_worker, worker.model_runner, worker.page_size = model, model, 1
    worker.draft_token_num = NUMBER
    worker._update_ngram_corpus = lambda batch: None
    worker.ngram_corpus = SimpleNamespace(erase_match_state=lambda names: None)
    requests = [Request(number, prompt) for number, prompt in enumerate(PROMPTS)]
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    batch = SimpleNamespace(
        reqs=requests,
        forward_mode=ForwardMode.DECODE,
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=torch.arange(len(requests) * NUMBER),
        has_grammar=False,
        return_logprob=False,
        sampling_info=Greedy(),
        token_to_kv_pool_allocator=SimpleNamespace(free=lambda slots: None),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, 1)),
        req_pool_indices=torch.arange(len(requests)),
        model_config=SimpleNamespace(think_end_id=None),
        batch_size=lambda: len(requests),
        # what a prompt has left
        mamba_track_indices=None,
        mamba_track_mask=torch.ones(len(requests)),
        mamba_track_seqlens=torch.ones(len(requests)),
    )
    batch.get_model_worker_batch = lambda: batch
    cached: list[dict[int, int]] = [{} for _ in requests]

    def prepare(batch: Any) -> None:
        tokens = [token for number, request in enumerate(requests) for token in model.drafts(request, number)]
        rows = torch.arange(len(tokens)).view(-1, NUMBER)
        following, beside = (
            torch.tensor([[2, -1, 3, -1]] * len(requests)),
            torch.tensor([[-1, -1, 1, -1]] * len(requests)),
        )
        batch.out_cache_loc = torch.arange(len(tokens))
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec_info = NgramVerifyInput(
            torch.tensor(tokens), torch.ones(1), torch.zeros(1), rows, following, beside, NUMBER
        )

    worker._prepare_for_speculative_decoding = prepare
    while not any(request.finished() for request in requests):
        NGRAMWorker.forward_batch_generation(worker, batch)
        for number, (request, kept) in enumerate(zip(requests, cached, strict=True)):
            kept[len(request.sequence()) - 1] = int(model.states[0, 2 * number + 2, 0])
    return [
        {
            "right": request.output_ids == expected(request),
            "wrongly cached": [
                length for length, state in kept.items() if state != at_boundary(request, length, len(request.tokens))
            ],
        }
        for request, kept in zip(requests, cached, strict=True)
    ]


def expected(request: Request) -> list[int]:
    tokens = [*request.tokens]
    for _ in request.output_ids:
        tokens.append(state_of(tokens))
    return tokens[len(request.tokens) :]


def at_boundary(request: Request, length: int, prompt: int) -> int:
    """The state after as many tokens as the last multiple of the interval that was passed since the prompt."""
    boundary = length // INTERVAL * INTERVAL
    return state_of((request.tokens + expected(request))[:boundary]) if boundary > prompt else 0


class Greedy:
    """Sampling of the likeliest token."""

    has_custom_logit_processor = False
    penalizer_orchestrator = SimpleNamespace(is_required=False)
    logit_bias = None
    is_all_greedy = True

    def __len__(self) -> int:
        return len(PROMPTS)


def verify_tree(
    predicts: Any, accept_index: Any, accept_token_num: Any, candidates: Any, target_predict: Any, **tree: Any
) -> None:
    """Walk each request's tree of drafts, as the CUDA kernel does."""
    for number, rows in enumerate(tree["retrive_index"].tolist()):
        here, accepted = 0, [rows[0]]
        while True:
            child, wanted = int(tree["retrive_next_token"][number, here]), int(target_predict[number, here])
            predicts[rows[here]] = wanted
            while child >= 0 and int(candidates[number, child]) != wanted:
                child = int(tree["retrive_next_sibling"][number, child])
            if child < 0:
                break
            accepted.append(rows[child])
            here = child
        accept_index[number, : len(accepted)] = torch.tensor(accepted)
        accept_token_num[number] = len(accepted) - 1


def scatter(to: Any, states: Any, slots: Any, steps: Any) -> None:
    for number, (slot, step) in enumerate(zip(slots.tolist(), steps.tolist(), strict=True)):
        if step >= 0:
            to[:, slot] = states[:, number, step]


class NoKernel:
    """A Triton kernel that writes what nobody reads here."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_: None


def main() -> None:
    one_batch.import_sglang()
    one_batch.load_plugins()
    backends: Any = importlib.import_module("sglang.srt.layers.attention.hybrid_linear_attn_backend")
    backends.fused_mamba_state_scatter_with_mask = scatter
    info: Any = importlib.import_module("sglang.srt.speculative.ngram_info")
    info.verify_tree_greedy, info.assign_req_to_token_pool = verify_tree, NoKernel()
    worker: Any = importlib.import_module("sglang.srt.speculative.ngram_worker")
    worker.set_time_batch = lambda *_, **__: None
    arguments: Any = importlib.import_module("sglang.srt.server_args")
    arguments._global_server_args = SimpleNamespace(
        enable_mamba_extra_buffer=lambda: True, mamba_track_interval=INTERVAL
    )
    telling.with_and_without(generate)


if __name__ == "__main__":
    main()
