# SPDX-License-Identifier: Apache-2.0
"""Differences between releases of the two methods, by the form of their source."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EagerForm:
    """Fields that differ between releases of init_forward_metadata."""

    # source of the slots that sliding-window layers write to: the pool, translated here, or made by this method
    window_locations: str = "translated"


@dataclasses.dataclass(frozen=True)
class ReplayForm:
    """Fields that differ between releases of the method that runs before a replay."""

    # attribute that receives window locations, if this method fills them
    window_locations: str = ""
    # set max_seq_len_k also for drafts with topk 1, where later releases no longer read it
    tells_bound: bool = False
    # with topk above 1, and for draft extend: use the context length when the host does not know the bound
    context_for_bound: bool = False
    # with topk above 1 verify never reads the host's lengths
    verify_bound_is_context: bool = False
    # spec_info attribute with the new tokens in version 1 of draft extend, if it exists
    accepted: str = ""


EAGER_FORMS = {
    "5a19856dae3d": EagerForm(window_locations="pool"),
    "79a922a5fb86": EagerForm(),
    "099edda70396": EagerForm(),
    "cf54eaeb69cd": EagerForm(),
    "c3cac1f7d2fd": EagerForm(),
    "239bbd08b241": EagerForm(),
    "b3983820819f": EagerForm(),
    "49993970c966": EagerForm(),
    "98e384b52bb3": EagerForm(window_locations="step's, translated"),
    "7a930b2b84d6": EagerForm(window_locations="step's"),
}
LATE = ReplayForm(context_for_bound=True, verify_bound_is_context=True)
REPLAY_FORMS = {
    "5d549a8d9ac9": ReplayForm(tells_bound=True, accepted="num_accepted_tokens"),
    "ea1beb34fbf6": ReplayForm(tells_bound=True, accepted="num_accept_tokens"),
    "ae8827d92958": ReplayForm("swa_out_cache_loc_buf", tells_bound=True, accepted="num_accept_tokens"),
    "80d23d660c6f": ReplayForm("swa_out_cache_loc_buf", tells_bound=True),
    "2df20bdc65e8": ReplayForm("swa_out_cache_loc_buf"),
    "dd2219cbb79d": dataclasses.replace(LATE, window_locations="swa_out_cache_loc_buf"),
    "cc9fb3a43d70": dataclasses.replace(LATE, window_locations="swa_out_cache_loc_buf"),
    "f97575dee6f4": dataclasses.replace(LATE, window_locations="cuda_graph_swa_out_cache_loc"),
    "c4331e951e58": LATE,
    "2186d2cc3756": LATE,
    "5860847f2465": LATE,
}
