# SPDX-License-Identifier: Apache-2.0
"""Generate the part on harm of docs/graphs_by_model.md, and its picture, from the servers recorded by tests/harm."""

from __future__ import annotations

import html
import json
import pathlib
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from cpu_sglang import architectures  # noqa: E402
from sglang_bcg_fixes.fixes import hybrids_without_graphs  # noqa: E402
from sglang_bcg_fixes.planning.registry import declared_in  # noqa: E402
from tests.harm import exceptions, matrix, rules, speed  # noqa: E402

RECORDED = REPOSITORY / "tests" / "harm" / "recorded"
RELEASES = tuple((REPOSITORY / "tools" / "releases.txt").read_text().split())
# a patched server compared with a stock one: a sign, a colour, and words
MENDED = ("+", "#43a047", "better: stock does not serve, answers wrongly or replays less")
EQUAL = ("=", "#a5d6a7", "equal: both replay graphs, and every answer equals the eager one")
ROUNDED = ("~", "#c5e1a5", "equal: both replay graphs, whose kernels round differently from the eager ones")
EAGER = ("e", "#e0e0e0", "equal: SGLang makes no prefill graphs for it, and both answer eagerly")
STOPPED = ("s", "#bdbdbd", "equal: neither serves here")
WRONG = ("w", "#ef9a9a", "equal: the same wrong answer")
EXCUSED = ("x", "#ffb74d", "less than stock, to prevent a wrong answer: see below")
WORSE = ("!", "#c62828", "worse off with the plugin")
ABSENT = ("", "#ffffff", "not in this release, or not recorded there yet")
KINDS = (MENDED, EQUAL, ROUNDED, EAGER, STOPPED, WRONG, EXCUSED, WORSE, ABSENT)
ROW, COLUMN, LEFT, TOP = 15, 40, 270, 70
Row = dict[str, Any]
Table = dict[str, dict[str, dict[str, Row]]]


def recorded() -> Table:
    """Release -> architecture -> arm -> row."""
    table: Table = {release: {} for release in RELEASES}
    for release in RELEASES:
        file = RECORDED / f"{release}.jsonl"
        for line in file.read_text().splitlines() if file.is_file() else ():
            row = json.loads(line)
            table[release].setdefault(row["architecture"], {})[row["arm"]] = row
    return table


def kind_of(release: str, name: str, arms: dict[str, Row]) -> tuple[str, str, str]:
    if not {"stock", "patched"} <= set(arms):
        return ABSENT
    stock, patched = arms["stock"], arms["patched"]
    broken = rules.broken(stock, patched)
    if any(not exceptions.excuse(release, name, rule) for rule in broken):
        return WORSE
    if set(broken) - {rules.MORE_BREAKS}:
        return EXCUSED
    if broken or rules.broken(patched, stock):
        return MENDED
    if "error" in stock:
        return STOPPED
    if not stock["graphs"]:
        return EAGER
    return same_answers(stock)


def same_answers(stock: Row) -> tuple[str, str, str]:
    worst = max(rules.difference(batch) for batch in stock["batches"])
    if worst == 0.0:
        return EQUAL
    return ROUNDED if worst <= rules.SAME else WRONG


def names_in(table: Table) -> list[str]:
    return sorted({name for rows in table.values() for name in rows}, key=str.lower)


def section(table: Table) -> str:
    names = names_in(table)
    kinds = {
        (name, release): kind_of(release, name, table[release].get(name, {})) for name in names for release in RELEASES
    }
    counted = {kind: sum(found is kind for found in kinds.values()) for kind in KINDS}
    lines = ["## Does the plugin do harm?", "", *verdict(counted), "", *introduction(table), ""]
    lines += ["![the matrix](harm.svg)", ""]
    lines += ["| | rows | patched compared with stock |", "|---|---|---|"]
    lines += [f"| `{kind[0]}` | {counted[kind]} | {kind[2]} |" for kind in KINDS if kind is not ABSENT]
    lines += ["", "| architecture | " + " | ".join(RELEASES) + " |", "|---|" + "---|" * len(RELEASES)]
    lines += [f"| {name} | " + " | ".join(kinds[name, release][0] for release in RELEASES) + " |" for name in names]
    lines += ["", "### What SGLang refuses", "", *admitted(table)]
    lines += ["", "### Linear layers inside", "", *inside(table)]
    lines += ["", "### Exceptions", "", *excused(), "", "### What is better", "", *better(table, kinds)]
    lines += ["", "### Time of a step", "", *time_of_steps(speed.recorded())]
    lines += ["", "### Other names of the registries", "", *others()]
    return "\n".join(lines) + "\n"


def verdict(counted: dict[tuple[str, str, str], int]) -> list[str]:
    recorded_rows = sum(count for kind, count in counted.items() if kind is not ABSENT)
    text = (
        f"**Patched, {counted[WORSE] or 'none'} of {recorded_rows} recorded servers is worse off, and "
        f"{counted[MENDED]} are better.** {counted[EXCUSED]} replay less than stock, to prevent a wrong answer. "
        "A server is a model on a release, on a CPU."
    )
    return [textwrap.fill(text, 120, break_on_hyphens=False)]


def introduction(table: Table) -> list[str]:
    rows = [row for of in table.values() for arms in of.values() for row in arms.values()]
    codes = sorted({row["key"].split()[1] for row in rows if row["arm"] == "patched"})
    text = (
        f"{len(rows)} servers of {len([release for release in RELEASES if table[release]])} releases ran on the CPU, "
        "with a stand-in for CUDA graphs and a tiny model of each architecture. They ran stock, with the plugin at its "
        "defaults and, in some releases, with `SGLANG_BCG_FIXES=off`. Some also ran with a fix for "
        "[what SGLang refuses](#what-sglang-refuses), or with [their linear layers inside](#linear-layers-inside). "
        "Each answered four batches, with a decode step after each, eagerly and then with prefill graphs. "
        "Every tensor of the answers was compared. Patched, no server may capture fewer buckets, break a graph more "
        "often, replay fewer batches or differ more from eager than stock. An [exception](#exceptions) names the wrong "
        "answer that it prevents. Switched off, a server must equal stock in everything. `make test` asserts both for "
        "the recorded rows, and repeats some of them in each release. `make harm` repeats those whose inputs have "
        f"changed. {len(matrix.IN_EVERY_RELEASE)} architectures are recorded in every release, the others in "
        f"{', '.join(matrix.EVERY_ARCHITECTURE_IN)}. "
        f"The patched rows were recorded with package code {', '.join(codes)}."
    )
    return [textwrap.fill(text, 120, break_on_hyphens=False)]


def admitted(table: Table) -> list[str]:
    """The arm with a fix that its flag asks for, where it is recorded."""
    fix = declared_in(hybrids_without_graphs)
    text = (
        f"With `{fix.flag}=on` ([by default](fixes/{fix.id}.md) only where a GPU has measured it, which is nothing "
        "here), prefill of these models is captured, with a break at each mixer and at each attention. Every answer "
        "must have the bits of the eager one."
    )
    lines = [textwrap.fill(text, 120, break_on_hyphens=False), ""]
    lines += ["| architecture | releases | stock | with it |", "|---|---|---|---|"]
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for release, rows in table.items():
        for name, arms in rows.items():
            if matrix.ADMITTED in arms:
                key = name, summary(arms[matrix.STOCK]), summary(arms[matrix.ADMITTED])
                grouped.setdefault(key, []).append(release)
    return lines + [f"| {name} | {', '.join(of)} | {stock} | {ours} |" for (name, stock, ours), of in grouped.items()]


def inside(table: Table) -> list[str]:
    """The arm whose linear layers run on our kernels."""
    text = (
        "With [our kernels](kernels.md) for linear layers, a graph breaks at attention only. Here they run in the "
        "implementations for a CPU: plain torch, token by token. They round "
        f"differently from the eager layers, in half precision: logits of about one may be off by {rules.SAME}. "
        f"`{declared_in(hybrids_without_graphs).flag}=on` where SGLang makes no prefill graphs."
    )
    lines = [textwrap.fill(text, 120, break_on_hyphens=False), ""]
    lines += ["| architecture | releases | breaks at its defaults | breaks inside | off by at most |"]
    lines += ["|---|---|---|---|---|"]
    grouped: dict[tuple[str, str, int], dict[str, float]] = {}
    for release, rows in table.items():
        for name, arms in rows.items():
            if matrix.INSIDE in arms:
                row, patched = arms[matrix.INSIDE], arms[matrix.PATCHED]["graphs"]
                key = name, str(most_breaks(patched)) if patched else "no graphs", most_breaks(row["graphs"])
                grouped.setdefault(key, {})[release] = max(map(rules.difference, row["batches"]))
    for (name, before, after), of in sorted(grouped.items()):
        where = "all" if len(of) == len(RELEASES) else ", ".join(of)
        lines.append(f"| {name} | {where} | {before} | {after} | {max(of.values()):g} |")
    return lines


def most_breaks(graphs: dict[str, list[int]]) -> int:
    return max(breaks for _, breaks in graphs.values())


def excused() -> list[str]:
    if not exceptions.EXCUSED:
        return ["None."]
    head = [
        "| the patched server | fix | architectures | releases | prevents | shown by |",
        "|---|---|---|---|---|---|",
    ]
    return head + [
        f"| {row.rule} | [{row.fix}](fixes/{row.fix}.md) | {', '.join(row.architectures)} | "
        f"{', '.join(row.releases)} | {row.prevents} | `{row.shown_by}` |"
        for row in exceptions.EXCUSED
    ]


def better(table: Table, kinds: dict[tuple[str, str], tuple[str, str, str]]) -> list[str]:
    lines = ["| architecture | releases | stock | patched |", "|---|---|---|---|"]
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for (name, release), kind in kinds.items():
        if kind is MENDED:
            arms = table[release][name]
            grouped.setdefault((name, summary(arms["stock"]), summary(arms["patched"])), []).append(release)
    lines += [f"| {name} | {', '.join(of)} | {stock} | {patched} |" for (name, stock, patched), of in grouped.items()]
    return lines


def summary(row: Row) -> str:
    """Summarise a server in a few words."""
    if "error" in row:
        return html.escape(row["error"][:120]).replace("|", "\\|")
    replayed = sum(map(rules.replays, row["batches"]))
    worst = max(map(rules.difference, row["batches"]))
    wrong = (
        ""
        if worst == 0.0
        else ", **ends or gives no number**"
        if worst == rules.NOT_A_NUMBER
        else f", off by {worst:g}"
    )
    breaks = f", {most_breaks(row['graphs'])} breaks" if row["graphs"] else ""
    return f"{len(row['graphs'])} buckets{breaks}, {replayed} of {len(row['batches'])} replayed{wrong}"


def time_of_steps(table: dict[str, Any]) -> list[str]:
    text = (
        f"Microseconds of Python that the plugin adds to a step of a {speed.LAYERS}-layer model, with a warm cache: "
        "the number of calls in a replayed prefill and in a decode step, counted in models of two depths, times the "
        "time of one call without SGLang's own code in it. Fixes that do not run in each layer together may add "
        f"{speed.PREFILL:.0f} to a prefill step and {speed.DECODE:.0f} to a decode step; those that do, "
        f"{speed.LAYER:.0f} per layer. "
        "The tests hold the recorded numbers to these limits. Decode ran without a CUDA graph, which takes the most "
        "calls. Kernels are excluded. The limit also excludes single_request_capture, which on 0.5.11 replays in "
        "place of SGLang's own method: most of its time is the replay's."
    )
    lines = [textwrap.fill(text, 120), "", "| release | model | step | total | held to the limit | by fix |"]
    lines.append("|---|---|---|---|---|---|")
    for release, found in table.items():
        for model, steps in found["models"].items():
            lines += [f"| {release} | {model} | {name} | {of_fixes(step)} |" for name, step in steps.items()]
    return lines


def of_fixes(step: speed.Step) -> str:
    costly = sorted(step.items(), key=lambda item: -item[1][0] * item[1][1])
    each = ", ".join(f"{fix} {calls:g} x {microseconds:g}" for fix, (calls, microseconds) in costly)
    return f"{speed.total(step):.1f} | {speed.total(step, speed.NOT_ADDED_TO_A_STEP):.1f} | {each}"


def others() -> list[str]:
    same: dict[str, list[str]] = {}
    for name, known in architectures.SAME_CODE.items():
        same.setdefault(known, []).append(name)
    reasons: dict[str, list[str]] = {}
    for name, reason in architectures.NOT_RUN.items():
        reasons.setdefault(reason, []).append(name)
    lines = ["A class without methods of its own runs the code of the one that it is derived from:", ""]
    lines += wrapped(f"- {known}: {', '.join(sorted(names))}" for known, names in sorted(same.items()))
    lines += ["", "Not run here:", ""]
    return lines + wrapped(f"- {reason}: {', '.join(sorted(names))}" for reason, names in sorted(reasons.items()))


def wrapped(items: Iterable[str]) -> list[str]:
    return [line for item in items for line in textwrap.wrap(item, 120, subsequent_indent="  ")]


def picture(table: Table) -> str:
    names = names_in(table)
    top = TOP + ROW * len(KINDS)
    width, height = LEFT + COLUMN * len(RELEASES) + 10, top + ROW * len(names) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="10" y="21" font-weight="bold">patched compared with stock</text>',
    ]
    for line, kind in enumerate(KINDS):
        y = 10 + ROW * line
        parts += [
            cell(LEFT, y, COLUMN, kind),
            f'<text x="{LEFT + COLUMN + 8}" y="{y + 11}">{html.escape(kind[2])}</text>',
        ]
    for place, release in enumerate(RELEASES):
        x = LEFT + COLUMN * place + COLUMN // 2
        parts.append(f'<text x="{x}" y="{top - 6}" transform="rotate(-40 {x} {top - 6})">{release}</text>')
    for line, name in enumerate(names):
        y = top + ROW * line
        parts.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{html.escape(name)}</text>')
        for place, release in enumerate(RELEASES):
            kind = kind_of(release, name, table[release].get(name, {}))
            parts.append(cell(LEFT + COLUMN * place, y, COLUMN, kind))
    return "\n".join([*parts, "</svg>"]) + "\n"


def cell(x: int, y: int, width: int, kind: tuple[str, str, str]) -> str:
    sign, colour, _ = kind
    box = f'<rect x="{x}" y="{y}" width="{width - 1}" height="{ROW - 1}" fill="{colour}"/>'
    return box + (
        f'<text x="{x + width // 2}" y="{y + 11}" text-anchor="middle">{html.escape(sign)}</text>' if sign else ""
    )
