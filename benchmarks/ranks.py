# SPDX-License-Identifier: Apache-2.0
"""Ask servers of two ranks, on two GPUs: defects with and without their fix, and faults of one rank.

    python benchmarks/ranks.py --json FILE [--only NAME,NAME]

Every server is `python -m sglang.launch_server` with two ranks and default flags. A defect's case starts SGLang alone
and with the plugin, and both are asked the same. So are servers one of whose ranks is killed, stops for a while at its
start, or has no fixes. What they answered is compared with `reference`, a server without prefill graphs.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.kernels.attention_extend import declaration as attention_extend
from sglang_bcg_fixes.lab.verify import environment
from sglang_bcg_fixes.lab.verify.servers import ended_by_signals

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import serving, serving_models
from benchmarks.serving import Wrong

DATA_PARALLEL = "data parallel attention"
STOCK, OURS, REFERENCE = "stock", "bcg_fixes", "reference"
# FlashInfer's sum over ranks is compiled by each server, and may use multicast, which not every host has
TWO = ("--tp-size", "2", "--enforce-disable-flashinfer-allreduce-fusion")
DP_ATTENTION = (*TWO, "--dp-size", "2", "--enable-dp-attention")
LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj")
DENSE, EXPERTS = "qwen3_0_6b", "qwen3_moe"
SIZES = (
    *("--max-total-tokens", "40000", "--max-running-requests", "32", "--mem-fraction-static", "0.8"),
    "--skip-server-warmup",
)
SECONDS_TO_START, SECONDS_TO_ANSWER, SECONDS_TO_END, SECONDS_OF_DELAY = 240.0, 90.0, 60.0, 45.0
ENDED = "Received sigquit from a child process"
LENGTHS = (61, 200, 1021, 7)
# makes the process that is spawned as so many-th, counted from 0, one without fixes and kernels of ours
ODD_RANK = """
import os, sys
if "--multiprocessing-fork" in sys.orig_argv:
    odd = int(os.environ["RANKS_ODD"])
    for number in range(odd + 1):
        try:
            os.close(os.open(os.path.join(os.environ["RANKS_FOLDER"], str(number)), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if number == odd:
            os.environ.update(SGLANG_BCG_FIXES="off", SGLANG_BCG_KERNELS="off")
        break
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One server for each arm, which `use` asks; it returns what is comparable between the arms."""

    name: str
    use: Callable[[serving.Server], Any]
    model: str = DENSE
    flags: tuple[str, ...] = TWO
    arms: tuple[str, ...] = (STOCK, OURS)
    fix: str = ""
    # the case whose answers of `reference` are right here, too, if it has none itself
    like: str = "two ranks"
    # what befalls one of its ranks
    is_odd: bool = False
    is_slow: bool = False
    # of this package
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


def post(server: serving.Server, path: str, **request: Any) -> Any:
    try:
        return server.post(path, SECONDS_TO_ANSWER, request)
    except TimeoutError as error:
        raise Wrong(f"no answer to {path} within {SECONDS_TO_ANSWER:.0f} s") from error
    except (urllib.error.URLError, ConnectionError) as error:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(SECONDS_TO_END)
        raise Wrong(f"no answer to {path} ({error})") from error


def tokens(source: random.Random, length: int) -> list[int]:
    return [source.randrange(2, 500) for _ in range(length)]


def generate(server: serving.Server, ids: list[int], new: int = 8, **more: Any) -> Any:
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    return post(server, "generate", input_ids=ids, sampling_params=sampling, **more)


def plain(server: serving.Server) -> list[list[int]]:
    """Prompts one after the other, then all at once; the tokens, and the logprob of the first."""
    source = random.Random(1)
    asked = [tokens(source, length) for length in LENGTHS]
    found = [generate(server, each, return_logprob=True) for each in asked]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(lambda each: generate(server, each[:-1]), asked))
    return [[each["output_ids"], each["meta_info"]["output_token_logprobs"][0][0]] for each in found]


def on_both(server: serving.Server) -> list[list[int]]:
    """Prompts on one rank while the other has none, then on both at once."""
    source = random.Random(2)
    asked = [(rank, tokens(source, length)) for length in LENGTHS for rank in range(2)]
    found = [generate(server, ids, routed_dp_rank=rank)["output_ids"] for rank, ids in asked]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(lambda each: generate(server, each[1], routed_dp_rank=each[0]), asked))
    return found


def scored(server: serving.Server) -> int:
    """Score items on both ranks at once, many times; some of them with embeddings of their own."""
    source = random.Random(3)
    hidden = serving_models.TEXT[DENSE].config["hidden_size"]
    own = {"embed_override_token_id": 501, "query_embed_overrides": [[0.01] * hidden]}

    def score(number: int) -> Any:
        # a generated prompt beside them in one batch ends this release
        asked = {"query": [5, 6, 7, 501, 9], "items": [tokens(source, 20 + number)], "label_token_ids": [10, 11]}
        return post(server, "v1/score", model="default", **asked, **(own if number % 3 == 0 else {}))

    pool = concurrent.futures.ThreadPoolExecutor(4)
    try:
        return len(list(pool.map(score, range(60))))
    finally:
        # one that hangs answers none of the others
        pool.shutdown(wait=False, cancel_futures=True)


def returned_experts(server: serving.Server) -> list[list[str]]:
    """The experts of each prompt, as SGLang encodes them: before the first decode step, and after some."""
    source = random.Random(4)
    asked = [(rank, tokens(source, length)) for length in (29, 61, 125) for rank in range(2)]
    found = []
    for new in (1, 4):
        for rank, ids in asked:
            answer = generate(server, ids, new, routed_dp_rank=rank, return_routed_experts=True)
            found.append([f"rank {rank}, {len(ids)} tokens", answer["meta_info"]["routed_experts"]])
    return found


def killed(server: serving.Server) -> str:
    """Kill the second rank while a prompt is being answered."""
    rank = scheduler(server, 1)
    plain(server)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(generate, server, tokens(random.Random(5), 61), 20_000)
        time.sleep(1)
        os.kill(rank, signal.SIGKILL)
        with contextlib.suppress(Wrong):
            asked.result()
    try:
        # where the other rank waits for it on the GPU, SGLang waits a minute for a dump of that
        server.process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        raise Wrong(f"still there {SECONDS_TO_END:.0f} s after its rank was killed") from None
    return "ended"


def scheduler(server: serving.Server, rank: int) -> int:
    name = f"sglang::scheduler_TP{rank}".encode()
    for process in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_named = process.name.isdigit() and name in (process / "cmdline").read_bytes()
            if is_named and os.getpgid(int(process.name)) == server.process.pid:
                return int(process.name)
    raise Wrong(f"no process {name.decode()}")


CASES = (
    Case("two ranks", plain, arms=(REFERENCE, STOCK, OURS)),
    Case(
        "two ranks, attention inside",
        plain,
        arms=(OURS,),
        variables={attention_extend.KERNEL.flag: attention_extend.KERNEL.impls[0].name},
    ),
    Case(DATA_PARALLEL, on_both, flags=DP_ATTENTION, arms=(REFERENCE, STOCK, OURS)),
    Case("LoRA", on_both, flags=(*DP_ATTENTION, *LORA), fix="eager_runner_cannot_vote", like=DATA_PARALLEL),
    Case("own embeddings", scored, flags=DP_ATTENTION, fix="refused_after_vote"),
    Case(
        "returned experts",
        returned_experts,
        EXPERTS,
        (*DP_ATTENTION, "--enable-return-routed-experts"),
        (REFERENCE, STOCK, OURS),
        "experts_of_another_rank",
    ),
    Case("a rank is killed", killed),
    Case("a rank is slow", plain, is_slow=True),
    Case("a rank has no fixes", on_both, flags=DP_ATTENTION, arms=(OURS,), like=DATA_PARALLEL, is_odd=True),
)


def start(case: Case, arm: str, folder: pathlib.Path, models: pathlib.Path) -> serving.Server:
    port, log = serving.free_port(), folder / "log"
    words = [*serving.LAUNCH, "--model-path", str(models / case.model), "--host", "127.0.0.1", "--port", str(port)]
    words += [*SIZES, *case.flags, *(serving.NO_PREFILL_GRAPHS if arm == REFERENCE else ())]
    ours = {"SGLANG_PLUGINS": "bcg_fixes", flags.REPORT_DIR: str(folder / "reports"), **case.variables}
    made = {**flags.environment_without_ours(), **(ours if arm == OURS else {"SGLANG_PLUGINS": "__none__"})}
    if case.is_odd:
        (folder / "odd").mkdir(exist_ok=True)
        (folder / "odd" / "sitecustomize.py").write_text(ODD_RANK)
        made["PYTHONPATH"] = os.pathsep.join([str(folder / "odd"), os.environ.get("PYTHONPATH", "")])
        # the schedulers are spawned first, behind what controls those of data parallel attention
        made |= {"RANKS_FOLDER": str(folder / "odd"), "RANKS_ODD": str(1 + ("--enable-dp-attention" in case.flags))}
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, env=made, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return serving.Server(arm, port, log, process)


def run(case: Case, arm: str, folder: pathlib.Path, models: pathlib.Path) -> dict[str, Any]:
    """Start the server, use it, and say how that went."""
    folder.mkdir(parents=True, exist_ok=True)
    server, began = start(case, arm, folder, models), time.monotonic()
    row: dict[str, Any] = {"case": case.name, "arm": arm, "fix": case.fix, "flags": list(case.flags)}
    try:
        if case.is_slow:
            delay(server)
            row["stopped_for"] = SECONDS_OF_DELAY
        while not server.is_healthy():
            # its parent may wait for ever
            if ENDED in server.text() or time.monotonic() - began > SECONDS_TO_START:
                raise Wrong(f"not healthy after {time.monotonic() - began:.0f} s")
            time.sleep(0.5)
        row["seconds_to_start"] = round(time.monotonic() - began, 1)
        asked = time.monotonic()
        row["found"] = case.use(server)
        row["seconds"] = round(time.monotonic() - asked, 1)
        row["ending"] = "as asked"
    except Wrong as wrong:
        row["ending"] = str(wrong).partition("\n")[0][:300]
        row["exit"] = server.process.poll()
    finally:
        try:
            if arm == OURS:
                row["status"] = status(folder / "reports")
        finally:
            server.stop()
    row["said"] = [line for line in server.text().splitlines() if is_told(line)][:30]
    return row


def is_told(line: str) -> bool:
    return any(word in line for word in ("bcg-fixes", "prefill CUDA graph end", "Error: ", "Watchdog", "Exception: "))


def delay(server: serving.Server) -> None:
    """Stop the second rank for a while as soon as it captures."""
    began = time.monotonic()
    while "Capture" not in server.text():
        server.is_healthy()
        if time.monotonic() - began > SECONDS_TO_START:
            raise Wrong("it captures nothing")
        time.sleep(0.2)
    rank = scheduler(server, 1)
    os.kill(rank, signal.SIGSTOP)
    time.sleep(SECONDS_OF_DELAY)
    os.kill(rank, signal.SIGCONT)


def status(reports: pathlib.Path) -> list[str]:
    asked = [sys.executable, "-m", "sglang_bcg_fixes", "status"]
    done = subprocess.run(
        asked, env={**os.environ, flags.REPORT_DIR: str(reports)}, capture_output=True, text=True, timeout=60
    )
    said = done.stdout.replace(str(reports), "DIR").splitlines()
    return [f"exit status {done.returncode}", *said[:12]]


def judged(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Say how many of each server's answers are the reference's; long ones are left out."""
    references = {row["case"]: row.get("found") for row in rows if row["arm"] == REFERENCE}
    of_case = {case.name: case.name if REFERENCE in case.arms else case.like for case in CASES}
    for row in rows:
        # the reference may be asked later than the others
        found, wanted = row.pop("found", None), references.get(of_case[row["case"]])
        if row["case"] == "returned experts" and found and wanted:
            row["equal"] = [
                [name, share_equal(mine, other)] for (name, mine), (_, other) in zip(found, wanted, strict=True)
            ]
        elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
            row["equal"] = f"{sum(map(equal, found, wanted))} of {len(found)}"
        else:
            row["found"] = found if not isinstance(found, list) else len(found)
        yield row


def equal(mine: Any, other: Any) -> bool:
    """Compare tokens, or tokens with a logprob of the first."""
    if isinstance(mine[0], list):
        return bool(mine[0] == other[0] and abs(mine[1] - other[1]) < 0.1)
    return bool(mine == other)


def share_equal(mine: str, other: str) -> float:
    """Share of the experts that are the same, of answers in base64."""
    one, two = (memoryview(base64.b64decode(each)).cast("i") for each in (mine, other))
    if len(one) != len(two):
        return 0.0
    return round(sum(a == b for a, b in zip(one, two, strict=True)) / len(one), 3)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help=", ".join(case.name for case in CASES))
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="servers at a time (default: %(default)s)")
    parser.add_argument("--folder", type=pathlib.Path, metavar="DIR", help="where the servers' logs stay")
    options = parser.parse_args(arguments)
    names = [name for name in options.only.split(",") if name]
    for name in names:
        if name not in [case.name for case in CASES]:
            raise SystemExit(f"--only: there is no '{name}'{flags.nearest(name, [case.name for case in CASES])}")
    chosen = [case for case in CASES if not names or case.name in names]
    header = environment.header(environment.look(sys.executable))
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        made = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bcg-ranks-")))
        folder = options.folder or made
        for name in {case.model for case in chosen}:
            serving_models.main(str(made / "models" / name), name)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(options.jobs))
        asked = [
            pool.submit(run, case, arm, folder / case.name.replace(" ", "_") / arm, made / "models")
            for case in chosen
            for arm in case.arms
        ]
        rows: list[dict[str, Any]] = []
        for each in concurrent.futures.as_completed(asked):
            rows.append(each.result())
            print({key: value for key, value in rows[-1].items() if key not in ("found", "said")}, flush=True)
            so_far = [*judged([dict(row) for row in rows])]
            lines = ",\n ".join(json.dumps(row) for row in so_far)
            options.json.write_text(f'{{"header": {json.dumps(header)}, "servers": [\n {lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
