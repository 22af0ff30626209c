# SPDX-License-Identifier: Apache-2.0
"""The entry of a module of scenarios: its first argument names the function that is run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def run(module: Mapping[str, Any]) -> None:
    """Call the function of this name with the other arguments, and print what it gives behind RESULT."""
    _, name, *arguments = sys.argv
    print("RESULT", json.dumps(module[name](*arguments)))
