# SPDX-License-Identifier: Apache-2.0
"""Plugins of SGLang in the shapes that public ones have; each counts the calls that go through it."""

from __future__ import annotations

import collections

calls: collections.Counter[str] = collections.Counter()
