# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what needs a GPU, as a release finds them."""

from __future__ import annotations

import pathlib

import pytest

from tests import processes, wheels
from tests.wheels import NEWEST

ASKED = processes.code("""
    import importlib
    from cpu_sglang import one_batch, stand_ins
    one_batch.import_sglang()
    kernels = importlib.import_module("sglang.kernels.ops.kvcache.set_mla_kv_buffer")
    print("RESULT", int(kernels.can_use_set_mla_kv_buffer(128, 32)))
""")


# the first one whose kernels are built by a module of their own
@pytest.mark.parametrize("release", ["0.5.18", "0.5.21", NEWEST])
def test_no_compiler_is_started_for_a_cuda_kernel(release: str, tmp_path: pathlib.Path) -> None:
    done = processes.on_cpu(wheels.unpacked(release), "-c", ASKED, environment={"HOME": str(tmp_path)})
    assert processes.result(done) == 0
    assert "exists only in a CUDA build" in done.stdout + done.stderr
