# SPDX-License-Identifier: Apache-2.0
"""Everything that benchmarks/results holds of one SGLang, measured again: the installed one, on this machine's GPUs.

    python benchmarks/record.py --folder recorded                       # some hours on one GPU, less on several
    python benchmarks/record.py --folder recorded --only bench,fa_metadata --seconds 500
    python benchmarks/record.py --list

Each GPU takes the next recording that nobody has taken. A recording has a process group of its own, a log beside its
file, and at most `--seconds`; then it is told to end, writes what it has, and the GPU goes on with the next one. Run
the same command again where a machine was lost or time ran out: what is whole is kept, and `verify` goes on behind its
last whole case. Write to a folder outside the checkout: what a file says of its commit must not depend on the files
before it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.lab.verify.servers import ended_by_signals
from sglang_bcg_fixes.source import releases

HERE = pathlib.Path(__file__).parent
# between being told to end and being ended
SECONDS_TO_END, SECONDS_BETWEEN_LOOKS = 20.0, 0.5
CUT_OFF = "ended before it was done"


@dataclasses.dataclass(frozen=True)
class Recording:
    """Arguments of python, with FILE for the file that it writes; one that `resumes` goes on with that file."""

    words: tuple[str, ...]
    suffix: str = "json"
    resumes: bool = False

    def command(self, file: pathlib.Path) -> list[str]:
        return [sys.executable, *(str(file) if word == "FILE" else word for word in self.words)]


def script(name: str, *words: str) -> tuple[str, ...]:
    return (str(HERE / name), *words)


RECORDINGS = {
    "attention_extend": Recording(script("attention_extend.py", "--jsonl", "FILE"), "jsonl"),
    "bench": Recording(("-m", "benchmarks.bench", "--flashinfer", "--jsonl", "FILE"), "jsonl"),
    "fa_metadata": Recording(script("fa_metadata.py", "--forms", "cuda,triton", "--jsonl", "FILE"), "jsonl"),
    "fa_steps": Recording(script("fa_steps.py", "--jsonl", "FILE"), "jsonl"),
    "gdn_extend": Recording(script("gdn_extend.py", "--json", "FILE")),
    "gdn_extend-bfloat16": Recording(script("gdn_extend.py", "--states", "bfloat16", "--json", "FILE")),
    "gdn_tuning": Recording(script("gdn_tuning.py", "--json", "FILE")),
    "mamba2_extend": Recording(script("mamba2_extend.py", "--json", "FILE")),
    **{
        name: Recording(script(f"{name}.py", "--times", "--json", "FILE"))
        for name in ("kda_extend", "short_conv_extend")
    },
    "selfcheck_starts": Recording(script("selfcheck_starts.py", "--json", "FILE")),
    "verify": Recording(("-m", "sglang_bcg_fixes", "verify", "--resume", "--json", "FILE"), resumes=True),
    "accuracy": Recording(
        script("accuracy/evaluate.py", "--arms", "reference,stock,patched,kernels,eager,eager", "--json", "FILE")
    ),
    "accuracy-mamba2": Recording(
        script(
            "accuracy/evaluate.py",
            *("--family", "nemotron_h", "--arms", "reference,stock,kernels,eager", "--json", "FILE"),
        )
    ),
    **{
        f"serving-{name}": Recording(script("serving.py", "--model", name, "--jsonl", "FILE"), "jsonl")
        for name in ("qwen3_5_4b", "qwen3_5_35b_a3b")
    },
    "break_lifetimes": Recording(script("break_lifetimes.py", "--json", "FILE")),
}


def gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return chosen.split(",")
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def record(name: str, gpu: str, file: pathlib.Path, seconds: float, over: threading.Event) -> str:
    """How it ended; the log says why."""
    began = time.monotonic()
    environment = {**flags.environment_without_ours(), "CUDA_VISIBLE_DEVICES": gpu, "PYTHONUNBUFFERED": "1"}
    with file.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            RECORDINGS[name].command(file),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while process.poll() is None and time.monotonic() - began < seconds and not over.wait(SECONDS_BETWEEN_LOOKS):
            pass
        status = process.poll()
        if status is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return CUT_OFF if status is None else f"exit status {status}"


def work(
    gpu: str, names: collections.deque[str], folder: pathlib.Path, version: str, seconds: float, over: threading.Event
) -> Iterator[bool]:
    """Until nothing is left: was the file written?"""
    while not over.is_set():
        try:
            name = names.popleft()
        except IndexError:
            return
        file, began = folder / f"{name}-{version}.{RECORDINGS[name].suffix}", time.monotonic()
        if file.is_file() and not RECORDINGS[name].resumes:
            print(f"{name}: {file} is there; remove it to record it again", flush=True)
            yield True
            continue
        ending = record(name, gpu, file, seconds, over)
        if ending == CUT_OFF and file.is_file() and not RECORDINGS[name].resumes:
            file.replace(file.with_suffix(f".partial.{RECORDINGS[name].suffix}"))
        what = file if file.is_file() else f"no file, see {file.with_suffix('.log')}"
        print(f"GPU {gpu}, {name}: {ending}, {time.monotonic() - began:.0f} s; {what}", flush=True)
        yield file.is_file()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, help="for the files and their logs")
    parser.add_argument("--only", default=",".join(RECORDINGS), metavar="A,B", help="in this order")
    parser.add_argument("--seconds", type=float, default=3600, help="at most, each (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the commands and start none")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    for name in chosen:
        if name not in RECORDINGS:
            raise SystemExit(f"--only: no recording '{name}'{flags.nearest(name, list(RECORDINGS))}")
    if options.list:
        for name in chosen:
            print(name, *RECORDINGS[name].command(pathlib.Path("FILE"))[1:])
        return 0
    source, devices = releases.installed(), gpus()
    if source is None or not devices:
        raise SystemExit(f"{sys.executable} has {'no GPU' if source else 'no SGLang'}")
    if options.folder is None:
        raise SystemExit("--folder: name one for the files")
    options.folder.mkdir(parents=True, exist_ok=True)
    left, over, version = collections.deque(chosen), threading.Event(), source.version

    def make(gpu: str) -> list[bool]:
        return list(work(gpu, left, options.folder, version, options.seconds, over))

    with ended_by_signals(), concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
        working = [pool.submit(make, gpu) for gpu in devices]
        try:
            there = [is_there for each in working for is_there in each.result()]
        finally:
            over.set()
    return 0 if len(there) == len(chosen) and all(there) else 1


if __name__ == "__main__":
    raise SystemExit(main())
