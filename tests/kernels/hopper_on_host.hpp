// SPDX-License-Identifier: Apache-2.0
// Hopper's instructions on the host, as gdn_extend.cuh names them: mbarriers, asynchronous copies, dynamic shared
// memory, and wgmma groups that have to be waited for.
//
// Data in flight is NaN: a tile from the start of its copy to its end, an accumulator until somebody has waited for it.
// A seed decides whether a product is computed when it is issued or when it is waited for, so both writing its operands
// too late and overwriting them too early is found. Operands are laid out as in the PTX manual, in the 128-byte
// swizzle; the swizzle depends on address bits, so an address inside eight rows works as it does there.
//
// wgmma reads shared memory through the async proxy. What was written there, by st.shared or cp.async, has to be fenced
// before, by the thread that wrote it or by the one that issues the product; else a GPU may multiply what was there.
#pragma once

#include <cmath>
#include <limits>
#include <map>

#include "device_on_host.hpp"

namespace host {

constexpr unsigned kMostSharedBytes = 227 << 10;
alignas(1024) inline unsigned char shared[kMostSharedBytes];
// zero is no address
constexpr unsigned kFirstAddress = 1024;
inline std::map<unsigned, Barrier> barriers;

inline unsigned char* in_shared(unsigned address, unsigned size) {
    if (address < kFirstAddress || address + size > kFirstAddress + kMostSharedBytes) stop("outside of shared memory");
    if (address % size) stop("a misaligned address in shared memory");
    return shared + (address - kFirstAddress);
}

// when a half of shared memory was written, by which thread, and when each thread has fenced
struct Written {
    unsigned long at;
    unsigned thread;
};
inline Written written[kMostSharedBytes / 2];
inline unsigned long fenced_at[1024], now;

inline void write(unsigned address, const void* values, unsigned size, unsigned thread) {
    std::memcpy(in_shared(address, size), values, size);
    const unsigned first = (address - kFirstAddress) / 2;
    for (unsigned half = first; half < first + size / 2; ++half) written[half] = {++now, thread};
}

template <typename T>
void write(unsigned address, const T& value) {
    write(address, &value, sizeof(T), threadIdx.x);
}

inline void check_fenced(unsigned address) {
    in_shared(address, 2);
    const Written& last = written[(address - kFirstAddress) / 2];
    if (last.at > std::max(fenced_at[last.thread], fenced_at[threadIdx.x])) {
        stop("a product reads what no proxy fence has followed");
    }
}

template <typename T>
T read(unsigned address) {
    T found;
    std::memcpy(&found, in_shared(address, sizeof(T)), sizeof(T));
    return found;
}

inline void count(Barrier& barrier) {
    if (--barrier.missing == 0) {
        barrier.missing = barrier.arrivals;
        ++barrier.round;
    }
}

inline Barrier& barrier_at(unsigned address) {
    if (!barriers.count(address)) stop("no barrier was made here");
    return barriers[address];
}

// What lanes of a warp hand each other, two rounds as in a Meeting.
struct Handed {
    unsigned registers[4];
    unsigned address;
};
inline Handed handed[2][kWarp * kWarp];

inline const Handed* hand_over(const Handed& own, const char* purpose) {
    Meeting& warp = own_warp();
    const int first = threadIdx.x / kWarp * kWarp;
    handed[warp.round % 2][threadIdx.x] = own;
    return &handed[meet(warp, purpose) % 2][first];
}

template <bool kBf16>
float as_float(uint16_t half) {
    if (kBf16) {
        const uint32_t bits = uint32_t(half) << 16;
        float found;
        std::memcpy(&found, &bits, 4);
        return found;
    }
    _Float16 found;
    std::memcpy(&found, &half, 2);
    return found;
}

template <bool kBf16>
uint16_t as_half(float exact) {
    uint16_t found;
    if (kBf16) {
        uint32_t bits;
        std::memcpy(&bits, &exact, 4);
        if (std::isnan(exact)) return 0x7fff;
        return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    const _Float16 rounded = static_cast<_Float16>(exact);
    std::memcpy(&found, &rounded, 2);
    return found;
}

inline unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

struct Operand {
    unsigned start, leading, stride;

    explicit Operand(uint64_t bits)
        : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4) {
        if (bits >> 62 != 1) stop("only operands that are swizzled by 128 bytes are modelled");
        if (bits >> 49 & 7) stop("only operands whose pattern begins at a multiple of 1024 bytes are modelled");
    }
    // `outer` is a row of the left operand or a column of the right one, `inner` is what is summed over
    unsigned place(bool is_transposed, int outer, int inner) const {
        if (is_transposed) {
            return swizzled(start + outer / 64 * leading + outer % 64 * 2 + inner / 8 * stride + inner % 8 * 128);
        }
        return swizzled(start + outer / 8 * stride + outer % 8 * 128 + 2 * inner);
    }
    uint16_t at(bool is_transposed, int outer, int inner) const {
        return read<uint16_t>(place(is_transposed, outer, inner));
    }
    // the threads of a warp share its sixteen rows of the left operand, those of a group all columns of the right one
    void check_rows(bool is_transposed) const {
        const int first = threadIdx.x % 128 / kWarp * 16;
        for (int at = threadIdx.x % kWarp; at < 256; at += kWarp) {
            check_fenced(place(is_transposed, first + at / 16, at % 16));
        }
    }
    void check_columns(bool is_transposed, int columns) const {
        for (int at = threadIdx.x % 128; at < 16 * columns; at += 128) {
            check_fenced(place(is_transposed, at / 16, at % 16));
        }
    }
};

// One thread's share of a product, and where it goes.
struct Product {
    float* registers;
    std::function<void(std::vector<float>&)> add;
};
struct Products {
    std::map<float*, std::vector<float>> hidden;
    std::vector<Product> open;
    std::deque<std::vector<Product>> closed;
};
inline std::map<unsigned, Products> products;
inline bool at_once;

inline void begin(float* registers, int number, std::function<void(std::vector<float>&)> add) {
    Products& mine = products[threadIdx.x];
    if (!mine.hidden.count(registers)) {
        mine.hidden[registers] = std::vector<float>(registers, registers + number);
        std::fill(registers, registers + number, std::numeric_limits<float>::quiet_NaN());
    }
    if (at_once) {
        add(mine.hidden[registers]);
        add = [](std::vector<float>&) {};
    }
    mine.open.push_back({registers, std::move(add)});
}

inline void wait_for(unsigned left) {
    Products& mine = products[threadIdx.x];
    if (!mine.open.empty()) stop("products that were not closed are waited for");
    std::map<float*, int> in_flight;
    while (mine.closed.size() > left) {
        for (Product& product : mine.closed.front()) product.add(mine.hidden[product.registers]);
        mine.closed.pop_front();
    }
    for (const auto& group : mine.closed) {
        for (const Product& product : group) ++in_flight[product.registers];
    }
    for (auto each = mine.hidden.begin(); each != mine.hidden.end();) {
        if (in_flight.count(each->first)) {
            ++each;
        } else {
            std::copy(each->second.begin(), each->second.end(), each->first);
            each = mine.hidden.erase(each);
        }
    }
}

// d [64, columns] (+)= left [64, 16] right [16, columns], of which this thread has two rows
template <bool kBf16>
void multiply(float* d, int columns, std::function<uint16_t(int, int)> left, std::function<uint16_t(int, int)> right,
              bool adds) {
    const int lane = threadIdx.x % kWarp, row = threadIdx.x % 128 / kWarp * 16 + lane / 4, column = 2 * (lane % 4);
    begin(d, columns / 2, [=](std::vector<float>& found) {
        float rows[2][16];
        for (int inner = 0; inner < 16; ++inner) {
            for (int lower : {0, 1}) rows[lower][inner] = as_float<kBf16>(left(row + 8 * lower, inner));
        }
        for (int at = 0; at < columns / 2; ++at) {
            float sum = 0;
            for (int inner = 0; inner < 16; ++inner) {
                sum += rows[at / 2 % 2][inner] * as_float<kBf16>(right(at / 4 * 8 + column + at % 2, inner));
            }
            found[at] = (adds ? found[at] : 0) + sum;
        }
    });
}

inline const bool is_hopper = [] {
    block.prepare = [](unsigned seed) {
        std::memset(shared, 0xff, sizeof(shared));
        std::fill(std::begin(written), std::end(written), Written{});
        std::fill(std::begin(fenced_at), std::end(fenced_at), 0);
        now = 0;
        barriers.clear();
        products.clear();
        at_once = seed % 2;
    };
    return true;
}();

}  // namespace host

namespace bcg {

inline unsigned shared_memory() { return host::kFirstAddress; }

template <int>
void setmaxnreg_inc() {}

template <int>
void setmaxnreg_dec() {}

inline void mbarrier_init(unsigned barrier, int arrivals) { host::barriers[barrier] = {arrivals, arrivals, 0}; }

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(unsigned barrier) { host::count(host::barrier_at(barrier)); }

inline void mbarrier_wait(unsigned barrier, unsigned parity) {
    const host::Barrier& found = host::barrier_at(barrier);
    while ((found.round & 1) == parity) {
        host::block.running->waits_at = &found;
        host::block.running->round = found.round;
        swapcontext(&host::block.running->context, &host::block.scheduler);
    }
}

inline void cp_async_16(unsigned to, const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16) host::stop("a misaligned copy");
    unsigned char* const place = host::in_shared(to, 16);
    std::memset(place, 0xff, 16);
    const unsigned thread = threadIdx.x;
    host::block.under_way.push_back([=] { host::write(to, from, 16, thread); });
}

inline void cp_async_mbarrier_arrive(unsigned barrier) {
    host::Barrier& found = host::barrier_at(barrier);
    host::block.under_way.push_back([&found] { host::count(found); });
}

inline void fence_proxy_async() { host::fenced_at[threadIdx.x] = ++host::now; }

inline float shared_float(unsigned from) { return host::read<float>(from); }
inline float2 shared_pair(unsigned from) { return host::read<float2>(from); }
inline int4 shared_piece(unsigned from) { return host::read<int4>(from); }

inline void set_shared(unsigned to, float value) { host::write(to, value); }
inline void set_shared(unsigned to, unsigned value) { host::write(to, value); }
inline void set_shared(unsigned to, float2 values) { host::write(to, values); }
inline void set_shared(unsigned to, uint16_t value) { host::write(to, value); }
inline void set_shared(unsigned to, int4 value) { host::write(to, value); }
inline void set_global(void* to, int4 value) {
    if (reinterpret_cast<uintptr_t>(to) % 16) host::stop("a misaligned store");
    std::memcpy(to, &value, 16);
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
    host::write(to, straight);
}

inline void stmatrix_x4_trans(unsigned to, unsigned first, unsigned second, unsigned third, unsigned fourth) {
    const host::Handed* all = host::hand_over({{first, second, third, fourth}, to}, "stmatrix");
    const int lane = threadIdx.x % host::kWarp, column = lane % 8;
    uint16_t turned[8];
    for (int row = 0; row < 8; ++row) {
        turned[row] = all[4 * row + column / 2].registers[lane / 8] >> 16 * (column % 2) & 0xffff;
    }
    host::write(to, turned);
}

template <bool kBf16>
unsigned halves(float first, float second) {
    return host::as_half<kBf16>(first) | unsigned(host::as_half<kBf16>(second)) << 16;
}

inline void wgmma_fence() { host::meet(host::own_warp(), "wgmma.fence"); }

inline void wgmma_commit() {
    host::Products& mine = host::products[threadIdx.x];
    mine.closed.push_back(std::move(mine.open));
    mine.open.clear();
}

template <int kCount, typename T>
void pin(T (&)[kCount]) {}

template <int kLeft, int... kSizes>
void wgmma_wait(float (&... d)[kSizes]) {
    host::wait_for(kLeft);
    if ((host::products[threadIdx.x].hidden.count(d) + ... + 0)) host::stop("an accumulator is still in flight");
    // a warp waits as one
    host::meet(host::own_warp(), "wgmma.wait_group");
}

template <bool kBf16, bool kTransposeLeft, bool kTransposeRight>
void wgmma_m64n64k16(float (&d)[32], uint64_t left, uint64_t right, int adds) {
    const host::Operand from_left(left), from_right(right);
    from_left.check_rows(kTransposeLeft);
    from_right.check_columns(kTransposeRight, 64);
    host::multiply<kBf16>(
        d, 64, [=](int row, int inner) { return from_left.at(kTransposeLeft, row, inner); },
        [=](int column, int inner) { return from_right.at(kTransposeRight, column, inner); }, adds);
}

// of all lanes of this warp: its sixteen rows
struct Fragment {
    unsigned registers[host::kWarp][4];

    explicit Fragment(const unsigned* own) {
        const host::Handed* all = host::hand_over({{own[0], own[1], own[2], own[3]}, 0}, "wgmma");
        for (int lane = 0; lane < host::kWarp; ++lane) std::memcpy(registers[lane], all[lane].registers, 16);
    }
    uint16_t at(int row, int inner) const {
        return registers[row % 8 * 4 + inner % 8 / 2][row % 16 / 8 + inner / 8 * 2] >> 16 * (inner % 2) & 0xffff;
    }
};

template <bool kBf16, bool kTransposeRight>
void wgmma_m64n64k16(float (&d)[32], const unsigned* left, uint64_t right, int adds) {
    const Fragment fragment(left);
    const host::Operand from_right(right);
    from_right.check_columns(kTransposeRight, 64);
    host::multiply<kBf16>(
        d, 64, [=](int row, int inner) { return fragment.at(row, inner); },
        [=](int column, int inner) { return from_right.at(kTransposeRight, column, inner); }, adds);
}

template <bool kBf16>
void wgmma_m64n128k16(float (&d)[64], const unsigned* left, uint64_t right) {
    const Fragment fragment(left);
    const host::Operand from_right(right);
    from_right.check_columns(true, 128);
    host::multiply<kBf16>(
        d, 128, [=](int row, int inner) { return fragment.at(row, inner); },
        [=](int column, int inner) { return from_right.at(true, column, inner); }, true);
}

}  // namespace bcg
