# SPDX-License-Identifier: Apache-2.0
"""What SGLang's own parser reads in each command, and all of its options, as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from cpu_sglang import stand_ins

stand_ins.install()

from sglang.srt.server_args import ServerArgs  # noqa: E402


def read(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, Any]:
    """The values that a command sets, beside those that are so by default."""
    found = vars(parser.parse_args([*MODEL, *words]))
    return {name: value for name, value in found.items() if value != DEFAULTS[name]}


MODEL = ["--model-path", "default"]
PARSER = argparse.ArgumentParser()
ServerArgs.add_cli_args(PARSER)
DEFAULTS = vars(PARSER.parse_args(MODEL))
OPTIONS = {option: action.dest for action in PARSER._actions for option in action.option_strings}
OPTIONS = {option: value for option, value in OPTIONS.items() if option.startswith("--") and value != "help"}
print(json.dumps({"read": [read(PARSER, words) for words in json.loads(sys.argv[1])], "options": OPTIONS}))
