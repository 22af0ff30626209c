// SPDX-License-Identifier: Apache-2.0
// What the kernels for Hopper share: its instructions, tiles in shared memory as wgmma reads them, and the rings in
// which a producer hands them to its consumers. Included by the headers of operations; program.py puts it in their
// place, because NVRTC compiles one text.
#ifndef BCG_HOPPER_CUH
#define BCG_HOPPER_CUH

namespace bcg {

using i64 = long long;
using u64 = unsigned long long;
using u32 = unsigned;
using u16 = unsigned short;

constexpr int kWarp = 32;
constexpr int kGroup = 128;

// tokens of a chunk, and numbers of a sequence in the tables
constexpr int kChunk = 64;
constexpr int kSequenceFields = 8;

// a tile has 64 rows of 128 bytes in the 128-byte swizzle of wgmma
constexpr int kRowBytes = 128;
constexpr int kPieces = kRowBytes / 16;
// rows that a warpgroup copies at once, and how often it does for a tile
constexpr int kRowsAtOnce = kGroup / kPieces;
constexpr int kRowSteps = kChunk / kRowsAtOnce;
constexpr int kTile = kChunk * kRowBytes;
constexpr int kEightRows = 8 * kRowBytes;

#ifdef __CUDACC__

// Hopper's instructions, named as PTX names them. Addresses are in shared memory.

extern __shared__ __align__(1024) unsigned char shared_bytes[];

__device__ __forceinline__ u32 shared_memory() { return static_cast<u32>(__cvta_generic_to_shared(shared_bytes)); }

template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

// copies 16 bytes, asynchronously
__device__ __forceinline__ void cp_async_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}

// the same, or writes zeros
__device__ __forceinline__ void cp_async_16_or_zeros(u32 to, const void* from, bool copies) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(copies ? 16 : 0)
                 : "memory");
}

// waits until all cp.async of this thread have landed
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// arrives once all earlier cp.async of this thread have landed
__device__ __forceinline__ void cp_async_mbarrier_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// orders writes of shared memory (cp.async, st.shared) before wgmma reads it through the async proxy
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ float shared_float(u32 from) {
    float found;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(found) : "r"(from) : "memory");
    return found;
}

__device__ __forceinline__ float2 shared_pair(u32 from) {
    float2 found;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(found.x), "=f"(found.y) : "r"(from) : "memory");
    return found;
}

__device__ __forceinline__ float4 shared_four(u32 from) {
    float4 found;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w)
                 : "r"(from)
                 : "memory");
    return found;
}

__device__ __forceinline__ int4 shared_piece(u32 from) {
    int4 found;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "r"(from)
                 : "memory");
    return found;
}

__device__ __forceinline__ void set_shared(u32 to, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

__device__ __forceinline__ void set_shared(u32 to, u16 value) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
}

__device__ __forceinline__ void set_shared(u32 to, int4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// asm, because the compiler splits what it cannot prove to be aligned into four stores
__device__ __forceinline__ void set_global(void* to, int4 value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

// the same, if it exists
__device__ __forceinline__ void set_global_if(bool exists, void* to, int4 value) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(int(exists)),
        "l"(__cvta_generic_to_global(to)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
        : "memory");
}

// stores four 8x8 matrices of halves from a wgmma accumulator; lanes 8n to 8n + 7 give the addresses of the n-th one's
// rows
__device__ __forceinline__ void stmatrix_x4(u32 to, u32 first, u32 second, u32 third, u32 fourth) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(first),
                 "r"(second), "r"(third), "r"(fourth)
                 : "memory");
}

// the same, transposed: the addresses are those of columns
__device__ __forceinline__ void stmatrix_x4_trans(u32 to, u32 first, u32 second, u32 third, u32 fourth) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(first),
                 "r"(second), "r"(third), "r"(fourth)
                 : "memory");
}

// loads four 8x8 matrices of halves as wgmma's and mma's operands have them; lanes as for stmatrix_x4
__device__ __forceinline__ void ldmatrix_x4(u32 (&found)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                 : "r"(from)
                 : "memory");
}

// the same, transposed
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&found)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                 : "r"(from)
                 : "memory");
}

// d [16, 8] = left [16, 16] right [16, 8] of a warp, in fp16
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&left)[4], u32 right, u32 right_below) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "r"(right_below), "f"(0.0f));
}

// packs two halves, the first one in the lower bits
template <bool kBf16>
__device__ __forceinline__ u32 halves(float first, float second) {
    u32 both;
    if constexpr (kBf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    }
    return both;
}

// volatile: rematerialises tid instead of keeping it, and what is computed from it, live across the loop
__device__ __forceinline__ int own_thread() {
    int found;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(found));
    return found;
}

// exp2 to 2 ulp; subnormals are flushed to zero
__device__ __forceinline__ float power_of_two(float exponent) {
    float found;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(exponent));
    return found;
}

__device__ __forceinline__ float one_over(float number) {
    float found;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(number));
    return found;
}

template <bool kBf16>
__device__ __forceinline__ float widened(u16 half) {
    float wide;
    if constexpr (kBf16) {
        wide = __uint_as_float(u32(half) << 16);
    } else {
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
    }
    return wide;
}

// orders register writes before the wgmma that reads or accumulates into them
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define BCG_16(d, i)                                                                                            \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]), "+f"(d[i + 12]),      \
        "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#define BCG_32_REGISTERS                                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BCG_64_REGISTERS                                                                                          \
    BCG_32_REGISTERS                                                                                              \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
    "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// what computes these values stays above this place, and what reads them below it
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
    for (int each = 0; each < kCount; ++each) asm volatile("" : "+f"(values[each]));
}
template <int kCount>
__device__ __forceinline__ void pin(u32 (&values)[kCount]) {
#pragma unroll
    for (int each = 0; each < kCount; ++each) asm volatile("" : "+r"(values[each]));
}

// waits until at most kLeft committed groups are in flight, and none of them accumulates into d
template <int kLeft, int... kSizes>
__device__ __forceinline__ void wgmma_wait(float (&... d)[kSizes]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
    (pin(d), ...);
}

// both operands in shared memory
#define BCG_WGMMA_SS(kind)                                                                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." kind "." kind \
                 " {" BCG_32_REGISTERS "}, %32, %33, p, 1, 1, %35, %36;\n}"                                            \
                 : BCG_16(d, 0), BCG_16(d, 16)                                                                         \
                 : "l"(left), "l"(right), "r"(adds), "n"(kTransposeLeft), "n"(kTransposeRight))

// left operand in registers
#define BCG_WGMMA_RS(kind)                                                                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." kind "." kind \
                 " {" BCG_32_REGISTERS "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"                                \
                 : BCG_16(d, 0), BCG_16(d, 16)                                                                         \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(adds),                      \
                   "n"(kTransposeRight))

// left operand in registers, right one transposed
#define BCG_WGMMA_RS_WIDE(kind)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." kind "." kind " {" BCG_64_REGISTERS \
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                        \
                 : BCG_16(d, 0), BCG_16(d, 16), BCG_16(d, 32), BCG_16(d, 48)                        \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))

// both operands in shared memory and transposed
#define BCG_WGMMA_SS_WIDE(kind)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." kind "." kind " {" BCG_64_REGISTERS \
                 "}, %64, %65, 1, 1, 1, 1, 1;"                                                      \
                 : BCG_16(d, 0), BCG_16(d, 16), BCG_16(d, 32), BCG_16(d, 48)                        \
                 : "l"(left), "l"(right))

// d [64, 64] (+)= left [64, 16] right [16, 64]: operands are K-major, or MN-major where transposed
template <bool kBf16, bool kTransposeLeft, bool kTransposeRight>
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], u64 left, u64 right, int adds) {
    if constexpr (kBf16) {
        BCG_WGMMA_SS("bf16");
    } else {
        BCG_WGMMA_SS("f16");
    }
}

template <bool kBf16, bool kTransposeRight>
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], const u32* left, u64 right, int adds) {
    if constexpr (kBf16) {
        BCG_WGMMA_RS("bf16");
    } else {
        BCG_WGMMA_RS("f16");
    }
}

template <bool kBf16>
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], u64 left, u64 right) {
    if constexpr (kBf16) {
        BCG_WGMMA_SS_WIDE("bf16");
    } else {
        BCG_WGMMA_SS_WIDE("f16");
    }
}

template <bool kBf16>
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], const u32* left, u64 right) {
    if constexpr (kBf16) {
        BCG_WGMMA_RS_WIDE("bf16");
    } else {
        BCG_WGMMA_RS_WIDE("f16");
    }
}

#endif

__device__ __forceinline__ int at_least(int one, int other) { return one > other ? one : other; }
__device__ __forceinline__ int at_most(int one, int other) { return one < other ? one : other; }
__device__ __forceinline__ int chunks_of(int tokens) { return (at_least(tokens, 0) + kChunk - 1) / kChunk; }

// Offset in a tile of a row's n-th 16 bytes, in the 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int piece) { return row * kRowBytes + ((piece ^ (row % 8)) * 16); }

// wgmma matrix descriptor of swizzled tiles: the stride is eight rows, the leading dimension the next tile (of operands
// wider than 64 halves). Moving along an operand adds to the address field.
__device__ __forceinline__ u64 descriptor(u32 address) {
    constexpr u64 kSwizzled128 = u64(1) << 62;
    return kSwizzled128 | u64(kEightRows / 16) << 32 | u64(kTile / 16) << 16 | u64(address / 16);
}
// address steps of 16 bytes: 16 halves along a row of one tile, and 16 rows down
constexpr u32 kAlongRow = 2;
constexpr u32 kSixteenRows = 2 * kEightRows / 16;
// a 32-bit addition: the address field never carries into the upper half
__device__ __forceinline__ u64 further(u64 descriptor, u32 steps) {
    return (descriptor >> 32 << 32) | u32(u32(descriptor) + steps);
}

// Stage of the ring, and the parity of its laps, which mbarrier_wait takes.
struct Pipeline {
    int stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// The outputs in the stages of a ring, each where the chunk's values were. They are the producer's to store before it
// reuses the stage, because a consumer without a second one beside it would have to wait. Two consumers hide each
// other's stores, and the producer has less time.
template <int kStages>
struct Outputs {
    int first_row[kStages];
    // the sequence's rows of a chunk, and the first column of an item behind them; 0 for a stage without an output
    u32 rows_and_column[kStages];

    __device__ __forceinline__ Outputs() {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) first_row[stage] = rows_and_column[stage] = 0;
    }

    __device__ __forceinline__ void add(int row, int rows, int column) {
#pragma unroll
        for (int stage = kStages - 1; stage > 0; --stage) {
            first_row[stage] = first_row[stage - 1];
            rows_and_column[stage] = rows_and_column[stage - 1];
        }
        first_row[0] = row;
        rows_and_column[0] = u32(column) * (2 * kChunk) + at_most(rows, kChunk);
    }

    // Store the output in the stage that is reused next: its consumer has left it.
    template <typename Job>
    __device__ __forceinline__ void store_oldest(const Job& job, u32 tile) const {
        const int thread = threadIdx.x % kGroup, piece = thread % kPieces, first = thread / kPieces;
        const int rows = rows_and_column[kStages - 1] % (2 * kChunk);
        const int column = rows_and_column[kStages - 1] / (2 * kChunk);
        const int row_size = job.row_size();
        u16* const to = job.output + i64(first_row[kStages - 1]) * row_size + column + piece * 8;
        int4 values[kRowSteps];
#pragma unroll
        for (int step = 0; step < kRowSteps; ++step) {
            values[step] = shared_piece(tile + swizzled(first + step * kRowsAtOnce, piece));
        }
#pragma unroll
        for (int step = 0; step < kRowSteps; ++step) {
            const int in_chunk = first + step * kRowsAtOnce;
            if (in_chunk < rows) set_global(to + i64(in_chunk) * row_size, values[step]);
        }
    }
};

// wgmma accumulator fragment of a thread, per eight columns: two adjacent columns of row n, then of row n + 8. Rounded
// to halves it is the next wgmma's left operand.
constexpr int kEights = kChunk / 8;

// Leave a chunk's output, transposed, in the tile that held its values. Each warp writes 32 bytes of every row.
__device__ __forceinline__ void leave_output(const u32 (&o)[16], u32 tile) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroup / kWarp;
#pragma unroll
    for (int eight = 0; eight < kEights; eight += 2) {
        const int token = 8 * (eight + lane / 16) + lane % 8;
        const u32* const four = &o[2 * eight];
        stmatrix_x4_trans(tile + swizzled(token, 2 * warp + lane / 8 % 2), four[0], four[1], four[2], four[3]);
    }
}

// Store an output that leave_output() has left. Each warp moves 32 bytes of every row on its own, so a __syncwarp is
// enough.
template <typename Job>
__device__ __forceinline__ void store_output(const Job& job, u32 tile, int first_row, int end, int column) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroup / kWarp;
    __syncwarp();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const int token = lane / 2 + 16 * step, piece = 2 * warp + lane % 2, row = first_row + token;
        const int4 values = shared_piece(tile + swizzled(token, piece));
        if (row < end) set_global(job.output + job.first_of_row(row) + column + piece * 8, values);
    }
}

// Hand a stage back to the producer: all lanes have read it, and left their output in it or stored it.
__device__ __forceinline__ void leave_stage(u32 empty) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) mbarrier_arrive(empty);
}

template <bool kBf16, int kCount>
__device__ __forceinline__ void round(u32 (&rounded)[kCount], const float (&exact)[2 * kCount]) {
#pragma unroll
    for (int pair = 0; pair < kCount; ++pair) rounded[pair] = halves<kBf16>(exact[2 * pair], exact[2 * pair + 1]);
}

// what rounding to halves has dropped, in halves
template <bool kBf16, int kCount>
__device__ __forceinline__ void round_rest(u32 (&rest)[kCount], const float (&exact)[2 * kCount],
                                           const u32 (&rounded)[kCount]) {
#pragma unroll
    for (int pair = 0; pair < kCount; ++pair) {
        rest[pair] = halves<kBf16>(exact[2 * pair] - widened<kBf16>(u16(rounded[pair])),
                                   exact[2 * pair + 1] - widened<kBf16>(u16(rounded[pair] >> 16)));
    }
}

}  // namespace bcg

#endif
