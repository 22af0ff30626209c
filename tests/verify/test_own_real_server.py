# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes verify -- COMMAND` with a real server on the CPU."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable

from cpu_sglang import ranks
from tests import processes
from tests.wheels import NEWEST

REAL_SERVER = (
    *("-m", "tests.verify.cpu_graph_server", "--load-format=dummy", "--skip-tokenizer-init", "--random-seed=0"),
    *("--context-length=128", "--max-total-tokens=512", "--max-running-requests=4", "--max-mamba-cache-size=8"),
    *("--device=cpu", "--attention-backend=torch_native", "--sampling-backend=pytorch", "--dtype=float32"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--disable-radix-cache", "--skip-server-warmup"),
)


def test_a_real_server_is_wrong_in_stock_and_right_with_the_fixes(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """Falcon-H1 through HTTP, scheduler and replays of SGLang's own code; the plugin is all that differs."""
    asked, found = tmp_path / "prompts.jsonl", tmp_path / "found.json"
    asked.write_text('{"input_ids": [3, 4, 5, 6, 7]}\n')
    words = ["--prompts", str(asked), "--max-new-tokens", "3", "--folder", str(tmp_path / "runs"), "--json", str(found)]
    model = processes.REPOSITORY / "cpu_sglang" / "models" / "falcon_h1"
    done = processes.python(
        *("-m", "sglang_bcg_fixes", "verify", *words, "--", sys.executable, *REAL_SERVER),
        *(f"--model-path={model}", f"--port={ranks.free_port()}"),
        paths=[release_root(NEWEST)],
        environment=processes.ON_CPU | processes.WITHOUT_KERNELS,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with the fixes no request differs from the server without replays; in stock 3 differ" in done.stdout
    arms = json.loads(found.read_text())["arms"]
    assert [arms[name]["counts"]["different"] for name in ("stock", "fixes", "stock-again")] == [3, 0, 3]
    assert "ssm_mixer_captured" in arms["fixes"]["applied"] and arms["fixes"]["replays"] > 0 == arms["eager"]["replays"]
