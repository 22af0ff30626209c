// SPDX-License-Identifier: Apache-2.0
// Enough of CUDA to run a kernel's source on the host: every thread of a block is a fiber of its own, and blocks run
// one after the other. What a GPU may do in any order is done in an order drawn from a seed. A barrier or a warp
// operation that not every thread of the block or warp reaches ends the run with a message; on a GPU it hangs or is
// undefined.
//
// Modelled: barriers of a block, shuffles and ballots of whole warps, static shared memory. Not modelled: the order in
// which memory accesses of different threads become visible, atomics. What Hopper has beyond that is in
// hopper_on_host.hpp.
//
// What runs the threads is in device_on_host.cpp, which is compiled once and not with every kernel: optimised, as most
// of the time is spent there, and unchecked.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__ inline
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct Dim {
    unsigned x = 1, y = 1, z = 1;
};
inline Dim threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

template <typename T>
T __ldg(const T* place) {
    return *place;
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

namespace host {

constexpr int kWarp = 32;

// Ends the run with this message; the thread never goes on.
void stop(const char* problem);

// Waits for the other threads of the block or the warp; returns the round of the warp that has just ended.
void meet_block(const char* purpose);
long meet_warp(const char* purpose);

// As meet_warp, with a value for the other lanes.
long exchange(uint64_t value, const char* purpose);
uint64_t exchanged(long round, int lane);

// Runs a kernel on its parameters. Returns a message about what went wrong, or null.
const char* run(void (*kernel)(const void*), const void* parameters, unsigned blocks, unsigned threads, unsigned seed);

constexpr int kMostThreads = 1024;
// How often a thread has met its block and its warp by what also orders memory.
struct Met {
    long block, warp;
};
inline Met met[kMostThreads];

inline void check_mask(unsigned mask) {
    if (mask != 0xffffffffu) stop("a warp operation without all lanes is not modelled");
}

template <typename T>
T shuffle(T value, int source, const char* purpose) {
    static_assert(sizeof(T) <= 8, "");
    if (source < 0 || source >= kWarp) stop("a shuffle from a lane that no warp has");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = exchanged(exchange(bits, purpose), source);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

}  // namespace host

inline void __syncwarp() {
    host::meet_warp("__syncwarp");
    ++host::met[threadIdx.x].warp;
}

inline void __syncthreads() {
    host::meet_block("__syncthreads");
    ++host::met[threadIdx.x].block;
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
    host::check_mask(mask);
    const int lane = threadIdx.x % host::kWarp;
    return host::shuffle(value, lane >= distance ? lane - distance : lane, "__shfl_up_sync");
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
    host::check_mask(mask);
    return host::shuffle(value, source % host::kWarp, "__shfl_sync");
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    host::check_mask(mask);
    return host::shuffle(value, threadIdx.x % host::kWarp ^ distance, "__shfl_xor_sync");
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
    host::check_mask(mask);
    const long round = host::exchange(vote, "__ballot_sync");
    unsigned votes = 0;
    for (int lane = 0; lane < host::kWarp; ++lane) votes |= unsigned(host::exchanged(round, lane)) << lane;
    return votes;
}

// exports a kernel whose only parameter is a struct
#define ON_HOST(kernel, Parameters)                                                                                   \
    extern "C" const char* kernel##_on_host(const void* parameters, unsigned size, unsigned blocks, unsigned threads, \
                                            unsigned seed) {                                                          \
        if (size != sizeof(Parameters)) return "the packed parameters do not have the size of " #Parameters;          \
        const auto run = [](const void* given) { kernel(*static_cast<const Parameters*>(given)); };                   \
        return host::run(run, parameters, blocks, threads, seed);                                                     \
    }
