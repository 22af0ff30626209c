# SPDX-License-Identifier: Apache-2.0
"""Cycles of the matrix products that gdn_extend is made of, on a Hopper GPU; some seconds.

    python benchmarks/wgmma_rate.py --json wgmma_rate.json

By shape, by where the left operand comes from, and with one or two warpgroups on a multiprocessor. A kernel issues 8 or
32 products and waits for all; the difference is free of the drain. BESIDE: what 128 independent multiplications of each
thread add to 32 products, behind them or where ptxas puts them, which is between the first few: nothing, if a warp
computes while its products are in flight.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import struct
import sys
from typing import Any

from sglang_bcg_fixes.kernels.cuda import driver, nvrtc, program
from sglang_bcg_fixes.kernels.gdn_extend.program import PROGRAM
from sglang_bcg_fixes.lab.verify import environment

ROUNDS, FEW, MANY = 64, 8, 32
# name, its number in the source, the columns of a product
PRODUCTS = (
    ("registers 64x64", 0, 64),
    ("registers 64x64, one descriptor", 1, 64),
    ("shared 64x64", 2, 64),
    ("registers 64x128", 3, 128),
    ("registers 64x128, right transposed", 4, 128),
    ("shared 64x128", 5, 128),
)
NOTHING, BEHIND, AMONG = 0, 1, 2
BESIDE = {"multiplications behind the products": BEHIND, "multiplications among the products": AMONG}
SHARED_BYTES = 65536
SOURCE = r"""
namespace bcg {
struct Rate { long long* cycles; float* sink; };

#define BCG_RATE_WIDE(operands, ...)                                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" BCG_64_REGISTERS     \
                 "}, " operands ";"                                                             \
                 : BCG_16(d, 0), BCG_16(d, 16), BCG_16(d, 32), BCG_16(d, 48)                    \
                 : __VA_ARGS__)

__device__ __forceinline__ void multiply(float (&others)[32], int begin, int end) {
#pragma unroll
    for (int each = begin; each < end; ++each) asm volatile("mul.f32 %0, %0, %0;" : "+f"(others[each % 32]));
}

template <int kProduct, int kSteps, int kBeside>
__device__ __forceinline__ void rate(const Rate& job) {
    constexpr int kOthers = 128;
    const u32 memory = shared_memory();
    for (int at = threadIdx.x; at < 4096; at += blockDim.x) set_shared(memory + 16 * at, make_int4(0, 0, 0, 0));
    fence_proxy_async();
    __syncthreads();
    float d[64], others[32];
    u32 left[32];
#pragma unroll
    for (int each = 0; each < 64; ++each) d[each] = 0;
#pragma unroll
    for (int each = 0; each < 32; ++each) {
        left[each] = own_thread() > 9999 ? each : 0;
        others[each] = own_thread();
    }
    const u64 all = descriptor(memory);
    float(&half)[32] = *reinterpret_cast<float(*)[32]>(d);
    const long long before = clock64();
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
        wgmma_fence();
#pragma unroll
        for (int number = 0; number < kSteps; ++number) {
            const int step = number % 8;
            const u64 right = further(all, kProduct == 1 ? 0 : step / 4 * (kTile / 16) + step % 4 * kAlongRow);
            const u64 shared = further(all, 4 * kTile / 16 + step % 4 * kAlongRow);
            const u32* const own = &left[4 * step];
            if constexpr (kProduct < 2) wgmma_m64n64k16<true, false>(half, own, right, 1);
            if constexpr (kProduct == 2) wgmma_m64n64k16<true, false, false>(half, shared, right, 1);
            if constexpr (kProduct == 3) {
                BCG_RATE_WIDE("{%64, %65, %66, %67}, %68, 1, 1, 1, 0", "r"(own[0]), "r"(own[1]), "r"(own[2]),
                              "r"(own[3]), "l"(right));
            }
            if constexpr (kProduct == 4) wgmma_m64n128k16<true>(d, own, further(all, step % 4 * kSixteenRows));
            if constexpr (kProduct == 5) BCG_RATE_WIDE("%64, %65, 1, 1, 1, 0, 0", "l"(shared), "l"(right));
            if constexpr (kBeside == 2) {
                multiply(others, number * kOthers / kSteps, (number + 1) * kOthers / kSteps);
            }
        }
        wgmma_commit();
        // always true, but ptxas moves nothing over a branch
        if (kBeside == 1 && job.sink) multiply(others, 0, kOthers);
        wgmma_wait<0>();
    }
    const long long after = clock64();
    if (threadIdx.x % kGroup == 0) job.cycles[blockIdx.x * 2 + threadIdx.x / kGroup] = after - before;
    float sum = 0;
#pragma unroll
    for (int each = 0; each < 64; ++each) sum += d[each] + others[each % 32];
    if (sum == 0.5f) job.sink[threadIdx.x] = sum;
}
}  // namespace bcg
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    product: int
    steps: int
    beside: int = NOTHING

    @property
    def name(self) -> str:
        return f"rate_{self.product}_{self.steps}_{self.beside}"

    @property
    def text(self) -> str:
        arguments = f"{self.product}, {self.steps}, {self.beside}"
        return (
            f'extern "C" __global__ void __launch_bounds__(256, 1) {self.name}(const __grid_constant__ bcg::Rate job) '
            f"{{ bcg::rate<{arguments}>(job); }}\n"
        )


def kernels() -> list[Kernel]:
    found = [Kernel(product, steps) for _, product, _ in PRODUCTS for steps in (FEW, MANY)]
    return found + [Kernel(product, MANY, beside) for _, product, _ in PRODUCTS[::2] for beside in BESIDE.values()]


def source() -> bytes:
    text = SOURCE.replace("ROUNDS", str(ROUNDS)) + "".join(kernel.text for kernel in kernels())
    return PROGRAM.source() + text.encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("wgmma_rate.json"))
    options = parser.parse_args()
    import torch

    cycles, sink = torch.zeros(2, 2**10, dtype=torch.int64, device="cuda"), torch.zeros(2**10, device="cuda")
    major = int(str(torch.version.cuda).split(".")[0])
    compiler_options = [f"--gpu-architecture={program.architecture((9, 0))}", *nvrtc.OPTIONS]
    cubin, log = nvrtc.compiler(major).cubin(source(), "wgmma_rate.cuh", compiler_options)
    slow = nvrtc.slow_code(log)
    functions = driver.load(cubin, tuple(kernel.name for kernel in kernels()))
    blocks = torch.cuda.get_device_properties().multi_processor_count

    def measured(kernel: Kernel, groups: int) -> float:
        """Cycles of a round, the mean of all multiprocessors."""
        threads, layout = 128 * groups, struct.Struct("2Q")
        launch = driver.launcher(
            functions[kernel.name], threads, layout, lambda: torch.cuda.current_stream().cuda_stream, SHARED_BYTES
        )
        for _ in range(3):
            launch(blocks, cycles.data_ptr(), sink.data_ptr())
        torch.cuda.synchronize()
        return float(cycles.view(-1, 2)[:blocks, :groups].double().mean()) / ROUNDS

    rows: list[dict[str, Any]] = []
    for name, product, columns in PRODUCTS:
        for groups in (1, 2):
            few, many = (measured(Kernel(product, steps), groups) for steps in (FEW, MANY))
            each = (many - few) / (MANY - FEW)
            row: dict[str, Any] = {"product": name, "warpgroups": groups, "cycles": round(each, 1)}
            row |= {"of 8 and the wait": round(few, 1), "of the tensor cores": round(columns / 2 * groups / each, 2)}
            for beside, kind in BESIDE.items() if Kernel(product, MANY, BEHIND) in kernels() else ():
                row[beside] = round(measured(Kernel(product, MANY, kind), groups) - many, 1)
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    content = {**environment.header(environment.here()), "slow code": slow, "rows": rows}
    options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
