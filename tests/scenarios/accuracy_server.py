# SPDX-License-Identifier: Apache-2.0
"""A server of benchmarks/accuracy that with graphs answers wrongly once, and then dies or hangs.

Arguments: `dies` or `hangs`, and the job's file.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import task


def main(ending: str, file: str) -> None:
    job = json.loads(pathlib.Path(file).read_text())
    with pathlib.Path(job["answers"]).open("w", buffering=1) as out:
        print(json.dumps({"started": 0.1}), file=out)
        for number, problem in enumerate(task.test_problems(job["questions"])):
            graphs = "enable_breakable_cuda_graph" in job["engine"]
            answer = [7] if graphs and number == 1 else problem.answer
            print(json.dumps({"phase": "serial", "number": number, "tokens": answer, "cached": 2}), file=out)
            if graphs and number == 2:
                out.write('{"phase": "ser')
                if ending == "dies":
                    sys.exit(3)
                time.sleep(60)
        print(json.dumps({"first_token_ms": {"median": 5}}), file=out)
        print(json.dumps({"finished": True}), file=out)
    time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
