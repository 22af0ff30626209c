# SPDX-License-Identifier: Apache-2.0
"""Known faults of an installation: SGLang's own source is right, and what pip put next to it is not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from sglang_bcg_fixes.source.tree import Source

Versions = Callable[[str], str | None]

# from this release on LayerRepository refuses what transformers 5.6 hands it: neither a revision nor a version
KERNELS_THAT_REFUSE = (0, 15)


@dataclasses.dataclass(frozen=True)
class InstallationFault:
    """One fault; `check` says in one sentence why it concerns an installation, or None.

    `versions` gives the installed version of a distribution, or None where it is not installed: then the answer is
    about what a fresh `pip install` would pick.
    """

    id: str
    title: str
    cause: str
    remedy: str
    check: Callable[[Source, Versions], str | None]


def check_all(source: Source, versions: Versions) -> list[tuple[InstallationFault, str]]:
    """The faults that concern this source, each with the reason."""
    return [(fault, reason) for fault in FAULTS if (reason := fault.check(source, versions))]


def kernels_unbounded(source: Source, versions: Versions) -> str | None:
    wanted = requirement(source, "kernels")
    if wanted is None or "<" in wanted or "==" in wanted:
        return None
    if not (requirement(source, "transformers") or "").startswith("==5.6."):
        return None
    have, beside = versions("kernels"), versions("transformers")
    # SGLang installed without kernels asks for them where it needs them
    if beside is not None and (have is None or not beside.startswith("5.6.")):
        return None
    if have is None:
        return "it asks for kernels without an upper bound, and pip picks one that transformers 5.6 cannot work with"
    if release(have) >= KERNELS_THAT_REFUSE:
        return f"kernels {have} is installed, which transformers 5.6 cannot work with"
    return None


def requirement(source: Source, name: str) -> str | None:
    """SGLang's requirement on a distribution: "" for any version, None if it has none."""
    metadata = source.text(f"sglang-{source.version}.dist-info/METADATA") or ""
    found = re.search(rf"^Requires-Dist: {re.escape(name)}(?![\w.-]) *([^;\n]*)(;.*)?$", metadata, re.MULTILINE)
    return found.group(1).strip() if found and "extra ==" not in (found.group(2) or "") else None


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, enough to tell releases apart: "0.17.2rc1" is (0, 17, 2)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


FAULTS = (
    InstallationFault(
        id="kernels_unbounded",
        title='import sglang fails with "Either a revision or a version must be specified"',
        cause="SGLang asks for kernels without an upper bound; transformers 5.6 fails with kernels 0.15 and later",
        remedy='pip install "kernels<0.13"',
        check=kernels_unbounded,
    ),
)
