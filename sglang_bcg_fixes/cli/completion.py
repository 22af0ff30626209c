# SPDX-License-Identifier: Apache-2.0
"""A shell's completion of `bcg-fixes`, from the parser that reads its words."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence

SHELLS = ("bash", "zsh")
# zsh can read what bash does
OF_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
FUNCTION = """_bcg_fixes() {{
    COMPREPLY=()
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} place words= command
    for ((place = 1; place < COMP_CWORD; place++)); do
        # what comes behind belongs to another command
        [[ ${{COMP_WORDS[place]}} == -- ]] && return
    done
    command=${{COMP_WORDS[1]}}
    ((COMP_CWORD == 1)) && command=
    case "$command $before" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _bcg_fixes bcg-fixes
"""


def script(shell: str, parser: argparse.ArgumentParser, values: Mapping[str, Sequence[str]]) -> str:
    """Text to be evaluated by the shell; `values` are the words that an option or a positional word can be."""
    cases = [
        f"        {pattern}) words={shlex.quote(' '.join(words))} ;;" for pattern, words in cases_of(parser, values)
    ]
    return (OF_ZSH if shell == "zsh" else "") + FUNCTION.format(cases="\n".join(cases))


def cases_of(parser: argparse.ArgumentParser, values: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, list[str]]]:
    """Each pattern of a command and the word before, the most special first, and the words that go there."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        options: list[str] = []
        takes_a_file: list[str] = []
        for action in command._actions:
            options += action.option_strings
            known = list(action.choices or values.get(str(action.metavar), ()))
            if not action.option_strings:
                options += known
            elif known:
                yield "|".join(f'"{name} {option}"' for option in action.option_strings), known
            elif action.nargs != 0:
                takes_a_file += action.option_strings
        if takes_a_file:
            # nothing is known of that word: the shell completes files
            yield "|".join(f'"{name} {option}"' for option in takes_a_file), []
        yield f'"{name} "*', options
    yield '" "*', [*commands.choices, *(option for action in parser._actions for option in action.option_strings)]
