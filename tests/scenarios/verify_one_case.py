# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes verify` with servers that need no GPU. Argument: what the interpreter has, as JSON."""

from __future__ import annotations

import json
import sys

from sglang_bcg_fixes.cli import main
from sglang_bcg_fixes.lab.verify import cases, command, environment
from tests.verify.test_command import CASE

if __name__ == "__main__":
    here = json.loads(sys.argv[1])
    environment.look = lambda python: here
    vars(cases)["CASES"] = (CASE,)
    command.make_models = lambda *_: None
    command.ENGINE = "tests.verify.fake_engine"
    sys.exit(main.main(["verify", "--quick", "--arms", "stock,patched", "--jobs", "3"]))
