# SPDX-License-Identifier: Apache-2.0
"""Generate docs/matrix.html: every defect on every release, and the models that it concerns with default flags.

    python tools/matrix_page.py

Needs the wheels of all releases: what a launch's flags leave to SGLang is read in its source.
"""

from __future__ import annotations

import html
import json
import pathlib
import re
import sys
from typing import Any

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tools")]

from make_docs import MENDED  # noqa: E402

from cpu_sglang import architectures  # noqa: E402
from sglang_bcg_fixes.cli import for_launch  # noqa: E402
from sglang_bcg_fixes.concern import Launch  # noqa: E402
from sglang_bcg_fixes.planning import registry  # noqa: E402
from sglang_bcg_fixes.source import tree, verdicts  # noqa: E402
from tests import wheels  # noqa: E402

PAGE = REPOSITORY / "docs" / "matrix.html"
TEMPLATE = pathlib.Path(__file__).with_name("matrix_template.html")
FIXES = sorted(registry.discover().fixes, key=lambda fix: fix.id)
LETTERS = {"affected": "A", "latent": "l", "fixed": "f", "absent": "-", "unknown": "?"}


def classes(source: tree.Source) -> set[str]:
    """Names of the classes in the models of an SGLang."""
    texts = (source.text(path) or "" for path in source.files.modules("sglang/srt/models"))
    return {name for text in texts for name in re.findall(r"^class (\w+)\(", text, re.MULTILINE)}


def of_release(release: str) -> dict[str, list[int]]:
    """Numbers of the defects that each model of a release may meet with default flags."""
    source = tree.Source(tree.Folder(wheels.unpacked(release)), release)
    found = verdicts.recorded()[release]
    affected = [(number, fix) for number, fix in enumerate(FIXES) if found[fix.id] == "affected"]
    told = {}
    for name in classes(source) & set(architectures.CONFIGURATIONS):
        config = {**architectures.CONFIGURATIONS[name].config, "architectures": [name]}
        launch = Launch(source, config, {})
        told[name] = [number for number, fix in affected if for_launch.worst(fix.concerns, launch) is not None]
    return told


def content() -> dict[str, Any]:
    recorded = verdicts.recorded()
    told = [of_release(release) for release in recorded]
    # many models meet the same defects
    sets = sorted({tuple(numbers) for of_models in told for numbers in of_models.values()})
    models = sorted({name for of_models in told for name in of_models})
    return {
        "releases": list(recorded),
        "defects": [fix.id for fix in FIXES],
        "verdicts": ["".join(LETTERS[row[fix.id]] for row in recorded.values()) for fix in FIXES],
        "sets": sets,
        # null without the model
        "models": {
            name: [sets.index(tuple(of_models[name])) if name in of_models else None for of_models in told]
            for name in models
        },
    }


def page(data: dict[str, Any]) -> str:
    fixes = {fix.id: fix for fix in FIXES}
    head = "".join(f'<th scope="col">{name}</th>' for name in ("defect", "fix", *data["releases"]))
    rows = []
    for name, letters in zip(data["defects"], data["verdicts"], strict=True):
        fix = fixes[name]
        title = html.escape(fix.title)
        cells = "".join(
            f'<td class="{letter if letter in "Al" else ""}" data-release="{release}">{letter}</td>'
            for release, letter in zip(data["releases"], letters, strict=True)
        )
        mends = MENDED[fix.default, fix.guard] if fix.patches else "no"
        rows.append(
            f'<tr><th scope="row"><a href="fixes/{name}.md">{name}</a><br>{title}</th><td>{mends}</td>{cells}</tr>'
        )
    text = TEMPLATE.read_text()
    parts = {"@HEAD@": f"<tr>{head}</tr>", "@ROWS@": "\n".join(rows), "@DATA@": json.dumps(data, separators=(",", ":"))}
    for mark, part in parts.items():
        assert text.count(mark) == 1, mark
        text = text.replace(mark, part)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(content()))
