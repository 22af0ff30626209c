# SPDX-License-Identifier: Apache-2.0
"""Each command with the settings of its file, and what SGLang's own parser says against it, as two lines of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import NoReturn

from cpu_sglang import stand_ins

stand_ins.install()

from sglang.srt import server_args  # noqa: E402


class RefusedError(Exception):
    """The words that argparse would print before it exits."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedError(message)


def refusal(words: list[str]) -> str:
    try:
        PARSER.parse_args(words)
    except RefusedError as error:
        return str(error)
    return ""


def merged(words: list[str]) -> list[str]:
    if "--config" not in words:
        return words
    try:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
    except ImportError:
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger
    found: list[str] = ConfigArgumentMerger(PARSER).merge_config_with_args(words)
    return found


PARSER = Parser()
server_args.ServerArgs.add_cli_args(PARSER)
COMMANDS = [merged(words) for words in json.loads(sys.argv[1])]
print(json.dumps(COMMANDS))
print(json.dumps([refusal(words) for words in COMMANDS]))
