# SPDX-License-Identifier: Apache-2.0
"""Hooks of the entry-point group `sglang_bcg_fixes`, through which packages contribute data."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from sglang_bcg_fixes.model import Fix, Kernel, Retired

PROJECT = "sglang_bcg_fixes"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def bcg_fixes() -> Sequence[Fix]:  # type: ignore[empty-body]
    """The defects that this package knows, with or without a fix."""


@hookspec
def bcg_kernels() -> Sequence[Kernel]:  # type: ignore[empty-body]
    """The operations that this package implements."""


@hookspec
def bcg_retired_flags() -> Sequence[Retired]:  # type: ignore[empty-body]
    """The flags that this package had: a server with one warns, and starts until the version that refuses it."""
