// SPDX-License-Identifier: Apache-2.0
// Hopper's instructions on the host, as gdn_extend.cuh names them: mbarriers, asynchronous copies, dynamic shared
// memory, and wgmma groups that have to be waited for.
//
// Data in flight is NaN: a tile from the start of its copy to its end, an accumulator until somebody has waited for it.
// A seed decides whether a product is computed when it is issued or when it is waited for, so both writing its operands
// too late and overwriting them too early is found. Operands are laid out as in the PTX manual, in the 128-byte
// swizzle; the swizzle depends on address bits, so an address inside eight rows works as it does there.
//
// Where threads meet by __syncthreads and __syncwarp alone, what two of them touch in between is a race if one writes.
//
// wgmma reads shared memory through the async proxy. What was written there, by st.shared or cp.async, has to be fenced
// before: by the thread that wrote it, by the one that issues the product, or by one that has arrived at an mbarrier in
// between; else a GPU may multiply what was there.
//
// What is done at each instruction is in hopper_on_host.cpp; see device_on_host.hpp.
#pragma once

#include <cmath>

#include "device_on_host.hpp"

namespace host {

constexpr unsigned kMostSharedBytes = 227 << 10;
alignas(1024) inline unsigned char shared[kMostSharedBytes];
// zero is no address
constexpr unsigned kFirstAddress = 1024;

inline unsigned char* in_shared(unsigned address, unsigned size) {
    if (address < kFirstAddress || address + size > kFirstAddress + kMostSharedBytes) stop("outside of shared memory");
    if (address % size) stop("a misaligned address in shared memory");
    return shared + (address - kFirstAddress);
}

// What touches shared memory: a thread, a warp as one, a product, or a copy under way.
enum class By { kThread, kWarp, kProduct, kCopy };
// Stops if another thread touches the same without a barrier in between, and one of them writes.
void touch(unsigned address, unsigned size, bool writes, By by);

void write(unsigned address, const void* values, unsigned size, unsigned thread);

template <typename T>
void write(unsigned address, const T& value, By by = By::kThread) {
    touch(address, sizeof(T), true, by);
    write(address, &value, sizeof(T), threadIdx.x);
}

template <typename T>
T read(unsigned address) {
    touch(address, sizeof(T), false, By::kThread);
    T found;
    std::memcpy(&found, in_shared(address, sizeof(T)), sizeof(T));
    return found;
}

// The 16 bytes that ldmatrix reads from an address.
inline const unsigned char* row_of_matrix(unsigned address) {
    touch(address, 16, false, By::kWarp);
    return in_shared(address, 16);
}

// What lanes of a warp hand each other.
struct Handed {
    unsigned registers[4];
    unsigned address;
};
// Waits for the warp; returns what each of its lanes has handed over.
const Handed* hand_over(const Handed& own, const char* purpose);

template <typename To, typename From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To found;
    std::memcpy(&found, &from, sizeof(To));
    return found;
}

template <bool kBf16>
float as_float(uint16_t half) {
    if (kBf16) return same_bits<float>(uint32_t(half) << 16);
    // by hand: g++ calls a function for each _Float16, unless it may use instructions that not every processor has
    const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = uint32_t(half & 0x7fff) << 13;
    const bool is_finite = rest < 0x7c00u << 13, is_quiet = rest > 0x7c00u << 13;
    const uint32_t scaled = same_bits<uint32_t>(same_bits<float>(rest) * 0x1p112f);
    return same_bits<float>(sign | (is_finite ? scaled : rest | 0x7f800000 | uint32_t(is_quiet) << 22));
}

template <bool kBf16>
uint16_t as_half(float exact) {
    if (kBf16) {
        const uint32_t bits = same_bits<uint32_t>(exact);
        if (std::isnan(exact)) return 0x7fff;
        return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    return same_bits<uint16_t>(static_cast<_Float16>(exact));
}

struct Operand {
    uint64_t bits;
    bool is_transposed;
};

// d [64, columns] (+)= left [64, 16] right [16, columns], of which this thread has two rows; issued, not waited for.
void multiply(bool is_bf16, float* d, int columns, Operand left, Operand right, bool adds);
// The left operand is in registers, of all lanes of this warp: its sixteen rows.
void multiply(bool is_bf16, float* d, int columns, const unsigned* left, Operand right, bool adds);

void close_products();
void wait_for_products(unsigned left);
bool is_in_flight(const float* registers);

}  // namespace host

namespace bcg {

inline unsigned shared_memory() { return host::kFirstAddress; }

template <int>
void setmaxnreg_inc() {}

template <int>
void setmaxnreg_dec() {}

void mbarrier_init(unsigned barrier, int arrivals);
inline void fence_mbarrier_init() {}
void mbarrier_arrive(unsigned barrier);
void mbarrier_wait(unsigned barrier, unsigned parity);

void cp_async_16(unsigned to, const void* from);
void cp_async_16_or_zeros(unsigned to, const void* from, bool copies);
void cp_async_wait_all();
void cp_async_mbarrier_arrive(unsigned barrier);

void fence_proxy_async();

inline float shared_float(unsigned from) { return host::read<float>(from); }
inline float2 shared_pair(unsigned from) { return host::read<float2>(from); }
inline int4 shared_piece(unsigned from) { return host::read<int4>(from); }

inline void set_shared(unsigned to, float value) { host::write(to, value); }
inline void set_shared(unsigned to, uint16_t value) { host::write(to, value); }
inline void set_shared(unsigned to, int4 value) { host::write(to, value); }
inline void set_global(void* to, int4 value) {
    if (reinterpret_cast<uintptr_t>(to) % 16) host::stop("a misaligned store");
    std::memcpy(to, &value, 16);
}
inline void set_global_if(bool exists, void* to, int4 value) {
    if (exists) set_global(to, value);
}
inline float4 shared_four(unsigned from) { return host::read<float4>(from); }
inline uint16_t shared_half(unsigned from) { return host::read<uint16_t>(from); }

inline int own_thread() { return threadIdx.x; }

inline float power_of_two(float exponent) { return std::exp2(exponent); }
inline float one_over(float number) { return 1 / number; }

template <bool kBf16>
float widened(uint16_t half) {
    return host::as_float<kBf16>(half);
}

inline void stmatrix_x4(unsigned to, unsigned first, unsigned second, unsigned third, unsigned fourth) {
    const host::Handed* all = host::hand_over({{first, second, third, fourth}, to}, "stmatrix");
    const int lane = threadIdx.x % host::kWarp, row = lane % 8;
    unsigned straight[4];
    for (int pair = 0; pair < 4; ++pair) straight[pair] = all[4 * row + pair].registers[lane / 8];
    host::write(to, straight, host::By::kWarp);
}

inline void stmatrix_x4_trans(unsigned to, unsigned first, unsigned second, unsigned third, unsigned fourth) {
    const host::Handed* all = host::hand_over({{first, second, third, fourth}, to}, "stmatrix");
    const int lane = threadIdx.x % host::kWarp, column = lane % 8;
    uint16_t turned[8];
    for (int row = 0; row < 8; ++row) {
        turned[row] = all[4 * row + column / 2].registers[lane / 8] >> 16 * (column % 2) & 0xffff;
    }
    host::write(to, turned, host::By::kWarp);
}

inline void ldmatrix_x4(unsigned (&found)[4], unsigned from) {
    const host::Handed* all = host::hand_over({{}, from}, "ldmatrix");
    const int lane = threadIdx.x % host::kWarp;
    for (int matrix = 0; matrix < 4; ++matrix) {
        std::memcpy(&found[matrix], host::row_of_matrix(all[8 * matrix + lane / 4].address) + 4 * (lane % 4), 4);
    }
}

inline void ldmatrix_x4_trans(unsigned (&found)[4], unsigned from) {
    const host::Handed* all = host::hand_over({{}, from}, "ldmatrix");
    const int lane = threadIdx.x % host::kWarp;
    for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t pair[2];
        for (int each = 0; each < 2; ++each) {
            const unsigned row = all[8 * matrix + 2 * (lane % 4) + each].address;
            std::memcpy(&pair[each], host::row_of_matrix(row) + 2 * (lane / 4), 2);
        }
        std::memcpy(&found[matrix], pair, 4);
    }
}

inline void mma_m16n8k16(float (&d)[4], const unsigned (&left)[4], unsigned right, unsigned right_below) {
    const int lane = threadIdx.x % host::kWarp;
    const auto half = [](unsigned both, int k) { return host::as_float<false>(both >> 16 * (k % 2) & 0xffff); };
    float lefts[2][16], rights[16][2];
    const host::Handed* all = host::hand_over({{left[0], left[1], left[2], left[3]}, 0}, "mma");
    for (int row = 0; row < 2; ++row) {
        for (int k = 0; k < 16; ++k) {
            lefts[row][k] = half(all[lane / 4 * 4 + k % 8 / 2].registers[row + 2 * (k / 8)], k);
        }
    }
    all = host::hand_over({{right, right_below}, 0}, "mma");
    for (int column = 0; column < 2; ++column) {
        for (int k = 0; k < 16; ++k) {
            rights[k][column] = half(all[(2 * (lane % 4) + column) * 4 + k % 8 / 2].registers[k / 8], k);
        }
    }
    for (int each = 0; each < 4; ++each) {
        d[each] = 0;
        for (int k = 0; k < 16; ++k) d[each] += lefts[each / 2][k] * rights[k][each % 2];
    }
}

template <bool kBf16>
unsigned halves(float first, float second) {
    return host::as_half<kBf16>(first) | unsigned(host::as_half<kBf16>(second)) << 16;
}

inline void wgmma_fence() { host::meet_warp("wgmma.fence"); }

inline void wgmma_commit() { host::close_products(); }

template <int kCount, typename T>
void pin(T (&)[kCount]) {}

template <int kLeft, int... kSizes>
void wgmma_wait(float (&... d)[kSizes]) {
    host::wait_for_products(kLeft);
    if ((host::is_in_flight(d) + ... + 0)) host::stop("an accumulator is still in flight");
    // a warp waits as one
    host::meet_warp("wgmma.wait_group");
}

template <bool kBf16, bool kTransposeLeft, bool kTransposeRight>
void wgmma_m64n64k16(float (&d)[32], uint64_t left, uint64_t right, int adds) {
    host::multiply(kBf16, d, 64, host::Operand{left, kTransposeLeft}, {right, kTransposeRight}, adds);
}

template <bool kBf16, bool kTransposeRight>
void wgmma_m64n64k16(float (&d)[32], const unsigned* left, uint64_t right, int adds) {
    host::multiply(kBf16, d, 64, left, {right, kTransposeRight}, adds);
}

template <bool kBf16>
void wgmma_m64n128k16(float (&d)[64], uint64_t left, uint64_t right) {
    host::multiply(kBf16, d, 128, host::Operand{left, true}, {right, true}, true);
}

template <bool kBf16>
void wgmma_m64n128k16(float (&d)[64], const unsigned* left, uint64_t right) {
    host::multiply(kBf16, d, 128, left, {right, true}, true);
}

}  // namespace bcg
