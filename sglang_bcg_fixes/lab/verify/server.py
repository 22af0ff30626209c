# SPDX-License-Identifier: Apache-2.0
"""One server of `bcg-fixes verify`, in this process and its children: python -m sglang_bcg_fixes.lab.verify.server JOB.

JOB is a file with the engine's arguments and the calls. Each event is written as one line of JSON, so that the parent
sees progress and keeps the answers given before a crash. If the job names a pipe instead of calls, they are read from
it, one line of JSON each, until its writer closes it.
"""

from __future__ import annotations

import json
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

TOP_LOGPROBS = 4
Generate = Callable[..., list[dict[str, Any]]]


def main(arguments: list[str]) -> None:
    job = json.loads(pathlib.Path(arguments[0]).read_text())
    started = time.perf_counter()

    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**job["engine"])
    run(job, engine.generate, time.perf_counter() - started)


def run(job: dict[str, Any], generate: Generate, start_seconds: float) -> None:
    """Make the calls one at a time, so that batches are the same in every server."""
    with open(job["answers"], "w", buffering=1) as out:
        print(json.dumps({"started": round(start_seconds, 1)}), file=out)
        for call in calls_of(job):
            with_logprobs = call.get("logprobs", job["logprobs"])
            wanted = {"return_logprob": True, "top_logprobs_num": TOP_LOGPROBS} if with_logprobs else {}
            began = time.perf_counter()
            sampling = {"temperature": 0, "max_new_tokens": call["new_tokens"], "ignore_eos": True}
            found = generate(input_ids=call["prompts"], sampling_params=sampling, **wanted)
            seconds = time.perf_counter() - began
            line = {"answers": [answer(each) for each in found], "milliseconds": round(seconds * 1e3, 3)}
            print(json.dumps(line), file=out)
        print(json.dumps({"finished": True}), file=out)
    # the parent ends this process: in an orderly exit every process removes its report
    signal.pause()


def calls_of(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "pipe" not in job:
        yield from job["calls"]
        return
    with open(job["pipe"]) as lines:
        yield from map(json.loads, lines)


def answer(found: dict[str, Any]) -> dict[str, Any]:
    """Fields of an answer that are compared; json keeps every bit of a float."""
    about = found["meta_info"]
    return {
        "tokens": found["output_ids"],
        "logprobs": [row[0] for row in about.get("output_token_logprobs") or ()],
        "top": [[[row[0], row[1]] for row in rows or ()] for rows in about.get("output_top_logprobs") or ()],
        "verifications": about.get("spec_verify_ct"),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
