# SPDX-License-Identifier: Apache-2.0
"""Differences between releases of the two methods that fill the metadata, read from their source."""

from __future__ import annotations

import dataclasses
import re

from sglang_bcg_fixes.source.syntax import Definition, Drifted

BOUND_OR_CONTEXT = "seq_lens_cpu.max().item() if seq_lens_cpu is not None else self.max_context_len"


@dataclasses.dataclass(frozen=True)
class EagerRules:
    """Fields that differ between releases of init_forward_metadata."""

    # source of the slots that sliding-window layers write to: the pool, translated here, or made by this method
    window_locations: str


@dataclasses.dataclass(frozen=True)
class ReplayRules:
    """Fields that differ between releases of the method that runs before a replay."""

    # attribute that receives window locations, if this method fills them
    window_locations: str
    # set max_seq_len_k also for drafts with topk 1, where later releases no longer read it
    tells_bound: bool
    # with topk above 1, and for draft extend: use the context length when the host does not know the bound
    context_for_bound: bool
    # with topk above 1 verify never reads the host's lengths
    verify_bound_is_context: bool
    # spec_info attribute with the new tokens in version 1 of draft extend, if it exists
    accepted: str


def lines(method: Definition) -> set[str]:
    """Its statements, but for those that take several lines."""
    return {line.strip() for line in method.text.splitlines()}


def of_eager(method: Definition) -> EagerRules:
    given = "translate_loc_from_full_to_swa(forward_batch.out_cache_loc)"
    of_step = "swa_out_cache_loc = self._get_swa_write_locations(forward_batch)"
    ways = {
        "pool": not method.mentions("swa_out_cache_loc"),
        "translated": method.mentions(given) and not method.mentions(of_step),
        "step's, translated": method.mentions(of_step)
        and method.mentions("translate_loc_from_full_to_swa(swa_out_cache_loc)"),
        "step's": method.mentions(of_step) and "metadata.swa_out_cache_loc = swa_out_cache_loc" in lines(method),
    }
    found = [way for way, applies in ways.items() if applies]
    if len(found) != 1:
        raise Drifted(f"another way to find the slots of sliding windows in {method.where}")
    return EagerRules(found[0])


def of_replay(method: Definition) -> ReplayRules:
    written = re.search(r"self\.(\w+)\[:n\]\.copy_\(", method.text)
    if method.mentions("translate_loc_from_full_to_swa(out_cache_loc)") and not written:
        raise Drifted(f"another place for the slots of sliding windows in {method.where}")
    accepted = re.search(r"spec_info\.(num_accept\w*_tokens)\[:bs\]", method.text)
    return ReplayRules(
        window_locations=written[1] if written else "",
        tells_bound="metadata.max_seq_len_k = max_len + self.speculative_step_id + 1" in lines(method),
        # one mention is of topk 1, where every release since 0.5.15 does so
        context_for_bound=method.text.count(BOUND_OR_CONTEXT) > 1,
        verify_bound_is_context="metadata.max_seq_len_k = self.max_context_len" in lines(method),
        accepted=accepted[1] if accepted else "",
    )
