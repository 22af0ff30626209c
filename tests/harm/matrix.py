# SPDX-License-Identifier: Apache-2.0
"""The harm matrix: its rows, what a row must not be, and the one command that records what is missing.

    python -m tests.harm.matrix [--release RELEASE] [--architecture NAME] [--arm ARM]

A release's rows lie in recorded/RELEASE.jsonl. A row is made again when its configuration has changed, and, where the
plugin mends, when the package's code has: comments and docstrings are no code. Interrupted, it goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from cpu_sglang import architectures
from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.fixes.hybrids_without_graphs import mixers
from sglang_bcg_fixes.kernels.gdn_extend.declaration import KERNEL as GDN
from sglang_bcg_fixes.kernels.kda_extend.declaration import KERNEL as KDA
from sglang_bcg_fixes.kernels.mamba2_extend.declaration import KERNEL as MAMBA2
from sglang_bcg_fixes.kernels.short_conv_extend.declaration import KERNEL as SHORT_CONV
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.syntax import canonical
from tests import processes, wheels

ADMITTING = declared_in(hybrids_without_graphs)
RECORDED = pathlib.Path(__file__).with_name("recorded")
STOCK, PATCHED, OFF, ADMITTED, INSIDE = "stock", "patched", "off", "admitted", "inside"
ARMS = {
    STOCK: {"SGLANG_PLUGINS": "__none__"},
    PATCHED: {"SGLANG_PLUGINS": "bcg_fixes"},
    OFF: {"SGLANG_PLUGINS": "bcg_fixes", "SGLANG_BCG_FIXES": "off"},
    # with a fix that by default leaves most of these alone
    ADMITTED: {"SGLANG_PLUGINS": "bcg_fixes", ADMITTING.flag: "on"},
    # with the implementations that run on a CPU; the windows of convolutions are as the model's, half precision here
    INSIDE: {
        "SGLANG_PLUGINS": "bcg_fixes",
        ADMITTING.flag: "on",
        **dict.fromkeys((GDN.flag, MAMBA2.flag, KDA.flag, SHORT_CONV.flag), "reference"),
        "SGLANG_MAMBA_CONV_DTYPE": "float16",
    },
}
# that fix is for these, with every bit of the eager answers
ADMITTED_ARCHITECTURES = {name for name, _ in mixers.MIXERS}
# those with linear layers that our kernels capture, and the breaks that are left: one for each layer of attention
BREAKS_OUTSIDE = {
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"), 1),
    **dict.fromkeys(("NemotronHForCausalLM", "GraniteMoeHybridForCausalLM"), 1),
    **dict.fromkeys(("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"), 1),
    "FalconH1ForCausalLM": 2,
    "KimiLinearForCausalLM": 1,
}
# where the kernel is not known for every release, or the model does not start on a CPU
INSIDE_IN = {"KimiLinearForCausalLM": ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21")}
# an interrupted recording has these first
FIRST_RELEASES = (wheels.NEWEST, wheels.RELEASES[0], "0.5.15.post1", "0.5.19")
FIRST_ARCHITECTURES = (
    *("LlamaForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    *("Qwen3NextForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "NemotronHForCausalLM"),
)
# each is recorded in every release; the others in these, and elsewhere as `make harm` comes to them
EVERY_ARCHITECTURE_IN = (wheels.RELEASES[0], "0.5.19", wheels.NEWEST)
IN_EVERY_RELEASE = {
    *("BailingMoeV2ForCausalLM", "BailingMoeV2_5ForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM"),
    *("DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "FalconH1ForCausalLM"),
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForCausalLM"),
    *("Glm4ForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM", "GraniteMoeHybridForCausalLM"),
    *("KimiLinearForCausalLM", "Lfm2ForCausalLM", "Llama4ForCausalLM", "LlamaEmbeddingModel", "LlamaForCausalLM"),
    *("LlamaForSequenceClassification", "MiniMaxM2ForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
    *("NemotronHForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM"),
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
}
# a model file's last statement, as SGLang's registry reads it
ENTRIES = re.compile(r"^EntryClass[^=\n]*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)
COMMENT = re.compile(r"#.*")
# seconds for a row, where others run beside it
PATIENCE = 900
Row = dict[str, Any]
Rows = dict[tuple[str, str], Row]


@functools.cache
def code_of_the_package() -> str:
    """A hash of what the plugin's modules do."""
    made = hashlib.sha256()
    for file in sorted((processes.REPOSITORY / "sglang_bcg_fixes").rglob("*.py")):
        made.update(file.relative_to(processes.REPOSITORY).as_posix().encode())
        made.update(repr(canonical(ast.parse(file.read_text()))).encode())
    return made.hexdigest()[:12]


def key(architecture: str, arm: str) -> str:
    """A digest of everything that the row rests on."""
    configuration = architectures.CONFIGURATIONS[architecture]
    made = json.dumps([configuration.config, configuration.server_args], sort_keys=True)
    digest = hashlib.sha256(made.encode()).hexdigest()[:8]
    return f"{digest} {code_of_the_package()}" if arm in (PATCHED, ADMITTED, INSIDE) else digest


def job(architecture: str, arm: str, is_recorded: bool = True) -> dict[str, Any]:
    """Tell a server its part; a row that is not kept needs no key, and so rests on no more than what it runs."""
    configuration = architectures.CONFIGURATIONS[architecture]
    # our kernels take half precision
    kind = {"dtype": "float16"} if arm == INSIDE else {}
    return {
        "architecture": architecture,
        "arm": arm,
        "key": key(architecture, arm) if is_recorded else "",
        "environment": ARMS[arm],
        "patience": PATIENCE,
        "configuration": {**configuration.config, "architectures": [architecture]},
        "server_args": {**configuration.server_args, **kind},
    }


def served(release: str, jobs: list[dict[str, Any]], rows: pathlib.Path) -> Iterator[Row]:
    """Run the jobs in one process of the release, and append each row to the file."""
    with tempfile.TemporaryDirectory() as folder:
        listed = pathlib.Path(folder, "jobs.json")
        listed.write_text(json.dumps(jobs))
        done = processes.on_cpu(
            wheels.unpacked(release),
            *("-m", "tests.harm.forked_rows", str(listed), str(rows.absolute())),
            environment={"SGLANG_BCG_REPORT_DIR": str(pathlib.Path(folder, "reports"))},
            timeout=PATIENCE * len(jobs),
        )
        if done.returncode:
            said = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"tests.harm.forked_rows ended with {done.returncode} on {release}: {said}")
    yield from read(rows)


def read(file: pathlib.Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def recorded(release: str) -> Rows:
    """Rows by architecture and arm; the one recorded last counts."""
    return {(row["architecture"], row["arm"]): row for row in read(file_of(release))}


def file_of(release: str) -> pathlib.Path:
    return RECORDED / f"{release}.jsonl"


def tidy(release: str) -> None:
    """One row for each architecture and arm, in their order."""
    rows = recorded(release)
    order = {arm: place for place, arm in enumerate(ARMS)}
    known = sorted(
        ((name, arm) for name, arm in rows if name in architectures.CONFIGURATIONS),
        key=lambda pair: (pair[0], order[pair[1]]),
    )
    draft = file_of(release).with_suffix(".draft")
    draft.write_text("".join(json.dumps(rows[pair]) + "\n" for pair in known))
    os.replace(draft, file_of(release))


def names_in(release: str) -> set[str]:
    """Every architecture that a model file of the release declares."""
    return set(declared(wheels.unpacked(release)))


def model_files(root: pathlib.Path) -> list[pathlib.Path]:
    return sorted((root / "sglang" / "srt" / "models").rglob("*.py"))


@functools.cache
def text_of(file: pathlib.Path) -> str:
    return file.read_text(encoding="utf-8-sig")


def declared(root: pathlib.Path) -> Iterator[str]:
    for file in model_files(root):
        for entries in ENTRIES.findall(text_of(file)):
            yield from re.findall(r"\w+", COMMENT.sub("", entries))


def code_of(root: pathlib.Path, name: str) -> str:
    """The class that this one of the models has all of its code from: itself, or what it is derived from."""
    text = next((text for text in map(text_of, model_files(root)) if f"\nclass {name}(" in text), "")
    found = re.search(rf"^class {name}\((\w+)\):\n((?:[ \t].*\n|\n)*)", text, re.MULTILINE)
    if found is None:
        return name
    body = ast.parse(f"class {name}:\n{found[2]}").body[0]
    assert isinstance(body, ast.ClassDef)
    is_empty = all(isinstance(part, ast.Pass) or is_text(part) for part in body.body)
    return code_of(root, found[1]) if is_empty else name


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def wanted_arms(release: str, name: str) -> list[str]:
    """Switched off there is nothing of ours to find: the ends of the list of releases, and some in all of them, do."""
    is_compared = release in (wheels.RELEASES[0], wheels.NEWEST) or name in FIRST_ARCHITECTURES
    off, admitted = [OFF] * is_compared, [ADMITTED] * (name in ADMITTED_ARCHITECTURES)
    is_inside = name in BREAKS_OUTSIDE and release in INSIDE_IN.get(name, wheels.RELEASES)
    return [STOCK, PATCHED, *off, *admitted, *[INSIDE] * is_inside]


def demanded(release: str) -> set[tuple[str, str]]:
    """Architectures and arms that must be recorded of this release."""
    known = architectures.CONFIGURATIONS.keys() & names_in(release)
    names = known if release in EVERY_ARCHITECTURE_IN else known & IN_EVERY_RELEASE
    return {(name, arm) for name in names for arm in wanted_arms(release, name)}


def missing(release: str, names: Iterable[str], arms: Iterable[str]) -> list[dict[str, Any]]:
    """Jobs whose rows are not there, or rest on something that has changed."""
    rows, arms = recorded(release), list(arms)
    wanted = [(name, arm) for name in names for arm in wanted_arms(release, name) if arm in arms]
    return [job(*pair) for pair in wanted if rows.get(pair, {}).get("key") != key(*pair)]


def record(releases: list[str], names: list[str], arms: list[str]) -> None:
    RECORDED.mkdir(exist_ok=True)
    for release in releases:
        known = names_in(release)
        jobs = missing(release, [name for name in names if name in known], arms)
        print(f"{release}: {len(jobs)} rows to record", flush=True)
        if jobs:
            for _ in served(release, jobs, file_of(release)):
                pass
            tidy(release)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="append", choices=wheels.RELEASES, help="all; repeat")
    parser.add_argument("--architecture", action="append", choices=sorted(architectures.CONFIGURATIONS), help="repeat")
    parser.add_argument("--arm", action="append", choices=ARMS, help="all; repeat")
    options = parser.parse_args()
    releases = options.release or list(dict.fromkeys((*FIRST_RELEASES, *reversed(wheels.RELEASES))))
    names, arms = options.architecture or list(architectures.CONFIGURATIONS), options.arm or list(ARMS)
    first = [name for name in FIRST_ARCHITECTURES if name in names]
    for some in (first, names):
        record(releases, some, arms)


if __name__ == "__main__":
    main()
