# SPDX-License-Identifier: Apache-2.0
from sglang_bcg_fixes.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
