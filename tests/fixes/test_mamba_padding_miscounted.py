"""Which rows of a replayed batch hybrid models take for padding: real backends, as the decode runner calls them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes
from tests.wheels import NEWEST

GUESSED_FOR_ALL = ("0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1")
GUESSED_FOR_LIGHTNING = ("0.5.14", "0.5.15", "0.5.15.post1", "0.5.16")
HANDED_DOWN = ("0.5.17", NEWEST)

CODE = """
import json, types
from cpu_sglang import stand_ins
stand_ins.install()
import torch
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend, MambaAttnBackendBase
from sglang.srt.layers.attention.linear.lightning_backend import LightningAttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

DRAFTS, ROWS = 4, 4
states = types.SimpleNamespace(enable_linear_replayssm=False)
pool = types.SimpleNamespace(
    get_mamba_indices=lambda rows: rows.to(torch.int32) + 100,
    translate_mamba_indices=lambda indices: indices,
    mamba_pool=states)

def verify(requests):
    drafts = torch.zeros(requests * DRAFTS, dtype=torch.int64)
    return types.SimpleNamespace(draft_token=drafts, draft_token_num=DRAFTS, ragged_verify_layout=None)

def prepare(family, mode, lengths, spec_info):
    "State slots and where each row's tokens start, of a batch that is padded to ROWS as the decode runner does it."
    backend = family.__new__(family)
    vars(backend).update(pad_slot_id=-1, device="cpu", req_to_token_pool=pool, topk=1, state_indices_list=[],
        query_start_loc_list=[], retrieve_next_token_list=[], retrieve_next_sibling_list=[],
        retrieve_parent_token_list=[], _fused_state_indices_ok=False)
    backend.init_cuda_graph_state(ROWS, ROWS * DRAFTS)
    padding = ROWS - len(lengths)
    view = types.SimpleNamespace(
        batch_size=ROWS, forward_mode=mode, spec_info=spec_info, num_padding=padding, mamba_track_indices=None,
        req_pool_indices=torch.tensor([*range(1, len(lengths) + 1), *[0] * padding]),
        seq_lens=torch.tensor([*lengths, *[1] * padding]), seq_lens_cpu=torch.tensor([*lengths, *[1] * padding]))
    if hasattr(backend, "init_forward_metadata_replay_cuda_graph"):
        backend.init_forward_metadata_replay_cuda_graph(ROWS, view.req_pool_indices, view.seq_lens, 0, None, mode,
            spec_info, view.seq_lens_cpu)
    else:
        backend.init_forward_metadata_out_graph(view)
    found = backend.forward_metadata
    return [found.mamba_cache_indices.tolist(), found.query_start_loc.tolist(), view.req_pool_indices.tolist()]

VERIFY, DECODE = ForwardMode.TARGET_VERIFY, ForwardMode.DECODE
found = {family.__name__: {
    "one of length one": prepare(family, VERIFY, [9, 1, 9, 9], verify(4)),
    "all of length one": prepare(family, VERIFY, [1, 1, 1, 1], verify(4)),
    "one of length one, padded": prepare(family, VERIFY, [1, 9], verify(2)),
    "padded": prepare(family, VERIFY, [9, 8, 7], verify(3)),
    "no request": prepare(family, VERIFY, [], verify(0)),
    "decode": prepare(family, DECODE, [9, 8, 7], None),
} for family in (MambaAttnBackendBase, Mamba2AttnBackend, LightningAttentionBackend)}
found["touched"] = [family.__name__ for family in (MambaAttnBackendBase, LightningAttentionBackend)
    if hasattr(vars(family).get("_replay_metadata"), "__bcg_fix__")]
print("RESULT", json.dumps(found))
"""


def rows(real: int, tokens: int = 4) -> list[list[int]]:
    """The first rows have their own slots, tokens and requests, the others nobody's."""
    padding = 4 - real
    starts = [min(row, real) * tokens for row in range(5)]
    requests = [*range(1, real + 1), *[0] * padding]
    return [[request + 100 if request else -1 for request in requests], starts, requests]


RIGHT = {
    "one of length one": rows(4),
    "all of length one": rows(4),
    "one of length one, padded": rows(2),
    "padded": rows(3),
    "no request": rows(0),
    "decode": rows(3, tokens=1),
}
# one real request is lost for each that has length 1
GUESSED = RIGHT | {
    "one of length one": rows(3),
    "all of length one": rows(0),
    "one of length one, padded": rows(1),
}
FAMILIES = ("MambaAttnBackendBase", "Mamba2AttnBackend", "LightningAttentionBackend")


@pytest.fixture
def run(release_root: Callable[[str], pathlib.Path]) -> Callable[[str, str], dict]:
    def run(release: str, flag: str) -> dict:
        only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_MAMBA_PADDING_MISCOUNTED": flag}
        return processes.beside(release_root(release), "-c", CODE, **only)[0]

    return run


@pytest.mark.parametrize("release", (*GUESSED_FOR_ALL, *GUESSED_FOR_LIGHTNING))
def test_without_the_fix_a_request_of_length_one_costs_the_last_one_its_state(
    run: Callable[[str, str], dict], release: str
) -> None:
    guessed = FAMILIES if release in GUESSED_FOR_ALL else FAMILIES[-1:]
    expected = {family: GUESSED if family in guessed else RIGHT for family in FAMILIES}
    assert run(release, "off") == {**expected, "touched": []}


@pytest.mark.parametrize("release", (*GUESSED_FOR_ALL, *GUESSED_FOR_LIGHTNING, *HANDED_DOWN))
def test_with_the_fix_requests_keep_their_state_and_padded_rows_have_none(
    run: Callable[[str, str], dict], release: str
) -> None:
    shared, lightning = release in GUESSED_FOR_ALL, release in GUESSED_FOR_LIGHTNING
    touched = FAMILIES[:1] if shared else FAMILIES[-1:] if lightning else ()
    assert run(release, "on") == {**dict.fromkeys(FAMILIES, RIGHT), "touched": list(touched)}
