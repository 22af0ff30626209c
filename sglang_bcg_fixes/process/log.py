# SPDX-License-Identifier: Apache-2.0
"""The plugin's messages: logged, or printed until SGLang has set up logging."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from typing import NoReturn

from sglang_bcg_fixes.process import procfs

logger = logging.getLogger("sglang_bcg_fixes")


# the title of the process that starts the schedulers of --dp-size
CONTROLLER = "data_parallel_controller"


def refuse(message: str, error: BaseException | None = None) -> NoReturn:
    """End this process and say why, with a SystemExit: SGLang swallows some Exceptions.

    SGLang's controller of data parallel schedulers waits forever for one that has left, so it is ended as SGLang ends
    it where a scheduler fails.
    """
    parent = os.getppid()
    if procfs.title(parent) == CONTROLLER:
        say(logging.ERROR, message)
        os.kill(parent, signal.SIGQUIT)
    raise SystemExit(message) from error


def say(level: int, message: str, error: BaseException | None = None) -> None:
    """Log, and make sure that it is seen: SGLang sets up logging only after it has loaded its plugins."""
    # a logging configuration of the user's disables the loggers that were there before it
    if level < logging.INFO or (logger.hasHandlers() and not logger.disabled):
        logger.log(level, message, exc_info=error)
    else:
        trace = traceback.format_exception(error) if error else []
        print("\n".join([message, *trace]), file=sys.stderr, flush=True)
