// SPDX-License-Identifier: Apache-2.0
// Enough of CUDA to run a kernel's source on the host: every thread of a block is a fiber of its own, and blocks run
// one after the other. What a GPU may do in any order is done in an order drawn from a seed. A barrier or a warp
// operation that not every thread of the block or warp reaches ends the run with a message; on a GPU it hangs or is
// undefined.
//
// Modelled: barriers of a block, shuffles and ballots of whole warps, static shared memory. Not modelled: the order in
// which memory accesses of different threads become visible, atomics. What Hopper has beyond that is in
// hopper_on_host.hpp.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

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
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

template <typename T>
T __ldg(const T* place) {
    return *place;
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

namespace host {

constexpr int kWarp = 32;
constexpr size_t kStack = 64 << 10;

// Where a group of threads, a block or a warp, meets. Two rounds of values: a fast thread may be one round ahead.
struct Meeting {
    int size = 0;
    int arrived = 0;
    long round = 0;
    const char* purpose = nullptr;
    uint64_t values[2][kWarp];
};

// Where threads wait for so many arrivals, again and again.
struct Barrier {
    int arrivals = 0;
    int missing = 0;
    long round = 0;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStack]};
    unsigned thread;
    bool done;
    // what it waits for: this meeting to be past this round, or this barrier
    const Meeting* waits;
    const Barrier* waits_at;
    long round;

    bool may_go() const {
        if (waits_at) return waits_at->round > round;
        return !waits || waits->round > round;
    }
    const char* purpose() const { return waits_at ? "what a barrier waits for" : waits->purpose; }
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Meeting> warps;
    Meeting all;
    ucontext_t scheduler;
    Fiber* running = nullptr;
    std::function<void()> kernel;
    // what is under way beside the threads, and done at some time, in this order
    std::deque<std::function<void()>> under_way;
    // before each block, with the run's seed
    std::function<void(unsigned)> prepare = [](unsigned) {};
    std::string problem;
};
inline Block block;

inline void stop(const std::string& problem) {
    if (block.problem.empty()) {
        block.problem = problem + ", block " + std::to_string(blockIdx.x) + " thread " + std::to_string(threadIdx.x);
    }
    // never resumed
    swapcontext(&block.running->context, &block.scheduler);
}

// Waits for the others of the group; returns the round that has just ended.
inline long meet(Meeting& meeting, const char* purpose, int lane = -1, uint64_t value = 0) {
    if (meeting.arrived > 0 && std::strcmp(meeting.purpose, purpose) != 0) {
        stop(std::string(purpose) + " meets " + meeting.purpose);
    }
    meeting.purpose = purpose;
    if (lane >= 0) meeting.values[meeting.round % 2][lane] = value;
    const long round = meeting.round;
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0;
        ++meeting.round;
    } else {
        block.running->waits = &meeting;
        block.running->round = round;
        swapcontext(&block.running->context, &block.scheduler);
    }
    return round;
}

inline Meeting& own_warp() { return block.warps[threadIdx.x / kWarp]; }

inline void check_mask(unsigned mask) {
    if (mask != 0xffffffffu) stop("a warp operation without all lanes is not modelled");
}

template <typename T>
T shuffle(T value, int source, const char* purpose) {
    static_assert(sizeof(T) <= 8, "");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    Meeting& warp = own_warp();
    const long round = meet(warp, purpose, threadIdx.x % kWarp, bits);
    std::memcpy(&value, &warp.values[round % 2][source], sizeof(T));
    return value;
}

inline void enter() {
    block.kernel();
    block.running->done = true;
    swapcontext(&block.running->context, &block.scheduler);
}

inline void start(Fiber& fiber, unsigned thread) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    fiber.thread = thread;
    fiber.done = false;
    fiber.waits = nullptr;
    fiber.waits_at = nullptr;
    makecontext(&fiber.context, enter, 0);
}

inline void run_block(unsigned threads, std::mt19937& chance, unsigned seed) {
    block.all = Meeting();
    block.all.size = static_cast<int>(threads);
    block.warps.assign((threads + kWarp - 1) / kWarp, Meeting());
    for (Meeting& warp : block.warps) warp.size = kWarp;
    if (block.fibers.size() != threads) block.fibers = std::vector<Fiber>(threads);
    block.under_way.clear();
    block.prepare(seed);
    std::vector<Fiber*> left;
    for (unsigned thread = 0; thread < threads; ++thread) {
        start(block.fibers[thread], thread);
        left.push_back(&block.fibers[thread]);
    }
    // warps that fall behind, a bit for each
    unsigned asleep = 0;
    while (!left.empty()) {
        std::shuffle(left.begin(), left.end(), chance);
        bool moved = false;
        // for a while, or until all others wait for them
        if (chance() % 64 == 0) asleep = chance() & chance();
        for (Fiber* fiber : left) {
            if (!fiber->may_go() || (asleep >> fiber->thread / kWarp & 1)) continue;
            moved = true;
            fiber->waits = nullptr;
            fiber->waits_at = nullptr;
            block.running = fiber;
            threadIdx.x = fiber->thread;
            swapcontext(&block.scheduler, &fiber->context);
            if (!block.problem.empty()) return;
        }
        if (!block.under_way.empty() && (!moved || chance() % 4 == 0)) {
            block.under_way.front()();
            block.under_way.pop_front();
            moved = true;
        }
        if (!moved && asleep) {
            asleep = 0;
            continue;
        }
        if (!moved) {
            block.problem = std::string("some threads never reach ") + left[0]->purpose() + ", block " +
                            std::to_string(blockIdx.x) + " thread " + std::to_string(left[0]->thread);
            return;
        }
        left.erase(std::remove_if(left.begin(), left.end(), [](const Fiber* fiber) { return fiber->done; }),
                   left.end());
    }
}

// What went wrong, or null.
inline const char* run(std::function<void()> kernel, unsigned blocks, unsigned threads, unsigned seed) {
    std::mt19937 chance(seed);
    std::vector<unsigned> order(blocks);
    for (unsigned place = 0; place < blocks; ++place) order[place] = place;
    std::shuffle(order.begin(), order.end(), chance);
    block.kernel = std::move(kernel);
    block.problem.clear();
    gridDim.x = blocks;
    blockDim.x = threads;
    for (unsigned place : order) {
        blockIdx.x = place;
        run_block(threads, chance, seed);
        if (!block.problem.empty()) return block.problem.c_str();
    }
    return nullptr;
}

}  // namespace host

inline void __syncwarp() { host::meet(host::own_warp(), "__syncwarp"); }

inline void __syncthreads() { host::meet(host::block.all, "__syncthreads"); }

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
    host::Meeting& warp = host::own_warp();
    const long round = host::meet(warp, "__ballot_sync", threadIdx.x % host::kWarp, vote);
    unsigned votes = 0;
    for (int lane = 0; lane < host::kWarp; ++lane) votes |= unsigned(warp.values[round % 2][lane]) << lane;
    return votes;
}

// exports a kernel whose only parameter is a struct
#define ON_HOST(kernel, Parameters)                                                                                   \
    extern "C" const char* kernel##_on_host(const void* parameters, unsigned size, unsigned blocks, unsigned threads, \
                                            unsigned seed) {                                                          \
        if (size != sizeof(Parameters)) return "the packed parameters do not have the size of " #Parameters;          \
        return host::run([&] { kernel(*static_cast<const Parameters*>(parameters)); }, blocks, threads, seed);        \
    }
