# SPDX-License-Identifier: Apache-2.0
from benchmarks.bench.command import main

if __name__ == "__main__":
    raise SystemExit(main())
