# SPDX-License-Identifier: Apache-2.0
"""`cpu_sglang.one_batch` in a process that may find SGLang imported. Arguments: its own."""

from __future__ import annotations

from cpu_sglang import one_batch

if __name__ == "__main__":
    one_batch.import_sglang()
    one_batch.main()
