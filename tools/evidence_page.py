# SPDX-License-Identifier: Apache-2.0
"""Generate the tables of docs/evidence.md and of the README's times, from what GPUs recorded in benchmarks/results."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import answers_page
import kernel_times_page

RESULTS = kernel_times_page.RESULTS
ALONE, BESIDE, IMAGES = (f"serving-{name}qwen3_5_4b-0.5.23.jsonl" for name in ("again-", "", "images-"))
LARGE, DENSE = "serving-qwen3_5_35b_a3b-0.5.23.jsonl", "attention-qwen3_1_7b-0.5.23.jsonl"
WITHOUT, STOCK, AGAIN, OURS = "stock without prefill graphs", "stock", "stock again", "bcg_fixes"
ARMS = (WITHOUT, STOCK, AGAIN, OURS)
# by default since then
INSIDE = "bcg_fixes with attention inside"
Server = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A line of the table of times: the file, and what of it."""

    file: str
    what: str
    tokens: int
    clients: int = 1
    says: str = ""

    @property
    def label(self) -> str:
        return self.says or f"first token of {self.tokens:,} tokens, ms"

    def rounds(self, arm: str) -> list[float]:
        """Times of five rounds, or tokens in a second, sorted."""
        if self.file == DENSE and arm == OURS:
            arm = INSIDE
        rows = kernel_times_page.lines(self.file)
        wanted = self.what, self.tokens, self.clients, arm
        (row,) = (row for row in rows if (row["measured"], row["tokens"], row["sequences"], row["arm"]) == wanted)
        assert row["verdict"] == "green" and len(row["details"]["rounds"]) == 5
        return sorted(taken[self.what] for taken in row["details"]["rounds"])


FIRST = "first token"
SHORT = (Measured(ALONE, FIRST, 253), Measured(ALONE, FIRST, 1021))
SMALL = (
    Measured(DENSE, FIRST, 61, says="first token of 61 tokens, Qwen3-1.7B, ms"),
    Measured(DENSE, "first token behind 4,096 cached", 61, says="the same after 4,096 cached tokens"),
)
MEASURED = (
    *SHORT,
    *(Measured(ALONE, FIRST, tokens) for tokens in (4093, 8189)),
    *(
        Measured(IMAGES, "first token, with an image", tokens, says=f"of {tokens:,} tokens, an image among them")
        for tokens in (509, 1021)
    ),
    *SMALL,
    *(
        Measured(LARGE, FIRST, tokens, says=f"first token of {tokens:,} tokens, Qwen3.5-35B-A3B, ms")
        for tokens in (253, 1021, 4093)
    ),
    Measured(BESIDE, "chat-like", 1024, 64, "64 clients, 1,024 in, 256 out, tokens/s"),
    *(
        Measured(BESIDE, "prefill-heavy", 4096, clients, f"{clients} clients, 4,096 in, 64 out, tokens/s")
        for clients in (16, 64)
    ),
)
OF_README = (*SHORT, *SMALL)
WITH_FIXES = tuple(each for each in answers_page.RELEASES if (RESULTS / f"accuracy-{each}.json").exists())
# of Mamba2, where stock is wrong from a warm prefix cache
WARM = ("0.5.15.post1", "0.5.17")
# arms of a trained model, as the tables name them
PATCHED, EAGER, KERNELS, REFUSED = "patched", "eager", "kernels", "reference"


def blocks() -> dict[str, str]:
    """The tables of docs/evidence.md."""
    return {
        "accuracy": accuracy_with_fixes(),
        "accuracy_of_mamba2": accuracy_of_mamba2(),
        "accuracy_of_granite": accuracy_of_granite(),
        "times": times(MEASURED),
        "cost": cost(),
    }


def times(measured: tuple[Measured, ...]) -> str:
    lines = ["| | no prefill graphs | stock | stock again | **bcg_fixes** |", "|---|---|---|---|---|"]
    for line in measured:
        form = "{:.1f}" if line.clients == 1 else "{:,.0f}"
        *others, ours = (form.format(line.rounds(arm)[2]) for arm in ARMS)
        lines.append(f"| {line.label} | {' | '.join(others)} | **{ours}** |")
    return "\n".join(lines) + "\n"


def servers(name: str) -> dict[str, Server]:
    found: list[Server] = json.loads((RESULTS / f"accuracy-{name}.json").read_text())["servers"]
    return {server["arm"]: server for server in found if server["phases"]}


def right(server: Server, phases: list[str]) -> str:
    """The share of right answers, from the worst of these phases to the best."""
    if server["ending"] != "finished":
        return "no start" if "before it served" in server["ending"] else "dies"
    shares = sorted({f"{100 * server['phases'][name]['accuracy']:.1f}" for name in phases})
    return f"{' to '.join(dict.fromkeys((shares[0], shares[-1])))} %"


def differing(server: Server, phases: list[str]) -> int:
    return sum(server["phases"][name]["differs_from"][REFUSED] for name in phases)


def row(label: str, arms: tuple[str, ...], ours: str, found: dict[str, Server], phases: list[str]) -> str:
    cells = (right(found[arm], phases) for arm in arms)
    shown = (f"**{cell}**" if arm == ours else cell for arm, cell in zip(arms, cells, strict=True))
    return f"| {label} | {' | '.join(shown)} | **{differing(found[ours], phases)}** |"


def accuracy_with_fixes() -> str:
    lines = ["| SGLang | stock | **patched** | replay refused | differ |", "|---|---|---|---|---|"]
    for release in WITH_FIXES:
        found = servers(release)
        lines.append(row(release, (STOCK, PATCHED, REFUSED), PATCHED, found, list(found[PATCHED]["phases"])))
    return "\n".join(lines) + "\n"


def warm(found: dict[str, Server]) -> list[str]:
    return [name for name in found[STOCK]["phases"] if name.startswith("warm")]


def accuracy_of_mamba2() -> str:
    lines = ["| SGLang | stock | stock without graphs | **patched** | replay refused | differ |"]
    lines.append("|---|---|---|---|---|---|")
    for release in WARM:
        found = servers(f"mamba2-{release}")
        lines.append(row(release, (STOCK, EAGER, KERNELS, REFUSED), KERNELS, found, warm(found)))
    return "\n".join(lines) + "\n"


def accuracy_of_granite() -> str:
    lines = [
        "| SGLang | stock | with breaks | **mixers inside** | replay refused | differ |",
        "|---|---|---|---|---|---|",
    ]
    found = servers("granite-0.5.17")
    lines.append(row("0.5.17", (STOCK, PATCHED, KERNELS, REFUSED), KERNELS, found, warm(found)))
    return "\n".join(lines) + "\n"


def cost() -> str:
    """The time that is added by loading the plugin, and by a call of a function that is patched."""
    found = json.loads((RESULTS / "cost_of_being_there.json").read_text())
    lines = ["| what | adds |", "|---|---|"]
    for release, before in found["load_after_importing"].items():
        seconds = sorted(each["seconds"] for each in before.values())
        lines.append(f"| loading the plugin into SGLang {release} | {seconds[0]:.1f} to {seconds[-1]:.1f} s |")
    calls = found["call_nanoseconds"]
    added = sorted(calls[how] - calls["direct"] for how in ("before", "after", "around"))
    lines.append(f"| a call of a patched Python function | {added[0] / 1000:.1f} to {added[-1] / 1000:.1f} us |")
    return "\n".join(lines) + "\n"
