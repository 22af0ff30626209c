"""Start a fix: copy fixes/_template.py to fixes/<id>.py and set its id; `make fix ID=<id>`."""

from __future__ import annotations

import argparse
import pathlib
import re

FIXES = pathlib.Path(__file__).parent.parent / "sglang_bcg_fixes" / "fixes"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("id", help="lower case with underscores, such as stale_page_table")
    name = parser.parse_args().id
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        parser.error(f"'{name}' cannot be an id; use lower case letters, digits and underscores")
    target = FIXES / f"{name}.py"
    if target.exists():
        parser.error(f"{target} exists; choose another id")
    template = (FIXES / "_template.py").read_text()
    target.write_text(template.replace('id="_template"', f'id="{name}"'))
    print(f"wrote {target.relative_to(FIXES.parent.parent)}; its docstring says what to do next")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
