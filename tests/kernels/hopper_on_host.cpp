// SPDX-License-Identifier: Apache-2.0
// Shared memory, barriers and products of hopper_on_host.hpp. Variables are inline as in device_on_host.cpp.
#include "hopper_on_host.hpp"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "device_threads.hpp"

namespace host {

inline std::map<unsigned, Barrier> barriers;

// when a half of shared memory was written, by which thread, and when each thread has fenced
struct Written {
    unsigned long at;
    unsigned thread;
};
inline Written written[kMostSharedBytes / 2];
inline unsigned long fenced_at[kMostThreads], now;
// when a thread had fenced from which this one has heard by an mbarrier
inline unsigned long heard_at[kMostThreads];

void write(unsigned address, const void* values, unsigned size, unsigned thread) {
    std::memcpy(in_shared(address, size), values, size);
    const unsigned first = (address - kFirstAddress) / 2;
    for (unsigned half = first; half < first + size / 2; ++half) written[half] = {++now, thread};
}

// Who touched a half of shared memory last.
struct Access {
    Met met;
    unsigned thread;
    By by;
    // so did another thread of its warp; and something else than that
    bool has_others, is_mixed;
};
constexpr int kReaders = 4;
struct Touched {
    Access written;
    // by warp
    Access read[kReaders];
};
inline Touched touched[kMostSharedBytes / 2];

static bool is_unordered(const Access& before, const Access& now) {
    if (before.met.block != now.met.block) return false;
    if (before.thread / kWarp != now.thread / kWarp) return true;
    if (before.met.warp != now.met.warp) return false;
    // what a warp does as one it does in order
    if (before.by == now.by && !before.is_mixed && (now.by == By::kWarp || now.by == By::kProduct)) return false;
    // a copy that has landed is its thread's
    if (before.by == By::kCopy && before.thread == now.thread) return false;
    return before.has_others || before.is_mixed || before.thread != now.thread || before.by != now.by;
}

void touch(unsigned address, unsigned size, bool writes, By by) {
    // mbarriers order memory in ways that are not modelled
    if (!barriers.empty()) return;
    in_shared(address, size);
    if (threadIdx.x / kWarp >= kReaders) stop("more warps than races are looked for among");
    const Access now{met[threadIdx.x], threadIdx.x, by, false, false};
    const unsigned first = (address - kFirstAddress) / 2;
    for (unsigned half = first; half < first + size / 2; ++half) {
        Touched& found = touched[half];
        bool is_race = is_unordered(found.written, now);
        for (const Access& read : found.read) is_race |= writes && is_unordered(read, now);
        if (is_race) stop("threads touch the same shared memory without a barrier in between");
        if (writes) {
            found.written = now;
        } else {
            Access& read = found.read[now.thread / kWarp];
            const Access before = read;
            read = now;
            if (before.met.block == now.met.block && before.met.warp == now.met.warp) {
                read.has_others = before.has_others || before.thread != now.thread;
                read.is_mixed = before.is_mixed || before.by != by;
            }
        }
    }
}

static void check_fenced(unsigned address) {
    in_shared(address, 2);
    const Written& last = written[(address - kFirstAddress) / 2];
    const unsigned long heard = last.thread == threadIdx.x ? 0 : heard_at[threadIdx.x];
    if (last.at > std::max({fenced_at[last.thread], fenced_at[threadIdx.x], heard})) {
        stop("a product reads what no proxy fence has followed");
    }
}

static void count(Barrier& barrier) {
    if (--barrier.missing == 0) {
        barrier.missing = barrier.arrivals;
        ++barrier.round;
    }
}

static Barrier& barrier_at(unsigned address) {
    const auto found = barriers.find(address);
    if (found == barriers.end()) stop("no barrier was made here");
    return found->second;
}

// two rounds as in a Meeting
inline Handed handed[2][kMostThreads];

const Handed* hand_over(const Handed& own, const char* purpose) {
    const int first = threadIdx.x / kWarp * kWarp;
    handed[warp_round() % 2][threadIdx.x] = own;
    return &handed[meet_warp(purpose) % 2][first];
}

static unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// An operand in shared memory.
struct Matrix {
    unsigned start, leading, stride;
    bool is_transposed;

    Matrix() = default;
    explicit Matrix(const Operand& operand)
        : start((operand.bits & 0x3fff) << 4),
          leading((operand.bits >> 16 & 0x3fff) << 4),
          stride((operand.bits >> 32 & 0x3fff) << 4),
          is_transposed(operand.is_transposed) {
        if (operand.bits >> 62 != 1) stop("only operands that are swizzled by 128 bytes are modelled");
        if (operand.bits >> 49 & 7) stop("only operands whose pattern begins at a multiple of 1024 bytes are modelled");
    }
    // `outer` is a row of the left operand or a column of the right one, `inner` is what is summed over
    unsigned place(int outer, int inner) const {
        if (is_transposed) {
            return swizzled(start + outer / 64 * leading + outer % 64 * 2 + inner / 8 * stride + inner % 8 * 128);
        }
        return swizzled(start + outer / 8 * stride + outer % 8 * 128 + 2 * inner);
    }
    // the sixteen of a row of the left operand or a column of the right one
    void load(int outer, uint16_t (&to)[16]) const {
        if (is_transposed) {
            for (int inner = 0; inner < 16; ++inner) std::memcpy(to + inner, in_shared(place(outer, inner), 2), 2);
        } else {
            // eight of them lie together
            for (int inner : {0, 8}) std::memcpy(to + inner, in_shared(place(outer, inner), 16), 16);
        }
    }
    // the threads of a warp share its sixteen rows of the left operand, those of a group all columns of the right one
    void check_rows() const {
        const int first = threadIdx.x % 128 / kWarp * 16;
        for (int at = threadIdx.x % kWarp; at < 256; at += kWarp) check_fenced(place(first + at / 16, at % 16));
    }
    void check_columns(int columns) const {
        for (int at = threadIdx.x % 128; at < 16 * columns; at += 128) check_fenced(place(at / 16, at % 16));
    }
    // of these each warp reads its rows and all columns
    void touch_rows() const {
        const int first = threadIdx.x % 128 / kWarp * 16;
        for (int at = threadIdx.x % kWarp; at < 256; at += kWarp) {
            touch(place(first + at / 16, at % 16), 2, false, By::kProduct);
        }
    }
    void touch_columns(int columns) const {
        for (int at = threadIdx.x % kWarp; at < 16 * columns; at += kWarp) {
            touch(place(at / 16, at % 16), 2, false, By::kProduct);
        }
    }
};

// One thread's share of a product, and where it goes.
struct Product {
    float* registers;
    int columns;
    bool is_bf16, adds, is_left_here;
    Matrix left, right;
    // of the four lanes that have this thread's rows, where the left operand is in registers
    unsigned fragment[4][4];
    // this thread's own
    const unsigned* held = nullptr;

    // read from when it is issued until it has been waited for
    void touch_operands() const {
        if (held && std::memcmp(held, fragment[threadIdx.x % 4], sizeof(fragment[0]))) {
            stop("an operand in registers was overwritten in flight");
        }
        if (!is_left_here) left.touch_rows();
        right.touch_columns(columns);
    }

    void add_to(float* found) const {
        if (is_bf16) {
            columns == 64 ? add<true, 64>(found) : add<true, 128>(found);
        } else {
            columns == 64 ? add<false, 64>(found) : add<false, 128>(found);
        }
    }
    void load_left(int lower, uint16_t (&to)[16]) const {
        if (!is_left_here) return left.load(threadIdx.x % 128 / kWarp * 16 + threadIdx.x % kWarp / 4 + 8 * lower, to);
        for (int inner = 0; inner < 16; ++inner) {
            to[inner] = fragment[inner % 8 / 2][lower + inner / 8 * 2] >> 16 * (inner % 2) & 0xffff;
        }
    }
    template <bool kBf16, int kColumns>
    void add(float* found) const {
        constexpr int kOwn = kColumns / 2;
        uint16_t halves[16];
        // four of this thread's numbers are in two columns: two in each of its rows
        float of_left[16][4], of_right[16][kOwn], sums[kOwn] = {};
        for (int lower : {0, 1}) {
            load_left(lower, halves);
            for (int inner = 0; inner < 16; ++inner) {
                of_left[inner][2 * lower] = of_left[inner][2 * lower + 1] = as_float<kBf16>(halves[inner]);
            }
        }
        for (int at = 0; at < kOwn; at += 4) {
            for (int second : {0, 1}) {
                right.load(at / 4 * 8 + 2 * (threadIdx.x % 4) + second, halves);
                for (int inner = 0; inner < 16; ++inner) {
                    of_right[inner][at + second] = of_right[inner][at + second + 2] = as_float<kBf16>(halves[inner]);
                }
            }
        }
        for (int inner = 0; inner < 16; ++inner) {
            for (int at = 0; at < kOwn; at += 4) {
                for (int each = 0; each < 4; ++each) {
                    sums[at + each] += of_left[inner][each] * of_right[inner][at + each];
                }
            }
        }
        for (int at = 0; at < kOwn; ++at) found[at] = (adds ? found[at] : 0) + sums[at];
    }
};

struct Hidden {
    float* registers;
    std::vector<float> values;
};

struct Products {
    std::vector<Hidden> hidden;
    std::vector<Product> open;
    std::deque<std::vector<Product>> closed;

    void clear() {
        hidden.clear();
        open.clear();
        closed.clear();
    }
    Hidden* find(const float* registers) {
        const auto is_it = [=](const Hidden& each) { return each.registers == registers; };
        const auto found = std::find_if(hidden.begin(), hidden.end(), is_it);
        return found == hidden.end() ? nullptr : &*found;
    }
};
inline Products products[kMostThreads];
// copies of each thread that nobody has waited for
inline std::vector<std::function<void()>> copies[kMostThreads];
inline bool at_once;

static void issue(const Product& product) {
    product.touch_operands();
    Products& mine = products[threadIdx.x];
    const int number = product.columns / 2;
    float* const registers = product.registers;
    if (!mine.find(registers)) {
        mine.hidden.push_back({registers, std::vector<float>(registers, registers + number)});
        std::fill(registers, registers + number, std::numeric_limits<float>::quiet_NaN());
    }
    if (at_once) product.add_to(mine.find(registers)->values.data());
    mine.open.push_back(product);
}

void multiply(bool is_bf16, float* d, int columns, Operand left, Operand right, bool adds) {
    Product product{d, columns, is_bf16, adds, false, Matrix(left), Matrix(right), {}};
    product.left.check_rows();
    product.right.check_columns(columns);
    issue(product);
}

void multiply(bool is_bf16, float* d, int columns, const unsigned* left, Operand right, bool adds) {
    Product product{d, columns, is_bf16, adds, true, Matrix(), Matrix(), {}};
    const Handed* const all = hand_over({{left[0], left[1], left[2], left[3]}, 0}, "wgmma");
    const int first = threadIdx.x % kWarp / 4 * 4;
    for (int lane = 0; lane < 4; ++lane) std::memcpy(product.fragment[lane], all[first + lane].registers, 16);
    product.held = left;
    product.right = Matrix(right);
    product.right.check_columns(columns);
    issue(product);
}

void close_products() {
    Products& mine = products[threadIdx.x];
    mine.closed.push_back(std::move(mine.open));
    mine.open.clear();
}

void wait_for_products(unsigned left) {
    Products& mine = products[threadIdx.x];
    if (!mine.open.empty()) stop("products that were not closed are waited for");
    while (mine.closed.size() > left) {
        for (const Product& product : mine.closed.front()) {
            product.touch_operands();
            if (!at_once) product.add_to(mine.find(product.registers)->values.data());
        }
        mine.closed.pop_front();
    }
    const auto is_ready = [&](const Hidden& hidden) {
        for (const auto& group : mine.closed) {
            for (const Product& product : group) {
                if (product.registers == hidden.registers) return false;
            }
        }
        std::copy(hidden.values.begin(), hidden.values.end(), hidden.registers);
        return true;
    };
    mine.hidden.erase(std::remove_if(mine.hidden.begin(), mine.hidden.end(), is_ready), mine.hidden.end());
}

bool is_in_flight(const float* registers) { return products[threadIdx.x].find(registers); }

static void forget_all(unsigned seed) {
    std::memset(shared, 0xff, sizeof(shared));
    // what blocks before have written is nobody's
    std::fill(std::begin(fenced_at), std::end(fenced_at), now);
    std::fill(std::begin(heard_at), std::end(heard_at), 0);
    barriers.clear();
    // nor what they have touched
    long next = 0;
    // a block that was stopped has threads before and behind its last barrier
    for (const Met& each : met) next = std::max(next, each.block + 1);
    for (Met& each : met) each = {next, 0};
    for (Products& each : products) each.clear();
    for (auto& each : copies) each.clear();
    at_once = seed % 2;
}

inline const bool is_hopper = [] {
    prepare = forget_all;
    return true;
}();

}  // namespace host

namespace bcg {

void mbarrier_init(unsigned barrier, int arrivals) { host::barriers[barrier] = {arrivals, arrivals, 0, 0}; }

void mbarrier_arrive(unsigned barrier) {
    host::Barrier& found = host::barrier_at(barrier);
    found.fenced = std::max(found.fenced, host::fenced_at[threadIdx.x]);
    host::count(found);
}

void mbarrier_wait(unsigned barrier, unsigned parity) {
    const host::Barrier& found = host::barrier_at(barrier);
    while ((found.round & 1) == parity) host::wait_at(found);
    host::heard_at[threadIdx.x] = std::max(host::heard_at[threadIdx.x], found.fenced);
}

void cp_async_16(unsigned to, const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16) host::stop("a misaligned copy");
    std::memset(host::in_shared(to, 16), 0xff, 16);
    const unsigned thread = threadIdx.x;
    host::later([=] { host::write(to, from, 16, thread); });
}

void cp_async_16_or_zeros(unsigned to, const void* from, bool copies) {
    if (reinterpret_cast<uintptr_t>(from) % 16) host::stop("a misaligned copy");
    host::touch(to, 16, true, host::By::kCopy);
    std::memset(host::in_shared(to, 16), 0xff, 16);
    const unsigned thread = threadIdx.x;
    host::copies[thread].push_back([=] {
        host::touch(to, 16, true, host::By::kThread);
        constexpr unsigned char zeros[16] = {};
        host::write(to, copies ? from : zeros, 16, thread);
    });
}

void cp_async_wait_all() {
    for (const auto& copy : host::copies[threadIdx.x]) copy();
    host::copies[threadIdx.x].clear();
}

void cp_async_mbarrier_arrive(unsigned barrier) {
    host::Barrier& found = host::barrier_at(barrier);
    host::later([&found] { host::count(found); });
}

void fence_proxy_async() { host::fenced_at[threadIdx.x] = ++host::now; }

}  // namespace bcg
