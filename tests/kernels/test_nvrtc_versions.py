# SPDX-License-Identifier: Apache-2.0
"""Every NVRTC that a user may have writes fast machine code from our sources, or its code is refused."""

from __future__ import annotations

import pathlib
import re

import pytest

from sglang_bcg_fixes.kernels.cuda import nvrtc, program
from sglang_bcg_fixes.kernels.fa_metadata.program import PROGRAM as FA_METADATA
from sglang_bcg_fixes.kernels.gdn_extend.program import PROGRAM as GDN_EXTEND
from sglang_bcg_fixes.kernels.mamba2_extend.program import PROGRAM as MAMBA2_EXTEND
from tests import compilers
from tests.kernels import headers

HOPPER, BLACKWELL = (9, 0), (10, 0)
PAIRS = [
    (GDN_EXTEND, HOPPER),
    (MAMBA2_EXTEND, HOPPER),
    *((FA_METADATA, capability) for capability in ((8, 0), (8, 9), HOPPER, BLACKWELL, (12, 0))),
]
# two registers of a kernel for drafts, which Triton's implementation then does without
SPILLS = {("12.8.93", BLACKWELL), ("12.9.86", BLACKWELL)}
# each takes seconds, and one of those with such products is enough to be refused
ENTRY = re.compile(r'^extern "C" __global__ [^;{]*?(\w+)\(const __grid_constant__ .*?^}$', re.DOTALL | re.MULTILINE)
WITH_PRODUCTS = "bcg_gdn_prepare_f16"


# those in between compile the large sources under --everything only: these take a quarter of a minute each
ENDS = (compilers.VERSIONS[0], compilers.VERSIONS[-1])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    versions = compilers.VERSIONS if metafunc.config.getoption("--everything") else ENDS
    if "capability" not in metafunc.fixturenames:
        metafunc.parametrize("version", versions)
        return
    builds = [
        (version, source, capability)
        for version in compilers.VERSIONS
        for source, capability in PAIRS
        if version in versions or source is FA_METADATA
    ]
    metafunc.parametrize(
        ("version", "source", "capability"), builds, ids=lambda value: getattr(value, "header", str(value))
    )


def test_it_is_fast_or_refused(version: str, source: program.Program, capability: program.Capability) -> None:
    compiler, target = compilers.compiler(version), program.architecture(capability)
    assert version.startswith(nvrtc.dotted(compiler.version))
    if capability[0] * 10 + capability[1] not in compiler.architectures():
        # Blackwell came with 12.8; what is then said is tested beside program.machine_code
        assert version == "12.6.85" and capability >= BLACKWELL
        return
    _, log = compiler.cubin(source.source(), source.header, [*program.options(target), "--ptxas-options=-v"])
    spilled = {kernel for kernel, found in headers.resources(log).items() if found != headers.NOTHING_SPILLED}
    assert sorted(headers.resources(log)) == sorted(source.kernels)
    assert spilled == ({"bcg_verify_expand"} if (version, capability) in SPILLS else set())
    assert bool(nvrtc.slow_code(log)) == bool(spilled)


def test_products_that_wait_for_one_another_are_refused(version: str, tmp_path: pathlib.Path) -> None:
    wait = 'asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");'
    never = headers.mutant(GDN_EXTEND.file, wait, "", tmp_path)
    entries = [found[1] for found in ENTRY.finditer(never.read_text())]
    assert sorted(entries) == sorted(GDN_EXTEND.kernels)
    text = ENTRY.sub(lambda found: found[0] if found[1] == WITH_PRODUCTS else "", never.read_text())
    compiler = compilers.compiler(version)
    _, log = compiler.cubin(text.encode(), "mutant.cuh", program.options(program.architecture(HOPPER)))
    assert nvrtc.slow_code(log), log
