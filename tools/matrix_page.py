# SPDX-License-Identifier: Apache-2.0
"""Generate docs/matrix.html: every defect, its harm, its releases, and the models that it concerns with default flags.

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

from cpu_sglang import architectures  # noqa: E402
from sglang_bcg_fixes.cli import for_launch  # noqa: E402
from sglang_bcg_fixes.concern import Harm, Launch  # noqa: E402
from sglang_bcg_fixes.model import Fix  # noqa: E402
from sglang_bcg_fixes.planning import registry  # noqa: E402
from sglang_bcg_fixes.source import tree, verdicts  # noqa: E402
from tests import wheels  # noqa: E402

PAGE = REPOSITORY / "docs" / "matrix.html"
TEMPLATE = pathlib.Path(__file__).with_name("matrix_template.html")
FIXES = sorted(registry.discover().fixes, key=lambda fix: fix.id)
LETTERS = {"affected": "A", "latent": "l", "fixed": "f", "absent": "-", "unknown": "?"}
HARMS = tuple(Harm)
FIXED, OFF, NOT_FIXED = "fixed", "off by default", "not fixed"
# architecture -> the names under which models of it are published
PUBLISHED: dict[str, list[str]] = json.loads(pathlib.Path(__file__).with_name("published_models.json").read_text())
# a class without methods of its own has the configuration of the one that it is derived from
CONFIGURATIONS = {name: known.config for name, known in architectures.CONFIGURATIONS.items()} | {
    name: architectures.CONFIGURATIONS[architectures.SAME_CODE[name]].config
    for name in PUBLISHED
    if name in architectures.SAME_CODE
}


def with_plugin(fix: Fix) -> str:
    return NOT_FIXED if not fix.patches else FIXED if fix.default == "auto" else OFF


def classes(source: tree.Source) -> set[str]:
    """Names of the classes in the models of an SGLang."""
    texts = (source.text(path) or "" for path in source.files.modules("sglang/srt/models"))
    return {name for text in texts for name in re.findall(r"^class (\w+)\(", text, re.MULTILINE)}


def of_release(release: str) -> dict[str, list[list[int]]]:
    """Find the defects that each model of a release may meet with default flags: its number and that of its harm."""
    source = tree.Source(tree.Folder(wheels.unpacked(release)), release)
    found = verdicts.recorded()[release]
    affected = [(number, fix) for number, fix in enumerate(FIXES) if found[fix.id] == "affected"]
    told = {}
    for name in classes(source) & set(CONFIGURATIONS):
        launch = Launch(source, {**CONFIGURATIONS[name], "architectures": [name]}, {})
        worst = [(number, for_launch.worst(fix.concerns, launch)) for number, fix in affected]
        told[name] = [[number, HARMS.index(concern.harm)] for number, concern in worst if concern is not None]
    return told


def content() -> dict[str, Any]:
    recorded = verdicts.recorded()
    told = [of_release(release) for release in recorded]
    # many models meet the same defects
    sets = sorted({json.dumps(numbers) for of_models in told for numbers in of_models.values()})
    models = sorted({name for of_models in told for name in of_models})
    return {
        "releases": list(recorded),
        "harms": [[harm.name.lower(), harm.value] for harm in HARMS],
        "defects": [fix.id for fix in FIXES],
        # to any model
        "harm": [min(HARMS.index(concern.harm) for concern in fix.concerns) for fix in FIXES],
        "plugin": [with_plugin(fix) for fix in FIXES],
        "verdicts": ["".join(LETTERS[row[fix.id]] for row in recorded.values()) for fix in FIXES],
        "sets": [json.loads(numbers) for numbers in sets],
        # null without the model
        "models": {
            name: [sets.index(json.dumps(of_models[name])) if name in of_models else None for of_models in told]
            for name in models
        },
        "published": PUBLISHED,
    }


def page(data: dict[str, Any]) -> str:
    head = [f'<th scope="col">{name}</th>' for name in ("defect", "harm", "with the plugin")]
    head += [f'<th scope="col" data-release="{release}">{release}</th>' for release in data["releases"]]
    rows = []
    for fix, letters, harm, plugin in zip(FIXES, data["verdicts"], data["harm"], data["plugin"], strict=True):
        cells = "".join(
            f'<td class="{letter if letter in "Al" else ""}" data-release="{release}">{letter}</td>'
            for release, letter in zip(data["releases"], letters, strict=True)
        )
        kind, says = data["harms"][harm]
        name = fix.id.replace("_", "_<wbr>")
        rows.append(
            f'<tr data-harm="{kind}"><th scope="row"><a href="fixes/{fix.id}.md">{name}</a><br>'
            f'{html.escape(fix.title)}</th><td class="harm">{says}</td>'
            f'<td class="{plugin.split()[0]}">{plugin}</td>{cells}</tr>'
        )
    text = TEMPLATE.read_text()
    parts = {
        "@HEAD@": f"<tr>{''.join(head)}</tr>",
        "@ROWS@": "\n".join(rows),
        "@DATA@": json.dumps(data, separators=(",", ":")),
    }
    for mark, part in parts.items():
        assert text.count(mark) == 1, mark
        text = text.replace(mark, part)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(content()))
