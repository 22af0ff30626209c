# SPDX-License-Identifier: Apache-2.0
"""A process that keeps machine code in a folder and reads it back, while others do the same.

Arguments: the folder, and the letter that its own code is made of. It prints how often it read another's.
"""

from __future__ import annotations

import pathlib
import sys
import time

from sglang_bcg_fixes.kernels.cuda import cubins


def main(folder: pathlib.Path, letter: bytes) -> None:
    end, read = time.monotonic() + 1.5, 0
    while time.monotonic() < end:
        cubins.keep(folder, "name", letter * 300_000)
        found = cubins.read(folder, "name")
        assert found is not None and len(set(found)) == 1 and len(found) == 300_000
        read += found[:1] != letter
    print(read)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2].encode())
