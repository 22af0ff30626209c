# SPDX-License-Identifier: Apache-2.0
"""Copy fixes/_template.py to fixes/<id>.py and print the next steps; `make fix ID=<id>`."""

from __future__ import annotations

import argparse
import pathlib
import re
import shutil

REPOSITORY = pathlib.Path(__file__).parent.parent
FIXES = REPOSITORY / "sglang_bcg_fixes" / "fixes"
# the id in the steps of CONTRIBUTING.md
EXAMPLE = "stale_page_table"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("id", help=f"lower case with underscores, such as {EXAMPLE}")
    name = parser.parse_args().id
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        parser.error(f"'{name}' cannot be an id; use lower case letters, digits and underscores")
    target = FIXES / f"{name}.py"
    if target.exists():
        parser.error(f"{target} exists; choose another id")
    shutil.copy(FIXES / "_template.py", target)
    print(f"wrote {target.relative_to(REPOSITORY)}. Next:\n{next_steps(name)}")
    return 0


def next_steps(name: str) -> str:
    """The numbered steps of CONTRIBUTING.md, for this id."""
    section = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("\n## Add a fix\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^(?:\d+\. | {3}).+", section, re.MULTILINE)
    return "\n".join(steps).replace(EXAMPLE, name)


if __name__ == "__main__":
    raise SystemExit(main())
