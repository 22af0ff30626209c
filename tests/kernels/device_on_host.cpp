// SPDX-License-Identifier: Apache-2.0
// The threads of device_on_host.hpp: fibers, and who of them goes on next.
//
// Variables are inline: the libraries of a process share one of each, as only one kernel runs at a time.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device_threads.hpp"

namespace host {

constexpr size_t kStack = 64 << 10;
// what a function that does not wait takes of it at most; the first call of one takes the most
constexpr ptrdiff_t kLeaf = 4 << 10;

// Where a group of threads, a block or a warp, meets. Two rounds of values: a fast thread may be one round ahead.
struct Meeting {
    int size = 0;
    int arrived = 0;
    long round = 0;
    const char* purpose = nullptr;
    uint64_t values[2][kWarp];
};

struct alignas(64) Fiber {
    // what it waits for: these rounds to be past this one; in one line of the cache, as every step asks all fibers
    const long* rounds;
    long round;
    const char* purpose;
    unsigned thread;
    bool began, done;
    // where it begins each block, and where it goes on: a context would ask the kernel about signals each time
    jmp_buf beginning, place;
    std::unique_ptr<char[]> stack{new char[kStack]};
    // of the part that a kernel uses, once this fiber has a beginning
    char* top = nullptr;
    // how far it was used where this thread waited
    char* deepest = stack.get();

    bool may_go() const { return *rounds > round; }
};

// Draws orders from a seed. Threads are put into another one for each step, and the standard library takes longer for
// that than they do for the step.
class Chance {
   public:
    // not zero, which would stay so
    explicit Chance(unsigned seed) : state((uint64_t(seed) + 1) * 0x9e3779b97f4a7c15u) {}

    // xorshift*, whose upper bits are the better ones
    unsigned draw() {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return static_cast<unsigned>(state * 0x2545f4914f6cdd1du >> 32);
    }
    unsigned below(unsigned limit) { return static_cast<unsigned>(uint64_t(draw()) * limit >> 32); }

    template <typename T>
    void shuffle(std::vector<T>& values) {
        for (size_t left = values.size(); left > 1; --left) std::swap(values[left - 1], values[below(left)]);
    }

   private:
    uint64_t state;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Meeting> warps;
    Meeting all;
    jmp_buf scheduler;
    Fiber* running = nullptr;
    void (*kernel)(const void*);
    const void* parameters;
    std::deque<std::function<void()>> under_way;
    std::string problem;
};
inline Block block;

// To the scheduler, and back when that chooses this thread again.
void pause() {
    Fiber& own = *block.running;
    own.deepest = std::min(own.deepest, static_cast<char*>(__builtin_frame_address(0)));
    if (!_setjmp(own.place)) _longjmp(block.scheduler, 1);
}

void enter();

void go_on(Fiber& fiber) {
    block.running = &fiber;
    threadIdx.x = fiber.thread;
    if (_setjmp(block.scheduler)) return;
    if (fiber.began) _longjmp(fiber.place, 1);
    fiber.began = true;
    if (fiber.top) _longjmp(fiber.beginning, 1);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
    setcontext(&context);
}

void stop(const char* problem) {
    if (block.problem.empty()) {
        block.problem =
            std::string(problem) + ", block " + std::to_string(blockIdx.x) + " thread " + std::to_string(threadIdx.x);
    }
    // never resumed
    pause();
}

// Waits for the round that is counted here to end.
void wait_for(const long& rounds, const char* purpose) {
    block.running->rounds = &rounds;
    block.running->round = rounds;
    block.running->purpose = purpose;
    pause();
}

// Waits for the others of the group; returns the round that has just ended.
long meet(Meeting& meeting, const char* purpose, int lane = -1, uint64_t value = 0) {
    if (meeting.arrived > 0 && std::strcmp(meeting.purpose, purpose) != 0) {
        stop((std::string(purpose) + " meets " + meeting.purpose).c_str());
    }
    meeting.purpose = purpose;
    if (lane >= 0) meeting.values[meeting.round % 2][lane] = value;
    const long round = meeting.round;
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0;
        ++meeting.round;
    } else {
        wait_for(meeting.round, purpose);
    }
    return round;
}

Meeting& own_warp() { return block.warps[threadIdx.x / kWarp]; }

void meet_block(const char* purpose) { meet(block.all, purpose); }

long meet_warp(const char* purpose) { return meet(own_warp(), purpose); }

long exchange(uint64_t value, const char* purpose) { return meet(own_warp(), purpose, threadIdx.x % kWarp, value); }

uint64_t exchanged(long round, int lane) { return own_warp().values[round % 2][lane]; }

long warp_round() { return own_warp().round; }

void wait_at(const Barrier& barrier) { wait_for(barrier.round, "what a barrier waits for"); }

void later(std::function<void()> work) { block.under_way.push_back(std::move(work)); }

// Below the frame of `enter`, which stays as it is from block to block.
__attribute__((noinline)) void run_kernel() {
    block.running->top = static_cast<char*>(__builtin_frame_address(0));
    block.kernel(block.parameters);
    block.running->done = true;
    pause();
}

void enter() {
    _setjmp(block.running->beginning);
    run_kernel();
}

constexpr long kEnded = 1;

void start(Fiber& fiber, unsigned thread) {
    // registers that nobody has set are NaN, and not zeros or what a thread before has left
    char* const end = fiber.top ? fiber.top : fiber.stack.get() + kStack;
    char* const used = fiber.deepest - std::min(kLeaf, fiber.deepest - fiber.stack.get());
    std::memset(used, 0xff, end - used);
    fiber.deepest = end;
    fiber.thread = thread;
    fiber.began = false;
    fiber.done = false;
    // nothing
    fiber.rounds = &kEnded;
    fiber.round = 0;
}

void run_block(unsigned threads, Chance& chance, unsigned seed) {
    block.all = Meeting();
    block.all.size = static_cast<int>(threads);
    block.warps.assign((threads + kWarp - 1) / kWarp, Meeting());
    for (Meeting& warp : block.warps) warp.size = kWarp;
    if (block.fibers.size() < threads) block.fibers = std::vector<Fiber>(threads);
    block.under_way.clear();
    if (prepare) prepare(seed);
    std::vector<Fiber*> left;
    for (unsigned thread = 0; thread < threads; ++thread) {
        start(block.fibers[thread], thread);
        left.push_back(&block.fibers[thread]);
    }
    // warps that fall behind, a bit for each
    unsigned asleep = 0;
    while (!left.empty()) {
        chance.shuffle(left);
        bool moved = false;
        // for a while, or until all others wait for them
        if (chance.below(64) == 0) asleep = chance.draw() & chance.draw();
        for (Fiber* fiber : left) {
            if (!fiber->may_go() || (asleep >> fiber->thread / kWarp & 1)) continue;
            moved = true;
            go_on(*fiber);
            if (!block.problem.empty()) return;
        }
        if (!block.under_way.empty() && (!moved || chance.below(4) == 0)) {
            block.under_way.front()();
            block.under_way.pop_front();
            moved = true;
        }
        if (!moved && asleep) {
            asleep = 0;
            continue;
        }
        if (!moved) {
            block.problem = std::string("some threads never reach ") + left[0]->purpose + ", block " +
                            std::to_string(blockIdx.x) + " thread " + std::to_string(left[0]->thread);
            return;
        }
        left.erase(std::remove_if(left.begin(), left.end(), [](const Fiber* fiber) { return fiber->done; }),
                   left.end());
    }
}

const char* run(void (*kernel)(const void*), const void* parameters, unsigned blocks, unsigned threads, unsigned seed) {
    Chance chance(seed);
    std::vector<unsigned> order(blocks);
    for (unsigned place = 0; place < blocks; ++place) order[place] = place;
    chance.shuffle(order);
    block.kernel = kernel;
    block.parameters = parameters;
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
