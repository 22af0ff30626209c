# SPDX-License-Identifier: Apache-2.0
"""One page with what a report about this plugin needs, the details beside it, and nothing that is somebody's secret."""

from __future__ import annotations

import collections
import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sglang_bcg_fixes import __version__, flags
from sglang_bcg_fixes.cli import catalogue, doctor, ranks, status, terminal
from sglang_bcg_fixes.lab.verify import environment
from sglang_bcg_fixes.planning.registry import Registry
from sglang_bcg_fixes.process import report, report_folders
from sglang_bcg_fixes.source import releases

# of the JSON; 2: `gpu` is every GPU with its driver, by nvidia-smi
FORMAT = 2
OURS = "bcg-fixes"
STDOUT = "-"
# torch brings CUDA's runtime, under a name with or without the major version
DISTRIBUTIONS = (*environment.DISTRIBUTIONS, "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
GPUS = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
# the page that nvidia-smi prints by itself names the CUDA that the driver is for
CUDA = re.compile(r"CUDA(?: UMD)? Version: *([\d.]+)")
SECONDS = 20
# of the page: its width, the last lines of the logs, and as much of each as is read there
WIDTH, LAST, SHORT = 120, 12, 300
# the end of a log, as far as somebody will read
LINES, LENGTH = 2000, 2000
# flags whose words are a choice or a size; the words of all others may be names, addresses or keys, numbers too
CHOICES = "backend|algorithm|strategy|dtype|policy"
SIZES = "size|topk|steps|tokens|requests|length|interval|static|bs|tp|dp"
TOLD = re.compile(rf"-({CHOICES}|{SIZES})(-prefill|-decode)?$")
# of a server's report: what it is, and not what it was called with
OF_A_PROCESS = (
    *("package", "sglang", "process", "title", "time", "seconds", "plan", "verified", "selfcheck", "canary"),
    *("batches", "fixes", "kernels"),
)


class ReportFileError(Exception):
    """The file cannot be written, and what to do."""


def command(known: Registry, file: str, logs: Sequence[pathlib.Path]) -> str:
    """Write the page and its details, and give the words to print: those of the page itself for `-`."""
    targets = None if file == STDOUT else targets_of(pathlib.Path(file))
    # before anything that takes seconds
    refuse_what_is_there(targets or ())
    lines = [line for log in logs for line in lines_of_ours(log)]
    folders = report_folders.chosen()
    live = ranks.with_ranks([status.with_calls(each) for each in report_folders.live(folders)])
    notes = [f"ranks differ: {each}" for each in ranks.differences(live)]
    notes += [text for folder in folders if (text := report_folders.problem(folder))]
    notes += known.problems
    examined, source = None, releases.installed()
    try:
        if source is not None:
            examined = doctor.examine(known, known.settings(), source, installed=True)
    except flags.FlagError as error:
        # a report about a setting that is refused has to be possible
        notes.append(str(error))
    content = made(source.version if source else None, examined, live, notes, lines)
    if targets is None:
        return page(content)
    text_file, details = targets
    write(details, json.dumps(content, indent=1))
    try:
        write(text_file, page(content))
    except ReportFileError:
        details.unlink()
        raise
    return f"{text_file} is one page, and {details} has the details: read both before you send them"


def made(
    sglang: str | None,
    examined: doctor.Examination | None,
    live: Sequence[dict[str, Any]],
    notes: Sequence[str],
    logs: Iterable[str],
) -> dict[str, Any]:
    states = catalogue.by_state(examined.plan.fixes) if examined else {}
    content = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "sglang": sglang,
        "bcg_fixes": __version__,
        "commit": environment.commit(),
        **gpus(),
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "settings": flags.of_ours(),
        "other_settings": flags.names_of_others(),
        "states": {state.value: names for state, names in states.items()},
        "doctor": examined.as_dict() if examined else None,
        "processes": [process(each) for each in live],
        "notes": list(notes),
        "log": list(logs),
    }
    found: dict[str, Any] = without_home(content)
    return found


def versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def gpus() -> dict[str, Any]:
    """Every GPU and its driver, or why none is known; torch would take seconds and memory of a GPU."""
    try:
        listed = run(*GPUS)
        cuda = CUDA.search(run(GPUS[0]))
    except FileNotFoundError:
        return {"gpu": [], "cuda_of_driver": None, "why": "nvidia-smi is not installed"}
    except (OSError, subprocess.SubprocessError) as error:
        return {"gpu": [], "cuda_of_driver": None, "why": f"nvidia-smi does not answer: {words_of(error)}"}
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.count(",") == 2]
    found = [{"name": name, "memory": memory, "driver": driver} for name, memory, driver in rows]
    why = None if found else "nvidia-smi lists no GPU"
    return {"gpu": found, "cuda_of_driver": cuda[1] if cuda else None, "why": why}


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=True)
    return done.stdout


def words_of(error: OSError | subprocess.SubprocessError) -> str:
    """The reason in a line: what it printed last, if it ended with an error."""
    printed = f"{error.stdout or ''}\n{error.stderr or ''}" if isinstance(error, subprocess.CalledProcessError) else ""
    return (printed.strip().splitlines() or [str(error)])[-1]


def page(content: dict[str, Any]) -> str:
    """The content as one page for people."""
    lines = [f"bcg-fixes report of {content['date']}", "", *facts(content), *servers(content["processes"])]
    if content["notes"]:
        lines += ["", "notes", *(f"  {note}" for note in content["notes"])]
    if content["log"]:
        last = content["log"][-LAST:]
        lines += [
            "",
            f"log: the last {len(last)} of {len(content['log'])} lines of ours",
            *(f"  {line[:SHORT]}" for line in last),
        ]
    return "\n".join(terminal.fold(line, WIDTH) for line in lines)


def facts(content: dict[str, Any]) -> Iterator[str]:
    known, driver = content["versions"], f"driver's CUDA {content['cuda_of_driver'] or 'unknown'}"
    names = collections.Counter(f"{each['name']} ({each['memory']})" for each in content["gpu"])
    drivers = dict.fromkeys(each["driver"] for each in content["gpu"])
    runtime = [f"runtime {known[name]}" for name in known if name.startswith("nvidia-cuda-runtime")]
    states = [f"{len(of)} {state}{told(state, of)}" for state, of in content["states"].items() if of]
    examined = content["doctor"] or {}
    rows = {
        "SGLang": content["sglang"] or "not installed here",
        "plugin": content["bcg_fixes"] + (f", commit {content['commit']}" if content["commit"] else ""),
        "GPU": ", ".join(f"{count} x {name}" for name, count in names.items()) or f"none: {content['why']}",
        "driver": ", ".join(drivers) or "none",
        "CUDA": ", ".join([driver, *runtime]),
        **{name: known.get(name, "not installed") for name in ("torch", "triton")},
        **{name: version for name, version in known.items() if not name.startswith(("torch", "triton", "nvidia-cuda"))},
        "Python": f"{content['python']} on {content['platform']}",
        "our flags": " ".join(f"{name}={value}" for name, value in content["settings"].items()) or "none set",
        "others": " ".join(content["other_settings"]) or "none set",
        "doctor": "; ".join(states) or "no answer",
        "kernels": ", ".join(f"{op} {row['impl']}" for op, row in examined.get("kernels", {}).items()),
        "": "; ".join(filter(None, [examined.get("loading"), *examined.get("problems", ())])),
    }
    yield from (f"{name:18}  {value}".rstrip() for name, value in rows.items() if value)


def told(state: str, names: Sequence[str]) -> str:
    """The names behind a count, where somebody may have to act on them."""
    quiet = (catalogue.State.NOT_HERE.value, catalogue.State.LATENT.value)
    return "" if state in quiet else f" ({', '.join(names)})"


def servers(processes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each running process, and one for each thing in it that is not as it is wanted."""
    yield from ("", f"running processes with the plugin: {len(processes)}")
    for each in processes:
        rows = report.rows({"fixes": [], "kernels": {}, **each})
        counts = collections.Counter(row["state"] for row in rows)
        check = each.get("selfcheck")
        words = [f"{count} {state}" for state, count in counts.items()]
        words.append(f"self-check: {check['verdict']}" if check else "no self-check")
        yield f"  {each.get('title') or each.get('process')}: SGLang {each.get('sglang')}; {', '.join(words)}"
        yield f"    flags: {' '.join(each['flags']) or 'none'}"
        for state in report.MISSING:
            if missing := [row["id"] for row in rows if row["state"] == state]:
                yield f"    {state}: {', '.join(missing)}"


def process(content: dict[str, Any]) -> dict[str, Any]:
    found = {name: content[name] for name in OF_A_PROCESS if name in content}
    return {**found, "flags": list(flags_of(content.get("argv", ())))}


def flags_of(words: Sequence[str]) -> Iterator[str]:
    """The flags of a command, with their words where these are a size or a choice."""
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            yield f"{name}={value if is_told(name, value) else '...'}" if value else name
        elif name:
            yield word if is_told(name, word) else "..."


def is_told(name: str, word: str) -> bool:
    return bool(TOLD.search(name) and re.fullmatch(r"[\w.+-]{1,40}", word))


def lines_of_ours(file: pathlib.Path) -> list[str]:
    try:
        with file.open(errors="replace") as lines:
            return [line.rstrip()[:LENGTH] for line in lines if OURS in line][-LINES:]
    except OSError as error:
        raise ReportFileError(f"--log: {file} cannot be read ({error.strerror}); give a server's log file") from error


def without_home(value: Any) -> Any:
    """The same without the name of this user's folder."""
    home = os.path.expanduser("~").rstrip("/")
    if not home:
        return value
    return json.loads(json.dumps(value).replace(json.dumps(home)[1:-1], "~"))


def targets_of(file: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The file of the page, and that of the details beside it."""
    if not file.name or file.is_dir():
        raise ReportFileError(f"--file: {file} is a folder; name a file in it, such as {file / 'report.txt'}")
    return file.with_suffix(".txt") if file.suffix == ".json" else file, file.with_suffix(".json")


def refuse_what_is_there(files: Iterable[pathlib.Path]) -> None:
    for file in files:
        if os.path.lexists(file):
            raise ReportFileError(f"{file} is there already; name another with --file, or remove it")
        if not os.access(file.parent, os.W_OK):
            reason = "it is not writable" if file.parent.is_dir() else "no such folder"
            raise ReportFileError(f"--file: {file} cannot be written ({reason}); name a file elsewhere")


def write(file: pathlib.Path, text: str) -> None:
    """For this user alone: whoever sends it has looked at it first."""
    try:
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "w") as opened:
            opened.write(f"{text}\n")
    except FileExistsError as error:
        raise ReportFileError(f"{file} is there already; name another with --file, or remove it") from error
    except OSError as error:
        raise ReportFileError(f"--file: {file} cannot be written ({error.strerror}); name a file elsewhere") from error
