# SPDX-License-Identifier: Apache-2.0
"""One server of `bcg-fixes verify`, in this process and its children: python -m sglang_bcg_fixes.lab.verify.server JOB.

JOB is a file with the engine's arguments and the calls. Each event is written as one line of JSON, so that the parent
sees progress and keeps the answers given before a crash. If the job names a pipe instead of calls, they are read from
it, one line of JSON each, until its writer closes it.
"""

from __future__ import annotations

import functools
import json
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

TOP_LOGPROBS = 4
SECONDS_TO_IDLE = 1
# the cache first, which may get the pages that the graphs had
ASLEEP = ("kv_cache", "cuda_graph")
Generate = Callable[..., list[dict[str, Any]]]


def main(arguments: list[str]) -> None:
    job = json.loads(pathlib.Path(arguments[0]).read_text())
    started = time.perf_counter()

    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**job["engine"])
    run(job, engine.generate, time.perf_counter() - started, functools.partial(sleep, engine))


def run(job: dict[str, Any], generate: Generate, start_seconds: float, sleep: Callable[[], None] | None = None) -> None:
    """Make the calls one at a time, so that batches are the same in every server."""
    with open(job["answers"], "w", buffering=1) as out:
        print(json.dumps({"started": round(start_seconds, 1)}), file=out)
        for call in calls_of(job):
            if call.get("after_sleep"):
                assert sleep, "this server cannot sleep"
                sleep()
            wanted = {"return_logprob": True, "top_logprobs_num": TOP_LOGPROBS} if job["logprobs"] else {}
            thinks = call.get("thinks", False)
            if thinks:
                wanted["require_reasoning"] = True
            began = time.perf_counter()
            # where the end is ignored, a request begins only once there is room for all that it may generate
            sampling = {"temperature": 0, "max_new_tokens": call["new_tokens"], "ignore_eos": not thinks}
            found = generate(input_ids=call["prompts"], sampling_params=sampling, **wanted)
            seconds = time.perf_counter() - began
            line = {"answers": [answer(each) for each in found], "milliseconds": round(seconds * 1e3, 3)}
            print(json.dumps(line), file=out)
        print(json.dumps({"finished": True}), file=out)
    # the parent ends this process: in an orderly exit every process removes its report
    signal.pause()


def sleep(engine: Any) -> None:
    """Have the server give the memory of its cache and its graphs back, and take it again."""
    # a request that has just ended still counts, and a server that is not idle ends
    time.sleep(SECONDS_TO_IDLE)
    engine.release_memory_occupation(tags=list(ASLEEP))
    for tag in ASLEEP:
        engine.resume_memory_occupation(tags=[tag])


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
        "cached": about.get("cached_tokens"),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
