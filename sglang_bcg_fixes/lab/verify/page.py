# SPDX-License-Identifier: Apache-2.0
"""A run of `bcg-fixes verify` as a page: a square for each request, and what to do about it."""

from __future__ import annotations

import collections
import html
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_bcg_fixes.lab.verify import compare
from sglang_bcg_fixes.lab.verify.arms import ALONE, PATCHED, STOCK
from sglang_bcg_fixes.lab.verify.servers import FINISHED

COLOURS = {
    compare.EQUAL: "#2e7d32",
    compare.TOKENS_EQUAL: "#9ccc65",
    compare.DIFFERS: "#ef6c00",
    compare.BROKEN: "#c62828",
    compare.MISSING: "#37474f",
}
SIDE, IN_A_ROW = 9, 33
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse }
th, td { border: 1px solid #8886; padding: .4rem .6rem; text-align: left; vertical-align: top }
caption { text-align: left; padding-bottom: .5rem }
.green { color: #2e7d32 } .red { color: #c62828 }
small { display: block; max-width: 24rem; font-weight: normal }
"""
Server = Mapping[str, Any]


class PageError(Exception):
    """The file of an earlier run cannot be read, and what to do."""


def read(file: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
        servers = content["servers"]
    except (ValueError, KeyError, TypeError) as error:
        raise PageError(f"{file} is no file of `bcg-fixes verify --json` ({error!r}); name one") from error
    if not servers:
        raise PageError(f"{file} has no server: run `bcg-fixes verify --json {file}` once more")
    return dict(content)


def page(content: Mapping[str, Any]) -> str:
    title = f"SGLang {content['sglang']} on {content['gpu']}"
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    ours = f"bcg-fixes {content['bcg_fixes']}, commit {content['commit'] or 'unknown'}"
    made = f"{ours}, {content['date'][:10]}; {versions}"
    by_case: dict[str, list[Server]] = collections.defaultdict(list)
    for server in content["servers"]:
        by_case[server["case"]].append(server)
    arms = [arm for arm in (STOCK, PATCHED) if any(server["arm"] == arm for server in content["servers"])]
    head = "".join(f'<th scope="col">{name}</th>' for name in ("case", *arms))
    rows = "\n".join(row(name, servers, arms) for name, servers in by_case.items())
    squares = ", ".join(f"{square(colour)} {name}" for name, colour in COLOURS.items())
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
<h1>{html.escape(title)}</h1>
{"".join(f"<p>{line}</p>" for line in told(content["servers"], arms))}
<div class="scroll" tabindex="0" role="region" aria-label="Every request">
<table>
<caption>A square for each request: {squares}. The first server of an arm is drawn.</caption>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
<p>{html.escape(made)}</p>
</html>
"""


def told(servers: Sequence[Server], arms: Sequence[str]) -> Iterator[str]:
    for arm in arms:
        of_arm = [server for server in servers if server["arm"] == arm]
        equal, asked = (sum(server[part] for server in of_arm) for part in ("equal", "requests"))
        dead = sum(server["ending"] != FINISHED for server in of_arm)
        ended = f"; {dead} of {len(of_arm)} servers did not finish" if dead else ""
        yield f"<b>{arm}</b>: {equal:,} of {asked:,} requests are equal{ended}."
    bad = {server["case"] for server in servers if server["arm"] == PATCHED and server["verdict"] != compare.GREEN}
    if bad:
        yield (
            f"Not green with the plugin: {', '.join(sorted(bad))}. See below why; if stock is not the same there, "
            "send the JSON file of this run."
        )
    elif PATCHED in arms:
        yield "Every server with all fixes is green: <code>SGLANG_PLUGINS=bcg_fixes</code> and your command."
    alone = {server["case"] for server in servers if server["arm"] == ALONE and server["verdict"] != compare.GREEN}
    if alone:
        yield f"A fix alone is not green: {', '.join(sorted(alone))}. The JSON file of this run says why."


def row(name: str, servers: Sequence[Server], arms: Sequence[str]) -> str:
    standard = html.escape(servers[0]["standard"])
    cells = "".join(cell([server for server in servers if server["arm"] == arm]) for arm in arms)
    return f'<tr><th scope="row">{html.escape(name)}<small>{standard}</small></th>{cells}</tr>'


def cell(servers: Sequence[Server]) -> str:
    if not servers:
        return "<td>not run</td>"
    first = servers[0]
    worst = next((server for server in servers if server["verdict"] != compare.GREEN), first)
    state = worst["verdict"]
    note = f"<small>{html.escape(worst['why'])}</small>" if worst["why"] else ""
    counted = f"{first['equal']} of {first['requests']}"
    return f'<td>{strip(first)}<b class="{state}">{counted}, {state}</b>{note}</td>'


def strip(server: Server) -> str:
    """The requests of one server, the equal ones first."""
    odd = [(request["outcome"], f"{request['part']}: {request['difference']}") for request in server["not_equal"]]
    odd.sort(key=lambda request: list(COLOURS).index(request[0]))
    requests = [(compare.EQUAL, "")] * server["equal"] + odd
    parts = []
    for number, (outcome, difference) in enumerate(requests):
        x, y = number % IN_A_ROW * (SIDE + 1), number // IN_A_ROW * (SIDE + 1)
        tip = f"<title>{html.escape(difference)}</title>" if difference else ""
        parts.append(f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="{COLOURS[outcome]}">{tip}</rect>')
    height = ((len(requests) - 1) // IN_A_ROW + 1) * (SIDE + 1)
    label = f"{server['equal']} of {server['requests']} requests are equal"
    size = f'width="{IN_A_ROW * (SIDE + 1)}" height="{height}"'
    return f'<svg role="img" aria-label="{label}" {size}>{"".join(parts)}</svg><br>'


def square(colour: str) -> str:
    side = f'width="{SIDE}" height="{SIDE}"'
    return f'<svg aria-hidden="true" {side}><rect {side} fill="{colour}"/></svg>'
