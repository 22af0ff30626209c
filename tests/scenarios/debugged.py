# SPDX-License-Identifier: Apache-2.0
"""The plugin's lines for debugging, which a server shows with --log-level debug, on standard error."""

from __future__ import annotations

import logging


def show() -> None:
    logger = logging.getLogger("sglang_bcg_fixes")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
