# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes verify -- COMMAND`: what the command says of the server that it starts."""

from __future__ import annotations

import argparse

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.cli import doctor, model_config, server_command
from sglang_bcg_fixes.cli.server_command import CommandLineError
from sglang_bcg_fixes.lab.verify import command as verify
from sglang_bcg_fixes.lab.verify.own import command as own
from sglang_bcg_fixes.lab.verify.own import prompts, server
from sglang_bcg_fixes.lab.verify.own.arms import Launch
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.tree import Source

ERRORS = (own.OwnLaunchError, prompts.PromptError, server.ServerError, CommandLineError)
HOST, PORT = "127.0.0.1", 30000
# a server that listens everywhere also listens here
EVERYWHERE = ("0.0.0.0", "::", "")
# every published model has as many ids
FEW_IDS = 1000
OF_MODELS = ("release", "fix", "case", "arms", "quick", "once", "jobs", "page_only", "resume", "plan")


def run(options: argparse.Namespace) -> int:
    if not options.launch:
        if options.prompts:
            raise own.OwnLaunchError("--prompts is for a server of yours: put its command behind `--`")
        return verify.run(options)
    for name in OF_MODELS:
        if getattr(options, name):
            word = name.replace("_", "-")
            raise own.OwnLaunchError(f"--{word} is for tiny models; leave it out, or leave the command out")
    source = releases.installed()
    if source is None:
        raise own.OwnLaunchError("no SGLang is installed here; run it in the environment of the server")
    return own.run(options, launch_of(source, server_command.read(options.launch)), source)


def launch_of(source: Source, typed: server_command.Command) -> Launch:
    environ = flags.environment_with(typed.environ)
    if flags.is_off(environ):
        raise own.OwnLaunchError(f"{flags.EVERYTHING}=off leaves nothing to compare; unset it")
    typed = typed.loading(doctor.ENTRY_POINT, environ)
    given = typed.options(source)
    refuse_what_it_cannot_end(typed, given)
    host = first(given, "--host") or HOST
    port = first(given, "--port") or str(PORT)
    if not port.isdigit():
        raise own.OwnLaunchError(f"--port {port} is no number")
    model = first(given, *server_command.MODEL_FLAGS) or ""
    return Launch(
        words=(*(typed.program or server_command.MODULE), *typed.words),
        variables=typed.variables,
        host=HOST if host in EVERYWHERE else host,
        port=int(port),
        api_key=first(given, "--api-key"),
        vocabulary=vocabulary_of(model),
    )


def refuse_what_it_cannot_end(typed: server_command.Command, given: dict[str, list[str]]) -> None:
    """Servers of which a part is out of reach: neither its variables nor its end are the command's."""
    if typed.container:
        raise own.OwnLaunchError(
            f"{typed.container} starts the server where `verify` cannot end it; run `bcg-fixes verify -- COMMAND` "
            f"inside the container, with the command that starts SGLang there"
        )
    nodes = first(given, "--nnodes") or "1"
    if nodes != "1":
        raise own.OwnLaunchError(
            f"--nnodes {nodes} starts a part of the server on other machines, which `verify` does not reach; give a "
            f"command for one node, with a --tp-size that fits there"
        )


def first(given: dict[str, list[str]], *names: str) -> str | None:
    return next((given[name][0] for name in names if given.get(name)), None)


def vocabulary_of(model: str) -> int:
    """The number of token ids; few that every model has, where the configuration is not at hand."""
    try:
        config = model_config.config_of(model)
    except model_config.ModelError:
        return FEW_IDS
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else FEW_IDS
