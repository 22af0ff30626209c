# SPDX-License-Identifier: Apache-2.0
"""Imports the target and then the end of the circle, and uses that while it is imported itself."""

from sglang.srt import circle_end, target  # noqa: F401

USED = circle_end.end(1)
