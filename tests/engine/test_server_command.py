# SPDX-License-Identifier: Apache-2.0
"""Commands as people type them, and what SGLang's own parser says of each, beside what ours says."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence

import pytest

from sglang_bcg_fixes.cli import server_command
from sglang_bcg_fixes.model import Workaround
from sglang_bcg_fixes.source import command_line, releases
from sglang_bcg_fixes.source.tree import Source
from tests import processes, wheels

COMMANDS = (
    "",
    "--model-path a",
    "--model a --tp 2 --trust-remote-code",
    "a",
    "--model a --tp-size banana",
    "--model a --tp-size",
    "--model a --mem-fraction-static high",
    "--model a --no-such-flag 3",
    "--model a --no-such-flag=3 --other",
    "--model a --attention-backend fa9",
    "--model a --attention-backend fa3 --sampling-backend pytorch",
    "--model a --trust-remote-code yes",
    "--model a --disable-cuda-graph --disable-overlap-schedule",
    "--model a --lora-paths one two --max-loras-per-batch 2",
    "--model a --lora-target-modules",
    "--model a --load-format torn",
    "--model a --quantization fp9",
    "--model a --speculative-algorithm EAGLE --speculative-num-steps x",
    "--model a --cuda-graph-bs 1 2 x",
    "--model a --dtype half --kv-cache-dtype fp8_e5m2",
    "--model a --dtype quarter",
    "--model a --tool-call-parser qwen --reasoning-parser deepseek-r1",
    "--model a --enable-metrics --log-level info --port 1x",
    "--model a --speculative 3",
    "--model a --chunked-prefill-size -1",
    "--model a --json-model-override-args {}",
    "--model a --cuda-graph-config {bad",
    "--model a --cuda-graph-config=[]",
    '--model a --cuda-graph-config {"prefil":{}}',
    '--model a --cuda-graph-config {"prefill":null}',
    '--model a --cuda-graph-config {"prefill":{"max_seq_len":1}}',
    '--model a --cuda-graph-config {"decode":{"max_seq_len":1}}',
    '--model a --cuda-graph-config {"decode":{"bs":[1,2]},"prefill":{"backend":"breakable","max_bs":8}}',
)
# the text is argparse's; behind these words are lists, which platforms extend when SGLang runs, in another order
LISTS = re.compile(r"(choose from|could match).*", re.DOTALL)


def source_of(release: str) -> Source:
    return releases.in_folder(wheels.unpacked(release))


def refusal(source: Source, words: Sequence[str]) -> str:
    try:
        command_line.check(source, words)
    except command_line.RefusedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_our_parser_refuses_what_sglangs_does_in_its_words(release: str) -> None:
    arguments = json.dumps([command.split() for command in COMMANDS])
    done = processes.on_cpu(wheels.unpacked(release), "-m", "tests.scenarios.refused_commands", arguments, cold=True)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    source = source_of(release)
    ours = [refusal(source, command.split()) for command in COMMANDS]
    assert [LISTS.sub("", text) for text in ours] == [LISTS.sub("", text) for text in theirs]
    assert sum(map(bool, ours)) > 10


@pytest.mark.parametrize(
    ("typed", "variables", "program", "arguments"),
    [
        ("--tp 2", {}, "", "--tp 2"),
        ("sglang serve a/b --tp 2", {}, "sglang serve", "--model-path a/b --tp 2"),
        ("/opt/bin/sglang serve --model a", {}, "/opt/bin/sglang serve", "--model a"),
        ("A=1 B=c=d sglang serve a", {"A": "1", "B": "c=d"}, "sglang serve", "--model-path a"),
        ("env A=1 python3 -m sglang.launch_server --tp 2", {"A": "1"}, "python3 -m sglang.launch_server", "--tp 2"),
        ("sglang serve a --model-type llm --tp 2", {}, "sglang serve", "--model-path a --tp 2"),
        ("numactl -N 0 sglang serve a", {}, "numactl -N 0 sglang serve", "--model-path a"),
        ("my-launcher --tp 2", {}, "my-launcher", "--tp 2"),
    ],
)
def test_a_command_is_taken_apart(typed: str, variables: dict[str, str], program: str, arguments: str) -> None:
    found = server_command.read(typed.split())
    assert found.variables == variables and " ".join(found.program) == program
    assert " ".join(found.arguments) == arguments


@pytest.mark.parametrize(
    ("typed", "flags", "changed"),
    [
        ("sglang serve a", "--disable-overlap-schedule", "sglang serve a --disable-overlap-schedule"),
        ("sglang serve a --page-size 64 --tp 2", "--page-size 1", "sglang serve a --tp 2 --page-size 1"),
        ("sglang serve a --enable-mixed-chunk --tp 2", "(leave out) --enable-mixed-chunk", "sglang serve a --tp 2"),
        (
            "sglang serve a --speculative-algo NGRAM --tp 2",
            "(leave out) --speculative-algorithm NGRAM",
            "sglang serve a --tp 2",
        ),
        (
            "sglang serve a --disable-radix-cache",
            "--disable-radix-cache --chunked-prefill-size -1",
            "sglang serve a --disable-radix-cache --chunked-prefill-size -1",
        ),
        (
            "sglang serve a",
            "--attention-backend fa3 (or flashinfer), or, with topk 1, --disable-cuda-graph",
            "sglang serve a --attention-backend fa3",
        ),
        (
            "sglang serve a --enable-mixed-chunk",
            "--disable-cuda-graph-padding, and (leave out) --enable-mixed-chunk",
            "sglang serve a --disable-cuda-graph-padding",
        ),
        (
            'sglang serve a --cuda-graph-config {"prefill":{"backend":"full"}} --tp 2',
            "--cuda-graph-backend-prefill breakable",
            "sglang serve a --tp 2 --cuda-graph-backend-prefill breakable",
        ),
        (
            'sglang serve a --cuda-graph-config={"prefill":{"backend":"full","max_bs":8},"decode":{"bs":[1]}}',
            "--cuda-graph-backend-prefill breakable",
            """sglang serve a --cuda-graph-config '{"prefill": {"max_bs": 8}, "decode": {"bs": [1]}}' """
            "--cuda-graph-backend-prefill breakable",
        ),
        (
            'sglang serve a --cuda-graph-config {"prefill":{"max_bs":8}}',
            "--cuda-graph-backend-prefill disabled",
            """sglang serve a --cuda-graph-config '{"prefill":{"max_bs":8}}' --cuda-graph-backend-prefill disabled""",
        ),
    ],
)
def test_a_workaround_changes_the_command(typed: str, flags: str, changed: str) -> None:
    way = Workaround(flags=flags, option="--any", effect="")
    found = server_command.read(typed.split()).changed(source_of(wheels.NEWEST), way)
    assert found.text == changed


def test_a_workaround_wins_over_the_json_of_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("cuda-graph-config: {prefill: {backend: full}}\n")
    way = Workaround(flags="--cuda-graph-backend-prefill breakable", option="--any", effect="")
    typed = server_command.read(["sglang", "serve", "a", "--config", str(file)])
    changed = typed.changed(source_of(wheels.NEWEST), way)
    assert " ".join(changed.words).endswith("--cuda-graph-config {} --cuda-graph-backend-prefill breakable")


def test_every_workaround_can_be_applied() -> None:
    from sglang_bcg_fixes.planning import registry

    for release in (wheels.RELEASES[0], wheels.NEWEST):
        source = source_of(release)
        every = {way for fix in registry.discover().fixes for way in fix.workarounds}
        for way in (way for way in every if source.has_option(way.option)):
            command = server_command.read(["sglang", "serve", "a"]).changed(source, way)
            assert refusal(source, command.arguments) == "", way


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [("mine", "mine,bcg_fixes"), ("__none__", "bcg_fixes"), ("a, bcg_fixes ,b", "a,b,bcg_fixes"), ("", "bcg_fixes")],
)
def test_other_plugins_stay(chosen: str, kept: str) -> None:
    assert server_command.with_plugin(chosen, "bcg_fixes") == kept


def test_a_file_of_settings_is_merged_as_sglang_does(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "server.yaml"
    switches = "trust-remote-code: true\nskip-tokenizer-init: false\n"
    file.write_text(f"tp-size: 4\n{switches}cuda-graph-bs-prefill: [64, 128]\nport: 1\n")
    words = ["--model-path", "m", "--config", str(file), "--port", "2"]
    assert server_command.merged(words) == [
        *("--tp-size", "4", "--trust-remote-code", "--cuda-graph-bs-prefill", "64", "128", "--port", "1"),
        *("--model-path", "m", "--port", "2"),
    ]
    done = processes.on_cpu(
        wheels.unpacked(wheels.NEWEST), "-m", "tests.scenarios.refused_commands", json.dumps([words]), cold=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-2]) == [server_command.merged(words)]
