"""Print what the probe of a fix or kernel answers on unpacked releases, with the forms of the definitions it read.

    python tools/known_forms.py linear_attention_captured FOLDER_OF_UNPACKED_RELEASES...

The last lines are ready to be pasted into the file as `known`, once every form in them has been read.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pathlib

from sglang_bcg_fixes.model import Fix, Kernel
from sglang_bcg_fixes.probe import Folder, Source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("id", help="of the fix, or the operation of the kernel")
    parser.add_argument("roots", nargs="+", type=pathlib.Path, help="folders that each contain sglang/, oldest first")
    options = parser.parse_args()
    found = declared(options.id)
    seen: dict[str, list[str]] = {}
    for root in options.roots:
        finding = found.probe(Source(Folder(root)))
        print(f"{root.name:14} {finding.verdict.value:9} {finding.reason}")
        for item in finding.evidence:
            print(f"{'':14} {item}")
            seen.setdefault(f"{item.form} {item.where.partition(':')[2]}", []).append(root.name)
    for form, releases in seen.items():
        digest, _, name = form.partition(" ")
        print(f'        "{digest}": "{name}, {releases[0]} to {releases[-1]}",')


def declared(name: str) -> Fix | Kernel:
    """Loaded by its name alone: one that is being written may not be ready to be discovered."""
    for kind, module in (("FIX", f"fixes.{name}"), ("KERNEL", f"kernels.{name}.kernel")):
        if exists(f"sglang_bcg_fixes.{module}"):
            found: Fix | Kernel = getattr(importlib.import_module(f"sglang_bcg_fixes.{module}"), kind)
            return found
    raise SystemExit(f"there is no sglang_bcg_fixes/fixes/{name}.py and no sglang_bcg_fixes/kernels/{name}/kernel.py")


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    main()
