# SPDX-License-Identifier: Apache-2.0
"""The plugin's messages: logged, or printed until SGLang has set up logging."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("sglang_bcg_fixes")


def say(level: int, message: str) -> None:
    """Log, and make sure that it is seen: SGLang sets up logging only after it has loaded its plugins."""
    if logger.hasHandlers() and logger.isEnabledFor(level):
        logger.log(level, message)
    else:
        print(message, file=sys.stderr, flush=True)
