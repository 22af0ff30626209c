# SPDX-License-Identifier: Apache-2.0
"""Send one of docs/upstream to SGLang as an issue, with GitHub's gh.

python tools/report.py NAME            # make report ID=NAME
python tools/report.py NAME --print    # the issue's text, and nothing is sent
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess

UPSTREAM = pathlib.Path(__file__).parent.parent / "docs" / "upstream"
SGLANG = "sgl-project/sglang"
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
# a line that goes on with the paragraph or the item before it
GOES_ON = re.compile(r"(?<=\S)\n *(?=\S)(?!- |#|\|)")
THREAD = re.compile(r"#(\d+)\b")


def names() -> list[str]:
    return sorted(file.stem for file in UPSTREAM.glob("*.md") if file.name != "README.md")


def read(name: str) -> tuple[str, str]:
    """The title of a report, and its text."""
    title, text = (UPSTREAM / f"{name}.md").read_text().split("\n\n", 1)
    return title.removeprefix("# "), text


def threads(text: str) -> list[str]:
    """Numbers of SGLang's issues and pull requests in the first paragraph: SGLang knows of it."""
    return THREAD.findall(text.split("\n\n", 1)[0])


def unwrapped(text: str) -> str:
    """The text as GitHub wants it in an issue, where the end of a line ends a line."""
    parts = CODE.split(text)
    return "".join(part if number % 2 else GOES_ON.sub(" ", part) for number, part in enumerate(parts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=names(), metavar="NAME", help="one of those that docs/upstream/README.md lists")
    parser.add_argument("--print", action="store_true", help="show the text and send nothing")
    options = parser.parse_args()
    title, text = read(options.name)
    body = unwrapped(text)
    if options.print:
        print(f"{title}\n\n{body}", end="")
        return 0
    command = ["gh", "issue", "create", "--repo", SGLANG, "--title", title, "--body-file", "-"]
    try:
        return subprocess.run(command, input=body, text=True).returncode
    except FileNotFoundError:
        raise SystemExit("gh is not installed: https://cli.github.com; --print shows the text to paste") from None


if __name__ == "__main__":
    raise SystemExit(main())
