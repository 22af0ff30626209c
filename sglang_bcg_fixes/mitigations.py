"""Ways round the defects with SGLang's own flags, shared by the fixes that need the same one."""

from __future__ import annotations

from sglang_bcg_fixes.model import Mitigation

# where a release knows both names the newer one comes first: the older is deprecated there
PREFILL_GRAPHS_OFF = (
    Mitigation(
        flags="--cuda-graph-backend-prefill disabled",
        option="--cuda-graph-backend-prefill",
        effect="prefill runs eagerly: right, and slower on short prompts",
    ),
    Mitigation(
        flags="(leave out) --enable-breakable-cuda-graph",
        option="--enable-breakable-cuda-graph",
        effect="breakable graphs are off by default in this release",
    ),
)
