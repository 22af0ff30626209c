# SPDX-License-Identifier: Apache-2.0
"""Generate docs/graphs_by_model.md: each architecture of the newest release, and why it has prefill graphs or none."""

from __future__ import annotations

import json
import pathlib
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import harm_page

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from sglang_bcg_fixes.fixes import hybrids_without_graphs  # noqa: E402
from sglang_bcg_fixes.fixes.hybrids_without_graphs import feed_forward, latent, measured, mixers  # noqa: E402
from sglang_bcg_fixes.planning.registry import declared_in  # noqa: E402
from tests.harm import rules  # noqa: E402
from tests.releases.registry_configs import (  # noqa: E402
    CAPTURED,
    NEVER,
    NO_ATTENTION,
    NO_LAYERS,
    NO_MODEL,
    OF_OTHER_LAYERS,
)

RECORDED = REPOSITORY / "tests" / "releases" / "registry_graphs.json"
ASK = "--cuda-graph-backend-prefill=breakable"
DEFAULT, ASKED, REFUSED, DRAFT, UNKNOWN = "default", "asked", "refused", "draft", "unknown"
BREAKABLE, FULL, AS_ITS_TARGET = "breakable", "full", "as its target"
BUILT, READ = "¹", "²"
# by the words of SGLang's own rules
SWITCHED_OFF = {
    "off: multimodal model": "Multimodal, and not on the list of those that SGLang calls validated",
    "off: KDA hybrid linear attention": "Kimi delta attention",
    "off: DeepSeek-V4 (heavy capture-pool memory pressure)": "DeepSeek-V4, whose capture takes much memory",
}
# by the class that a layer has in place of an attention that SGLang finds
LAYERS = {
    "no attention": "blocks that its architecture search left out",
    "DsV3MLA": "latent attention as `attention`, where SGLang looks for grouped queries only",
    "JetBlock": "Jet-Nemotron's linear attention",
    "Lfm2MoeShortConv": "short convolutions",
    "Lfm2ShortConv": "short convolutions",
    "LlamaAttention": "transformers' own attention: any model with `--model-impl transformers`",
    "MambaMixer1": "Mamba layers",
    "MambaMixer2": "Mamba2 layers",
    "MllamaTextCrossAttention": "cross attention to the image",
    "ModuleList": "two attentions in each layer",
    "NemotronHMLP": "feed-forward layers of their own",
    "MossVLTextCrossAttention": "cross attention to the image",
    "Qwen3MoeAttention": "transformers' own attention: any model with `--model-impl transformers`",
    "ZayaBlock": "experts in layers of their own",
}
# what the configuration of an architecture decides
EXCEPT = {
    "DeciLMForCausalLM": "one that has left out none has graphs",
    "NemotronHForCausalLM": "NemotronHForCausalLM has graphs in 0.5.11 to 0.5.18. In this release it has them without "
    "`-` and `E` in `hybrid_override_pattern`, and with `E` but no `-` on GPUs of compute capability 12.0",
}
# the fixes without which stock answers wrongly or ends, of the recorded servers
NEEDS = {
    "FalconH1ForCausalLM": ("ssm_mixer_captured",),
    "Gemma3nForCausalLM": ("shared_layers_refused", "heads_not_joined"),
    "GlmImageForConditionalGeneration": ("stack_call_signature",),
    "KimiK3ForConditionalGeneration": ("kda_raw_beta",),
    "KimiK3LinearForCausalLM": ("kda_raw_beta",),
    "KimiLinearForCausalLM": ("kda_raw_beta",),
    "MiniCPMSALAForCausalLM": ("heads_not_joined",),
    "PersimmonForCausalLM": ("stack_call_signature",),
    "PhiForCausalLM": ("stack_call_signature",),
    "SarvamMLAForCausalLM": ("expanded_form_captured",),
}
# its checkpoints have towers or not
OF_TWO_KINDS = "MiMoV2ForCausalLM"
DOTS3 = ("Dots3NoteForCausalLM", "dots3_attention_captured")
Row = dict[str, Any]
Rows = dict[str, Row]
# architecture -> arm -> row, of one release
Served = dict[str, Rows]


def recorded() -> tuple[str, Rows]:
    """The release, which lags behind the newest until it is recorded, and its architectures."""
    table = json.loads(RECORDED.read_text())
    return table["release"], table["architectures"]


def answer(name: str, rows: Rows) -> str:
    """The runner's answer; that of another architecture where the model consists of its layers."""
    said: str = rows[name].get("asked for", "")
    return answer(said, rows) if said in rows else said


def group_of(name: str, rows: Rows) -> tuple[str, str]:
    """The section of the page, and the part of it."""
    row, said = rows[name], answer(name, rows)
    if "not examined" in row:
        return UNKNOWN, ""
    if row["by default"] == AS_ITS_TARGET:
        return DRAFT, said
    if said != CAPTURED:
        return REFUSED, said
    # a rule that is new has to be described here
    return (DEFAULT, row["by default"]) if row["by default"] in (BREAKABLE, FULL) else (ASKED, row["by default"])


def page(release: str, rows: Rows, servers: harm_page.Table) -> str:
    served = servers[release]
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(rows, key=str.lower):
        groups.setdefault(group_of(name, rows), []).append(marked(name, rows[name], served))

    def size(section: str) -> int:
        return sum(len(names) for (of, _), names in groups.items() if of == section)

    lines = ["# Does your model get prefill graphs?", "", *paragraph(introduction(release, len(rows))), ""]
    lines += ["| architectures | breakable prefill graphs |", "|---|---|"]
    lines += [
        f"| {size(DEFAULT)} | [without a flag](#graphs-without-a-flag) |",
        f"| {size(ASKED)} | [where you ask for them](#graphs-where-you-ask-for-them) |",
        f"| {size(REFUSED)} | [none](#none-whatever-the-flags), whatever the flags |",
        f"| {size(DRAFT)} | [drafts](#drafts) of speculation |",
        f"| {size(UNKNOWN)} | [not examined](#not-examined) |",
    ]
    lines += ["", *paragraph(HOW_IT_IS_KNOWN), "", "## With the plugin", "", *paragraph(WITH_THE_PLUGIN), ""]
    lines += [*better(release, served), "", *paragraph(LEFT_ALONE), "", "| | no graphs with |", "|---|---|"]
    lines += [*(f"| {where} | {what} |" for where, what in STAYS_EAGER.items()), "", *paragraph(WHAT_ELSE), ""]
    lines += ["## Graphs without a flag", "", *listed(groups[DEFAULT, BREAKABLE]), ""]
    in_text = [name for name, row in rows.items() if "as multimodal" in row]
    whole = f"{', '.join(groups[DEFAULT, FULL])} has one graph for the whole prefill, `full`."
    lines += wrapped(f"- {line}" for line in (in_text_only(in_text), BLACKWELL, SHARED, whole, *ends(served)))
    lines += ["", "## Graphs where you ask for them", "", *paragraph(IF_YOU_ASK), ""]
    for rule, words in SWITCHED_OFF.items():
        lines += [f"### {words}", "", *listed(groups[ASKED, rule]), ""]
    lines += ["## None, whatever the flags", "", *paragraph(REFUSES), ""]
    lines += ["### Layers without an attention that SGLang finds", "", *layers(rows, groups[REFUSED, NO_ATTENTION]), ""]
    lines += ["### No `layers`", "", *paragraph(LAYERS_MISSING), "", *listed(groups[REFUSED, NO_LAYERS]), ""]
    others = groups[REFUSED, NO_MODEL]
    generating = [name for name in others if rows[plain(name)]["generates"]]
    lines += ["### No `model` and no `language_model`", "", *paragraph(MODEL_MISSING), "", *listed(generating), ""]
    lines += ["These do not generate:", "", *listed(name for name in others if name not in generating), ""]
    lines += ["## Drafts", "", *paragraph(DRAFTS), ""]
    for reason, words in OF_DRAFTS.items():
        lines += [f"### {words}", "", *listed(groups[DRAFT, reason]), ""]
    lines += ["## Not examined", ""]
    lines += wrapped(f"- {name}: {row['not examined']}." for name, row in rows.items() if "not examined" in row)
    lines += ["", "## In older releases", "", *paragraph(OLDER), "", *older(release, rows, servers)]
    shown = {
        *((DEFAULT, kind) for kind in (BREAKABLE, FULL)),
        *((ASKED, rule) for rule in SWITCHED_OFF),
        *((REFUSED, reason) for reason in (NO_ATTENTION, NO_LAYERS, NO_MODEL)),
        *((DRAFT, reason) for reason in OF_DRAFTS),
        (UNKNOWN, ""),
    }
    assert groups.keys() == shown, f"the page has no words for {groups.keys() ^ shown}"
    return "\n".join(lines).rstrip() + "\n"


def plain(name: str) -> str:
    return name.strip("*" + BUILT + READ)


def marked(name: str, row: Row, served: Served) -> str:
    """The name with a mark for how its row is known, and bold where the plugin is needed."""
    shown = f"**{name}**" if name in (*NEEDS, DOTS3[0]) else name
    if "read" in row or row.get("asked for") == NEVER:
        return shown + READ
    ran = name not in OF_OTHER_LAYERS and "error" not in served.get(name, {}).get("patched", {"error": ""})
    return shown + ("" if ran else BUILT)


def better(release: str, served: Served) -> list[str]:
    found = {
        name: arms
        for name, arms in sorted(served.items(), key=lambda item: item[0].lower())
        if harm_page.kind_of(release, name, arms) is harm_page.MENDED
    }
    assert found.keys() == NEEDS.keys(), f"NEEDS and the recorded servers differ: {found.keys() ^ NEEDS.keys()}"
    return [
        *("| architecture | stock | the plugin's fix |", "|---|---|---|"),
        *(f"| {name} | {wrong(arms['stock'])} | {', '.join(map(link, NEEDS[name]))} |" for name, arms in found.items()),
        f"| {DOTS3[0]} | not run here: ends at a replay, or answers wrongly | {link(DOTS3[1])} |",
    ]


def link(fix: str) -> str:
    return f"[{fix}](fixes/{fix}.md)"


def ends(served: Served) -> list[str]:
    """Those that end in a capture with the plugin too."""
    return [
        f"{name} ends while it captures, with the plugin too: `{arms['patched']['error'].partition(': ')[2]}`. "
        "`--cuda-graph-backend-prefill=disabled` avoids it."
        for name, arms in served.items()
        if "ends while it captures" in arms["patched"].get("error", "")
    ]


def wrong(stock: Row) -> str:
    if "error" in stock:
        error = stock["error"].partition(": ")[2].replace("|", "\\|")
        return f"ends while it captures: `{error}`"
    worst = max(map(rules.difference, stock["batches"]))
    if worst == rules.NOT_A_NUMBER:
        return "replays, and answers with no number"
    return f"replays, and logits are off by {worst:.2g}"


def layers(rows: Rows, names: list[str]) -> list[str]:
    lines = ["| architecture | what SGLang does not find | |", "|---|---|---|"]
    grouped: dict[str, list[str]] = {}
    for name in names:
        whose = plain(name)
        while "layers of" not in rows[whose]:
            whose = rows[whose]["asked for"]
        grouped.setdefault(" and ".join(LAYERS[part] for part in rows[whose]["layers of"]), []).append(name)
    for words, those in grouped.items():
        unless = "; ".join(EXCEPT[name] for each in those if (name := plain(each)) in EXCEPT)
        lines.append(f"| {', '.join(those)} | {words} | {unless} |")
    return lines


def older(release: str, rows: Rows, servers: harm_page.Table) -> list[str]:
    """Architectures with graphs in the release that an earlier one refuses."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(rows, key=str.lower):
        without = tuple(
            older
            for older in harm_page.RELEASES[: harm_page.RELEASES.index(release)]
            if (row := servers[older].get(name, {}).get("stock")) and row.get("graphs") == {}
        )
        if without and answer(name, rows) == CAPTURED:
            grouped.setdefault(without, []).append(name)
    lines = ["| refused in | architectures |", "|---|---|"]
    return lines + [f"| {', '.join(releases)} | {', '.join(names)} |" for releases, names in grouped.items()]


def paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def listed(names: Iterable[str]) -> list[str]:
    return paragraph(", ".join(names))


def wrapped(items: Iterable[str]) -> list[str]:
    return [
        line
        for item in items
        for line in textwrap.wrap(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    ]


def introduction(release: str, count: int) -> str:
    return (
        f"Find your architecture (`architectures` in its `config.json`) with Ctrl-F. These are all {count} of the "
        f"registry of SGLang {release}, on one NVIDIA GPU. Without a graph prefill runs eagerly: right, "
        "and slower on short prompts. Some flags [switch prefill graphs off](#decided-at-start-up) for every model. "
        "Below you find [what the plugin changes for each model](#does-the-plugin-do-harm), and "
        "[what each kind of request gets](#what-each-kind-of-request-gets-from-breakable-prefill-graphs)."
    )


def in_text_only(names: list[str]) -> str:
    by_flag = ", ".join(name for name in names if name != OF_TWO_KINDS)
    return (
        f"{by_flag} are served as text models unless `--enable-multimodal` is given, {OF_TWO_KINDS} unless its "
        "configuration has images and sound. Then they have graphs [where you ask for them]"
        "(#graphs-where-you-ask-for-them)."
    )


HOW_IT_IS_KNOWN = (
    "No mark: the real server ran on a CPU with a tiny model, eagerly and with graphs "
    f"([harm](#does-the-plugin-do-harm)). {BUILT} built without weights, up to where the capture would begin. {READ} "
    "read in its source, not run. "
    "`python -m tests.releases.test_registry_graphs` repeats it."
)
ADMITTING = declared_in(hybrids_without_graphs)
ADMITTED = (
    *(name for name, _ in mixers.MIXERS),
    latent.BAILING_NAME,
    *feed_forward.NEMOTRON_NAMES,
)
WITH_THE_PLUGIN = (
    f"At its defaults the plugin gives graphs to {' and '.join(measured.MEASURED)}, without experts "
    "and on Hopper, where a GPU has [measured it](kernel_times.md#as-users-serve). With "
    f"`{ADMITTING.flag}=on` it gives them to {', '.join(ADMITTED)}: [{ADMITTING.id}](fixes/{ADMITTING.id}.md). "
    "These, bold below, need it to answer rightly with graphs:"
)
LEFT_ALONE = (
    f"Some servers of the models that `{ADMITTING.flag}=on` names stay without graphs. Nobody has measured or tried "
    "them, or SGLang refuses them itself."
)
STAYS_EAGER = {
    "by default": "experts, tensor parallelism, quantization, a memory saver, forward hooks, "
    "`--cuda-graph-prefill-max-context`; less than 4 GiB of GPU memory free; a mixer that `mamba2_extend` does not "
    "take",
    "always": "speculation and drafts, LoRA, DP attention, pipeline stages, context parallelism, two-batch overlap, a "
    "hierarchical cache, deterministic inference; a mixer that would not break the graph",
    "Ling": "attention other than fa3. `mla_dispatch_unaware` off before 0.5.16, `mla_replay_prepared_as_mha` off on "
    "0.5.17. 0.5.16 and 0.5.17 prefill eagerly behind a cached prefix",
    "LFM2": "SGLang refuses `--attention-backend triton` to Lfm2ForCausalLM",
    "Granite before 0.5.18": "with triton it ends, if its first layer is a mixer: `layer_id=0 not in full attention "
    "layers`. On Blackwell before 0.5.13 SGLang chooses triton: give `--attention-backend flashinfer`",
}
WHAT_ELSE = (
    "What else concerns your model is in the [matrix](matrix.html), and `bcg-fixes doctor --model FOLDER` says it of "
    "your flags. What a GPU answered is [elsewhere](answers.md)."
)
BLACKWELL = (
    "DeepseekV3ForCausalLM has none by default where its attention is `trtllm_mla`, as on Blackwell: "
    f"`{ASK}` asks for them."
)
SHARED = (
    "Gemma4ForCausalLM needs a fix where its last layers read the KV cache of earlier ones, as in E2B and E4B: without "
    f"{link('shared_layers_refused')} it ends before it captures."
)
IF_YOU_ASK = (
    f"SGLang's own rules switch these off, and `{ASK}` overrides the rule. The servers ran with text only: try images "
    "with [`bcg-fixes verify`](verify.md). Gemma3nForConditionalGeneration and Gemma4ForConditionalGeneration end "
    "while they capture, with the plugin too: `You must specify exactly one of input_ids or inputs_embeds`."
)
REFUSES = (
    "The runner looks at the model and logs why it captures nothing. No flag overrides that, and the answers are right."
)
LAYERS_MISSING = (
    "The log says \"does not have a 'layers' attribute\": the layers are under another name or behind another module. "
    "Of HrmTextForCausalLM, SGLang switches off all graphs before that."
)
MODEL_MISSING = (
    'The log says "not a language model". Their layers are under another name, such as `transformer` or `llm`.'
)
DRAFTS = (
    "A draft's prefill graphs are those that its target is started with, and only the worker of EAGLE, EAGLE3, NEXTN "
    "and STANDALONE asks for them, without `--enable-multi-layer-eagle`. A replay may drop what the target passes to "
    "the draft, which is then accepted less often: [draft_states_dropped](fixes/draft_states_dropped.md)."
)
OF_DRAFTS = {
    CAPTURED: "With graphs",
    NO_LAYERS: "None: no `layers`",
    NEVER: "None: no graphs with DFlash, DSpark or a frozen KV cache",
}
OLDER = (
    "Recorded [servers](#does-the-plugin-do-harm) that have graphs above, and none where they were started with an "
    "older release:"
)
