# SPDX-License-Identifier: Apache-2.0
"""A stand-in for SGLang's HTTP server, for tests of serving.py and ranks.py; with the plugin it obeys MISBEHAVIOUR."""

from __future__ import annotations

import argparse
import array
import base64
import http.server
import json
import os
import sys
from typing import Any

MISBEHAVIOUR = os.environ.get("MISBEHAVIOUR", "") if os.environ["SGLANG_PLUGINS"] == "bcg_fixes" else ""


class Handler(http.server.BaseHTTPRequestHandler):
    replays = True

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if MISBEHAVIOUR == "ends":
            os._exit(3)
        # a line in one call: requests come side by side
        sys.stderr.write(f"Prefill batch, #new-seq: 1, cuda graph: {self.replays}, input throughput\n")
        off = 5.0 if MISBEHAVIOUR == "wrong" else 0.0
        tops = [[[-1.0 - off, 7, None], [-2.0, 8, None]]]
        found: dict[str, Any] = {"output_top_logprobs": tops, "output_token_logprobs": tops[0]}
        experts = [3, 1, 4, 2 if off else 1]
        more = {"routed_experts": base64.b64encode(array.array("i", experts).tobytes()).decode()}
        found = {**(found if asked.get("return_logprob") else {}), **more}
        self.answer({"meta_info": found, "output_ids": [7, 8]})

    def answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cuda-graph-backend-prefill")
    options, _ = parser.parse_known_args()
    if MISBEHAVIOUR == "does not start":
        raise SystemExit("it does not start")
    Handler.replays = options.cuda_graph_backend_prefill != "disabled"
    http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
