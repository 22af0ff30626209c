# SPDX-License-Identifier: Apache-2.0
"""A server that is healthy at once and gives every request the same completion.

Arguments: its port, a line for its log, the completion's ids as JSON, and the HTTP status of its answers.
"""

from __future__ import annotations

import http.server
import json
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    ids: object
    status: int

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps({"output_ids": self.ids}).encode())


def main(port: str, log_line: str, ids: str, status: str) -> None:
    print(log_line, flush=True)
    Handler.ids, Handler.status = json.loads(ids), int(status)
    http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
