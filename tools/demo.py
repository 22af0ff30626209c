# SPDX-License-Identifier: Apache-2.0
"""Show what the newest SGLang answers with prefill graphs, as it is and with the plugin; needs only Python.

    make demo                             # or: python tools/demo.py
    make demo PICTURE=docs/demo.svg       # write the picture there

Two tiny models with random weights run on SGLang's own code. A tape on the CPU stands in for CUDA graphs:
cpu_sglang/graphs.py. The exit status is 0 only if stock SGLang is wrong, or ends, and SGLang with the plugin is right.
"""

from __future__ import annotations

import html
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import serve_install
from serve_server import Group, ServeError, run

RELEASE = serve_install.RELEASES[-1]
MODELS = {"falcon_h1": "Falcon-H1", "phi": "Phi"}
# installing the plugin is enough for SGLang to load it, so stock names no plugin on purpose
ARMS = {"stock": {"SGLANG_PLUGINS": "__none__"}, "plugin": {"SGLANG_PLUGINS": "bcg_fixes"}}
STEPS = 4
LIMIT_S = 600

EQUAL, DIFFERS, MISSING = "equal", "differs", "missing"
ANSI = {EQUAL: "32", DIFFERS: "31;1", MISSING: "31;1"}
FILL = {EQUAL: "#2da44e", DIFFERS: "#cf222e", MISSING: "#8c1c24"}
COLUMNS = {"eager": "without graphs", "stock": "stock, with graphs", "plugin": "plugin, with graphs"}

MEANING = (
    "Tiny models with random weights run on SGLang's own code. Green equals the run without graphs.",
    "This is a CPU's model of CUDA graphs, not a GPU. A dash means that SGLang ended.",
    "The tokens are those of memory kept: freed memory holds what was written to it last.",
)
# real servers of the same models
VERIFY = (sys.executable, "-m", "sglang_bcg_fixes", "verify")
CASES = ("--case", "phi_prefill_graph", "--case", "falcon_h1_prefill_graph")
NEXT = "Your own model, in the environment of your SGLang: bcg-fixes doctor --model FOLDER_OR_CONFIG_JSON"


class Token(NamedTuple):
    text: str
    state: str


class Row(NamedTuple):
    """A request: the tokens of each column."""

    model: str
    tokens: dict[str, list[Token]]


def demo(environ: Mapping[str, str]) -> int:
    started = time.monotonic()
    serve_install.check_python()
    # a GPU changes nothing here: these runs are the CPU's
    python = serve_install.prepare(serve_install.environment_folder(environ), RELEASE, on_gpu=False)
    folder = serve_install.cache_folder(environ, "demo")
    picture = pathlib.Path(environ.get("PICTURE") or folder / "demo.svg").absolute()
    with serve_install.step(f"running {' and '.join(MODELS.values())}, stock and with the plugin"):
        report = measure(python, environment_of_runs(environ), folder)
    rows = list(rows_of(report))
    print(table(rows, report, colour=wants_colour(environ)))
    try:
        picture.write_text(drawn(rows, report["release"]))
    except OSError as error:
        raise ServeError(f"the picture cannot be written: {error}. Next: name another file, PICTURE=FILE.") from error
    print(f"picture: {picture}   log: {folder / 'demo.log'}   {time.monotonic() - started:.0f} s")
    shown = judge(report)
    print(shown or "Stock is wrong or ends, and the plugin is right.")
    is_shown = on_the_gpu(environ) and not shown
    print(NEXT)
    return 0 if is_shown else 1


def on_the_gpu(environ: Mapping[str, str]) -> bool:
    """Run real servers of the same models where there is a GPU and this Python has an SGLang; false if that fails."""
    if not shutil.which("nvidia-smi"):
        return True
    if importlib.util.find_spec("sglang") is None:
        print(f"The same on your GPU, in the environment of your SGLang: bcg-fixes verify {' '.join(CASES)}")
        return True
    print(f"The same on your GPU, with the SGLang of {sys.executable}:", flush=True)
    # the plugin must be installed beside that SGLang, and `verify` says so where it is not
    status = subprocess.run([*VERIFY, *CASES], cwd=serve_install.REPOSITORY, env=environ).returncode
    if status:
        print(f"On the GPU it is not shown: `verify` ended with exit status {status}, see above.")
    return status == 0


def wants_colour(environ: Mapping[str, str]) -> bool:
    return sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def environment_of_runs(environ: Mapping[str, str]) -> dict[str, str]:
    # your own settings of SGLang and of the plugin would change what an arm is
    inherited = {name: value for name, value in environ.items() if not name.startswith(("SGLANG", "PYTHON"))}
    return inherited | {
        "PYTHONPATH": str(serve_install.REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        # runs SGLang's Triton kernels without a GPU
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # an arm has a core
        "OMP_NUM_THREADS": "1",
    }


def measure(python: pathlib.Path, environment: Mapping[str, str], folder: pathlib.Path) -> dict[str, Any]:
    """Run all arms of all models; return the report of cpu_sglang.demo."""
    answers, log = folder / "demo.json", folder / "demo.log"
    answers.unlink(missing_ok=True)
    command = [str(python), "-m", "cpu_sglang.demo", f"--json={answers}", f"--steps={STEPS}", "--model", *MODELS]
    for name, variables in ARMS.items():
        command += ["--arm", name, *(f"{variable}={value}" for variable, value in variables.items())]
    runs = Group(command, environment, log)
    try:
        status = runs.process.wait(LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise ServeError(f"the runs took more than {LIMIT_S} s. Next: read {log}.") from error
    finally:
        runs.stop()
    if status != 0 or not answers.exists():
        last = "".join(runs.lines()[-1:])
        raise ServeError(f"the runs ended with exit status {status} ({last}). Next: read {log}.")
    report: dict[str, Any] = json.loads(answers.read_text())
    return report


def rows_of(report: Mapping[str, Any]) -> Iterator[Row]:
    for model, of_model in report["models"].items():
        for index, eager in enumerate(of_model["eager"]):
            tokens = {"eager": [Token(str(token), EQUAL) for token in eager]}
            for arm, ran in of_model["arms"].items():
                answered = ran["kept"].get("tokens")
                tokens[arm] = compared(answered[index] if answered else [], eager)
            yield Row(MODELS[model], tokens)


def compared(answered: list[int], eager: list[int]) -> list[Token]:
    given = [
        Token(str(token), EQUAL if token == right else DIFFERS) for token, right in zip(answered, eager, strict=False)
    ]
    return given + [Token("-", MISSING)] * (len(eager) - len(given))


def judge(report: Mapping[str, Any]) -> str:
    """Say what the demo fails to show; nothing where stock is wrong and the plugin right, in each model."""
    for model, of_model in report["models"].items():
        name, stock, plugin = MODELS[model], of_model["arms"]["stock"], of_model["arms"]["plugin"]
        if stock["with_plugin"]:
            return f"{name}: the stock run had the plugin, so it shows nothing."
        if not plugin["with_plugin"]:
            return f"{name}: SGLang did not load the plugin."
        if stock["kept"].get("tokens") == of_model["eager"]:
            return f"{name}: stock is right, so there is nothing to fix."
        for memory in ("kept", "reused"):
            ran = plugin[memory]
            if "error" in ran:
                return f"{name}: SGLang with the plugin ends (memory {memory}): {ran['error']}"
            if ran["tokens"] != of_model["eager"] or ran["max_abs_logit_difference"] != 0:
                return f"{name}: SGLang with the plugin is wrong (memory {memory})."
            if not ran["replays"]:
                return f"{name}: SGLang with the plugin replayed no graph."
    return ""


def table(rows: list[Row], report: Mapping[str, Any], colour: bool) -> str:
    lines = [f"SGLang {report['release']}, first {STEPS} tokens of each request; * is a wrong token", ""]
    width = 5 * STEPS
    lines.append(f"{'':11}" + "".join(f"{title:{width + 1}}" for title in COLUMNS.values()).rstrip())
    for model, of_model in report["models"].items():
        of_this = [row for row in rows if row.model == MODELS[model]]
        for index, row in enumerate(of_this):
            cells = [" ".join(painted(token, colour) for token in row.tokens[column]) for column in COLUMNS]
            lines.append(f"{row.model if index == 0 else '':11}" + "  ".join(cells).rstrip())
        lines += [*said_of(of_model["arms"]), ""]
    return "\n".join([*lines, *MEANING])


def painted(token: Token, colour: bool) -> str:
    text = f"{token.text + ('*' if token.state == DIFFERS else ''):4}"
    return f"\033[{ANSI[token.state]}m{text}\033[0m" if colour else text


def said_of(arms: Mapping[str, Any]) -> list[str]:
    """Lines on each arm: how far its logits are off, or how it ended."""
    lines = []
    for arm, ran in arms.items():
        kept, reused = (
            f"ends with {ran[memory]['error']}"
            if "error" in ran[memory]
            else f"logits off by {ran[memory]['max_abs_logit_difference']:.2g}"
            for memory in ("kept", "reused")
        )
        said = (
            [f"memory kept or reused: {kept}"]
            if kept == reused
            else [f"memory kept: {kept}", f"memory reused: {reused}"]
        )
        lines.append(f"  {arm + ':':8}{'; '.join(said)}")
    return lines


def drawn(rows: list[Row], release: str) -> str:
    """Draw a square for each token, as SVG."""
    wide, high, left, top, gap = 34, 22, 96, 70, 24
    block = STEPS * wide + gap
    total = left + len(COLUMNS) * block
    bottom = top + len(rows) * high + 10 * len(MODELS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {bottom + 61}" '
        f'font-family="sans-serif" font-size="12" fill="#1f2328">',
        f"<title>Tokens of SGLang {release} without graphs, stock, and with the plugin</title><defs>",
        *(
            f'<rect id="{state}" width="{wide - 3}" height="{high - 3}" rx="3" fill="{fill}"/>'
            for state, fill in FILL.items()
        ),
        f'</defs><rect width="{total}" height="{bottom + 61}" fill="#fff"/>',
        f'<text x="12" y="26" font-size="16" font-weight="bold">SGLang {release}: tokens with CUDA graphs</text>',
    ]
    for number, title in enumerate(COLUMNS.values()):
        parts.append(f'<text x="{left + number * block}" y="{top - 10}" font-weight="bold">{title}</text>')
    tokens, y, model = [], top - 10, ""
    for row in rows:
        if row.model != model:
            model, y = row.model, y + 10
            parts.append(f'<text x="12" y="{y + 14}" font-weight="bold">{html.escape(model)}</text>')
        for number, column in enumerate(COLUMNS):
            for step, token in enumerate(row.tokens[column]):
                x = left + number * block + step * wide
                parts.append(f'<use href="#{token.state}" x="{x}" y="{y}"/>')
                tokens.append(f'<text x="{x + (wide - 3) // 2}" y="{y + 14}">{token.text}</text>')
        y += high
    parts += ['<g fill="#fff" font-size="11" text-anchor="middle">', *tokens, "</g>"]
    for number, sentence in enumerate(MEANING):
        parts.append(f'<text x="12" y="{bottom + 14 + 17 * number}" font-size="10">{html.escape(sentence)}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    sys.exit(run("make demo", demo))
