# SPDX-License-Identifier: Apache-2.0
"""Generate docs/answers.md from the runs of `bcg-fixes verify` in benchmarks/results."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import textwrap
from collections.abc import Iterator
from typing import Any

REPOSITORY = pathlib.Path(__file__).parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
RELEASES = tuple((REPOSITORY / "tools" / "releases.txt").read_text().split())
# what each case asks, in the order of the page
ASKED = {
    "qwen3_5_by_default": "Qwen3.5, default flags",
    "qwen3_5_prefill_graph": "Qwen3.5, prefill graphs",
    "qwen3_5_text_by_default": "Qwen3.5 without images, default flags",
    "qwen3_5_text_prefill_graph": "Qwen3.5 without images, prefill graphs",
    "qwen3_next_prefill_graph": "Qwen3-Next, prefill graphs",
    "qwen3_next_prefix_cache": "Qwen3-Next, warm prefix cache",
    "falcon_h1_prefill_graph": "Falcon-H1, prefill graphs",
    "falcon_h1_checkpoints": "Falcon-H1, warm prefix cache",
    "granite_hybrid_prefill_graph": "Granite hybrid, warm prefix cache",
    "lfm2_prefill_graph": "LFM2, warm prefix cache",
    "kimi_linear_prefill_graph": "Kimi-Linear, prefill graphs",
    "phi_prefill_graph": "Phi, prefill graphs",
    "cohere_prefill_graph": "Cohere, prefill graphs",
    "gpt_oss_breakable_start": "GPT-OSS, prefill graphs",
    "gpt_oss_decode_padding": "GPT-OSS, padded decode graphs",
    "llama_several_requests": "Llama, several requests in one prefill",
    "llama_prefix_cache": "Llama, warm prefix cache",
    "llama_sleep": "Llama, decode graphs after sleep",
    "llama_stripped_thinking_at_full_load": "Llama, thinking not cached, full load",
    "qwen3_next_stripped_thinking": "Qwen3-Next, thinking not cached",
    "eagle_triton_draft_extend": "EAGLE: drafts accepted as without the graph",
    "eagle3_windowed_draft": "EAGLE3, the draft has a window",
    "qwen3_next_adaptive_speculation": "Qwen3-Next, adaptive speculation",
    "qwen3_next_mixed_chunks": "Qwen3-Next, chunks mixed with running answers",
    "deepseek_unbroken_prefix": "DeepSeek, full prefill graphs, behind a prefix",
    "llama_4_unbroken_chunk": "Llama 4, full prefill graphs, one pool",
    "ling_host_memory": "Ling 2.5, prefixes from host memory",
    "llama_host_memory": "Llama, prefixes from host memory",
}
# on the model and the prompts of another case
LIKE_OTHERS = ("llama_stack_by_structure", "eagle_prefix_only_worker")
NOT_RUN = "\u2013"
TWO_GPUS = ("tp2-verify", "dp2-verify", "ranks", "ranks-again")
COLUMNS = 6
Found = dict[str, Any]
Arms = dict[str, list[Found]]


@dataclasses.dataclass(frozen=True)
class Note:
    """A reason why patched answers are not all equal to the reference, and the cells that it explains."""

    says: str
    cells: dict[str, tuple[str, ...]]


NOTES = (
    Note(
        "Stock gives the very same answers. So does the padded batch when it runs without a graph, where that was run "
        "(all but 0.5.17): padding changes the rounding.",
        {
            "qwen3_5_by_default": ("0.5.19",),
            "qwen3_5_prefill_graph": ("0.5.15.post1", "0.5.15", "0.5.14"),
            "qwen3_next_prefill_graph": ("0.5.18", "0.5.17", "0.5.16", "0.5.15.post1", "0.5.15", "0.5.14"),
            "qwen3_next_stripped_thinking": ("0.5.22",),
        },
    ),
    Note(
        "[Patched](fixes/kda_raw_beta.md) gives fewer another token than stock. The [self-check](selfcheck.md) finds "
        "the patched replays right. Graph and eager prefill run different kernels of SGLang there, and the model has "
        "experts, which turn rounding into other tokens.",
        {"kimi_linear_prefill_graph": ("0.5.23", "0.5.22")},
    ),
    Note(
        "SGLang copies a mask into too small a buffer, without any prefill graph.",
        {"qwen3_next_adaptive_speculation": ("0.5.16", "0.5.15.post1", "0.5.15", "0.5.14")},
    ),
    Note(
        "Where stock starts, it gives the very same answers. From 0.5.14 to 0.5.16 all are equal without "
        "torch.compile, which uses another form of a norm.",
        {"cohere_prefill_graph": RELEASES[RELEASES.index("0.5.14") :]},
    ),
    Note(
        "All answers are right. [This fix](fixes/vlm_embeds_dropped.md) runs every batch without a graph there. Stock "
        'ends with "Boolean value of Tensor is ambiguous".',
        {"qwen3_5_prefill_graph": ("0.5.13.post1", "0.5.13")},
    ),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """The servers of one case on one release: `of` requests, and in words how many were equal, the worst server's."""

    of: int
    stock: str
    patched: str

    @property
    def is_right(self) -> bool:
        return self.patched == str(self.of)


def files() -> list[Found]:
    """List what was run whole, and what was run again where SGLang lacked a package; the newest last."""
    paths = [RESULTS / f"verify-{release}.json" for release in RELEASES] + sorted(RESULTS.glob("verify-again-*.json"))
    return sorted((json.loads(path.read_text()) for path in paths if path.exists()), key=lambda found: found["date"])


def servers() -> dict[tuple[str, str], Arms]:
    """Servers of each arm in the newest file that has the case, by case and release."""
    newest: dict[tuple[str, str], Arms] = {}
    for found in files():
        of_file: dict[tuple[str, str], Arms] = {}
        # one that was cut off shows nothing
        for server in (each for each in found["servers"] if not each["ending"].startswith("interrupted")):
            arms = of_file.setdefault((server["case"], found["sglang"]), {})
            arms.setdefault(server["arm"], []).append(server)
        newest |= {place: arms for place, arms in of_file.items() if {"stock", "patched"} <= set(arms)}
    return newest


def said_of(server: Found) -> str:
    if "before it served" in server["why"]:
        return "no start"
    if "proves nothing" in server["why"]:
        return "no replay"
    if "while it served" in server["why"]:
        return f"{server['equal']}, dies" if server["equal"] else "dies"
    return str(server["equal"])


def cell_of(arms: Arms) -> Cell:
    stock, patched = (min(map(said_of, arms[arm]), key=worth) for arm in ("stock", "patched"))
    return Cell(max(server["requests"] for server in arms["patched"]), stock, patched)


def worth(said: str) -> int:
    """Words are worse than any number."""
    return int(said) if said.isdigit() else -1


def cells() -> dict[tuple[str, str], Cell]:
    return {place: cell_of(arms) for place, arms in servers().items() if place[0] not in LIKE_OTHERS}


def note_of(case: str, release: str) -> int:
    """The number of a cell's note; 0 if it has none."""
    return next((number for number, note in enumerate(NOTES, 1) if release in note.cells.get(case, ())), 0)


def unexplained(found: dict[tuple[str, str], Cell]) -> list[tuple[str, str]]:
    """List cells whose patched answers are not all right and that no note explains, and notes without such a cell."""
    of_notes = {(case, release) for note in NOTES for case, releases in note.cells.items() for release in releases}
    return sorted(of_notes ^ {place for place, cell in found.items() if not cell.is_right})


def page() -> str:
    found = cells()
    if places := unexplained(found):
        raise SystemExit(f"{places} need a note in tools/answers_page.py, or have one and are all right")
    if places := [place for place, cell in found.items() if worth(cell.patched) < worth(cell.stock)]:
        raise SystemExit(f"{places} are worse patched than stock")
    with_a_run = [release for release in RELEASES if any(of == release for _, of in found)][::-1]
    parts = [introduction(found, with_a_run), tables(found, with_a_run), notes(), two_gpus(), runs()]
    return "\n".join(line for part in parts for line in part) + "\n"


def introduction(found: dict[tuple[str, str], Cell], with_a_run: list[str]) -> list[str]:
    without = [release for release in RELEASES if release not in with_a_run]
    right = sum(cell.is_right for cell in found.values())
    better = sum(cell.is_right and cell.stock != cell.patched for cell in found.values())
    lines = ["# What GPUs have answered", ""]
    verdict = (
        f"**Patched servers gave {right} of {len(found)} cases right in every answer, {better} of them where stock "
        f"does not.** The notes explain the other {len(found) - right}. No cell is worse patched than stock."
    )
    if without:
        verdict += f" No GPU has compared answers of {', '.join(without)} yet; there every fix is proved on a CPU."
    lines += [
        verdict,
        "",
        "[`bcg-fixes verify`](verify.md) ran tiny models with random weights. The reference is the same server with "
        "every replay refused. An answer is right if it is bitwise equal to it in every token and logprob. In "
        "[some cases](verify.md#verdicts) tokens alone count, or the server's own earlier answers, as where eager "
        "prefill uses other kernels. A cell is stock → **patched**, of "
        f'two servers the worse; {NOT_RUN}: not run, or the release does not have it. "Dies" is an illegal memory '
        "access but where a note says otherwise. Behind thinking that is not cached it is SGLang's check of its pool, "
        "and with Ling's host memory an error of the copy.",
    ]
    return [textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False) for line in lines]


def tables(found: dict[tuple[str, str], Cell], with_a_run: list[str]) -> Iterator[str]:
    for first in range(0, len(with_a_run), COLUMNS):
        releases = with_a_run[first : first + COLUMNS]
        yield from ["", f"| what is asked | of | {' | '.join(releases)} |", "|---|---|" + "---|" * len(releases)]
        for case, asked in ASKED.items():
            if of := {found[case, release].of for release in releases if (case, release) in found}:
                row = " | ".join(in_words(found, case, release) for release in releases)
                yield f"| {asked} | {max(of)} | {row} |"


def in_words(found: dict[tuple[str, str], Cell], case: str, release: str) -> str:
    cell, note = found.get((case, release)), note_of(case, release)
    return f"{cell.stock} → **{cell.patched}**{f' ({note})' if note else ''}" if cell else NOT_RUN


def notes() -> Iterator[str]:
    yield ""
    for number, note in enumerate(NOTES, 1):
        yield textwrap.fill(f"{number}. {note.says}", 120, subsequent_indent="   ", break_on_hyphens=False)


def two_gpus() -> Iterator[str]:
    """Tell what two ranks did, each on a GPU of its own."""
    tensor, data, *ranks = (json.loads((RESULTS / f"{name}-0.5.17.json").read_text()) for name in TWO_GPUS)
    yield from ["", "## Two GPUs", ""]
    for found, flag in ((tensor, "--tp-size 2"), (data, "--tp-size 2 --dp-attention")):
        patched = [server for server in found["servers"] if server["arm"] == "patched"]
        started = [server for server in patched if "before it served" not in server["why"]]
        equal, asked = (sum(each[number] for each in started) for number in ("equal", "requests"))
        told = f"`verify {flag}` on {found['sglang']}: {len(started)} cases, {equal:,} of {asked:,} answers "
        told += "bitwise equal to those of refused replays. "
        if others := [each["case"] for each in started if each["equal"] < each["requests"]]:
            told += f"The others are those of {', '.join(others)}: padding changes the rounding. "
        if any("proves nothing" in each["why"] for each in started):
            told += "No prompt was long enough for the largest graph: of that they prove nothing. "
        missing = [each["case"] for each in patched if each not in started]
        told += f"No server started for {', '.join(missing)}."
        yield from [*textwrap.wrap(told, 120, break_long_words=False, break_on_hyphens=False), ""]
    yield from ["| two ranks on 0.5.17 | SGLang | with the plugin |", "|---|---|---|"]
    of: dict[tuple[str, str, str], list[str]] = {}
    for row in (row for found in ranks for row in found["servers"] if row["arm"] != "reference"):
        of.setdefault((row["case"], row["fix"], row["arm"]), []).append(what_ranks_did(row))
    for name, fix in dict.fromkeys(place[:2] for place in of):
        cells = (", then ".join(dict.fromkeys(of.get((name, fix, arm), [NOT_RUN]))) for arm in ("stock", "bcg_fixes"))
        yield f"| {f'[{name}](fixes/{fix}.md)' if fix else name} | {' | '.join(cells)} |"
    notes = "SGLang's log says that it hangs. Where the server of a killed rank took longest to end, the other rank "
    notes += "waited for it on the GPU: SGLang's own code then waits a minute for a dump."
    yield from ["", *textwrap.wrap(notes, 120)]


def what_ranks_did(row: Found) -> str:
    if row["ending"] != "as asked":
        return "dies" if row.get("exit") is not None else "hangs"
    if isinstance(row.get("equal"), list):
        of_second = [share for of, share in row["equal"] if of.startswith("rank 1")]
        return f"the second rank's are {min(of_second):.0%} right"
    if "equal" in row:
        return f"{row['equal']} right"
    return f"ended after {row['seconds']:.0f} s" if row["found"] == "ended" else f"{row['found']} answered"


def runs() -> Iterator[str]:
    yield from ["", "## The runs", "", "| release | date | commit | GPU | torch | cases |", "|---|---|---|---|---|---|"]
    cases: dict[tuple[str, ...], set[str]] = {}
    for found in sorted(files(), key=lambda found: (RELEASES.index(found["sglang"]), found["date"]), reverse=True):
        gpu = found["gpu"].split()[1]
        run: tuple[str, ...] = (found["sglang"], found["date"][:10], found["commit"], gpu, found["versions"]["torch"])
        cases.setdefault(run, set()).update(server["case"] for server in found["servers"])
    for of, names in cases.items():
        yield f"| {' | '.join(of)} | {len(names)} |"
