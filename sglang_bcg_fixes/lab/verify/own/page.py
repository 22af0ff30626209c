# SPDX-License-Identifier: Apache-2.0
"""The result as a page: a square for each request of an arm."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from sglang_bcg_fixes.lab.verify import compare as squares
from sglang_bcg_fixes.lab.verify import page
from sglang_bcg_fixes.lab.verify.own import compare

SQUARE = {
    compare.EQUAL: squares.EQUAL,
    compare.EXPLAINED: squares.TOKENS_EQUAL,
    compare.DIFFERENT: squares.DIFFERS,
    compare.MISSING: squares.MISSING,
    compare.REFUSED: squares.BROKEN,
}


def text(content: Mapping[str, Any]) -> str:
    rows = "\n".join(row(name, arm) for name, arm in content["arms"].items())
    legend = ", ".join(f"{page.square(page.COLOURS[square])} {state}" for state, square in SQUARE.items())
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>bcg-fixes verify</title>
<style>{page.STYLE}</style>
<h1>{html.escape(content["verdict"][0].upper() + content["verdict"][1:])}</h1>
<p><code>{html.escape(content["command"])}</code></p>
<div class="scroll" tabindex="0" role="region" aria-label="Every request">
<table>
<caption>A square for each request, compared with the server that refuses replays: {legend}.</caption>
<tbody>
{rows}
</tbody>
</table>
</div>
<p>{html.escape(where(content))}</p>
</html>
"""


def where(content: Mapping[str, Any]) -> str:
    versions = f"SGLang {content['sglang']}, bcg-fixes {content['bcg_fixes']}"
    return "; ".join([content["date"][:10], versions, *content["gpus"]])


def row(name: str, arm: Mapping[str, Any]) -> str:
    odd = [
        {"outcome": SQUARE[each["state"]], "part": each["name"], "difference": each["difference"]}
        for each in arm["not_equal"]
    ]
    drawn = {
        "equal": arm["counts"][compare.EQUAL],
        "requests": arm["counts"][compare.EQUAL] + len(odd),
        "not_equal": odd,
    }
    strip = page.strip(drawn) if drawn["requests"] else ""
    said = [arm["ending"]]
    if arm["first_token_ms"] is not None:
        said.append(f"first token after {arm['first_token_ms']} ms")
    if "in use" in arm["memory"]:
        said.append(f"{arm['memory']['in use']} GiB")
    return f'<tr><th scope="row">{name}<small>{html.escape("; ".join(said))}</small></th><td>{strip}</td></tr>'
