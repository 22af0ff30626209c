# SPDX-License-Identifier: Apache-2.0
"""An attribute that is another one for a while: of an instance, a module of a model, or a class."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while; afterwards the owner's own value, or its class's, is back."""
    had_its_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had_its_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
