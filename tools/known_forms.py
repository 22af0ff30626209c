"""Print what a fix's probe answers on unpacked releases, with the forms of the definitions it read.

    python tools/known_forms.py linear_attention_captured FOLDER_OF_UNPACKED_RELEASES...

The last lines are ready to be pasted into the fix as `known`, once every form in them has been read.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib

from sglang_bcg_fixes.model import Fix
from sglang_bcg_fixes.probe import Folder, Source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fix", help="id of the fix")
    parser.add_argument("roots", nargs="+", type=pathlib.Path, help="folders that each contain sglang/, oldest first")
    options = parser.parse_args()
    fix: Fix = importlib.import_module(f"sglang_bcg_fixes.fixes.{options.fix}").FIX
    seen: dict[str, list[str]] = {}
    for root in options.roots:
        finding = fix.probe(Source(Folder(root)))
        print(f"{root.name:14} {finding.verdict.value:9} {finding.reason}")
        for item in finding.evidence:
            print(f"{'':14} {item}")
            seen.setdefault(f"{item.form} {item.where.partition(':')[2]}", []).append(root.name)
    for form, releases in seen.items():
        digest, _, name = form.partition(" ")
        print(f'        "{digest}": "{name}, {releases[0]} to {releases[-1]}",')


if __name__ == "__main__":
    main()
