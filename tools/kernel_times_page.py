# SPDX-License-Identifier: Apache-2.0
"""Generate docs/kernel_times.md from what GPUs have measured of our kernels, in benchmarks/results."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

REPOSITORY = pathlib.Path(__file__).parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
Row = dict[str, Any]
# shape, tokens, sequences
Case = tuple[str, int, int]
Times = dict[Case, dict[str, float]]
SGLANG, FLASHINFER, TRITON, CUDA = "SGLang's kernels", "SGLang's kernels with FlashInfer", "`triton`", "`cuda`"
# columns of the tables; the statements below them are of all cases in the file
SIZES = ((256, 1), (1024, 1), (4096, 1), (8192, 1), (16384, 1), (256, 64), (8192, 8), (8192, 64))
# what the files call an arm
NAMES = {
    "sglang, captured": SGLANG,
    "sglang flashinfer, captured": FLASHINFER,
    "bcg_fixes triton, captured": TRITON,
    "bcg_fixes cuda, captured": CUDA,
    "triton": TRITON,
    "cuda": CUDA,
    "SGLang's": SGLANG,
}
BREAKS, INSIDE = "breakable graphs, patched", "breakable graphs, patched, linear layers inside"
WITHOUT, REFUSED = "no prefill graphs", "breakable graphs, replay refused"
ARMS = {
    WITHOUT: "without graphs",
    REFUSED: "replays refused",
    "breakable graphs, stock": "stock",
    BREAKS: "with breaks",
    "breakable graphs, patched, delta net inside": "inside",
    f"{INSIDE}, in Triton": "inside, `triton`",
    INSIDE: "inside",
}
PROMPTS = (253, 1021, 4093, 8189)
MODELS = {
    "qwen3_next": "Qwen3-Next",
    "qwen3_0_6b": "Qwen3-0.6B",
    "gpt_oss_20b": "GPT-OSS-20B, 4 of 24 layers",
    "qwen3_5_4b": "Qwen3.5-4B",
    "nemotron_h_8b": "Nemotron-H-8B",
    "nemotron_h_8b_tp8": "Nemotron-H-8B, one of eight ranks",
    "falcon_h1_7b": "Falcon-H1-7B",
    "falcon_h1_34b_tp2": "Falcon-H1-34B, one of two ranks",
    "granite_4_h_micro": "Granite-4.0-H-Micro",
    "lfm2_1_2b": "LFM2-1.2B",
    "ling_2_5": "Ling 2.5",
    "kimi_linear_48b": "Kimi-Linear-48B-A3B",
    "qwen3_1_7b": "Qwen3-1.7B",
    "qwen3_8b": "Qwen3-8B",
    "qwen3_5_35b_a3b": "Qwen3.5-35B-A3B, 8 of 40 layers",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "fp32",
    "": "one layer",
}


@dataclasses.dataclass(frozen=True)
class Layers:
    """One layer in files that are shown beside each other, and the arms that others are compared with."""

    files: tuple[str, ...]
    against: tuple[str, ...] = (SGLANG,)
    is_shown: bool = True


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation: its layers, and the files of servers, each named without `bench-` and its ending."""

    title: str
    layers: tuple[Layers, ...]
    servers: str


OPERATIONS = (
    Operation(
        "Gated delta net",
        (
            Layers(("bench-0.5.23-layer-16_warps.jsonl",), (SGLANG, TRITON)),
            Layers(("bench-0.5.23-layer.jsonl",), (FLASHINFER,), is_shown=False),
            Layers(("bench-0.5.21-layer.jsonl",), is_shown=False),
            Layers(("bench-0.5.17-layer.jsonl",), is_shown=False),
            Layers(("bench-0.5.12.post1-cuda.jsonl",), is_shown=False),
        ),
        "quiet-0.5.23 0.5.12.post1-inside",
    ),
    Operation(
        "Mamba2",
        (Layers(("mamba2_variants.json", "bench-0.5.15.post1-mamba2.jsonl"), (SGLANG, TRITON)),),
        "0.5.23-granite_4_h_micro-cuda 0.5.23-granite_4_h_micro 0.5.17-granite_4_h_micro "
        "0.5.23-falcon_h1_7b-cuda 0.5.17-falcon_h1_7b 0.5.15.post1-falcon_h1_7b 0.5.12.post1-falcon_h1_7b "
        "0.5.23-nemotron_h_8b-cuda 0.5.17-nemotron_h_8b 0.5.15.post1-nemotron_h_8b 0.5.12.post1-nemotron_h_8b",
    ),
    Operation("Short convolutions", (Layers(("short_conv_extend.json",)),), "0.5.23-lfm2_1_2b 0.5.17-lfm2_1_2b"),
    Operation("Lightning attention, whose kernel was retired", (), "0.5.23-ling_2_5 0.5.17-ling_2_5"),
    Operation("Kimi delta attention", (Layers(("kda_extend-times.json",)),), "0.5.17-kimi_linear_48b"),
)
# HTTP servers with default flags, or with those that the file names
SERVED = tuple(
    path.name
    for which in (
        "granite_4_h_micro",
        "lfm2_1_2b",
        "falcon_h1_7b",
        "both-qwen3_5_4b",
        "tp2-qwen3_5_4b",
        "turns-qwen3_1_7b",
        "turns-qwen3_8b",
    )
    for path in sorted(RESULTS.glob(f"serving-*{which}-*.jsonl"))
)
OURS = ("bcg_fixes", "bcg_fixes again")
# servers with attention inside their graphs, and FlashAttention's calls alone
ATTENTION = tuple(path.name for path in sorted(RESULTS.glob("attention-*.jsonl")))
COPIES = tuple(path.name for path in sorted(RESULTS.glob("copies-*.jsonl")))
ATTENTION_CALLS = tuple(path.name for path in sorted(RESULTS.glob("attention_extend-*.jsonl")))
ATTENTION_INSIDE = "bcg_fixes with attention inside"
TIMELINES = tuple(path.name for path in sorted(RESULTS.glob("prefill_timeline-*.json")))
RANKS = "serving-tp2-qwen3_5_4b-0.5.23.txt"
METADATA = ("fa_metadata-0.5.12.post1.jsonl", "fa_metadata-0.5.15.post1.jsonl")
# what is compared: SGLang's arm, and ours
CALLS = {
    "eager": ("sglang, eager", "ours, installed, eager"),
    "before a replay": ("sglang, before a replay", "ours, installed, before a replay"),
    "`cuda` alone, against the Triton kernels of 0.5.23": ("newest triton", "ours, cuda"),
}
STEPS_OF_SERVERS = ("fa_steps-0.5.12.post1.jsonl", "fa_steps-0.5.17.jsonl", "fa_steps-0.5.21.jsonl")
# of the kernels of today
RANDOM_STEPS = (
    *(f"gdn_extend-16_warps{which}.json" for which in ("", "-qwen3_5_4b", "-small")),
    "gdn_extend-bfloat16.json",
    *("mamba2_extend-cuda.json", "mamba2_extend.json", "short_conv_extend.json"),
    *(f"kda_extend{which}.json" for which in ("", "-lower_bound", "-32_keys")),
)


@functools.cache
def header(file: str) -> Row:
    text = (RESULTS / file).read_text()
    found: Row = json.loads(text.partition("\n")[0]) if file.endswith("l") else json.loads(text)
    return dict(found.get("header", found))


@functools.cache
def lines(file: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()[1:]]


def cases(file: str, measured: str) -> dict[Case, dict[str, Row]]:
    """Rows by case and arm; what answered wrongly has no time, and is left out."""
    found: dict[Case, dict[str, Row]] = {}
    for row in lines(file):
        if row["measured"] == measured and row["median"] is not None and row["l2"] != "cold":
            found.setdefault((row["shape"], row["tokens"], row["sequences"]), {})[row["arm"]] = row
    return found


def medians(file: str, measured: str) -> Times:
    return {case: {arm: row["median"] for arm, row in arms.items()} for case, arms in cases(file, measured).items()}


def link(file: str) -> str:
    """Release, GPU and day of a file, as it tells them; torch where no SGLang was there."""
    told = header(file)
    of = told["sglang"] or f"torch {told['versions']['torch']}"
    return f"[{of}, {told['gpu'].split()[1]}, {told['date'][:10]}](../benchmarks/results/{file})"


def layer_rows(file: str) -> Iterator[tuple[Case, dict[str, float]]]:
    """Device times of a layer, by arm, of each case."""
    if file.endswith(".jsonl"):
        yield from medians(file, "device time of a layer").items()
        return
    for row in header(file).get("rows", ()):
        assert row["verdict"] == "green", file
        yield (row["shape"], row["tokens"], row["sequences"]), {row["variant"]: row["layer_us"]}
    for row in header(file).get("times", ()):
        yield (row.get("dtype", ""), row["tokens"], row["sequences"]), {arm: row[arm] for arm in NAMES if arm in row}


def layer_times(files: Iterable[str]) -> Times:
    """Times by case and arm; the first file that has an arm counts."""
    found: Times = {}
    for file in files:
        known = {arm for arms in found.values() for arm in arms}
        for case, arms in layer_rows(file):
            new = {NAMES[arm]: time for arm, time in arms.items() if arm in NAMES and NAMES[arm] not in known}
            found.setdefault(case, {}).update(new)
    return found


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A row whose first two cells are those of the row above leaves them empty."""
    names, above = list(head), ["", ""]
    yield from ["", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for first, second, *cells in rows:
        start = ["" if first == above[0] else first, "" if [first, second] == above else second]
        yield f"| {' | '.join([*start, *cells])} |"
        above = [first, second]


def said(*sentences: str) -> Iterator[str]:
    yield from ["", *textwrap.wrap(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False)]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def span(values: Iterable[float]) -> str:
    found = sorted(values)
    low, high = f"{found[0]:.2f}", f"{found[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


def shares(times: Times, mine: str, other: str) -> list[float]:
    return [arms[mine] / arms[other] for arms in times.values() if mine in arms and other in arms]


def compared(times: Times, mine: str, other: str) -> str:
    found = shares(times, mine, other)
    less = sum(share < 1 for share in found)
    return f"{mine} takes {span(found)} of the time of {other}, less at {less} of {len(found)} points."


def page() -> str:
    parts = [introduction(), *map(of_operation, OPERATIONS), served(), attention()]
    parts += [metadata(), accuracy(), random_steps()]
    return "\n".join(line for part in parts for line in part) + "\n"


def introduction() -> Iterator[str]:
    yield "# Times of our kernels"
    yield from said(
        "`tools/kernel_times_page.py` computes this page from [benchmarks/results](../benchmarks/results/README.md), "
        "which has the command of each file. A link names the SGLang, the GPU and the day. Only what answered right "
        "has a time. [verify](verify.md#times) says how it is measured, [kernels](kernels.md) what runs by default, "
        "and where."
    )
    yield from said(
        "Layers: device us of one replayed layer, without projections; `8,192 in 8` are 8,192 tokens in 8 sequences. "
        "SGLang's kernels are captured for the comparison; a server runs them in a break. Servers: ms to the first "
        "token of one prompt of so many tokens, and tokens/s of many prompts at once. Models have published sizes, few "
        "layers and random weights. `inside` is in `cuda` where there is such an implementation and nothing else is "
        "said."
    )


def of_operation(operation: Operation) -> Iterator[str]:
    yield from ["", f"## {operation.title}"]
    told = []
    for layers in operation.layers:
        times = layer_times(layers.files)
        ours = [CUDA] if any(CUDA in arms for arms in times.values()) else [TRITON]
        pairs = ((each, other) for each in ours for other in layers.against if shares(times, each, other))
        where = "" if layers.is_shown else f"{link(layers.files[0])}: "
        told.append(where + " ".join(compared(times, *pair) for pair in pairs))
        if layers.is_shown:
            yield from of_layers(layers, times)
    if told:
        yield from said(*told)
    yield from of_servers(operation.servers)


def of_layers(layers: Layers, times: Times) -> Iterator[str]:
    sizes = [size for size in SIZES if any(case[1:] == size and TRITON in arms for case, arms in times.items())]
    head = [f"{tokens:,}" if sequences == 1 else f"{tokens:,} in {sequences}" for tokens, sequences in sizes]
    rows = (
        [MODELS[shape], arm, *(number(times.get((shape, *size), {}).get(arm)) for size in sizes)]
        for shape in dict.fromkeys(shape for shape, *_ in times)
        for arm in (SGLANG, TRITON, CUDA)
        if any(arm in found for case, found in times.items() if case[0] == shape)
    )
    yield from table([" and ".join(map(link, layers.files)), "", *head], rows)


def of_servers(files: str) -> Iterator[str]:
    rows: list[list[str]] = []
    sooner: dict[str, list[float]] = {}
    faster: dict[str, list[float]] = {}
    for name in files.split():
        file = f"bench-{name}.jsonl"
        first, load = medians(file, "time to first token"), medians(file, "output throughput")
        arms = {arm for case in first.values() for arm in case}
        (shape,) = {shape for shape, *_ in first}
        ((_, _, requests),) = load
        mine = next(arm for arm, name in ARMS.items() if name == "inside" and arm in arms)
        # where a run has no server without graphs, one whose replays are refused stands for it
        for arm in (arm for arm in ARMS if arm in arms and (arm != REFUSED or WITHOUT not in arms)):
            times = [number(first[shape, tokens, 1].get(arm)) for tokens in PROMPTS]
            rows.append([MODELS[shape], link(file), ARMS[arm], *times, *(whole(of[arm]) for of in load.values())])
            if arm in (BREAKS, WITHOUT):
                sooner.setdefault(ARMS[arm], []).extend(shares(first, mine, arm))
                faster.setdefault(ARMS[arm], []).extend(shares(load, mine, arm))
    head = [*(f"{tokens:,}" for tokens in PROMPTS), f"tokens/s of {requests}"]
    yield from table(["servers", "", "", *head], rows)
    yield from said(
        *(
            f"Inside, a first token comes after {span(of)} of the time {arm}, sooner in "
            f"{sum(share < 1 for share in of)} of {len(of)} cases; tokens/s are {span(faster[arm])} times as many."
            for arm, of in sooner.items()
        )
    )


def served() -> Iterator[str]:
    yield from ["", "## As users serve"]
    yield from said(
        "[HTTP servers](verify.md#as-users-serve) with and without the plugin, asked in turn. Without it there are "
        "most often three: two alike, and one with prefill graphs turned off. The plugin without its kernels counts as "
        "one of them. A cell has ours, the middle one of the others, and the share."
    )
    prompts = {file: of_prompts(file) for file in SERVED}
    every = sorted({tokens for found in prompts.values() for tokens in found})
    shown = [tokens for tokens in every if sum(tokens in found for found in prompts.values()) > 1]
    first = ([model(file), link(file), *(found.get(each, "") for each in shown)] for file, found in prompts.items())
    yield from table(["first token, ms", "", *(f"{tokens:,}" for tokens in shown)], first)
    yield from table(("load", "", "", "clients", "tokens/s", "first token", "each later one"), of_loads())
    silent = {model(file): sorted({row["arm"] for row in lines(file) if row["verdict"] == "red"}) for file in SERVED}
    yield from said(
        "The last two columns are shares of the median time to a first token, and for each token after it.",
        *(f"{of}: {' and '.join(arms)} answered nothing." for of, arms in silent.items() if arms),
    )
    yield from said(two_ranks())


def model(file: str) -> str:
    told = header(file).get("server_arguments", ())
    return MODELS[lines(file)[0]["shape"]] + "".join(f" `{each}`" for each in told)


def median(row: Row) -> float:
    return float(row["median"])


def of_rounds(name: str) -> Callable[[Row], float]:
    return lambda row: statistics.median(each[name] for each in row["details"]["rounds"])


def beside_others(arms: dict[str, Row], value: Callable[[Row], float]) -> tuple[list[float], float]:
    """Ours, and the middle one of the others."""
    middle = statistics.median(value(row) for arm, row in arms.items() if arm not in OURS)
    return [value(arms[arm]) for arm in OURS if arm in arms], middle


def share_of_others(arms: dict[str, Row], value: Callable[[Row], float]) -> str:
    ours, middle = beside_others(arms, value)
    return span(each / middle for each in ours)


def in_a_cell(arms: dict[str, Row], form: Callable[[float], str]) -> str:
    ours, middle = beside_others(arms, median)
    return f"{' and '.join(map(form, ours))} / {form(middle)} (**{share_of_others(arms, median)}**)"


def of_prompts(file: str) -> dict[int, str]:
    """A cell for each length of a prompt that is asked alone."""
    return {tokens: in_a_cell(arms, number) for (_, tokens, _), arms in cases(file, "first token").items()}


def of_loads() -> Iterator[list[str]]:
    for file, load in itertools.product(SERVED, ("chat-like", "prefill-heavy", "varied", "chat turns")):
        for (_, tokens, clients), arms in cases(file, load).items():
            told = next(iter(arms.values()))["details"]["rounds"][0]
            names = ("median_ttft_ms", "median_tpot_ms")
            waits = (share_of_others(arms, of_rounds(name)) if name in told else "" for name in names)
            each = f"{clients}, {header(file).get('asks', 1)} each"
            yield [model(file), link(file), f"{load}, {tokens:,} tokens", each, in_a_cell(arms, whole), *waits]


def two_ranks() -> str:
    ours, _, stock = (RESULTS / RANKS).read_text().partition("== stock\n")
    told = []
    for name, log in (("with the plugin", ours), ("SGLang's", stock)):
        found = re.findall(r"prefill CUDA graph end\. elapsed=([\d.]+) s, mem usage=([\d.]+) GB", log)
        seconds, size = (max(float(each[place]) for each in found) for place in (0, 1))
        told.append(f"{name} {size} GB and {seconds:.0f} s")
    compiled = " and ".join(number(float(each)) for each in re.findall(r"NVRTC [\d.]+ in ([\d.]+) s", ours))
    return (
        f"In the run with two ranks, [its logs](../benchmarks/results/{RANKS}) tell of the prefill graphs of a rank: "
        f"{', '.join(told)}. NVRTC compiled for {compiled} s in them, at that machine's first start."
    )


def attention() -> Iterator[str]:
    yield from ["", "## Attention inside the graph"]
    yield from said(
        "[Servers](verify.md#as-users-serve) of random weights, ms to the first token of so many new tokens, alone and "
        "behind a cached prefix. The two servers that are SGLang's show what is chance. SGLang's graphs without breaks "
        "are an experiment of its own. Above 512 tokens the plugin replays SGLang's graph: its time is SGLang's, and "
        "[three servers of each](#servers-of-one-command) show the chance. Qwen3.5-4B has 16 of its 32 layers; with "
        "the plugin its delta net is inside, too."
    )
    for file in ATTENTION:
        picture = RESULTS / f"{file.removesuffix('jsonl')}png"
        if picture.exists():
            name = f"{served_model(file)} on {header(file)['sglang']}"
            yield from ["", f"![{name}, ms to the first token](../benchmarks/results/{picture.name})"]
    yield from said(
        "With attention inside, a first token takes so much of the mean of both servers of SGLang. In brackets is what "
        "the middle three of five rounds of each of these took of it; in bold is what lies outside."
    )
    kinds = list(dict.fromkeys(row["measured"] for file in ATTENTION for row in lines(file)))
    every = sorted({row["tokens"] for file in ATTENTION for row in lines(file)})
    rows = []
    for file, kind in itertools.product(ATTENTION, kinds):
        asked = {tokens: of for (_, tokens, _), of in cases(file, kind).items()}
        if asked:
            name = served_model(file) + kind.removeprefix("first token").replace(" cached", "")
            cells = (beside_chance(asked[tokens]) if tokens in asked else "" for tokens in every)
            rows.append([name, link(file), *cells])
    yield from table(["", "", *(f"{tokens:,}" for tokens in every)], rows)
    yield from said(*map(calls_of_attention, ATTENTION_CALLS))
    for file in TIMELINES:
        yield from timeline(file)
    yield from servers_of_one_command()


def servers_of_one_command() -> Iterator[str]:
    yield from ["", "### Servers of one command"]
    yield from said(
        "Three servers of SGLang and three with the plugin, started together and asked in turn: ms to the first token "
        "of each, the soonest first. A server that keeps its breaks captured while the others took the GPU's memory."
    )
    kinds = list(dict.fromkeys(row["measured"] for file in COPIES for row in lines(file)))
    every = sorted({row["tokens"] for file in COPIES for row in lines(file)})
    rows = []
    for file, kind, arm in itertools.product(COPIES, kinds, ("stock", "bcg_fixes")):
        name = served_model(file) + kind.removeprefix("first token").replace(" cached", "")
        asked = {tokens: of for (_, tokens, _), of in cases(file, kind).items()}
        cells = (", ".join(number(time) for time in times_of(arm, asked[tokens])) for tokens in every)
        rows.append([name, link(file), arm, *cells])
    yield from table(["", "", "", *(f"{tokens:,}" for tokens in every)], rows)


def times_of(arm: str, servers: dict[str, Row]) -> list[float]:
    return sorted(median(row) for name, row in servers.items() if name.partition(" #")[0] == arm)


def served_model(file: str) -> str:
    given = header(file)["server_arguments"]
    in_fp8, on_two = "--quantization=fp8" in given, "--tp-size=2" in given
    return MODELS[lines(file)[0]["shape"]] + ", FP8" * in_fp8 + ", two GPUs" * on_two


def beside_chance(arms: dict[str, Row]) -> str:
    """Write the share of SGLang's time, and the shares that most rounds of SGLang's two servers took themselves."""
    both = arms["stock"], arms["stock again"]
    mean = statistics.mean(row["median"] for row in both)
    # files of one arm with the plugin name attention's flag in their header
    share = (arms.get(ATTENTION_INSIDE) or arms["bcg_fixes"])["median"] / mean
    low, high = min(row["p20"] for row in both) / mean, max(row["p80"] for row in both) / mean
    shown = f"{share:.2f}" if low <= share <= high else f"**{share:.2f}**"
    return f"{shown} ({low:.2f} to {high:.2f})"


def calls_of_attention(file: str) -> str:
    found = [row[bound] for row in lines(file) for bound in ("bound 1", "bound 0")]
    alike = [call for call in found if call["agree"]]
    return (
        f"{link(file)}: {len(found):,} captured calls of FlashAttention beside eager ones. "
        f"{len(alike):,} split the keys alike by the plugin's rule, and {sum(call['bits'] for call in alike):,} of "
        f"these have eager's bits. The rows of padding are zeros in {sum(call['zeros'] for call in found):,}."
    )


def timeline(file: str) -> Iterator[str]:
    found = json.loads((RESULTS / file).read_text())
    replay = next(each for each in found["scheduler"] if each["name"] == "cudaGraphLaunch")
    computed = next(each for each in found["gpu"] if each["begin"] > replay["begin"])
    answer = found["scheduler"][-1]["begin"] - computed["begin"] - computed["us"]
    name = f"{MODELS[found['header']['model']]}, {found['header']['tokens']} tokens"
    yield from ["", f"![{name}: scheduler and GPU](../benchmarks/results/{file.removesuffix('json')}svg)"]
    yield from said(
        f"{link(file)}: {name}, under a profiler, which slows the host.",
        f"SGLang replays the graph {replay['begin'] / 1000:.1f} ms after the request.",
        f"The GPU computes for {computed['us'] / 1000:.1f} ms.",
        f"SGLang launches the next step before it looks at the answer, {answer / 1000:.1f} ms later.",
        f"Without a profiler a first token takes {found['first_token_ms']:.1f} ms.",
    )


def metadata() -> Iterator[str]:
    yield from ["", "## FlashAttention's metadata"]
    measured = ("host time of a call", "wall time of a call", "device time of a call")
    rows = []
    for file in METADATA:
        for what, (theirs, ours) in CALLS.items():
            gains = [[1 / share for share in shares(medians(file, each), ours, theirs)] for each in measured]
            cells = (f"{statistics.median(gain):.1f}x, {min(gain):.2f}x" for gain in gains)
            slower = sum(gain < 1 for gain in gains[-1])
            rows.append([what, link(file), str(len(gains[0])), *cells, str(slower)])
    yield from said("A call, how many times as fast as SGLang's own: the median of all cases, and the least.")
    yield from table(["", "", "cases", "host", "wall", "device", "slower on the device"], rows)
    yield from said("Steps of servers, how many times as fast as SGLang's own:")
    yield from table(["", "", "requests", "SGLang's again", "`triton`", "`cuda`"], steps_of_servers())


def steps_of_servers() -> Iterator[list[str]]:
    arms = ("sglang again", "ours, triton", "ours, cuda")
    for file in STEPS_OF_SERVERS:
        of_kinds: dict[str, dict[int, dict[str, float]]] = {}
        for (kind, _, requests), times in medians(file, "time of a step").items():
            of_kinds.setdefault(kind, {})[requests] = times
        for kind, cases in of_kinds.items():
            cells = (
                ", ".join(f"{times['sglang'] / times[arm]:.2f}" for times in cases.values() if arm in times)
                for arm in arms
            )
            yield [kind, link(file), ", ".join(map(str, cases)), *cells]


def accuracy() -> Iterator[str]:
    yield from ["", "## Accuracy"]
    yield from said(
        "[Models that were trained for it](../benchmarks/accuracy/README.md) answer the same questions six times: "
        "alone, together, and from a warm prefix cache. Each column has the worst of the six; the last one counts "
        "answers that are others than with every replay refused."
    )
    rows = []
    for path in RESULTS.glob("accuracy-*.json"):
        servers = {server["arm"]: server for server in header(path.name)["servers"]}
        if "kernels" in servers and servers["kernels"]["phases"]:
            rows.append((header(path.name)["date"], answers(path.name, servers)))
    ordered = sorted((row for _, row in sorted(rows, reverse=True)), key=lambda row: row[0])
    yield from table(
        ["", "", "implementation", "questions", "right inside", "replays refused", "other answers"], ordered
    )


def answers(file: str, servers: dict[str, Row]) -> list[str]:
    environment = servers["kernels"]["environment"]
    ((flag, name),) = ((key, value) for key, value in environment.items() if key.startswith("SGLANG_BCG_KERNEL_"))
    phases = servers["kernels"]["phases"].values()
    right = (
        f"{100 * min(phase['accuracy'] for phase in servers[arm]['phases'].values()):.1f} %"
        for arm in ("kernels", "reference")
    )
    operation = flag.removeprefix("SGLANG_BCG_KERNEL_").lower()
    of = f"`{operation}`{', Granite' if 'granite' in file else ''}"
    others = max(phase["differs_from"]["reference"] for phase in phases)
    return [of, link(file), f"`{name}`", f"{header(file)['questions']:,}", *right, str(others)]


def random_steps() -> Iterator[str]:
    yield from ["", "## Random steps"]
    yield from said(
        "Steps of random lengths on a GPU, each replayed and with each sequence alone: bits have to be those of the "
        "eager batch, and errors within the tolerance."
    )
    rows = []
    for file in RANDOM_STEPS:
        found = header(file)
        shapes = found.get("steps", found)
        of = {name: each for name, each in shapes.items() if isinstance(each, dict) and "faults" in each}
        faults = [fault for each in of.values() for fault in each["faults"]]
        worst = max((float(fault.rsplit(" ", 1)[1]) for fault in faults), default=None)
        steps = sum(each["steps"] for each in of.values())
        # a fault begins with its shape and seed
        wrong = {tuple(fault.split(", ")[:2]) for fault in faults}
        name = f"`{re.split('[-.]', file)[0]}`"
        name += ", states in bfloat16" if found.get("states") == "bfloat16" else ""
        cells = (f"`{found.get('form', 'triton')}`", str(len(of)), str(steps), str(len(wrong)))
        rows.append([name, link(file), *cells, "" if worst is None else f"{worst:.4f}"])
    yield from table(["", "", "implementation", "shapes", "steps", "beyond the tolerance", "off by at most"], rows)
