# SPDX-License-Identifier: Apache-2.0
"""Ask a server over HTTP: the same prompts alone, together, again, and in a second turn."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import http.client
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from sglang_bcg_fixes.lab.verify.own import prompts
from sglang_bcg_fixes.lab.verify.own.prompts import Prompt

ALONE, TOGETHER, WARM, SECOND_TURN = "alone", "together", "again", "second turn"
AT_A_TIME = 8
TOP_LOGPROBS = 4
# of one request; the first ones may compile kernels
SECONDS_TO_ANSWER = 600
SECONDS_TO_FLUSH, SECONDS_BETWEEN_FLUSHES = 10, 0.1
# prompts whose first token is timed
TIMED = 5
UNREACHABLE = (OSError, http.client.HTTPException)


@dataclasses.dataclass(frozen=True)
class Client:
    host: str
    port: int
    api_key: str | None
    seconds: float

    def call(self, method: str, path: str, content: Any = None, seconds: float | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds or self.seconds)
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, path, None if content is None else json.dumps(content), headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def is_healthy(self) -> bool:
        try:
            return self.call("GET", "/health", seconds=30)[0] == http.HTTPStatus.OK
        except UNREACHABLE:
            # not listening yet, or not ready
            return False

    def about(self) -> dict[str, Any]:
        """The server's own description; older and newer releases answer elsewhere."""
        for path in ("/server_info", "/get_server_info"):
            status, content = self.call("GET", path)
            if status == http.HTTPStatus.OK:
                found = json.loads(content)
                return found if isinstance(found, dict) else {}
        return {}

    def flush(self) -> None:
        """Empty the prefix cache; SGLang refuses that while it still counts an answered request as running."""
        deadline = time.monotonic() + SECONDS_TO_FLUSH
        while (status := self.call("POST", "/flush_cache")[0]) != http.HTTPStatus.OK:
            if time.monotonic() > deadline:
                print(f"the prefix cache was not emptied: HTTP status {status}", file=sys.stderr, flush=True)
                return
            time.sleep(SECONDS_BETWEEN_FLUSHES)

    def answer(self, prompt: Prompt, new_tokens: int) -> dict[str, Any]:
        if prompt.kind == prompts.MESSAGES:
            chat = {"model": "default", "messages": prompt.content, "max_tokens": new_tokens, "temperature": 0}
            wanted = {"logprobs": True, "top_logprobs": TOP_LOGPROBS, "ignore_eos": True}
            status, content = self.call("POST", "/v1/chat/completions", {**chat, **wanted})
        else:
            sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
            wanted = {"return_logprob": True, "top_logprobs_num": TOP_LOGPROBS}
            question = {prompt.kind: prompt.content, "sampling_params": sampling, **wanted}
            status, content = self.call("POST", "/generate", question)
        digest = hashlib.sha256(json.dumps(prompt.content).encode()).hexdigest()[:12]
        if status != http.HTTPStatus.OK:
            return {"asked": digest, "error": f"HTTP status {status}: {content.decode(errors='replace')[:300]}"}
        found = json.loads(content)
        return {"asked": digest, **(of_chat(found) if prompt.kind == prompts.MESSAGES else of_generate(found))}


def of_generate(found: dict[str, Any]) -> dict[str, Any]:
    about = found["meta_info"]
    rows = about.get("output_token_logprobs") or []
    return {
        "text": found.get("text", ""),
        "tokens": found.get("output_ids") or [row[1] for row in rows],
        "logprobs": [row[0] for row in rows],
        "top": [[row[:2] for row in place or ()] for place in about.get("output_top_logprobs") or ()],
    }


def of_chat(found: dict[str, Any]) -> dict[str, Any]:
    choice = found["choices"][0]
    places = (choice.get("logprobs") or {}).get("content") or []
    return {
        "text": choice["message"].get("content") or "",
        "tokens": [place["token"] for place in places],
        "logprobs": [place["logprob"] for place in places],
        "top": [[[row["logprob"], row["token"]] for row in place.get("top_logprobs") or ()] for place in places],
    }


def everything(
    client: Client, asked: Sequence[Prompt], new_tokens: int, vocabulary: int, answers: dict[str, dict[str, Any]]
) -> None:
    """Put every answer into `answers` as it comes, so that those before a crash are kept."""
    client.flush()
    for prompt in asked:
        answers[f"{ALONE}, {prompt.name}"] = client.answer(prompt, new_tokens)
    client.flush()
    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
        found = pool.map(lambda prompt: client.answer(prompt, new_tokens), asked)
        for prompt, answer in zip(asked, found, strict=True):
            answers[f"{TOGETHER}, {prompt.name}"] = answer
    # the beginnings are in the prefix cache now
    for prompt in asked:
        answers[f"{WARM}, {prompt.name}"] = client.answer(prompt, new_tokens)
    for prompt in asked:
        first = answers[f"{WARM}, {prompt.name}"]
        if "error" not in first:
            more = prompts.second_turn(prompt, first, vocabulary)
            answers[f"{SECOND_TURN}, {prompt.name}"] = client.answer(more, new_tokens)


def first_token_ms(client: Client, asked: Sequence[Prompt]) -> float:
    """Median of the time to an answer of one token, without a prefix cache."""
    taken = []
    for prompt in asked[len(asked) // 2 :][:TIMED]:
        client.flush()
        began = time.perf_counter()
        client.answer(prompt, 1)
        taken.append((time.perf_counter() - began) * 1e3)
    return round(statistics.median(taken), 1)
