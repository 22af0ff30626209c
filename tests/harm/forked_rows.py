# SPDX-License-Identifier: Apache-2.0
"""One release's answers for many models: a process that has imported it forks a child for each row of the matrix.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m tests.harm.forked_rows JOBS.json ROWS.jsonl

SGLang's globals allow one model in a process, and its imports take the longest, so they are inherited. A child loads
plugins by its arm's environment, as a server does, and builds the model from a config.json with the real ModelRunner.
What is built knows that there will be prefill graphs. The child answers each batch eagerly, captures the graphs,
answers the batches again, and compares.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import logging
import os
import pathlib
import re
import resource
import select
import signal
import sys
import tempfile
import time
from typing import Any, NoReturn

import torch

from cpu_sglang import graphs, one_batch, prefill
from sglang_bcg_fixes.anatomy.runners import PREFILL_MODULE
from tests.harm import added_time, rules, steps
from tests.releases import kinds_of_request

# lengths of the prompts of each batch: in the largest bucket, filling the other one, ragged, and with more padding
BATCHES = ([11], [8], [6, 5], [9])
# of processor time; no server of these sizes takes as long
SECONDS = 60
LINE = 240
# the arm that measures what the plugin's Python takes
TIMED = "timed"
# where a machine's numbers are in a message, rows would differ from run to run
ADDRESS = re.compile(r"0x[0-9a-f]{4,}")


def serve(job: dict[str, Any], row: dict[str, Any]) -> None:
    """Fill the row; an exception is one of SGLang's, and ends the server."""
    row["error"] = "does not start"
    loaded = load(job)
    said = Said()
    logging.getLogger().addHandler(said)
    for name in ("sglang", "sglang_bcg_fixes"):
        logging.getLogger(name).setLevel(logging.INFO)
    model_runner = loaded.model_runner
    prepare(model_runner.model)
    kinds_of_request.forget_pinned_memory()
    row["error"] = "does not answer eagerly"
    eager = [steps.answer(loaded, lengths) for lengths in BATCHES]
    row["eager"] = digest([eager_answer for eager_answer, _ in eager])
    row["eager values"] = [values(eager_answer) for eager_answer, _ in eager]
    row["calls eager"] = eager[-1][1]
    row["error"] = "ends while it captures"
    row["graphs"], row["why no graphs"] = captured(model_runner, said)
    row["error"] = "ends while it replays"
    row["batches"] = []
    for lengths, (expected, _) in zip(BATCHES, eager, strict=True):
        before = graphs.counters.replays
        answer, row["calls"] = attempt(loaded, lengths)
        row["batches"].append([graphs.counters.replays - before, difference(expected, answer)])
    del row["error"]


def load(job: dict[str, Any]) -> one_batch.LoadedModel:
    """The server up to its first request, plugins first."""
    register(job["configuration"]["model_type"])
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(job["configuration"]))
        one_batch.load_plugins()
        with prefill.built_for_graphs():
            return one_batch.load(folder, **job["server_args"])


def attempt(loaded: one_batch.LoadedModel, lengths: list[int]) -> tuple[Any, Any]:
    try:
        return steps.answer(loaded, lengths)
    except Exception as error:
        return one_line(error), {}


def captured(model_runner: Any, said: Said) -> tuple[dict[str, list[int]], str | None]:
    """Segments and breaks of each bucket, or what SGLang or we say of there being none."""
    graphs.freed_memory_is_garbage = True
    del said.lines[:]
    # as on an NVIDIA GPU: where it is false, 0.5.17 and later take captures of latent attention for the expanded form
    if hasattr(model_runner, "init_prefill_cuda_graph"):
        importlib.import_module(PREFILL_MODULE).is_cuda = lambda: True  # type: ignore[attr-defined]
    try:
        runner = prefill.capture_prefill(model_runner)
    except RuntimeError as error:
        if "captured nothing" not in str(error):
            raise
        return {}, said.last_of("graph")
    return {
        str(size): [len(graph._segments), len(graph._break_fns)]
        for size, graph in prefill.captured_graphs(runner).items()
    }, None


def prepare(model: Any) -> None:
    """Weights that show each layer; what a model derives from its weights is derived again."""
    one_batch.randomize(model)
    one_batch.derive(model)


def register(model_type: str) -> None:
    """Have transformers know a configuration that comes with its model's code."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    if model_type not in CONFIG_MAPPING:
        AutoConfig.register(model_type, type(model_type, (PretrainedConfig,), {"model_type": model_type}))


class Said(logging.Handler):
    """Lines that SGLang and we log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, shortened(record.getMessage())))

    def last_of(self, word: str) -> str:
        """The last of the gravest lines with this word."""
        lines = [(level, line) for level, line in self.lines if word in line.lower()]
        gravest = max((level for level, _ in lines), default=0)
        return next((line for level, line in reversed(lines) if level == gravest), "nothing is said")


def one_line(error: BaseException) -> str:
    return shortened(f"{type(error).__name__}: {error}")


def shortened(text: str) -> str:
    return " ".join(ADDRESS.sub("0x", text).split())[:LINE]


def digest(answers: list[dict[str, torch.Tensor]]) -> str:
    made = hashlib.sha256()
    for answer in answers:
        for name in sorted(answer):
            made.update(name.encode() + answer[name].contiguous().numpy().tobytes())
    return made.hexdigest()[:16]


def values(answer: dict[str, torch.Tensor]) -> list[float]:
    """The first of the answer's numbers: enough to know it again on a machine that rounds otherwise."""
    numbers = torch.cat([tensor.flatten()[:8] for _, tensor in sorted(answer.items())])[:8]
    return [round(number, 4) for number in numbers.tolist()]


def difference(eager: dict[str, Any], graph: dict[str, Any] | str) -> float | str:
    """The largest one in any tensor; where that is no number, a word for it."""
    found = kinds_of_request.difference(eager, graph)
    if isinstance(found, float) and not found < float("inf"):
        return "not a number"
    return found if isinstance(found, str) else float(f"{found:.4g}")


def child(job: dict[str, Any], write: int) -> NoReturn:
    """Write the row, whatever becomes of the server, and end without a word to anybody else."""
    null = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(null, standard)
    os.environ.update(job["environment"])
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS, used + SECONDS))
    row: dict[str, Any] = {"architecture": job["architecture"], "arm": job["arm"], "key": job["key"]}
    started = time.process_time()
    try:
        (added_time.serve if job["arm"] == TIMED else serve)(job, row)
    # plugins refuse to start with a SystemExit
    except BaseException as error:
        row["error"] = f"{row.get('error', 'ends')}: {one_line(error)}"
    row["seconds"] = round(time.process_time() - started, 1)
    row["modules"] = sorted(name for name in sys.modules if name.startswith("sglang."))
    with os.fdopen(write, "w") as out:
        out.write(json.dumps(row))
    os._exit(0)


def forked(job: dict[str, Any]) -> dict[str, Any]:
    """The row of one job; a child that ends without one, or not in time, is a server that died."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        child(job, write)
    os.close(write)
    written, deadline = b"", time.monotonic() + job["patience"]
    while (left := deadline - time.monotonic()) > 0 and select.select([read], [], [], left)[0]:
        chunk = os.read(read, 1 << 20)
        if not chunk:
            break
        written += chunk
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not written:
        died = f"the process ends: {signal.Signals(-status).name}" if status < 0 else f"the process ends: {status}"
        return {"architecture": job["architecture"], "arm": job["arm"], "key": job["key"], "error": died}
    row: dict[str, Any] = json.loads(written)
    return row


def import_release(first: dict[str, Any]) -> None:
    """Import SGLang, and what the first job's server imports, so that no child does it again."""
    one_batch.import_sglang(with_graphs=True)
    one_batch._import_benchmark()
    for name in ("sglang.srt.models.registry", "sglang.srt.model_executor.model_runner"):
        importlib.import_module(name)
    stock = {**first, "arm": "stock", "environment": {"SGLANG_PLUGINS": "__none__"}}
    for name in forked(stock).get("modules", []):
        # the plugin is to patch the model's modules when they are imported, as in a server
        if not name.startswith("sglang.srt.models."):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def main(jobs_file: str, rows_file: str) -> None:
    jobs = json.loads(pathlib.Path(jobs_file).read_text())
    import_release(jobs[0])
    with open(rows_file, "a") as rows:
        for job in jobs:
            row = forked(job)
            if not rules.is_of_the_server(row):
                raise SystemExit(f"{job['architecture']}, {job['arm']} is not recorded: {row['error']}")
            row.pop("modules", None)
            rows.write(json.dumps(row) + "\n")
            rows.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
