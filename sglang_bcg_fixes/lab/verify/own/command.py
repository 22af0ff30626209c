# SPDX-License-Identifier: Apache-2.0
"""Run the arms one after the other, keep each in a folder, compare them, and say what follows."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_bcg_fixes import __version__, flags
from sglang_bcg_fixes.lab.verify import environment, servers
from sglang_bcg_fixes.lab.verify.instruments import SELFCHECK, SUFFIX
from sglang_bcg_fixes.lab.verify.own import ask, compare, page, prompts, server
from sglang_bcg_fixes.lab.verify.own.arms import (
    AGAIN,
    ARMS,
    EAGER,
    FIXES,
    STOCK,
    STOCKS,
    WITH_PLUGIN,
    Launch,
    environment_of,
)
from sglang_bcg_fixes.process import report
from sglang_bcg_fixes.source.tree import Source

FINISHED = servers.FINISHED
# of a server that does not say how long a prompt may be
SHORT_CONTEXT = 2048
START_LIMIT, NEW_TOKENS = 1800, 16
GOOD, WORSE, NO_RESULT = 0, 1, 2
SHOWN = 3
# what an ending goes on with
LOG = "; its log "
Arm = dict[str, Any]


class OwnLaunchError(Exception):
    """The command cannot be verified, and what to do."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--prompts", type=pathlib.Path, metavar="FILE", help="for your server: JSON lines, one each")
    command.add_argument(
        "--start-limit", type=float, default=START_LIMIT, metavar="S", help=f"for its start; by default {START_LIMIT}"
    )
    command.add_argument(
        "--max-new-tokens", type=int, default=NEW_TOKENS, metavar="N", help=f"of each answer; by default {NEW_TOKENS}"
    )


def run(options: argparse.Namespace, launch: Launch, source: Source) -> int:
    given = prompts.read(options.prompts) if options.prompts else []
    folder = folder_of(options, launch, source)
    found: dict[str, Arm] = {}
    try:
        with servers.ended_by_signals():
            for arm in ARMS:
                found[arm] = kept(folder, arm) or measured(options, launch, source, folder, arm, given)
    except KeyboardInterrupt as error:
        raise OwnLaunchError(
            f"interrupted; the server was ended. The same command with --folder {folder} goes on"
        ) from error
    content = judged(found, launch, source)
    for file, text in ((options.json, json.dumps(content, indent=1) + "\n"), (options.page, page.text(content))):
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    print(table(content))
    print(f"logs and answers: {folder}")
    return int(content["status"])


def folder_of(options: argparse.Namespace, launch: Launch, source: Source) -> pathlib.Path:
    """The folder for the arms; it takes one command, so that what was measured is never mixed."""
    named = options.folder
    folder = pathlib.Path(named or tempfile.mkdtemp(prefix="bcg-fixes-verify-")).resolve()
    mine = {
        "command": [launch.words, dict(launch.variables)],
        "settings": flags.of_ours(flags.environment_with(launch.variables)),
        "prompts": options.prompts.read_text() if options.prompts else None,
        "new_tokens": options.max_new_tokens,
        "versions": [__version__, source.version],
    }
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    file = folder / "command.json"
    if file.exists() and json.loads(file.read_text())["digest"] != digest:
        raise OwnLaunchError(
            f"--folder: {named} holds another command, other prompts, or another version; name a new folder"
        )
    if not file.exists() and folder.exists() and any(folder.iterdir()):
        raise OwnLaunchError(f"--folder: {named} is not empty, and not from an earlier run; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"digest": digest, "command": shlex.join(launch.words)}) + "\n")
    return folder


def kept(folder: pathlib.Path, arm: str) -> Arm | None:
    """Give an arm that an earlier run measured to its end."""
    file = folder / f"{arm}.json"
    found: Arm = json.loads(file.read_text()) if file.exists() else {"ending": ""}
    if found["ending"] != FINISHED:
        return None
    print(f"{arm}: kept from an earlier run", file=sys.stderr, flush=True)
    return found


def measured(
    options: argparse.Namespace,
    launch: Launch,
    source: Source,
    folder: pathlib.Path,
    arm: str,
    given: Sequence[prompts.Prompt],
) -> Arm:
    reports, log = folder / f"{arm}.reports", folder / f"{arm}.log"
    # of a run that was interrupted
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(mode=0o700)
    print(f"{arm}: starting, log in {log}", file=sys.stderr, flush=True)
    client = ask.Client(launch.host, launch.port, launch.api_key, ask.SECONDS_TO_ANSWER)
    answers: dict[str, dict[str, Any]] = {}
    found: Arm = {"arm": arm, "ending": FINISHED, "first_token_ms": None, "memory": {}}
    settings = environment_of(launch, arm, source, reports)
    of_others = gib_in_use()
    with server.started(launch, settings, log) as process:
        try:
            found["start_seconds"] = round(server.wait(process, client, log, options.start_limit), 1)
            about = client.about()
            asked = given or prompts.made(launch.vocabulary, context_of(about, options.max_new_tokens))
            print(f"{arm}: asking {len(asked)} prompts, four times each", file=sys.stderr, flush=True)
            ask.everything(client, asked, options.max_new_tokens, launch.vocabulary, answers)
            found["first_token_ms"] = ask.first_token_ms(client, asked)
            found["memory"] = memory_of(about, of_others, process.pid)
        except server.Ended as error:
            found["ending"] = str(error)
        except ask.UNREACHABLE as error:
            found["ending"] = f"no answer after {len(answers)} requests ({error}); {server.how_it_ended(process, log)}"
        # an orderly end removes reports
        found |= plugin_in(reports)
    found["answers"] = answers
    draft = folder / f"{arm}.tmp"
    draft.write_text(json.dumps(found))
    draft.replace(folder / f"{arm}.json")
    print(f"{arm}: {found['ending']}", file=sys.stderr, flush=True)
    return found


def context_of(about: Mapping[str, Any], new_tokens: int) -> int:
    """The longest prompt that leaves room for two answers."""
    longest = next((about[name] for name in ("max_req_input_len", "context_length") if about.get(name)), SHORT_CONTEXT)
    return int(longest) - 2 * new_tokens - 16


def memory_of(about: Mapping[str, Any], of_others: float | None, group: int) -> dict[str, Any]:
    """GiB by purpose as SGLang counts them, and what the driver says is in use by the server."""
    states = about.get("internal_states") or [{}]
    found = {
        name: value
        for name, value in (states[0].get("memory_usage") or {}).items()
        if isinstance(value, int | float) and name != "token_capacity"
    }
    mine = [
        size for process, size in asked_of_driver("compute-apps=pid,used_gpu_memory") if server.is_of(process, group)
    ]
    now = gib_in_use()
    if mine:
        found["in use"] = round(sum(mine) / 1024, 1)
    elif now is not None and of_others is not None:
        # a container knows its processes by other numbers than the driver
        found["in use"] = round(now - of_others, 1)
    return found


def gib_in_use() -> float | None:
    """GiB in use on all GPUs, by whatever process; none without a driver."""
    found = asked_of_driver("gpu=index,memory.used")
    return sum(size for _, size in found) / 1024 if found else None


def asked_of_driver(what: str) -> list[tuple[int, int]]:
    """Pairs of numbers that the driver answers."""
    pairs = [line.split(", ") for line in answer_of_driver(what)]
    return [(int(pair[0]), int(pair[1])) for pair in pairs if len(pair) == 2 and all(map(str.isdigit, pair))]


def answer_of_driver(what: str) -> list[str]:
    """Lines that nvidia-smi prints; none where there is no driver."""
    if not shutil.which("nvidia-smi"):
        return []
    wanted = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader,nounits"]
    return [line for line in subprocess.run(wanted, capture_output=True, text=True).stdout.split("\n") if line]


def plugin_in(reports: pathlib.Path) -> dict[str, Any]:
    """Processes with the plugin, fixes and kernels that they have, and replays and refusals that they counted."""
    contents = [json.loads(file.read_text()) for file in sorted(reports.glob("*.json"))]
    rows = [row for content in contents for row in report.rows(content)]
    known = {name for name in (row["id"] for row in rows) if not name.startswith(("count_", "refuse_"))}
    # which one rank has not, the server has not
    known -= {row["id"] for row in rows if row["state"] in report.MISSING}
    passes = [line for file in reports.glob(f"*{SUFFIX}") for line in servers.lines_in(file) if line[0] != SELFCHECK]
    return {
        "processes": len(contents),
        "applied": sorted({row["id"] for row in rows if row["state"] == report.APPLIED} & known),
        "replays": sum(line[1] == "replayed" for line in passes),
        "refusals": sum(line[1] == "refused" for line in passes),
    }


def judged(found: Mapping[str, Arm], launch: Launch, source: Source) -> dict[str, Any]:
    """Everything that is written: counts and differences of each arm, and the verdict."""
    reference = found[EAGER]["answers"]
    bound = compare.bound_of(found[STOCK]["answers"], found[AGAIN]["answers"], reference)
    compared = {arm: compare.compare(found[arm]["answers"], reference, bound) for arm in ARMS}
    status, verdict = verdict_of(found, compared)
    return {
        "verdict": verdict,
        "status": status,
        "command": shlex.join(launch.words),
        "sglang": source.version,
        "bcg_fixes": __version__,
        "commit": environment.commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpus": answer_of_driver("gpu=name,driver_version"),
        "bound": bound,
        "arms": {
            arm: {
                **{name: value for name, value in found[arm].items() if name != "answers"},
                "counts": compare.counted(compared[arm]),
                "not_equal": [
                    dataclasses.asdict(each)
                    for each in compared[arm]
                    if each.state not in (compare.EQUAL, compare.NOT_ASKED)
                ],
            }
            for arm in ARMS
        },
    }


def verdict_of(found: Mapping[str, Arm], compared: Mapping[str, Sequence[compare.Compared]]) -> tuple[int, str]:
    dead = [arm for arm in ARMS if found[arm]["ending"] != FINISHED]
    if dead == list(ARMS):
        return NO_RESULT, f"no server answered, with the fixes and without: {found[STOCK]['ending']}"
    if FIXES in dead:
        stock = "neither does stock" if STOCK in dead else "stock does"
        return WORSE, f"the server does not finish with the fixes, and {stock}"
    for arm in WITH_PLUGIN:
        if arm not in dead and not found[arm]["processes"]:
            return NO_RESULT, (
                f"no process of {arm} had the plugin: install sglang-bcg-fixes in the environment of the command"
            )
    if EAGER in dead:
        return NO_RESULT, "the server without replays did not finish, so there is nothing to compare with"
    if found[EAGER]["replays"]:
        return (
            NO_RESULT,
            f"the server that refuses replays made {found[EAGER]['replays']} of them; its answers prove nothing",
        )
    if not any(each.state in (compare.EQUAL, compare.EXPLAINED, compare.DIFFERENT) for each in compared[FIXES]):
        return NO_RESULT, "no request was answered: give prompts that this server takes, with --prompts FILE"
    if not found[FIXES]["replays"]:
        return NO_RESULT, "no graph was replayed with the fixes, so the answers prove nothing about graphs"
    lost = refused_with_the_plugin(found, compared[FIXES])
    finished = [arm for arm in STOCKS if arm not in dead]
    wrong = wrong_in(compared[FIXES]) | lost
    # one that has ended is no excuse where the other one answered
    wrong_in_stock = {name for arm in finished or STOCKS for name in wrong_in(compared[arm])} - lost
    if more := wrong - wrong_in_stock:
        return WORSE, f"with the fixes {requests(len(more))}, and not in stock"
    gained = f"in stock {shown(len(wrong_in_stock))}" if finished else "stock does not finish"
    if wrong and not finished:
        return GOOD, f"with the fixes {requests(len(wrong))} from the server without replays; {gained}"
    if wrong:
        return GOOD, f"with the fixes {requests(len(wrong))}, in stock, too; {gained}"
    return GOOD, f"with the fixes no request differs from the server without replays; {gained}"


def wrong_in(compared: Sequence[compare.Compared]) -> set[str]:
    return {each.name for each in compared if each.state in (compare.DIFFERENT, compare.MISSING)}


def refused_with_the_plugin(found: Mapping[str, Arm], compared: Sequence[compare.Compared]) -> set[str]:
    """The requests that stock has answered, and the plugin with an error, with replays and without."""
    answered = {name for arm in STOCKS for name, one in found[arm]["answers"].items() if one.get("tokens")}
    return {each.name for each in compared if each.state == compare.REFUSED} & answered


def requests(count: int) -> str:
    return f"{count} request differs" if count == 1 else f"{count} requests differ"


def shown(wrong: int) -> str:
    return f"{wrong or 'none'} {'differs' if wrong in (0, 1) else 'differ'}"


def table(content: Mapping[str, Any]) -> str:
    states = "".join(f"{state:>11}" for state in compare.STATES)
    lines = [f"{'arm':12}{states}{'replays':>9}{'first token':>13}{'GPU memory':>12}  ending"]
    for name, arm in content["arms"].items():
        numbers = "".join(f"{arm['counts'][state]:>11}" for state in compare.STATES)
        first = f"{arm['first_token_ms']} ms" if arm["first_token_ms"] is not None else "-"
        used = f"{arm['memory']['in use']} GiB" if "in use" in arm["memory"] else "-"
        replays = arm["replays"] if name in WITH_PLUGIN else "-"
        lines.append(f"{name:12}{numbers}{replays:>9}{first:>13}{used:>12}  {arm['ending'].partition(LOG)[0]}")
    # a line of a log is as long as a screen is wide
    ended = [(name, arm["ending"].partition(LOG)[2]) for name, arm in content["arms"].items()]
    lines += [f"{name}: its log {said}" for name, said in ended if said]
    for name, arm in content["arms"].items():
        odd = [each for each in arm["not_equal"] if each["state"] in (compare.DIFFERENT, compare.REFUSED)]
        lines += [f"{name}, {each['state']}: {each['name']}: {each['difference']}" for each in odd[:SHOWN]]
        lines += [f"{name}: {len(odd) - SHOWN} more; --json FILE has all"] if len(odd) > SHOWN else []
    applied = content["arms"][FIXES]["applied"]
    lines.append(f"with the fixes {len(applied)} are applied; --json FILE names them")
    lines.append(f"a difference of up to {content['bound']:.3g} in a logprob is rounding")
    return "\n".join([*lines, content["verdict"]])
