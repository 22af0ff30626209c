# SPDX-License-Identifier: Apache-2.0
"""One short prefill of a server with the plugin, as torch's profiler sees it: its scheduler above, its GPU below.

    python benchmarks/prefill_timeline.py --model qwen3_1_7b --json FILE   # or a folder that serving_models.py made
    python benchmarks/prefill_timeline.py --draw FILE                      # writes FILE with .svg in place of .json

Attention is inside the graph. A profiler slows the host, so FILE has the time to a first token without one, too.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import pathlib
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import serving
from sglang_bcg_fixes.lab.verify import environment
from sglang_bcg_fixes.lab.verify.servers import ended_by_signals

TOKENS, WARM, ASKED, PROFILED = 61, 30, 100, 8
# SGLang's own marks of what its scheduler does, and CUDA's of a replay
STEP = "step[EXTEND"
RECEIVES, ENDS = "scheduler.recv_requests", "scheduler.process_batch_result"
SHOWN = {
    RECEIVES: "receives",
    "scheduler.get_next_batch_to_run": "makes the batch",
    "scheduler.run_batch": "runs it",
    STEP: "prefill",
    "step[DECODE": "the next step",
    "cudaGraphLaunch": "replay",
    ENDS: "answers",
}
# gaps of a GPU in which it waits for the host
LEAST_GAP = 30.0
SECONDS_TO_WRITE = 60
WIDTH, LEFT, HEIGHT = 900, 80, 22
COLOURS = ("#9a9a9a", "#4c78a8", "#f2a541", "#54a24b")

Span = dict[str, Any]


def spans(events: Sequence[Span]) -> dict[str, list[Span]]:
    """The last prefill among a profiler's events, in microseconds since its request was received."""
    # marks are there once more as the GPU came to them
    whole = [event for event in events if event.get("ph") == "X" and event.get("cat") != "gpu_user_annotation"]
    step = max((event for event in whole if event["name"].startswith(STEP)), key=lambda event: event["ts"])
    host = [event for event in whole if event["tid"] == step["tid"] and shown(event["name"])]
    began = max(event["ts"] for event in host if event["name"] == RECEIVES and event["ts"] < step["ts"])
    ended = min(event["ts"] + event["dur"] for event in host if event["name"] == ENDS and event["ts"] > step["ts"])
    scheduler: list[Span] = []
    open_until: list[float] = []
    for event in sorted(host, key=lambda event: (event["ts"], -event["dur"])):
        if began <= event["ts"] < ended:
            open_until = [end for end in open_until if end > event["ts"]]
            scheduler.append({**span(event["ts"], event["dur"], began), "name": event["name"], "in": len(open_until)})
            open_until.append(event["ts"] + event["dur"])
    device: list[Span] = []
    for event in sorted(whole, key=lambda event: event["ts"]):
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and began <= event["ts"] < ended:
            last = device[-1] if device else {"begin": 0.0, "us": -LEAST_GAP}
            if event["ts"] - began - last["begin"] - last["us"] >= LEAST_GAP:
                device.append({**span(event["ts"], 0.0, began), "kernels": 0})
            device[-1]["us"] = round(event["ts"] + event["dur"] - began - device[-1]["begin"], 1)
            device[-1]["kernels"] += 1
    return {"scheduler": scheduler, "gpu": device}


def shown(name: str) -> str | None:
    return next((text for start, text in SHOWN.items() if name.startswith(start)), None)


def span(begin: float, microseconds: float, origin: float) -> Span:
    return {"begin": round(begin - origin, 1), "us": round(microseconds, 1)}


def svg(found: dict[str, Any]) -> Iterator[str]:
    ends = max(each["begin"] + each["us"] for lane in ("scheduler", "gpu") for each in found[lane])
    scale, depth = WIDTH / ends, 1 + max(each["in"] for each in found["scheduler"])
    height = HEIGHT * (depth + 4)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" font-size="11"'
    yield '  font-family="system-ui, sans-serif">'
    yield f"<title>{TOKENS} tokens, from the request to its answer</title>"
    yield '<rect width="100%" height="100%" fill="#fff"/>'
    for row, name in ((0, "scheduler"), (depth + 1, "GPU")):
        yield f'<text x="8" y="{HEIGHT * row + 27}" font-weight="600">{name}</text>'
    for each in found["scheduler"]:
        yield bar(each, each["in"], scale, COLOURS[each["in"] % len(COLOURS)], shown(each["name"]) or "")
    for each in found["gpu"]:
        many = f"{each['kernels']} kernels" if each["kernels"] > 9 else ""
        yield bar(each, depth + 1, scale, COLOURS[-1], many)
    for millisecond in range(int(ends / 1000) + 1):
        x = LEFT + 1000 * millisecond * scale
        yield f'<text x="{x:.1f}" y="{height - 8}" fill="#555">{millisecond} ms</text>'
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{height - 20}" stroke="#c8c8c8" stroke-dasharray="2 3"/>'
    yield "</svg>"


def bar(each: Span, row: int, scale: float, colour: str, text: str) -> str:
    x, y, width = LEFT + each["begin"] * scale, HEIGHT * row + 12, max(0.5, each["us"] * scale)
    name = f'<text x="{x + 4:.1f}" y="{y + 15}" fill="#fff">{text}</text>' if 6 * len(text) + 8 < width else ""
    said = f"<title>{each.get('name', 'busy')}, {each['us']:.0f} µs</title>"
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT - 2}" fill="{colour}">{said}</rect>{name}'


def profile(server: serving.Server, prompts: serving.Prompts, folder: pathlib.Path) -> list[Span]:
    ask(server, "start_profile", {"output_dir": str(folder), "activities": ["CPU", "GPU"]})
    for _ in range(PROFILED):
        serving.first_token(server, prompts.tokens(TOKENS))
    ask(server, "stop_profile", {})
    for _ in range(SECONDS_TO_WRITE):
        for file in folder.glob("*.gz"):
            with contextlib.suppress(EOFError), gzip.open(file, "rt") as text:
                events: list[Span] = json.load(text)["traceEvents"]
                return events
        time.sleep(1)
    raise SystemExit(f"SGLang wrote no trace within {SECONDS_TO_WRITE} s: {server.last_lines()}")


def ask(server: serving.Server, path: str, body: dict[str, Any]) -> None:
    asked = urllib.request.Request(
        f"{server.address}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(asked, timeout=serving.SECONDS_TO_ANSWER).close()


def measure(name: str) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bcg-timeline-")))
        model = serving.model_of(name, folder)
        plan = serving.Plan(model, (serving.INSIDE,), words=serving.words_of(model), more=("--load-format", "dummy"))
        server = serving.start(plan, serving.INSIDE, folder)
        stack.callback(server.stop)
        serving.wait_until_healthy([server], lambda line: print(line, file=sys.stderr, flush=True))
        if server.why:
            raise SystemExit(f"nothing to profile: {server.why}")
        prompts = serving.Prompts("timeline", plan.words)
        times = [serving.first_token(server, prompts.tokens(TOKENS)) for _ in range(WARM + ASKED)][WARM:]
        traces = folder / "traces"
        traces.mkdir()
        found = spans(profile(server, prompts, traces))
        header = {**environment.header(environment.look(sys.executable)), "model": model.name, "tokens": TOKENS}
    return {"header": header, "first_token_ms": round(statistics.median(times), 2), **found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", metavar="NAME", help="one of serving_models.py, or a folder that it made")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--draw", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.draw:
        options.draw.with_suffix(".svg").write_text("\n".join(svg(json.loads(options.draw.read_text()))) + "\n")
        return 0
    if not options.model or not options.json:
        parser.error("--model and --json are needed, or --draw")
    options.json.write_text(json.dumps(measure(options.model), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
