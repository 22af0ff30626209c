# SPDX-License-Identifier: Apache-2.0
"""The plugin's messages: logged, or printed until SGLang has set up logging."""

from __future__ import annotations

import logging
import sys
import traceback

logger = logging.getLogger("sglang_bcg_fixes")


def say(level: int, message: str, error: BaseException | None = None) -> None:
    """Log, and make sure that it is seen: SGLang sets up logging only after it has loaded its plugins."""
    # a logging configuration of the user's disables the loggers that were there before it
    if level < logging.INFO or (logger.hasHandlers() and not logger.disabled):
        logger.log(level, message, exc_info=error)
    else:
        trace = traceback.format_exception(error) if error else []
        print("\n".join([message, *trace]), file=sys.stderr, flush=True)
