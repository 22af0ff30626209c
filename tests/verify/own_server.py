# SPDX-License-Identifier: Apache-2.0
"""A user's server that needs nothing: python tests/verify/own_server.py --port N; MISBEHAVIOUR says what goes wrong.

MISBEHAVIOUR is "arm=what" with commas between; arms are told apart as the plugin would: by the environment.
"""

from __future__ import annotations

import http.server
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

LONGEST_PROMPT = 81
VOCABULARY = 1000


def arm() -> str:
    if os.environ.get("SGLANG_BCG") == "off":
        return "stock"
    return "eager" if "refuse_prefill" in os.environ["SGLANG_BCG_INSTRUMENTS"] else "fixes"


def wrong() -> str:
    wrongs = dict(pair.split("=") for pair in os.environ.get("MISBEHAVIOUR", "").split(",") if pair)
    return wrongs.get(arm(), "")


def report() -> None:
    if arm() == "stock" or wrong() == "has no plugin":
        return
    reports = pathlib.Path(os.environ["SGLANG_BCG_REPORT_DIR"])
    fixes = [{"id": name, "state": "applied"} for name in ("a_fix", "count_prefill")]
    (reports / "1.json").write_text(json.dumps({"fixes": fixes, "kernels": {}}))
    replays = arm() == "fixes" if wrong() != "replays the other way" else arm() == "eager"
    (reports / "1.passes").write_text(json.dumps(["prefill", "replayed" if replays else "refused", 8, 1, None]) + "\n")


class Handler(http.server.BaseHTTPRequestHandler):
    asked = flushes = 0

    def do_GET(self) -> None:
        self.reply({"max_req_input_len": LONGEST_PROMPT, "internal_states": [{"memory_usage": {"weight": 1.5}}]})

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        if self.path == "/flush_cache":
            Handler.flushes += 1
            late = wrong() == "flushes late" and Handler.flushes < 3
            self.reply({"refused": True} if late or wrong() == "never flushes" else {})
            return
        Handler.asked += 1
        if wrong() == "dies" and Handler.asked == 9:
            print("RuntimeError: an illegal memory access", flush=True)
            print("[12:00:00] kill_process_tree called", flush=True)
            os.abort()
        if wrong() == "hangs" and Handler.asked == 9:
            time.sleep(999)
        if self.path == "/generate":
            content = question.get("input_ids") or [ord(letter) for letter in question["text"]]
            self.reply(told(content, question["sampling_params"]["max_new_tokens"]))
        else:
            content = [ord(letter) for each in question["messages"] for letter in each["content"]]
            self.reply(as_chat(told(content, question["max_tokens"])))

    def reply(self, content: Any) -> None:
        refused = isinstance(content, dict) and "refused" in content
        self.send_response(400 if refused else 200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: Any) -> None:
        pass


def told(prompt: list[int], count: int) -> dict[str, Any]:
    """Tokens that follow from the prompt; each has a rival that is nearly as likely where the sum is even."""
    if wrong() == "refuses all" or (wrong() == "refuses one" and len(prompt) == 16):
        return {"refused": "too long"}
    first = sum(prompt) % VOCABULARY
    tokens = [(first + step) % VOCABULARY for step in range(count)]
    rivals = [token + VOCABULARY for token in tokens]
    logprobs = [-1 / (1 + token) for token in tokens]
    others = [value - 0.01 for value in logprobs]
    if wrong() == "wrong tokens" and len(prompt) in (8, 16):
        tokens = [token + 1 for token in tokens]
    if wrong() == "wrong logprobs" and len(prompt) == 8:
        logprobs = [value - 1 for value in logprobs]
    if wrong() == "not a number" and len(prompt) == 8:
        logprobs = [float("nan") for _ in logprobs]
    if wrong() == "rounds":
        logprobs = [value - 0.001 for value in logprobs]
    if wrong() == "ties" and len(prompt) == 8:
        tokens, rivals, logprobs, others = rivals, tokens, others, logprobs
    return {
        "text": " ".join(map(str, tokens)),
        "output_ids": tokens,
        "meta_info": {
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
            "output_top_logprobs": [
                [[value, token, None], [other, rival, None]]
                for value, token, other, rival in zip(logprobs, tokens, others, rivals, strict=True)
            ],
        },
    }


def as_chat(found: dict[str, Any]) -> dict[str, Any]:
    about = found["meta_info"]
    places = [
        {"token": str(row[1]), "logprob": row[0], "top_logprobs": [{"token": str(t), "logprob": p} for p, t, _ in top]}
        for row, top in zip(about["output_token_logprobs"], about["output_top_logprobs"], strict=True)
    ]
    return {"choices": [{"message": {"content": found["text"]}, "logprobs": {"content": places}}]}


def main(arguments: list[str]) -> None:
    if wrong() == "dies at start":
        sys.exit("AssertionError: out_cache_loc_swa has different dtype")
    if wrong() == "hangs at start":
        # as SGLang does, with a process of its own that would outlive it
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(997)"])
        time.sleep(999)
    report()
    port = int(arguments[arguments.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
