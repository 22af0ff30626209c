# SPDX-License-Identifier: Apache-2.0
"""The two fixes of the draft model's extend step: probes on drifted sources, and bodies at their edges."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.engine.wrappers import wrap
from sglang_bcg_fixes.fixes import draft_extend_cache_extent as extent
from sglang_bcg_fixes.fixes import draft_extend_prefix_only as prefix_only
from sglang_bcg_fixes.flags import read
from sglang_bcg_fixes.model import Action, How
from sglang_bcg_fixes.planning.plan import ask, decide
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import wheels
from tests.fixes import alone
from tests.wheels import NEWEST

TRITON = "sglang/srt/layers/attention/triton_backend.py"
FLASH = "sglang/srt/layers/attention/flashattention_backend.py"
SPECULATIVE = "sglang/srt/speculative"
RUNNER = f"{SPECULATIVE}/eagle_draft_extend_cuda_graph_runner.py"

DRIFTED = {
    "the prefix is computed in another way": (NEWEST, TRITON, "seq_lens - extend_seq_lens", "seq_lens - new_lens"),
    "the rows are laid out in another way": ("0.5.16", TRITON, "* num_tokens_per_req + 1", "* num_tokens_per_req + 2"),
    "capture reads the lengths": (
        "0.5.12",
        TRITON,
        "kv_indptr = self.kv_indptr[: bs + 1]",
        "kv_indptr = extend_seq_lens_tensor",
    ),
    "the runner notes no lengths": ("0.5.11", RUNNER, "spec_info.extend_seq_lens_tensor", "spec_info.extend_lens"),
    "positions are counted on from seq_lens": (
        "0.5.12.post1",
        f"{SPECULATIVE}/spec_utils.py",
        "seq_length - accept_len + offsets",
        "seq_length + offsets",
    ),
}


@pytest.mark.parametrize("drift", DRIFTED)
def test_a_backend_that_drifted_is_unknown(drift: str) -> None:
    assert alone.asked(declared_in(extent), *DRIFTED[drift]).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    "change",
    [
        (FLASH, "seqlens_in_batch = forward_batch.seq_lens\n", "seqlens_in_batch = whole_lengths(forward_batch)\n"),
        (RUNNER, "forward_batch.seq_lens,\n", "whole_lengths(forward_batch),\n"),
    ],
)
def test_a_release_that_counts_by_itself_is_unknown(change: tuple[str, str, str]) -> None:
    assert alone.asked(declared_in(prefix_only), NEWEST, *change).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("value", "action"), [(None, Action.NOT_NEEDED), ("auto", Action.NOT_NEEDED), ("on", Action.APPLY)]
)
def test_a_prefix_alone_is_looked_for_only_on_request(value: str | None, action: Action) -> None:
    fix = declared_in(prefix_only)
    settings = read([fix], [], {fix.flag: value} if value else {})
    decision = decide(fix, settings.fixes[fix.id], ask(fix, Source(Folder(wheels.unpacked(NEWEST)))))
    assert decision.action is action


class Mode:
    """SGLang's ForwardMode, as far as the bodies ask it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_draft_extend(self, include_v2: bool = False) -> bool:
        return self.name == "DRAFT_EXTEND" or (include_v2 and self.is_draft_extend_v2())

    def is_draft_extend_v2(self) -> bool:
        return self.name == "DRAFT_EXTEND_V2"


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Backend:
    """The part of the Triton backend that the bodies use; its originals note their arguments."""

    speculative_num_steps = 3

    def __init__(self) -> None:
        self.qo_indptr = torch.zeros(9, dtype=torch.int64)
        self.forward_metadata = SimpleNamespace(max_extend_len=None, qo_indptr=self.qo_indptr)
        self.handed: Any = None

    def capture(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Any,
        seq_lens: torch.Tensor,
        encoder_lens: Any,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        self.handed = seq_lens

    def replay(
        self,
        bs: int,
        req_pool_indices: Any,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        encoder_lens: Any,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Any,
    ) -> None:
        self.handed = seq_lens

    def eager(self, forward_batch: Any) -> None:
        self.handed = forward_batch.seq_lens
        if forward_batch.fails:
            raise ValueError("from the original")


CAPTURE: dict[str, Any] = {"bs": 3, "num_tokens": 12, "req_pool_indices": None, "seq_lens": None, "encoder_lens": None}
REPLAY: dict[str, Any] = {"bs": 3, "req_pool_indices": None, "seq_lens": None, "seq_lens_sum": 0, "encoder_lens": None}


def call(way: str, backend: Backend, mode: str, by_keyword: bool, lengths: torch.Tensor, **spec_info: Any) -> None:
    wrapped = wrap(getattr(Backend, way), How.AROUND, getattr(extent, f"{way}_prefix_alone"))
    arguments = CAPTURE if way == "capture" else REPLAY
    arguments = arguments | {"seq_lens": lengths, "forward_mode": Mode(mode), "spec_info": SimpleNamespace(**spec_info)}
    if way == "replay":
        arguments["seq_lens_cpu"] = None
    if by_keyword:
        wrapped(backend, **arguments)
    else:
        wrapped(backend, *arguments.values())


@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("way", ["capture", "replay"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_prefix_is_what_is_left_of_the_length(way: str, by_keyword: bool, dtype: torch.dtype) -> None:
    backend, lengths = Backend(), torch.tensor([24, 9, 1, 7], dtype=dtype)
    call(way, backend, "DRAFT_EXTEND_V2", by_keyword, lengths, extend_seq_lens_tensor=int32(4, 2, 4, 4))
    # the buffers of a graph have more rows than this batch, and the last of its rows is padding
    assert backend.handed.tolist() == [20, 7, 0] and backend.handed.dtype is dtype
    assert backend.qo_indptr.tolist() == [0, 4, 6, 10, 0, 0, 0, 0, 0]
    assert lengths.tolist() == [24, 9, 1, 7], "the caller's buffer is read again by the next step"
    assert backend.forward_metadata.max_extend_len == (4 if way == "capture" else None)


@pytest.mark.parametrize("way", ["capture", "replay"])
def test_rows_are_full_where_nothing_is_noted(way: str) -> None:
    backend = Backend()
    call(way, backend, "DRAFT_EXTEND", True, int32(24, 9, 1))
    assert backend.handed.tolist() == [20, 5, 0] and backend.qo_indptr.tolist()[:4] == [0, 4, 8, 12]


@pytest.mark.parametrize("way", ["capture", "replay"])
@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
def test_other_modes_are_left_as_they_are(way: str, mode: str) -> None:
    backend, lengths = Backend(), int32(24, 9, 1)
    call(way, backend, mode, True, lengths, extend_seq_lens_tensor=int32(4, 4, 4))
    assert backend.handed is lengths and not backend.qo_indptr.any()


@pytest.mark.parametrize("fails", [False, True])
def test_an_eager_batch_has_its_own_lengths_back(fails: bool) -> None:
    lengths = torch.tensor([22, 9])
    batch = SimpleNamespace(
        forward_mode=Mode("DRAFT_EXTEND"), seq_lens=lengths, extend_seq_lens=int32(2, 4), fails=fails
    )
    backend = Backend()
    with pytest.raises(ValueError, match="from the original") if fails else contextlib.nullcontext():
        extent.eager_prefix_alone(Backend.eager, backend, batch)
    assert backend.handed.tolist() == [20, 5] and batch.seq_lens is lengths


@pytest.mark.parametrize("mode", ["DRAFT_EXTEND_V2", "EXTEND"])
def test_an_eager_batch_of_another_mode_is_left_as_it_is(mode: str) -> None:
    lengths = torch.tensor([24, 9])
    backend, batch = Backend(), SimpleNamespace(forward_mode=Mode(mode), seq_lens=lengths, fails=False)
    extent.eager_prefix_alone(Backend.eager, backend, batch)
    assert backend.handed is lengths


@pytest.mark.parametrize(
    ("mode", "rows"), [("DRAFT_EXTEND", 6), ("DRAFT_EXTEND", 8), ("DRAFT_EXTEND", 0), ("DRAFT_EXTEND_V2", 8)]
)
def test_rows_of_nobody_are_zero(mode: str, rows: int) -> None:
    backend, output = Backend(), torch.full((8, 2), torch.nan)
    backend.forward_metadata.qo_indptr = torch.tensor([0, min(rows, 2), rows])
    batch, unread = SimpleNamespace(forward_mode=Mode(mode)), torch.empty(0)
    written = extent.zero_rows_of_nobody(lambda *_, **__: output, backend, unread, None, None, None, batch, sinks=None)
    assert written is output and output.isnan().all(1).tolist() == [row < rows for row in range(8)]


def batch_of(seq_lens: torch.Tensor, **changes: Any) -> SimpleNamespace:
    """Two requests with 20 and 5 tokens before their 4 new ones."""
    batch = {
        "forward_mode": Mode("DRAFT_EXTEND_V2"),
        "seq_lens": seq_lens,
        "seq_lens_cpu": seq_lens.clone(),
        "seq_lens_sum": int(seq_lens.sum()),
        "extend_prefix_lens": int32(20, 5),
        "extend_prefix_lens_cpu": [20, 5],
        "extend_seq_lens": int32(4, 4),
        "extend_seq_lens_cpu": [4, 4],
    }
    return SimpleNamespace(**batch | changes)


def lengths_during(batch: SimpleNamespace, nested: int = 1) -> list[Any]:
    """Lengths that a method under so many patches sees in the batch, which is unchanged afterwards."""
    before, seen = dict(vars(batch)), list[Any]()

    def original(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
        assert in_capture
        lengths = [getattr(forward_batch, name) for name in ("seq_lens", "seq_lens_cpu", "seq_lens_sum")]
        seen.extend(value.tolist() if isinstance(value, torch.Tensor) else value for value in lengths)

    for _ in range(nested):
        original = wrap(original, How.AROUND, prefix_only.count_new_tokens)
    original(None, batch, in_capture=True)
    assert all(value is before[name] for name, value in vars(batch).items())
    return seen


@pytest.mark.parametrize("nested", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_new_tokens_are_added_to_a_prefix_and_to_nothing_else(nested: int, dtype: torch.dtype) -> None:
    prefix, whole = torch.tensor([20, 5], dtype=dtype), torch.tensor([24, 9], dtype=dtype)
    assert lengths_during(batch_of(prefix), nested) == [[24, 9], [24, 9], 33]
    assert lengths_during(batch_of(whole), nested) == [[24, 9], [24, 9], 33]
    # a row may have no new token, and a graph's buffers may have more rows
    assert lengths_during(batch_of(torch.tensor([20, 9, 1, 1], dtype=dtype)), nested) == [[24, 9, 1, 1]] * 2 + [35]
    none = {"extend_seq_lens": int32(0, 4), "extend_seq_lens_cpu": [0, 4]}
    assert lengths_during(batch_of(prefix, **none), nested) == [[20, 9], [20, 9], 29]
    # front tokens: the second prefix is shorter than they are, and passed as 0
    front: dict[str, Any] = {"extend_prefix_lens": int32(18, 0), "extend_seq_lens": int32(6, 6)}
    front |= {"extend_prefix_lens_cpu": [18, 0], "extend_seq_lens_cpu": [6, 6]}
    assert lengths_during(batch_of(torch.tensor([24, 5], dtype=dtype), **front), nested) == [[24, 5], [24, 5], 29]


def test_a_batch_without_lengths_on_the_host_stays_without() -> None:
    assert lengths_during(batch_of(int32(20, 5), seq_lens_cpu=None, seq_lens_sum=None)) == [[24, 9], None, None]


@pytest.mark.parametrize(
    "changes", [{"forward_mode": Mode("DECODE")}, {"extend_prefix_lens": None}, {"extend_seq_lens": None}]
)
def test_without_a_prefix_to_compare_with_nothing_is_added(changes: dict[str, Any]) -> None:
    assert lengths_during(batch_of(int32(20, 5), **changes)) == [[20, 5], [20, 5], 25]


def test_half_known_lengths_are_left_as_they_are_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    prefix_only.warn.cache_clear()
    for _ in range(2):
        assert lengths_during(batch_of(int32(20, 5), extend_prefix_lens_cpu=None)) == [[20, 5], [20, 5], 25]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{declared_in(prefix_only).flag}=off" in caplog.text and "extend_prefix_lens_cpu" in caplog.text


def test_a_failure_leaves_the_batch_as_it_was_passed() -> None:
    prefix = int32(20, 5)
    batch = batch_of(prefix)

    def original(self: Any, forward_batch: Any) -> None:
        raise ValueError("from the original")

    for body in (prefix_only.count_new_tokens, prefix_only.count_new_tokens_in_graph):
        with pytest.raises(ValueError, match="from the original"):
            body(original, None, batch)
        assert batch.seq_lens is prefix and batch.seq_lens_sum == 25
