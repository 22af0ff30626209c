// SPDX-License-Identifier: Apache-2.0
// Extend of Mamba2, for Hopper: `prepare` and `advance` do what their namesakes in triton.py do, through the same
// scratch. The contract is in sglang_bcg_fixes/kernels/mamba2_extend.
//
// Per chunk, with G the running sum of d A from the chunk's first token and S [head, states] the state before it:
//
//   W[i, j] = exp(G_i - G_j) d_j C_i.B_j, j <= i
//   output_i = exp(G_i) S C_i + sum_j W[i, j] x_j + D x_i
//   S after = exp(G_last) S + sum_j (exp(G_last - G_j) d_j x_j) B_j^T
//
// A long sequence of few heads is cut into segments, and `advance` computes them side by side. `carry` walks along each
// segment but the last before, without outputs: along the first one from the sequence's own state, along the others
// from zeros, because S after a segment is what it forgets of S, added to that. `advance` begins a segment with the
// sum.
//
// A work item is 64 rows of a head of a sequence, or of a segment. A block has four warpgroups, which hand chunk after
// chunk to one another in a ring in shared memory: the producer loads; the scaler makes of x what S learns, and the
// weigher W; and the walker computes outputs. It keeps S in registers for the whole sequence: the accumulator of one
// wgmma, rounded, is the left operand of the next. Its products have x, S and the output transposed, so that W and C
// are right operands as they lie.
//
// No host headers: NVRTC compiles this file on the user's machine.
#ifndef BCG_MAMBA2_EXTEND_CUH
#define BCG_MAMBA2_EXTEND_CUH

#include "../linear_extend.cuh"

namespace bcg {

constexpr int kThreads = 4 * kGroup;
// rows of a head's state that a block computes
constexpr int kRows = 64;
// states that one accumulator has of each
constexpr int kHalf = 128;
// floats of one chunk and head in `gates`: G in powers of two, then d; bytes of what the walker reads: exp(G_i),
// exp(G_last)
constexpr int kGates = 2 * kChunk;
constexpr int kGateBytes = 4 * kGates;
constexpr int kDecayBytes = 4 * (kChunk + 4);

// Layout of a stage: C and B (tiles of 64 states each), x, which the output replaces, W, and what of x is learnt.
template <int kStates>
struct Layout {
    static constexpr int kHalves = kStates / kHalf;
    static constexpr int kSide = kStates / 64 * kTile;
    static constexpr int kCTiles = 0;
    static constexpr int kBTiles = kSide;
    static constexpr int kXTile = 2 * kSide;
    static constexpr int kWTile = kXTile + kTile;
    static constexpr int kLearntTile = kWTile + kTile;
    static constexpr int kStage = kLearntTile + kTile;
    // no more fit
    static constexpr int kStages = kHalves == 1 ? 3 : 2;
    // else the walker does: of two stages each has to be loaded again soon
    static constexpr bool kProducerStores = kHalves == 1;
    static constexpr int kGatesAt = kStages * kStage;
    static constexpr int kDecaysAt = kGatesAt + kStages * kGateBytes;
    static constexpr int kBarriersAt = kDecaysAt + kStages * kDecayBytes;
    static constexpr int kSharedBytes = kBarriersAt + 24 * kStages;
    static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
    static_assert(4 * kRows * kStates <= kStage, "a state does not fit into a stage");

    static __device__ __forceinline__ u32 tiles(u32 memory, int stage) { return memory + stage * kStage; }
    static __device__ __forceinline__ u32 gates(u32 memory, int stage) {
        return memory + kGatesAt + stage * kGateBytes;
    }
    static __device__ __forceinline__ u32 decays(u32 memory, int stage) {
        return memory + kDecaysAt + stage * kDecayBytes;
    }
    // a stage is full, weighed, then empty
    static __device__ __forceinline__ u32 full(u32 memory, int stage) { return memory + kBarriersAt + 24 * stage; }
    static __device__ __forceinline__ u32 weighed(u32 memory, int stage) { return full(memory, stage) + 8; }
    static __device__ __forceinline__ u32 empty(u32 memory, int stage) { return full(memory, stage) + 16; }
};

// the bits of `flags`
enum Flag : int {
    kTracking = 1,
    kFloatD = 2,
    kFloatA = 4,
    kFloatDtBias = 8,
};

// Kernel parameters as cuda.py packs them: eight-byte fields first, then four-byte ones. A half is bf16 or f16.
struct Mamba2Advance {
    const u16* mixed;
    const float* gates;
    const void* D;
    u16* output;
    float* state;
    float* carries;
    float* befores;
    const int* sequences;
    const int* counts;
    i64 state_slot;
    int rows_of_output;
    int capacity;
    int heads;
    int groups;
    int head;
    int segment;
    int flags;

    // of the output
    __device__ __forceinline__ int row_size() const { return heads * head; }
    __device__ __forceinline__ i64 first_of_row(int row) const { return i64(row) * heads * head; }
};

struct Mamba2Prepare {
    const u16* x;
    const u16* dt;
    const u16* weights;
    const u16* bias;
    const void* A;
    const void* dt_bias;
    u16* conv;
    u16* mixed;
    float* gates;
    u16* output;
    const int* chunks;
    const int* counts;
    i64 conv_slot;
    i64 conv_channel;
    i64 conv_past;
    int x_row;
    int dt_row;
    int rows_of_output;
    int capacity;
    int max_chunks;
    int heads;
    int inner;
    int states;
    int channels;
    float least_step;
    float most_step;
    int flags;

    __device__ __forceinline__ bool is_tracking() const { return flags & kTracking; }
};

// Tokens of a segment of a sequence, and how many there are. They depend on nothing but the length and how the kernel
// was launched: a sequence has the same bits alone and beside others. With fewer segments `carry` would take as long as
// they save; with more, what begins each of them.
constexpr int kLeastSegments = 4;
constexpr int kMostSegments = 8;
struct Cut {
    int tokens;
    int segments;

    __device__ __forceinline__ Cut(const Mamba2Advance& job, int sequence) {
        const int* const fields = job.sequences + sequence * kSequenceFields;
        const int all = at_most(fields[1], job.rows_of_output) - fields[0];
        const int most = job.segment == 0 ? 1 : at_most(all / job.segment, kMostSegments);
        const int chunks = chunks_of(all), parts = most < kLeastSegments ? 1 : most;
        tokens = (chunks + parts - 1) / parts * kChunk;
        // none of them is empty
        segments = parts == 1 ? 1 : (all + tokens - 1) / tokens;
    }
};

// The number of sequences is read on the device, so a captured launch serves any.
template <bool kIsCarry>
__device__ __forceinline__ int items_of(const Mamba2Advance& job) {
    const int sequences = job.counts[2];
    int shares = kIsCarry ? 0 : sequences;
    // the longest sequences are first
    for (int sequence = 0; sequence < sequences; ++sequence) {
        const Cut cut(job, sequence);
        if (cut.segments == 1) break;
        shares += cut.segments - 1;
    }
    return shares * job.heads * (job.head / kRows);
}

struct Item {
    int start;
    int end;
    int slot;
    int head;
    // the first of its rows, in the head's
    int row;
    // of its segment
    int begin;
    int stop;
    int checkpoint;
    int track_slot;
    int first_chunk;
    int segments;
    int segment;
    bool has_prefix;

    // `carry` has no last segments
    __device__ __forceinline__ Item(const Mamba2Advance& job, int number, bool is_carry) {
        const int parts = job.head / kRows;
        int sequence = 0, share = number / (job.heads * parts);
        for (;; ++sequence) {
            segments = Cut(job, sequence).segments;
            // this one and all after it have a share each
            if (segments == 1) break;
            if (share < segments - is_carry) break;
            share -= segments - is_carry;
        }
        if (segments == 1) {
            sequence += share;
            share = 0;
        }
        segment = share;
        const int* const fields = job.sequences + sequence * kSequenceFields;
        start = fields[0];
        end = at_most(fields[1], job.rows_of_output);
        slot = fields[2];
        checkpoint = start + at_least(fields[3], 0);
        track_slot = job.flags & kTracking ? fields[4] : -1;
        first_chunk = fields[5];
        has_prefix = fields[6] != 0;
        const int tokens = segments > 1 ? Cut(job, sequence).tokens : chunks_of(end - start) * kChunk;
        begin = start + segment * tokens;
        stop = at_most(begin + tokens, end);
        head = number / parts % job.heads;
        row = number % parts * kRows;
    }

    // The record of a segment and head: the state after it, then of each row what is left of the one before. Two
    // sequences never share one: a segment is at least as long as job.segment.
    __device__ __forceinline__ float* carry_of(const Mamba2Advance& job, int number, int states) const {
        return job.carries + (i64(start / job.segment + number) * job.heads + head) * job.head * (states + 1);
    }
    // The state before a first segment, which is read after the slot has been overwritten.
    __device__ __forceinline__ float* before_of(const Mamba2Advance& job, int states) const {
        return job.befores + (i64(start / (kLeastSegments * job.segment)) * job.heads + head) * job.head * states;
    }
};

// A block's first state is the walker's to load, because nothing would hide the way through the ring.
__device__ __forceinline__ bool comes_early(const Mamba2Advance& job, const Item& item, int number) {
    const u64 places = reinterpret_cast<u64>(job.state) | static_cast<u64>(4 * job.state_slot);
    return item.segments == 1 && item.has_prefix && number != static_cast<int>(blockIdx.x) && places % 16 == 0;
}

// Offset of four floats of a state in a stage, swizzled so that the walker's reads have no bank conflicts.
template <int kStates>
__device__ __forceinline__ u32 in_state(int row, int four) {
    return 4 * kStates * row + 16 * (four ^ (row % 8 * 2));
}

template <int kStates>
__device__ __forceinline__ float* state_of(const Mamba2Advance& job, const Item& item, int slot) {
    return job.state + slot * job.state_slot + (i64(item.head) * job.head + item.row) * kStates;
}

// Producer: eight threads copy the 128 bytes of a row, 16 rows at a time.
template <int kStates, bool kIsCarry>
__device__ __forceinline__ void load(const Mamba2Advance& job) {
    using At = Layout<kStates>;
    constexpr bool kStores = At::kProducerStores && !kIsCarry;
    constexpr int kFours = kStates / 4;
    const u32 memory = shared_memory();
    const int thread = threadIdx.x % kGroup, piece = thread % kPieces, first = thread / kPieces;
    const int group = job.heads / job.groups;
    const i64 behind_B = i64(job.groups) * job.capacity * kStates;
    Pipeline pipe;
    Outputs<At::kStages> outputs;
    const int items = items_of<kIsCarry>(job);
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        const Item item(job, number, kIsCarry);
        if (item.begin >= item.stop) continue;
        if (!kIsCarry && comes_early(job, item, number)) {
            // no item before writes it, but where sequences share a slot, as in a dummy run, whose states nobody reads
            const float* const state = state_of<kStates>(job, item, item.slot);
            const u32 tiles = At::tiles(memory, pipe.stage);
            mbarrier_wait(At::empty(memory, pipe.stage), pipe.phase ^ 1);
            if constexpr (kStores) {
                outputs.store_oldest(job, tiles + At::kXTile);
                outputs.add(0, 0, 0);
            }
#pragma unroll 2
            for (int four = thread; four < kRows * kFours; four += kGroup)
                cp_async_16(tiles + in_state<kStates>(four / kFours, four % kFours), state + 4 * four);
            cp_async_mbarrier_arrive(At::full(memory, pipe.stage));
            pipe.advance(At::kStages);
        }
        const int column = item.head * job.head + item.row;
        const u16* const B = job.mixed + i64(item.head / group) * job.capacity * kStates;
        for (int first_row = item.begin; first_row < item.stop; first_row += kChunk) {
            const u32 tiles = At::tiles(memory, pipe.stage);
            // the parity of the lap before: on the first lap this does not wait
            mbarrier_wait(At::empty(memory, pipe.stage), pipe.phase ^ 1);
#pragma unroll
            for (int step = 0; step < kRowSteps; ++step) {
                const int in_chunk = first + step * kRowsAtOnce;
                // past the end repeat the last row: never a neighbour's, and its steps of zero multiply it
                const int row = at_most(first_row + in_chunk, item.end - 1);
                const int lies = swizzled(in_chunk, piece);
                const u16* const of_row = B + i64(row) * kStates + piece * 8;
#pragma unroll
                for (int tile = 0; tile < kStates / 64; ++tile) {
                    cp_async_16(tiles + At::kBTiles + tile * kTile + lies, of_row + 64 * tile);
                    if constexpr (!kIsCarry)
                        cp_async_16(tiles + At::kCTiles + tile * kTile + lies, of_row + behind_B + 64 * tile);
                }
            }
            if (thread < kGateBytes / 16) {
                const int chunk = item.first_chunk + (first_row - item.start) / kChunk;
                const float* const gates = job.gates + (i64(chunk) * job.heads + item.head) * kGates;
                cp_async_16(At::gates(memory, pipe.stage) + 16 * thread, gates + 4 * thread);
            }
            if constexpr (kStores) {
                outputs.store_oldest(job, tiles + At::kXTile);
                outputs.add(first_row, item.end - first_row, column);
            }
#pragma unroll
            for (int step = 0; step < kRowSteps; ++step) {
                const int in_chunk = first + step * kRowsAtOnce;
                const int row = at_most(first_row + in_chunk, item.end - 1);
                const u16* const x = job.output + job.first_of_row(row) + column + piece * 8;
                cp_async_16(tiles + At::kXTile + swizzled(in_chunk, piece), x);
            }
            cp_async_mbarrier_arrive(At::full(memory, pipe.stage));
            pipe.advance(At::kStages);
        }
    }
    for (int stage = 0; kStores && stage < At::kStages; ++stage) {
        mbarrier_wait(At::empty(memory, pipe.stage), pipe.phase ^ 1);
        outputs.store_oldest(job, At::tiles(memory, pipe.stage) + At::kXTile);
        outputs.add(0, 0, 0);
        pipe.advance(At::kStages);
    }
}

// d = C B^T, [to, from]
template <bool kBf16, int kStates>
__device__ __forceinline__ void relate(float (&d)[32], u32 tiles) {
    const u64 left = descriptor(tiles + Layout<kStates>::kCTiles);
    const u64 right = descriptor(tiles + Layout<kStates>::kBTiles);
#pragma unroll
    for (int step = 0; step < kStates / 16; ++step) {
        const u32 along = step / 4 * (kTile / 16) + step % 4 * kAlongRow;
        wgmma_m64n64k16<kBf16, false, false>(d, further(left, along), further(right, along), step > 0);
    }
    wgmma_commit();
}

// What the walker needs of a chunk's gates.
__device__ __forceinline__ void leave_decays(u32 gates, u32 decays) {
    const int token = threadIdx.x % kGroup;
    if (token < kChunk) set_shared(decays + 4 * token, power_of_two(shared_float(gates + 4 * token)));
    if (token == kChunk) set_shared(decays + 4 * kChunk, power_of_two(shared_float(gates + 4 * (kChunk - 1))));
}

// exp(G_last - G) d x, rounded, into its tile.
template <bool kBf16>
__device__ __forceinline__ void leave_learnt(u32 gates, u32 x, u32 tile) {
    const int thread = threadIdx.x % kGroup, piece = thread % kPieces, first = thread / kPieces;
    const float last = shared_float(gates + 4 * (kChunk - 1));
    float kept[kRowSteps];
    int4 eights[kRowSteps];
    // all before any is computed with: asm keeps its order
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) {
        const int token = first + step * kRowsAtOnce;
        eights[step] = shared_piece(x + swizzled(token, piece));
        const float to_end = last - shared_float(gates + 4 * token);
        // rounding may leave the whole sum a little above a partial one
        kept[step] = power_of_two(to_end > 0 ? 0.0f : to_end) * shared_float(gates + 4 * (kChunk + token));
    }
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) {
        const auto scaled = [&](int pair) {
            return static_cast<int>(halves<kBf16>(widened<kBf16>(u16(pair)) * kept[step],
                                                  widened<kBf16>(u16(u32(pair) >> 16)) * kept[step]));
        };
        const int4 eight = eights[step];
        set_shared(tile + swizzled(first + step * kRowsAtOnce, piece),
                   make_int4(scaled(eight.x), scaled(eight.y), scaled(eight.z), scaled(eight.w)));
    }
}

// Scaler: of chunk after chunk what does not need C, beside the weigher.
template <bool kBf16, int kStates, bool kIsCarry>
__device__ __forceinline__ void scale(const Mamba2Advance& job) {
    using At = Layout<kStates>;
    const u32 memory = shared_memory();
    Pipeline pipe;
    const int items = items_of<kIsCarry>(job);
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        const Item item(job, number, kIsCarry);
        if (item.begin >= item.stop) continue;
        const int first = !kIsCarry && comes_early(job, item, number) ? item.begin - kChunk : item.begin;
        for (int first_row = first; first_row < item.stop; first_row += kChunk) {
            const u32 tiles = At::tiles(memory, pipe.stage), gates = At::gates(memory, pipe.stage);
            mbarrier_wait(At::full(memory, pipe.stage), pipe.phase);
            // else it is a state
            if (first_row >= item.begin) {
                leave_decays(gates, At::decays(memory, pipe.stage));
                leave_learnt<kBf16>(gates, tiles + At::kXTile, tiles + At::kLearntTile);
                fence_proxy_async();
            }
            leave_stage(At::weighed(memory, pipe.stage));
            pipe.advance(At::kStages);
        }
    }
}

// exp(G_i - G_j) d_j of a thread's products [to, from], also where j comes after i
__device__ __forceinline__ void load_decays(float (&decays)[32], u32 gates) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroup / kWarp;
    const int own_row = 16 * warp + lane / 4, own_column = 2 * (lane % 4);
    const float upper = shared_float(gates + 4 * own_row), lower = shared_float(gates + 4 * (own_row + 8));
    float2 from[kEights], step[kEights];
    // all before any is computed with: asm keeps its order
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
        from[eight] = shared_pair(gates + 4 * (8 * eight + own_column));
        step[eight] = shared_pair(gates + 4 * (kChunk + 8 * eight + own_column));
    }
#pragma unroll
    for (int each = 0; each < 32; ++each) {
        const float2 gate = from[each / 4], of_step = step[each / 4];
        const float decay = power_of_two((each / 2 % 2 ? lower : upper) - (each % 2 ? gate.y : gate.x));
        decays[each] = decay * (each % 2 ? of_step.y : of_step.x);
    }
}

// W, rounded, into its tile.
template <bool kBf16>
__device__ __forceinline__ void leave_weights(const float (&products)[32], const float (&decays)[32], u32 tile) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroup / kWarp;
    const int own_row = 16 * warp + lane / 4, own_column = 2 * (lane % 4);
    u32 weights[16];
#pragma unroll
    for (int pair = 0; pair < 16; ++pair) {
        float both[2];
#pragma unroll
        for (int each = 0; each < 2; ++each) {
            const int row = own_row + pair % 2 * 8, column = pair / 2 * 8 + own_column + each;
            both[each] = column <= row ? products[2 * pair + each] * decays[2 * pair + each] : 0.0f;
        }
        weights[pair] = halves<kBf16>(both[0], both[1]);
    }
#pragma unroll
    for (int eight = 0; eight < kEights; eight += 2) {
        const u32 to = tile + swizzled(16 * warp + lane % 16, eight + lane / 16);
        const u32* const block = &weights[2 * eight];
        stmatrix_x4(to, block[0], block[1], block[2], block[3]);
    }
}

// Weigher: W of chunk after chunk, ahead of the walker.
template <bool kBf16, int kStates>
__device__ __forceinline__ void weigh(const Mamba2Advance& job) {
    using At = Layout<kStates>;
    const u32 memory = shared_memory();
    Pipeline pipe;
    float products[32], decays[32];
    const int items = items_of<false>(job);
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        const Item item(job, number, false);
        if (item.begin >= item.stop) continue;
        if (comes_early(job, item, number)) {
            mbarrier_wait(At::full(memory, pipe.stage), pipe.phase);
            leave_stage(At::weighed(memory, pipe.stage));
            pipe.advance(At::kStages);
        }
        for (int first_row = item.begin; first_row < item.stop; first_row += kChunk) {
            const u32 tiles = At::tiles(memory, pipe.stage);
            mbarrier_wait(At::full(memory, pipe.stage), pipe.phase);
            fence_proxy_async();
            wgmma_fence();
            relate<kBf16, kStates>(products, tiles);
            load_decays(decays, At::gates(memory, pipe.stage));
            pin(decays);
            wgmma_wait<0>(products);
            leave_weights<kBf16>(products, decays, tiles + At::kWTile);
            // the walker has no fence of its own
            fence_proxy_async();
            leave_stage(At::weighed(memory, pipe.stage));
            pipe.advance(At::kStages);
        }
    }
}

// Offset of a thread's first two numbers of a state.
template <int kStates>
__device__ __forceinline__ int own_in_state() {
    const int lane = own_thread() % kWarp, warp = own_thread() % kGroup / kWarp;
    return (16 * warp + lane / 4) * kStates + 2 * (lane % 4);
}

template <int kStates, int kHalves>
__device__ __forceinline__ void load_state(float (&S)[kHalves][kHalf / 2], const float* state) {
    state += own_in_state<kStates>();
#pragma unroll
    for (int eight = 0; eight < kStates / 8; ++eight) {
        float* const four = &S[eight / 16][eight % 16 * 4];
        const float2 upper = *reinterpret_cast<const float2*>(state + 8 * eight);
        const float2 lower = *reinterpret_cast<const float2*>(state + 8 * kStates + 8 * eight);
        four[0] = upper.x;
        four[1] = upper.y;
        four[2] = lower.x;
        four[3] = lower.y;
    }
}

// The same from the stage to which the producer has copied it.
template <int kStates, int kHalves>
__device__ __forceinline__ void take_state(float (&S)[kHalves][kHalf / 2], u32 tiles) {
    const int row = own_in_state<kStates>() / kStates, column = own_in_state<kStates>() % kStates;
    const u32 first = tiles + in_state<kStates>(row, column / 4) + 4 * (column % 4);
#pragma unroll
    for (int eight = 0; eight < kStates / 8; ++eight) {
        float* const four = &S[eight / 16][eight % 16 * 4];
        const u32 upper = first ^ (32 * eight);
        const float2 pairs[2] = {shared_pair(upper), shared_pair(upper + 8 * 4 * kStates)};
#pragma unroll
        for (int each = 0; each < 4; ++each) four[each] = each % 2 ? pairs[each / 2].y : pairs[each / 2].x;
    }
}

template <int kStates, int kHalves>
__device__ __forceinline__ void store_state(float* state, const float (&S)[kHalves][kHalf / 2]) {
    state += own_in_state<kStates>();
#pragma unroll
    for (int eight = 0; eight < kStates / 8; ++eight) {
        const float* const four = &S[eight / 16][eight % 16 * 4];
        *reinterpret_cast<float2*>(state + 8 * eight) = make_float2(four[0], four[1]);
        *reinterpret_cast<float2*>(state + 8 * kStates + 8 * eight) = make_float2(four[2], four[3]);
    }
}

template <int kHalves>
__device__ __forceinline__ void clear(float (&S)[kHalves][kHalf / 2]) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int each = 0; each < kHalf / 2; ++each) S[half][each] = 0;
    }
}

// The state before a segment: what is left of the one before each, and what that has learnt, one after the other.
template <int kStates, int kHalves>
__device__ __forceinline__ void begin_segment(float (&S)[kHalves][kHalf / 2], const Mamba2Advance& job,
                                              const Item& item) {
    if (item.segment > 0) {
        load_state<kStates>(S, item.carry_of(job, 0, kStates) + item.row * kStates);
    } else if (item.has_prefix) {
        load_state<kStates>(S, item.before_of(job, kStates) + item.row * kStates);
    } else {
        clear(S);
    }
    for (int number = 1; number < item.segment; ++number) {
        const float* const record = item.carry_of(job, number, kStates);
        const float left = record[job.head * kStates + item.row];
        const float* const learnt = record + item.row * kStates + own_in_state<kStates>();
#pragma unroll
        for (int eight = 0; eight < kStates / 8; ++eight) {
            float* const four = &S[eight / 16][eight % 16 * 4];
            const float2 upper = *reinterpret_cast<const float2*>(learnt + 8 * eight);
            const float2 lower = *reinterpret_cast<const float2*>(learnt + 8 * kStates + 8 * eight);
            four[0] = four[0] * left + upper.x;
            four[1] = four[1] * left + upper.y;
            four[2] = four[2] * left + lower.x;
            four[3] = four[3] * left + lower.y;
        }
    }
}

// Store a checkpoint. The item is read again, so that its registers are free until then.
template <int kStates, int kHalves>
__device__ __forceinline__ void keep(const Mamba2Advance& job, int number, const float (&S)[kHalves][kHalf / 2]) {
    const Item item(job, number, false);
    store_state<kStates>(state_of<kStates>(job, item, item.track_slot), S);
}

// x^T as a left operand: the rows of each warp, of every token.
__device__ __forceinline__ void load_x(u32 (&x)[16], u32 tile) {
    const int lane = own_thread() % kWarp, warp = own_thread() % kGroup / kWarp;
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
        const int token = 16 * step + lane / 16 * 8 + lane % 8;
        u32 four[4];
        ldmatrix_x4_trans(four, tile + swizzled(token, 2 * warp + lane / 8 % 2));
#pragma unroll
        for (int each = 0; each < 4; ++each) x[4 * step + each] = four[each];
    }
}

// what one left operand has of a state, in a thread: as many states as a tile has
constexpr int kQuarter = 16;

template <bool kBf16, int kHalves>
__device__ __forceinline__ void round_quarter(u32 (&rounded)[kQuarter], const float (&S)[kHalves][kHalf / 2],
                                              int number) {
#pragma unroll
    for (int pair = 0; pair < kQuarter; ++pair) {
        const float* const both = &S[number / 2][number % 2 * 2 * kQuarter + 2 * pair];
        rounded[pair] = halves<kBf16>(both[0], both[1]);
    }
}

// o (+)= S C^T of a tile of states
template <bool kBf16>
__device__ __forceinline__ void look_up(float (&o)[32], const u32 (&S)[kQuarter], u32 tile, bool adds) {
    const u64 C = descriptor(tile);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        wgmma_m64n64k16<kBf16, false>(o, &S[4 * step], further(C, step * kAlongRow), adds || step > 0);
    }
    wgmma_commit();
}

// S = exp(G_last) S + (exp(G_last - G) d x)^T B
template <bool kBf16, int kStates, int kHalves>
__device__ __forceinline__ void learn(float (&S)[kHalves][kHalf / 2], u32 tiles, u32 decays) {
    const float whole = shared_float(decays + 4 * kChunk);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int each = 0; each < kHalf / 2; ++each) S[half][each] *= whole;
    }
    wgmma_fence();
    const u64 left = descriptor(tiles + Layout<kStates>::kLearntTile);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        const u64 B = descriptor(tiles + Layout<kStates>::kBTiles + 2 * half * kTile);
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step) {
            wgmma_m64n128k16<kBf16>(S[half], further(left, step * kSixteenRows), further(B, step * kSixteenRows));
        }
    }
    wgmma_commit();
}

// exp(G) of a thread's tokens
__device__ __forceinline__ void load_kept(float2 (&kept)[kEights], u32 decays) {
    const int own_column = 2 * (own_thread() % 4);
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) kept[eight] = shared_pair(decays + 4 * (8 * eight + own_column));
}

// o = exp(G) o + D x
template <bool kBf16>
__device__ __forceinline__ void decay(float (&o)[32], const u32 (&x)[16], float through,
                                      const float2 (&kept)[kEights]) {
#pragma unroll
    for (int pair = 0; pair < 16; ++pair) {
        float* const both = &o[2 * pair];
        both[0] = both[0] * kept[pair / 2].x + widened<kBf16>(u16(x[pair])) * through;
        both[1] = both[1] * kept[pair / 2].y + widened<kBf16>(u16(x[pair] >> 16)) * through;
    }
}

// o += x^T W^T
template <bool kBf16>
__device__ __forceinline__ void add_weighed(float (&o)[32], const u32 (&x)[16], u32 tile) {
    const u64 weights = descriptor(tile);
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step)
        wgmma_m64n64k16<kBf16, false>(o, &x[4 * step], further(weights, step * kAlongRow), true);
    wgmma_commit();
}

// Begin a chunk: o = S C^T. Two quarters of S are rounded, the first one before; a later one takes the place of one
// that has been multiplied.
template <bool kBf16, int kHalves>
__device__ __forceinline__ void look_up_all(float (&o)[32], const float (&S)[kHalves][kHalf / 2],
                                            u32 (&rounded)[2][kQuarter], u32 tiles) {
#pragma unroll
    for (int quarter = 0; quarter < 2 * kHalves; ++quarter) {
        if (quarter > 1) wgmma_wait<1>();
        if (quarter > 0) {
            round_quarter<kBf16>(rounded[quarter % 2], S, quarter);
            pin(rounded[quarter % 2]);
        }
        look_up<kBf16>(o, rounded[quarter % 2], tiles + quarter * kTile, quarter > 0);
    }
}

template <int kLeft>
__device__ __forceinline__ void wait_for(float (&S)[1][kHalf / 2]) {
    wgmma_wait<kLeft>(S[0]);
}
template <int kLeft>
__device__ __forceinline__ void wait_for(float (&S)[2][kHalf / 2]) {
    wgmma_wait<kLeft>(S[0], S[1]);
}

template <bool kBf16>
__device__ __forceinline__ float through_of(const Mamba2Advance& job, int head) {
    return job.flags & kFloatD ? static_cast<const float*>(job.D)[head]
                               : widened<kBf16>(static_cast<const u16*>(job.D)[head]);
}

// Walker. Per chunk, with products on the left and what is computed beside them:
//
//   o = S C^T                           hand back the chunk before's stage, S = exp(G_last) S
//   S += (exp(G_last - G) d x)^T B      o = exp(G) o + D x
//   o += x^T W^T                        round a quarter of S for the next chunk
template <bool kBf16, int kStates>
__device__ __forceinline__ void walk(const Mamba2Advance& job) {
    using At = Layout<kStates>;
    constexpr int kHalves = At::kHalves;
    const u32 memory = shared_memory();
    Pipeline pipe;
    float S[kHalves][kHalf / 2], o[32];
    float2 kept[kEights];
    u32 rounded[2][kQuarter], x[16], right[16];
    const int items = items_of<false>(job);
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        const Item item(job, number, false);
        if (item.begin >= item.stop) continue;
        // no row is there without a slot for it
        const int checkpoint = item.track_slot < 0 ? -1 : item.checkpoint;
        const float through = through_of<kBf16>(job, item.head);
        if (comes_early(job, item, number)) {
            mbarrier_wait(At::weighed(memory, pipe.stage), pipe.phase);
            take_state<kStates>(S, At::tiles(memory, pipe.stage));
            leave_stage(At::empty(memory, pipe.stage));
            pipe.advance(At::kStages);
        } else if (item.segments > 1) {
            begin_segment<kStates>(S, job, item);
        } else if (item.has_prefix) {
            load_state<kStates>(S, state_of<kStates>(job, item, item.slot));
        } else {
            clear(S);
        }
        // the end of a segment is the segment's before
        if (checkpoint == item.start && item.segment == 0) keep<kStates>(job, number, S);
        round_quarter<kBf16>(rounded[0], S, 0);
        u32 tiles = At::tiles(memory, pipe.stage), decays = At::decays(memory, pipe.stage);
        mbarrier_wait(At::weighed(memory, pipe.stage), pipe.phase);
        look_up_all<kBf16>(o, S, rounded, tiles + At::kCTiles);
        for (int first_row = item.begin;; first_row += kChunk) {
            if constexpr (kHalves == 1) load_x(x, tiles + At::kXTile);
            learn<kBf16, kStates>(S, tiles, decays);
            // with two halves there are no registers for it before
            if constexpr (kHalves > 1) load_x(x, tiles + At::kXTile);
            load_kept(kept, decays);
            wgmma_wait<1>(o);
            decay<kBf16>(o, x, through, kept);
            wgmma_fence();
            add_weighed<kBf16>(o, x, tiles + At::kWTile);
            const u32 tiles_before = tiles, empty_before = At::empty(memory, pipe.stage);
            pipe.advance(At::kStages);
            const bool is_last = first_row + kChunk >= item.stop;
            if (!is_last) {
                tiles = At::tiles(memory, pipe.stage);
                decays = At::decays(memory, pipe.stage);
                mbarrier_wait(At::weighed(memory, pipe.stage), pipe.phase);
            }
            wait_for<1>(S);
            round_quarter<kBf16>(rounded[0], S, 0);
            pin(rounded[0]);
            if (checkpoint == first_row + kChunk) keep<kStates>(job, number, S);
            wgmma_wait<0>(o);
            round<kBf16>(right, o);
            leave_output(right, tiles_before + At::kXTile);
            const auto leave = [&] {
                if constexpr (!At::kProducerStores)
                    store_output(job, tiles_before + At::kXTile, first_row, item.end, item.head * job.head + item.row);
                leave_stage(empty_before);
            };
            // ptxas wants a way out on which nothing is in flight
            if (is_last) {
                leave();
                break;
            }
            look_up_all<kBf16>(o, S, rounded, tiles + At::kCTiles);
            leave();
        }
        const Item again(job, number, false);
        if (again.segment == again.segments - 1) store_state<kStates>(state_of<kStates>(job, again, again.slot), S);
    }
}

// Walker of `carry`: the state after each segment, or what it has learnt.
template <bool kBf16, int kStates>
__device__ __forceinline__ void carry_along(const Mamba2Advance& job) {
    using At = Layout<kStates>;
    const u32 memory = shared_memory();
    Pipeline pipe;
    float S[At::kHalves][kHalf / 2];
    const int items = items_of<true>(job);
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        const Item item(job, number, true);
        if (item.begin >= item.stop) continue;
        if (item.segment == 0 && item.has_prefix) {
            load_state<kStates>(S, state_of<kStates>(job, item, item.slot));
            store_state<kStates>(item.before_of(job, kStates) + item.row * kStates, S);
        } else {
            clear(S);
        }
        float left = 1;
        for (int first_row = item.begin; first_row < item.stop; first_row += kChunk) {
            const u32 decays = At::decays(memory, pipe.stage);
            mbarrier_wait(At::weighed(memory, pipe.stage), pipe.phase);
            left *= shared_float(decays + 4 * kChunk);
            learn<kBf16, kStates>(S, At::tiles(memory, pipe.stage), decays);
            wait_for<0>(S);
            leave_stage(At::empty(memory, pipe.stage));
            pipe.advance(At::kStages);
        }
        float* const record = item.carry_of(job, item.segment, kStates);
        store_state<kStates>(record + item.row * kStates, S);
        if (own_thread() % kGroup == 0) record[job.head * kStates + item.row] = left;
    }
}

template <bool kBf16, int kStates, bool kIsCarry>
__device__ __forceinline__ void advance(const Mamba2Advance& job) {
    using At = Layout<kStates>;
    // of the 512 that four threads have at the launch
    constexpr int kProducerRegisters = 56, kScalerRegisters = 64, kWeigherRegisters = 144, kWalkerRegisters = 248;
    static_assert(kProducerRegisters + kScalerRegisters + kWeigherRegisters + kWalkerRegisters == 512, "");
    const u32 memory = shared_memory();
    const int role = threadIdx.x / kGroup;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < At::kStages; ++stage) {
            mbarrier_init(At::full(memory, stage), kGroup);
            // one arrival for each warp, of the weigher and the scaler
            mbarrier_init(At::weighed(memory, stage), (kIsCarry ? 1 : 2) * kGroup / kWarp);
            mbarrier_init(At::empty(memory, stage), kGroup / kWarp);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    // ptxas serialises products if their roles come last
    if (role == 3) {
        setmaxnreg_inc<kWalkerRegisters>();
        if constexpr (kIsCarry) {
            carry_along<kBf16, kStates>(job);
        } else {
            walk<kBf16, kStates>(job);
        }
    } else if (role == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        load<kStates, kIsCarry>(job);
    } else if (role == 1) {
        setmaxnreg_dec<kScalerRegisters>();
        scale<kBf16, kStates, kIsCarry>(job);
    } else {
        setmaxnreg_inc<kWeigherRegisters>();
        if constexpr (!kIsCarry) weigh<kBf16, kStates>(job);
    }
}

// `prepare`: a block is one warpgroup. A work item is the gates of several heads of a chunk; or a tile of its channels,
// a strip of rows for each warp and four channels for each thread; or a part of the tail of zeros. Nothing goes through
// shared memory, and no warp waits for another.

// channels of a thread: halves in 8 bytes
constexpr int kFour = 4;
constexpr int kChannels = kWarp * kFour;
constexpr int kStrip = kChunk / (kGroup / kWarp);
// heads of an item, each with 16 threads of four tokens
constexpr int kFours = kChunk / kFour;
constexpr int kHeads = kGroup / kFours;
// with so many a thread still has registers for a strip's inputs
constexpr int kBlocksOfMultiprocessor = 6;

// Step sizes of a chunk, and the running sums of its gates. All threads have to get here.
template <bool kBf16>
__device__ __forceinline__ void gate(const Mamba2Prepare& job, const Chunk& chunk, int number, int first_head) {
    const int four = threadIdx.x % kFours, head = first_head + threadIdx.x / kFours;
    const bool is_head = head < job.heads;
    float step[kFour], sum[kFour], shift = 0, factor = 0;
    if (is_head) {
        shift = number_at<kBf16>(job.dt_bias, head, job.flags & kFloatDtBias);
        factor = number_at<kBf16>(job.A, head, job.flags & kFloatA) * kLog2E;
    }
    const int first_row = chunk.first_row + kFour * four;
    float total = 0;
#pragma unroll
    for (int each = 0; each < kFour; ++each) {
        step[each] = 0;
        if (is_head && first_row + each < chunk.end) {
            const float x = widened<kBf16>(job.dt[i64(first_row + each) * job.dt_row + head]) + shift;
            const float soft = x <= kSoftplusLinear ? log1pf(expf(x)) : x;
            // not fmaxf and fminf, which drop NaN
            const float enough = soft < job.least_step ? job.least_step : soft;
            step[each] = enough > job.most_step ? job.most_step : enough;
        }
        const float gate = step[each] * factor;
        total += gate < kLeastGate ? kLeastGate : gate;
        sum[each] = total;
    }
#pragma unroll
    for (int distance = 1; distance < kFours; distance *= 2) {
        const float before = __shfl_up_sync(0xffffffffu, total, distance);
        if (four >= distance) total += before;
    }
    // exclusive, by a shuffle: subtracting would round
    float before = __shfl_up_sync(0xffffffffu, total, 1);
    if (four == 0) before = 0;
    if (!is_head) return;
    float4* const to = reinterpret_cast<float4*>(job.gates + (i64(number) * job.heads + head) * kGates) + four;
    to[0] = make_float4(before + sum[0], before + sum[1], before + sum[2], before + sum[3]);
    to[kFours] = make_float4(step[0], step[1], step[2], step[3]);
}

// The inputs of a thread's channels that a convolution at `end` looks back at; a short sequence also takes some from
// its slot.
__device__ __forceinline__ void window_before(u16 (&found)[kPast][kFour], const Mamba2Prepare& job, const Chunk& chunk,
                                              int channel, const u16* own, int end) {
#pragma unroll
    for (int past = 0; past < kPast; ++past) {
        const int row = end - kPast + past;
#pragma unroll
        for (int each = 0; each < kFour; ++each) {
            found[past][each] = 0;
            if (row >= chunk.start) {
                found[past][each] = job.x[i64(row) * job.x_row + channel + each];
            } else if (chunk.has_window) {
                found[past][each] = own[each * job.conv_channel + (kPast + row - chunk.start) * job.conv_past];
            }
        }
    }
}

__device__ __forceinline__ void store_window(const Mamba2Prepare& job, u16* own, const u16 (&window)[kPast][kFour]) {
#pragma unroll
    for (int past = 0; past < kPast; ++past) {
#pragma unroll
        for (int each = 0; each < kFour; ++each) {
            own[each * job.conv_channel + past * job.conv_past] = window[past][each];
        }
    }
}

// In a sequence's first chunk: take a thread's channels of the old window, and write the new one to the pool. No other
// thread reads or writes them.
__device__ __forceinline__ void turn_window(u16 (&window)[kPast][kFour], const Mamba2Prepare& job, const Chunk& chunk,
                                            int channel) {
    u16* const own = job.conv + chunk.slot * job.conv_slot + channel * job.conv_channel;
    u16 after[kPast][kFour];
    // before anything is overwritten
    window_before(window, job, chunk, channel, own, chunk.start);
    if (chunk.track_slot >= 0) {
        window_before(after, job, chunk, channel, own, chunk.start + chunk.track_after);
        store_window(job, own + (chunk.track_slot - chunk.slot) * job.conv_slot, after);
    }
    window_before(after, job, chunk, channel, own, chunk.end);
    store_window(job, own, after);
}

template <bool kBf16>
__device__ __forceinline__ void widen(float (&wide)[kFour], int2 four) {
    wide[0] = widened<kBf16>(u16(four.x));
    wide[1] = widened<kBf16>(u16(u32(four.x) >> 16));
    wide[2] = widened<kBf16>(u16(four.y));
    wide[3] = widened<kBf16>(u16(u32(four.y) >> 16));
}

__device__ __forceinline__ int2 four_at(const u16* numbers) { return __ldg(reinterpret_cast<const int2*>(numbers)); }

// SiLU of the causal convolution of a strip's rows: x to the output, B and C to `mixed`.
template <bool kBf16>
__device__ __forceinline__ void convolve(const Mamba2Prepare& job, const Chunk& chunk, int channel) {
    const int first_row = chunk.first_row + threadIdx.x / kWarp * kStrip;
    const u16* const x = job.x + i64(first_row) * job.x_row + channel;
    float inputs[kWidth][kFour];
    if (first_row == chunk.start) {
        u16 window[kPast][kFour];
        turn_window(window, job, chunk, channel);
#pragma unroll
        for (int number = 0; number < kPast; ++number) {
#pragma unroll
            for (int each = 0; each < kFour; ++each) inputs[number][each] = widened<kBf16>(window[number][each]);
        }
    } else if (first_row >= chunk.end) {
        return;
    } else {
#pragma unroll
        for (int number = 0; number < kPast; ++number) {
            widen<kBf16>(inputs[number], four_at(x + i64(number - kPast) * job.x_row));
        }
    }
    int2 given[kStrip];
#pragma unroll
    for (int number = 0; number < kStrip; ++number) {
        given[number] = make_int2(0, 0);
        if (first_row + number < chunk.end) given[number] = four_at(x + i64(number) * job.x_row);
    }
    // each channel's taps
    float taps[kFour][kWidth], bias[kFour] = {0, 0, 0, 0};
#pragma unroll
    for (int each = 0; each < kFour; ++each) widen<kBf16>(taps[each], four_at(job.weights + (channel + each) * kWidth));
    if (job.bias) widen<kBf16>(bias, four_at(job.bias + channel));
    const bool is_x = channel < job.inner;
    const int row_size = is_x ? job.inner : job.states, past_x = channel - job.inner;
    u16* to =
        is_x ? job.output + i64(first_row) * job.inner + channel
             : job.mixed + (i64(past_x / job.states) * job.capacity + first_row) * job.states + past_x % job.states;
#pragma unroll
    for (int number = 0; number < kStrip; ++number) {
        widen<kBf16>(inputs[(number + kPast) % kWidth], given[number]);
        float mixed[kFour];
#pragma unroll
        for (int each = 0; each < kFour; ++each) {
            mixed[each] = bias[each];
#pragma unroll
            for (int tap = 0; tap < kWidth; ++tap)
                mixed[each] += inputs[(number + tap) % kWidth][each] * taps[each][tap];
            mixed[each] *= one_over(1.0f + power_of_two(-kLog2E * mixed[each]));
        }
        if (first_row + number < chunk.end) {
            *reinterpret_cast<int2*>(to) =
                make_int2(halves<kBf16>(mixed[0], mixed[1]), halves<kBf16>(mixed[2], mixed[3]));
        }
        to += row_size;
    }
}

// The output's rows up to `end` of a strip that no sequence writes.
__device__ __forceinline__ void make_zeros(const Mamba2Prepare& job, int first_row, int end, int channel) {
    first_row += threadIdx.x / kWarp * kStrip;
    for (int row = first_row; row < at_most(first_row + kStrip, end); ++row) {
        *reinterpret_cast<int2*>(job.output + i64(row) * job.inner + channel) = make_int2(0, 0);
    }
}

// Work items: every chunk's gates, then its channels, then the tail of zeros.
template <bool kBf16>
__device__ __forceinline__ void prepare(const Mamba2Prepare& job) {
    const int chunks = at_most(job.counts[0], job.max_chunks), tail = job.counts[1];
    const int of_heads = (job.heads + kHeads - 1) / kHeads, lane = threadIdx.x % kWarp;
    const int of_channels = (job.channels + kChannels - 1) / kChannels;
    const int of_outputs = (job.inner + kChannels - 1) / kChannels;
    int item = blockIdx.x;
    for (; item < chunks * of_heads; item += gridDim.x) {
        const int number = item / of_heads;
        const Chunk chunk(job, number);
        if (chunk.slot >= 0) gate<kBf16>(job, chunk, number, item % of_heads * kHeads);
    }
    for (item -= chunks * of_heads; item < chunks * of_channels; item += gridDim.x) {
        const Chunk chunk(job, item / of_channels);
        const int channel = item % of_channels * kChannels + lane * kFour;
        if (chunk.slot >= 0) {
            if (channel < job.channels) convolve<kBf16>(job, chunk, channel);
        } else if (channel < job.inner) {
            make_zeros(job, chunk.first_row, chunk.end, channel);
        }
    }
    for (item -= chunks * of_channels; item < chunks_of(job.rows_of_output - tail) * of_outputs; item += gridDim.x) {
        const int channel = item % of_outputs * kChannels + lane * kFour;
        if (channel < job.inner) make_zeros(job, tail + item / of_outputs * kChunk, job.rows_of_output, channel);
    }
}

}  // namespace bcg

extern "C" __global__ void __launch_bounds__(bcg::kGroup, bcg::kBlocksOfMultiprocessor)
    bcg_mamba2_prepare_bf16(const __grid_constant__ bcg::Mamba2Prepare job) {
    bcg::prepare<true>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kGroup, bcg::kBlocksOfMultiprocessor)
    bcg_mamba2_prepare_f16(const __grid_constant__ bcg::Mamba2Prepare job) {
    bcg::prepare<false>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_mamba2_carry_128_bf16(const __grid_constant__ bcg::Mamba2Advance job) {
    bcg::advance<true, 128, true>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_mamba2_carry_128_f16(const __grid_constant__ bcg::Mamba2Advance job) {
    bcg::advance<false, 128, true>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_mamba2_carry_256_bf16(const __grid_constant__ bcg::Mamba2Advance job) {
    bcg::advance<true, 256, true>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_mamba2_carry_256_f16(const __grid_constant__ bcg::Mamba2Advance job) {
    bcg::advance<false, 256, true>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_mamba2_advance_128_bf16(const __grid_constant__ bcg::Mamba2Advance job) {
    bcg::advance<true, 128, false>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_mamba2_advance_128_f16(const __grid_constant__ bcg::Mamba2Advance job) {
    bcg::advance<false, 128, false>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_mamba2_advance_256_bf16(const __grid_constant__ bcg::Mamba2Advance job) {
    bcg::advance<true, 256, false>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_mamba2_advance_256_f16(const __grid_constant__ bcg::Mamba2Advance job) {
    bcg::advance<false, 256, false>(job);
}

#endif
