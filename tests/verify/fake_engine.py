# SPDX-License-Identifier: Apache-2.0
"""A server of `verify` that needs nothing: answers follow from the prompts, and MISBEHAVIOUR says what goes wrong.

MISBEHAVIOUR is "arm=what" with commas between; arms are told apart as SGLang's plugin would: by the environment.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

from sglang_bcg_fixes.lab.verify import server
from sglang_bcg_fixes.lab.verify.instruments import INSIDE


def arm() -> str:
    if "refuse_" in os.environ["SGLANG_BCG_INSTRUMENTS"]:
        return "reference"
    if "padded" in os.environ["SGLANG_BCG_INSTRUMENTS"]:
        return "padded"
    if os.environ["SGLANG_BCG_FIXES"] == "auto":
        return "patched"
    return "checked" if os.environ["SGLANG_BCG_SELFCHECK"] == "warn" else "stock"


def kernels_by_name() -> dict[str, dict[str, Any]]:
    """Report kernels as applied, each in the implementation that the environment names."""
    prefix = "SGLANG_BCG_KERNEL_"
    named = {name.removeprefix(prefix).lower(): value for name, value in os.environ.items() if name.startswith(prefix)}
    return {
        op: {"state": "applied", "impl": implementation}
        for op, implementation in named.items()
        if implementation != "off"
    }


def main(arguments: list[str]) -> None:
    job = json.loads(pathlib.Path(arguments[0]).read_text())
    wrongs = dict(pair.split("=") for pair in os.environ.get("MISBEHAVIOUR", "").split(",") if pair)
    wrong = wrongs.get(arm(), "nothing")
    reports = pathlib.Path(os.environ["SGLANG_BCG_REPORT_DIR"])
    passes = (reports / "1.passes").open("w", buffering=1)
    said = "wrong" if arm() == "checked" and wrong != "says nothing" else os.environ.get("PATCHED_SAYS")
    if named := kernels_by_name():
        (reports / "1.json").write_text(json.dumps({"fixes": [], "kernels": named}))
    if waits := os.environ.get("ALL_WAIT"):
        fixes = [{"id": name, "state": os.environ.get("ALL_ARE", "pending")} for name in waits.split(",")]
        (reports / "1.json").write_text(json.dumps({"fixes": fixes, "kernels": {}}))
    if said:
        found = {"verdict": said, "reason": "it was noticed", "seconds": 1.5, "kept_bytes": 0}
        (reports / "1.json").write_text(json.dumps({"fixes": [], "kernels": {}, "selfcheck": found}))
    asked = 0
    if wrong == "dies at start":
        sys.exit("AssertionError: out_cache_loc_swa has different dtype")
    if wrong == "hangs at start":
        time.sleep(999)

    is_inside = kernels_by_name().get("attention_extend") and wrong != "keeps its breaks"

    def note(what: str, detail: Any, requests: int) -> None:
        for phase in ("prefill", INSIDE) if is_inside and what == "replayed" else ("prefill",):
            print(json.dumps([phase, what, 8, requests, detail]), file=passes)

    def replayed_or_not(longest: int) -> tuple[str, int]:
        """The last word on a batch, and its bucket."""
        if wrong == "replays small ones" and longest > 128:
            return "admitted, not replayed", longest
        return "admitted, not replayed" if wrong == "only admits" else "replayed", longest

    if wrong != "captures nothing":
        note("captured", None, 1)

    def generate(input_ids: list[list[int]], sampling_params: dict[str, int], **_: Any) -> list[dict[str, Any]]:
        nonlocal asked
        asked += 1
        if wrong == "crashes" and asked == 3:
            os.kill(os.getpid(), 9)
        if wrong == "hangs" and asked == 3:
            time.sleep(999)
        silent = wrong in ("never replays", "captures nothing")
        if (arm() == "reference" and wrong != "replays") or silent:
            note("refused", "for the reference" if not silent else "by the runner", len(input_ids))
        else:
            note(*replayed_or_not(max(map(len, input_ids))), len(input_ids))
        return [told(prompt, sampling_params["max_new_tokens"], wrong, asked) for prompt in input_ids]

    server.run(job, generate, 0.1)


def told(prompt: list[int], count: int, wrong: str, asked: int) -> dict[str, Any]:
    tokens = [(sum(prompt) + step) % 1000 for step in range(count)]
    logprobs = [-1 / (1 + token) for token in tokens]
    if wrong == "wrong tokens" and asked == 2:
        tokens[1] += 1
    if wrong == "wrong logprobs" and asked == 2:
        logprobs[1] *= 1 + 2**-52
    if wrong == "differs when asked again" and asked == 4:
        tokens[0] += 1
    if wrong == "not a number":
        logprobs[0] = float("nan")
    if wrong == "too short":
        tokens.pop(), logprobs.pop()
    if wrong == "no logprobs":
        logprobs.clear()
    return {
        "output_ids": tokens,
        "meta_info": {
            "cached_tokens": len(prompt) - 1 if wrong == "finds it" else 0,
            "output_token_logprobs": [[value, token] for value, token in zip(logprobs, tokens, strict=False)],
            "output_top_logprobs": [[[value, token, None]] for value, token in zip(logprobs, tokens, strict=False)],
        },
    }


if __name__ == "__main__":
    main(sys.argv[1:])
