# SPDX-License-Identifier: Apache-2.0
"""Operations with several implementations: a folder each, with one in plain torch, triton.py and cuda.py."""

from __future__ import annotations

import importlib.machinery

from sglang_bcg_fixes.model import Accepted, Rejected


def has_triton() -> Accepted | Rejected:
    if importlib.machinery.PathFinder.find_spec("triton"):
        return Accepted()
    return Rejected("triton is not installed; SGLang's own requirements bring it")
