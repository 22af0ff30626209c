// SPDX-License-Identifier: Apache-2.0
// Extend of the gated delta rule, for Hopper: `prepare` and `advance` do what their namesakes in triton.py do, through
// the same scratch; `carry` lets few heads of a long sequence keep all multiprocessors busy. The contract is in
// sglang_bcg_fixes/kernels/gdn_extend.
//
// Per chunk, with G the running sum of the gates from the chunk's first token and S [values, keys] the state before it:
//
//   A[i, j] = beta_i exp(G_i - G_j) k_i.k_j, j < i      T = (I + A)^-1 diag(beta)
//   P[i, j] = exp(G_i - G_j) q_i.k_j, j <= i            r_i = v_i - exp(G_i) S k_i
//   n = T r                                             output_i = exp(G_i) S q_i + sum_j P[i, j] n_j
//   S after = exp(G_last) S + sum_j exp(G_last - G_j) n_j k_j^T
//
// `prepare` makes T and P, and the convolved q, k and v. `advance` walks along each sequence, with values as the rows
// of S, r, n and the output: n = r T^T, output = exp(G) S q^T + n P^T, S += n k.
//
// A block of `advance` has one producer warpgroup, which loads chunk after chunk into a ring in shared memory, and two
// consumer warpgroups, which compute 64 values of a head each. A consumer keeps S in registers for a whole sequence:
// the accumulator of one wgmma is the left operand of the next. Where the grid has a block for each half of a head, the
// second consumer idles and its half is another block's; the results have the same bits.
//
// A long sequence of few heads is cut into segments, and `advance_segments` computes them side by side. A segment is
// affine in the state before it: S after = S M + B. So `carry` walks along each segment but the last, without outputs:
// from zeros, which makes B [values, keys], and from the identity, which makes M [keys, keys]; along the first one from
// the sequence's own state. A consumer of `advance_segments` then begins with its segment's state, by a product for
// each segment between the first and its own.
//
// No host headers: NVRTC compiles this file on the user's machine.
#ifndef BCG_GDN_EXTEND_CUH
#define BCG_GDN_EXTEND_CUH

#include "../linear_extend.cuh"

namespace bcg {

constexpr int kThreads = 3 * kGroup;

constexpr int kKeys = 128;
constexpr int kValues = 128;
// values that one warpgroup computes
constexpr int kPart = 64;
constexpr int kParts = kValues / kPart;
// floats of one chunk and head in `decays`: -exp(G_i), exp(G_last - G_i), exp(G_last); and the bytes that are read
constexpr int kDecays = 3 * kChunk;
constexpr int kDecayBytes = 4 * (2 * kChunk + 4);

// layout of a stage: keys and queries (two tiles each, split along the key dimension), T, P, the values of each part
constexpr int kKeyTiles = 0;
constexpr int kQueryTiles = 2 * kTile;
constexpr int kInverseTile = 4 * kTile;
constexpr int kScoreTile = 5 * kTile;
constexpr int kValueTiles = 6 * kTile;
constexpr int kStagesOfOnePart = 4;
constexpr int kStagesOfTwoParts = 3;
constexpr int kStageOfOnePart = kValueTiles + kTile;
constexpr int kStageOfTwoParts = kValueTiles + 2 * kTile;
constexpr int kBarriers = kStagesOfOnePart * (kStageOfOnePart + kDecayBytes);
constexpr int kSharedBytes = kBarriers + 16 * kStagesOfOnePart;
static_assert(kStagesOfTwoParts * (kStageOfTwoParts + kDecayBytes) <= kBarriers, "the stages overlap the barriers");
static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");

// What `carry` leaves of a segment and head, in floats. First [values, keys]: B, and of a first segment the state after
// it. Then M as tiles in the swizzle, rounded to halves, and behind them what the rounding has dropped, in halves too;
// of a first segment the state before it, which is read after the slot has been overwritten.
constexpr int kStateSize = kValues * kKeys;
constexpr int kCarrySize = 2 * kStateSize;
constexpr int kMapBytes = 4 * kTile;
static_assert(2 * kMapBytes == 4 * kStateSize, "M takes as much as a state");

// Kernel parameters as cuda.py packs them: eight-byte fields first, then four-byte ones. A half is bf16 or f16.
struct GdnAdvance {
    const u16* queries;
    const u16* keys;
    const u16* inverses;
    const u16* scores;
    const float* decays;
    u16* output;
    float* state;
    float* carries;
    const int* sequences;
    const int* counts;
    const int* bounds;
    i64 state_slot;
    int span;
    int first_token;
    int rows_of_output;
    int last_token;
    int capacity;
    int key_heads;
    int value_heads;
    int tracking;
    int segment;

    // of the output
    __device__ __forceinline__ int row_size() const { return value_heads * kValues; }
    __device__ __forceinline__ i64 first_of_row(int row) const { return i64(row) * value_heads * kValues; }
};

// the bits of `flags`
enum Flag : int {
    kTracking = 1,
    kFloatALog = 2,
    kFloatDtBias = 4,
};

struct GdnPrepare {
    const u16* x;
    const u16* a;
    const u16* b;
    const u16* weights;
    const u16* bias;
    const void* A_log;
    const void* dt_bias;
    u16* conv;
    u16* queries;
    u16* keys;
    u16* inverses;
    u16* scores;
    float* decays;
    u16* output;
    const int* chunks;
    const int* counts;
    const int* bounds;
    i64 conv_slot;
    i64 conv_channel;
    i64 conv_past;
    int span;
    int first_token;
    int x_row;
    int a_row;
    int b_row;
    int rows_of_output;
    int last_token;
    int capacity;
    int max_chunks;
    int key_heads;
    int value_heads;
    int flags;

    __device__ __forceinline__ bool is_tracking() const { return flags & kTracking; }
};

// Three kernels walk along sequences: `advance` where none is cut, because it is shorter then; `advance_segments`, and
// `carry` before it.
enum Kernel { kAdvance, kAdvanceSegments, kCarry };

// The number of segments of a sequence. It depends on nothing but the length and how the kernel was launched: a
// sequence has the same bits alone and beside others. With fewer segments `carry` would take as long as they save.
constexpr int kLeastSegments = 4;
template <Kernel kKernel>
__device__ __forceinline__ int segments_of(const GdnAdvance& job, int sequence) {
    if (kKernel == kAdvance) return 1;
    const int* const fields = job.sequences + sequence * kSequenceFields;
    const int tokens = at_most(fields[1], job.rows_of_output) - fields[0];
    return tokens > (kLeastSegments - 1) * job.segment ? (tokens + job.segment - 1) / job.segment : 1;
}

// Matrices of each head of a sequence that a kernel computes: a state for each segment, and `carry` the state after the
// first one, then B and M of those in between.
template <Kernel kKernel>
__device__ __forceinline__ int shares_of(int segments) {
    if (kKernel != kCarry) return segments;
    return segments > 1 ? 2 * segments - 3 : 0;
}

// All that a kernel computes, in matrices of every head. The number of sequences is read on the device, so a captured
// launch serves any.
template <Kernel kKernel>
__device__ __forceinline__ int all_shares(const GdnAdvance& job) {
    const int sequences = job.counts[2];
    int shares = kKernel == kCarry ? 0 : sequences;
    // the longest sequences are first
    for (int sequence = 0; kKernel != kAdvance && sequence < sequences; ++sequence) {
        const int segments = segments_of<kKernel>(job, sequence);
        if (segments == 1) break;
        shares += shares_of<kKernel>(segments) - shares_of<kKernel>(1);
    }
    return shares;
}

// How this block's work is split.
struct Cut {
    u32 memory;
    int parts;
    int stages;
    int stage_bytes;
    int items;

    __device__ __forceinline__ Cut(const GdnAdvance& job, int shares, int most_parts) {
        memory = shared_memory();
        const int halves_of_heads = shares * job.value_heads * kParts;
        // half a head for each block, as long as there are enough blocks
        parts = halves_of_heads > static_cast<int>(gridDim.x) ? most_parts : 1;
        items = halves_of_heads / parts;
        stages = parts == 1 ? kStagesOfOnePart : kStagesOfTwoParts;
        stage_bytes = parts == 1 ? kStageOfOnePart : kStageOfTwoParts;
    }

    __device__ __forceinline__ u32 tiles(int stage) const { return memory + stage * stage_bytes; }
    __device__ __forceinline__ u32 decays(int stage) const {
        return memory + stages * stage_bytes + stage * kDecayBytes;
    }
    __device__ __forceinline__ u32 full(int stage) const { return memory + kBarriers + 16 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return full(stage) + 8; }
};

// Work item: one head of a sequence, or one part of its values, within this span and segment. A span may begin and end
// within a sequence, but not within a chunk; only a sequence that is in one span has segments.
template <Kernel kKernel>
struct Item {
    int start;
    int end;
    int slot;
    int head;
    int part;
    int begin;
    int stop;
    int checkpoint;
    int track_slot;
    int first_chunk;
    int segments;
    int segment;
    // M of the segment, not B
    bool is_map;

    __device__ __forceinline__ Item(const GdnAdvance& job, const Cut& cut, int number) {
        int sequence = 0, share = number / (job.value_heads * (kParts / cut.parts));
        for (;; ++sequence) {
            segments = segments_of<kKernel>(job, sequence);
            // this one and all after it have a share each
            if (segments == 1) break;
            if (share < shares_of<kKernel>(segments)) break;
            share -= shares_of<kKernel>(segments);
        }
        if (segments == 1) {
            sequence += share;
            share = 0;
        }
        segment = kKernel == kCarry ? (share + 1) / 2 : share;
        is_map = kKernel == kCarry && share > 0 && share % 2 == 0;
        const int* const fields = job.sequences + sequence * kSequenceFields;
        start = fields[0];
        end = at_most(fields[1], job.rows_of_output);
        slot = fields[2];
        head = number / (kParts / cut.parts) % job.value_heads;
        part = cut.parts == 1 ? number % kParts : 0;
        if (segments == 1) {
            begin = start + chunks_of(job.first_token - start) * kChunk;
            stop = at_most(start + chunks_of(job.last_token - start) * kChunk, end);
        } else {
            const int tokens = (chunks_of(end - start) + segments - 1) / segments * kChunk;
            begin = start + segment * tokens;
            stop = at_most(begin + tokens, end);
        }
        track_slot = job.tracking ? fields[4] : -1;
        checkpoint = start + at_least(fields[3], 0);
        first_chunk = fields[5] - job.bounds[job.span];
    }

    // The record of one of its segments. Two never share one: segments are at most as long as job.segment.
    __device__ __forceinline__ float* carry_of(const GdnAdvance& job, int number) const {
        return job.carries + (i64(start / job.segment + number) * job.value_heads + head) * kCarrySize;
    }
};

// Store what is left in the ring at the end.
__device__ __forceinline__ void store_rest(const GdnAdvance& job, const Cut& cut, Pipeline& pipe,
                                           Outputs<kStagesOfOnePart>& outputs) {
    for (int stage = 0; stage < kStagesOfOnePart; ++stage) {
        mbarrier_wait(cut.empty(pipe.stage), pipe.phase ^ 1);
        outputs.store_oldest(job, cut.tiles(pipe.stage) + kValueTiles);
        outputs.add(0, 0, 0);
        pipe.advance(kStagesOfOnePart);
    }
}

// Copy M of the segments between the first one and an item's, each in two stages of the ring, which has one part.
__device__ __forceinline__ void load_maps(const GdnAdvance& job, const Cut& cut, const Item<kAdvanceSegments>& item,
                                          Pipeline& pipe, Outputs<kStagesOfOnePart>& outputs) {
    const int thread = threadIdx.x % kGroup;
    for (int number = 2; number < 2 * item.segment; ++number) {
        const float* const maps = item.carry_of(job, number / 2) + kStateSize;
        const auto* const from = reinterpret_cast<const unsigned char*>(maps) + number % 2 * kMapBytes;
        mbarrier_wait(cut.empty(pipe.stage), pipe.phase ^ 1);
        outputs.store_oldest(job, cut.tiles(pipe.stage) + kValueTiles);
        outputs.add(0, 0, 0);
#pragma unroll
        for (int at = 16 * thread; at < kMapBytes; at += 16 * kGroup)
            cp_async_16(cut.tiles(pipe.stage) + at, from + at);
        cp_async_mbarrier_arrive(cut.full(pipe.stage));
        pipe.advance(cut.stages);
    }
}

// Offset of four floats of a state in a stage, swizzled so that a consumer's reads have no bank conflicts.
__device__ __forceinline__ u32 in_state(int row, int four) { return 4 * kKeys * row + 16 * (four ^ (row % 8 * 2)); }

// A block's first state is the consumers' to load, because nothing would hide the way through the ring. Blocks of one
// part have no other one.
__device__ __forceinline__ bool comes_early(const GdnAdvance& job, int number) {
    const u64 places = reinterpret_cast<u64>(job.state) | static_cast<u64>(4 * job.state_slot);
    return number != static_cast<int>(blockIdx.x) && places % 16 == 0;
}

// Copy the state before an item to a stage, beside the items before. None of them writes it, but where sequences share
// a slot, as in a dummy run, whose states nobody reads.
__device__ __forceinline__ void load_early(const GdnAdvance& job, const Cut& cut, const Item<kAdvance>& item,
                                           Pipeline& pipe) {
    constexpr int kFours = kKeys / 4;
    static_assert(4 * kStateSize <= kStageOfTwoParts, "a state does not fit into a stage");
    const float* const state = job.state + item.slot * job.state_slot + i64(item.head) * kStateSize;
    const u32 tiles = cut.tiles(pipe.stage);
    mbarrier_wait(cut.empty(pipe.stage), pipe.phase ^ 1);
#pragma unroll 2
    for (int four = threadIdx.x % kGroup; four < kValues * kFours; four += kGroup)
        cp_async_16(tiles + in_state(four / kFours, four % kFours), state + 4 * four);
    cp_async_mbarrier_arrive(cut.full(pipe.stage));
    pipe.advance(cut.stages);
}

// Producer warpgroup: eight threads copy the 128 bytes of a row, 16 rows at a time.
template <Kernel kKernel>
__device__ __forceinline__ void load(const GdnAdvance& job, const Cut& cut) {
    const int thread = threadIdx.x % kGroup, piece = thread % kPieces, first = thread / kPieces;
    const int group = job.value_heads / job.key_heads;
    Pipeline pipe;
    Outputs<kStagesOfOnePart> outputs;
    for (int number = blockIdx.x; number < cut.items; number += gridDim.x) {
        const Item<kKernel> item(job, cut, number);
        if constexpr (kKernel == kAdvanceSegments) load_maps(job, cut, item, pipe, outputs);
        if constexpr (kKernel == kAdvance) {
            if (item.begin < item.stop && comes_early(job, number)) load_early(job, cut, item, pipe);
        }
        const i64 of_keys = i64(item.head / group) * job.capacity - job.first_token;
        const i64 of_values = i64(item.head) * job.capacity - job.first_token;
        for (int first_row = item.begin; first_row < item.stop; first_row += kChunk) {
            const u32 tiles = cut.tiles(pipe.stage);
            // the parity of the lap before: on the first lap this does not wait
            mbarrier_wait(cut.empty(pipe.stage), pipe.phase ^ 1);
            if (kKernel != kCarry && cut.parts == 1) {
                outputs.store_oldest(job, tiles + kValueTiles);
                outputs.add(first_row, item.end - first_row, item.head * kValues + item.part * kPart);
            }
#pragma unroll
            for (int step = 0; step < kRowSteps; ++step) {
                const int in_chunk = first + step * kRowsAtOnce;
                // past the end repeat the last row: never a neighbour's, and the decays multiply it by zero
                const int row = at_most(first_row + in_chunk, item.end - 1);
                const int lies = swizzled(in_chunk, piece);
                const i64 at_keys = (of_keys + row) * kKeys + piece * 8;
                const i64 at_matrix = (of_values + row) * kChunk + piece * 8;
                const i64 at_values =
                    (i64(row) * job.value_heads + item.head) * kValues + item.part * kPart + piece * 8;
                cp_async_16(tiles + kKeyTiles + lies, job.keys + at_keys);
                cp_async_16(tiles + kKeyTiles + kTile + lies, job.keys + at_keys + kKeys / 2);
                cp_async_16(tiles + kInverseTile + lies, job.inverses + at_matrix);
                if (!item.is_map) {
                    cp_async_16(tiles + kValueTiles + lies, job.output + at_values);
                    if (cut.parts == kParts)
                        cp_async_16(tiles + kValueTiles + kTile + lies, job.output + at_values + kPart);
                }
                if constexpr (kKernel != kCarry) {
                    cp_async_16(tiles + kQueryTiles + lies, job.queries + at_keys);
                    cp_async_16(tiles + kQueryTiles + kTile + lies, job.queries + at_keys + kKeys / 2);
                    cp_async_16(tiles + kScoreTile + lies, job.scores + at_matrix);
                }
            }
            if (thread < kDecayBytes / 16) {
                const int chunk = item.first_chunk + (first_row - item.start) / kChunk;
                const float* decays = job.decays + (i64(chunk) * job.value_heads + item.head) * kDecays;
                cp_async_16(cut.decays(pipe.stage) + 16 * thread, decays + 4 * thread);
            }
            cp_async_mbarrier_arrive(cut.full(pipe.stage));
            pipe.advance(cut.stages);
        }
    }
    if constexpr (kKernel != kCarry) {
        if (cut.parts == 1) store_rest(job, cut, pipe, outputs);
    }
}

__device__ __forceinline__ void load_state(float (&S)[64], const float* state) {
#pragma unroll
    for (int eight = 0; eight < kKeys / 8; ++eight) {
        const float2 upper = *reinterpret_cast<const float2*>(state + 8 * eight);
        const float2 lower = *reinterpret_cast<const float2*>(state + 8 * kKeys + 8 * eight);
        S[4 * eight] = upper.x;
        S[4 * eight + 1] = upper.y;
        S[4 * eight + 2] = lower.x;
        S[4 * eight + 3] = lower.y;
    }
}

// The same of what load_early() has copied.
__device__ __forceinline__ void take_state(float (&S)[64], const Cut& cut, int row, int column, Pipeline& pipe) {
    const u32 first = cut.tiles(pipe.stage) + in_state(row, column / 4) + 4 * (column % 4);
    mbarrier_wait(cut.full(pipe.stage), pipe.phase);
#pragma unroll
    for (int eight = 0; eight < kKeys / 8; ++eight) {
        const u32 upper = first ^ (32 * eight);
        const float2 pairs[2] = {shared_pair(upper), shared_pair(upper + 8 * 4 * kKeys)};
#pragma unroll
        for (int each = 0; each < 4; ++each) S[4 * eight + each] = each % 2 ? pairs[each / 2].y : pairs[each / 2].x;
    }
    leave_stage(cut.empty(pipe.stage));
    pipe.advance(cut.stages);
}

__device__ __forceinline__ void scale(float (&S)[64], float factor) {
#pragma unroll
    for (int each = 0; each < 64; ++each) S[each] *= factor;
}

__device__ __forceinline__ void store_state(float* state, const float (&S)[64]) {
#pragma unroll
    for (int eight = 0; eight < kKeys / 8; ++eight) {
        *reinterpret_cast<float2*>(state + 8 * eight) = make_float2(S[4 * eight], S[4 * eight + 1]);
        *reinterpret_cast<float2*>(state + 8 * kKeys + 8 * eight) = make_float2(S[4 * eight + 2], S[4 * eight + 3]);
    }
}

// n = v T^T, the part of n that does not need the state
template <bool kBf16>
__device__ __forceinline__ void begin_chunk(float (&n)[32], u32 tiles, int of_values) {
    const u64 values = descriptor(tiles + of_values), inverse = descriptor(tiles + kInverseTile);
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
        wgmma_m64n64k16<kBf16, true, false>(n, further(values, step * kSixteenRows), further(inverse, step * kAlongRow),
                                            step > 0);
    }
    wgmma_commit();
}

// d = S k^T or S q^T, for every token of the chunk, or the steps from kBegin to kEnd of it
constexpr int kLookUpSteps = kKeys / 16;
template <bool kBf16, int kBegin = 0, int kEnd = kLookUpSteps>
__device__ __forceinline__ void look_up(float (&d)[32], const u32 (&S)[32], u32 tiles) {
    const u64 all = descriptor(tiles);
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
        const u64 right = further(all, step / 4 * (kTile / 16) + step % 4 * kAlongRow);
        wgmma_m64n64k16<kBf16, false>(d, &S[4 * step], right, step > 0);
    }
    wgmma_commit();
}

// d += left T^T or left P^T; or d = left T^T
template <bool kBf16, bool kAdds = true>
__device__ __forceinline__ void add_product(float (&d)[32], const u32 (&left)[16], u32 tile) {
    const u64 matrix = descriptor(tile);
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step)
        wgmma_m64n64k16<kBf16, false>(d, &left[4 * step], further(matrix, step * kAlongRow), kAdds || step > 0);
    wgmma_commit();
}

// -exp(G) of a thread's tokens
__device__ __forceinline__ void load_decays(float2 (&minus)[kEights], u32 decays) {
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) minus[eight] = shared_pair(decays + 32 * eight);
}

// n -= (exp(G) known) T^T, with known = S k^T: now n = r T^T. Where there are no values, n begins with it.
template <bool kBf16, bool kBegins = false>
__device__ __forceinline__ void correct(float (&n)[32], const float (&known)[32], u32 (&left)[16], u32 tiles,
                                        const float2 (&minus)[kEights]) {
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
        left[2 * eight] = halves<kBf16>(known[4 * eight] * minus[eight].x, known[4 * eight + 1] * minus[eight].y);
        left[2 * eight + 1] =
            halves<kBf16>(known[4 * eight + 2] * minus[eight].x, known[4 * eight + 3] * minus[eight].y);
    }
    wgmma_fence();
    add_product<kBf16, !kBegins>(n, left, tiles + kInverseTile);
}

// S += (exp(G_last - G) n) k
template <bool kBf16>
__device__ __forceinline__ void learn(float (&S)[64], const float (&n)[32], u32 (&left)[16], u32 tiles, u32 decays) {
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
        const float2 to_end = shared_pair(decays + 4 * kChunk + 32 * eight);
        const float* const four = &n[4 * eight];
        left[2 * eight] = halves<kBf16>(four[0] * to_end.x, four[1] * to_end.y);
        left[2 * eight + 1] = halves<kBf16>(four[2] * to_end.x, four[3] * to_end.y);
    }
    wgmma_fence();
    const u64 keys = descriptor(tiles + kKeyTiles);
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
        wgmma_m64n128k16<kBf16>(S, &left[4 * step], further(keys, step * kSixteenRows));
    }
    wgmma_commit();
}

// o *= exp(G)
__device__ __forceinline__ void decay(float (&o)[32], const float2 (&minus)[kEights]) {
#pragma unroll
    for (int each = 0; each < 32; ++each) o[each] *= each % 2 ? -minus[each / 4].y : -minus[each / 4].x;
}

// Offset in a tile of two adjacent columns.
__device__ __forceinline__ u32 pair_of(int row, int column) { return swizzled(row, column / 8) + 2 * (column % 8); }

// d += left M, with M's tiles of one rounding
template <bool kBf16>
__device__ __forceinline__ void add_mapped(float (&d)[64], const u32 (&left)[32], u32 tiles) {
    const u64 map = descriptor(tiles);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
        const u32 down = step / 4 * (2 * kTile / 16) + step % 4 * kSixteenRows;
        wgmma_m64n128k16<kBf16>(d, &left[4 * step], further(map, down));
    }
    wgmma_commit();
}

// S = S M + B of a segment. Both S and M are split in two halves each, which is as good as fp32's product here: the
// product of what both roundings dropped is left out.
template <bool kBf16>
__device__ __forceinline__ void carry_over(float (&S)[64], const float* B, const Cut& cut, Pipeline& pipe) {
    u32 rounded[32], rest[32];
    round<kBf16>(rounded, S);
    round_rest<kBf16>(rest, S, rounded);
    load_state(S, B);
    u32 empty[2];
#pragma unroll
    for (int rounding = 0; rounding < 2; ++rounding) {
        const u32 tiles = cut.tiles(pipe.stage);
        empty[rounding] = cut.empty(pipe.stage);
        mbarrier_wait(cut.full(pipe.stage), pipe.phase);
        fence_proxy_async();
        wgmma_fence();
        add_mapped<kBf16>(S, rounded, tiles);
        if (rounding == 0) add_mapped<kBf16>(S, rest, tiles);
        pipe.advance(cut.stages);
    }
    wgmma_wait<0>(S);
    leave_stage(empty[0]);
    leave_stage(empty[1]);
}

// The state before an item.
template <bool kBf16>
__device__ __forceinline__ void begin_segment(float (&S)[64], const float* state, const Item<kAdvanceSegments>& item,
                                              int in_head, const GdnAdvance& job, const Cut& cut, Pipeline& pipe) {
    if (item.segments == 1) {
        load_state(S, state);
    } else if (item.segment == 0) {
        load_state(S, item.carry_of(job, 0) + kStateSize + in_head);
    } else {
        load_state(S, item.carry_of(job, 0) + in_head);
        for (int before = 1; before < item.segment; ++before) {
            carry_over<kBf16>(S, item.carry_of(job, before) + in_head, cut, pipe);
        }
    }
}

// Store a part's rows of M as load_maps() reads them.
template <bool kBf16>
__device__ __forceinline__ void store_map(const float (&S)[64], unsigned char* tiles) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroup / kWarp;
    u32 rounded[32], rest[32];
    round<kBf16>(rounded, S);
    round_rest<kBf16>(rest, S, rounded);
#pragma unroll
    for (int pair = 0; pair < 32; ++pair) {
        const int row = 16 * warp + lane / 4 + pair % 2 * 8, column = pair / 2 * 8 + 2 * (lane % 4);
        unsigned char* const to = tiles + column / 64 * kTile + pair_of(row, column % 64);
        *reinterpret_cast<u32*>(to) = rounded[pair];
        *reinterpret_cast<u32*>(to + kMapBytes) = rest[pair];
    }
}

// Consumer warpgroup: one part of a head, chunk after chunk. Steady state of chunk t, a wgmma group a line; beside it,
// what the warps do while it and the groups above it, down to the last wait, are in flight:
//
//   look_up(t)          known = S k^T                    leave the output of t - 1 in its stage, free that
//   look_up(t)          o = S q^T, first half
//   -- wgmma_wait<1>: known is there, o in flight
//   correct(t)          n -= (exp(G) known) T^T
//   look_up(t)          o += S q^T, second half          scale S by exp(G_last)
//   -- wgmma_wait<1>: n is there, o in flight
//   learn(t)            S += (exp(G_last - G) n) k       round n to halves, wait for chunk t + 1 in the ring
//   -- wgmma_wait<0>: S and o are there
//   begin_chunk(t + 1)  n = v T^T                        round S to halves, store a checkpoint, scale o by exp(G)
//   add_product(t)      o += n P^T
//   -- wgmma_wait<0>: o and n are there, round the output to halves
//
// S can be scaled beside the look-ups because they read its rounded copy. The queries are looked up in two halves so
// that products are in flight both while known and while n becomes the next left operand. Some release of ptxas
// serialises every product with more in flight over the wait for S, or if the next chunk still reads o. ptxas also
// moves arithmetic past a wait unless there is a branch in between: so S is rounded before the branch of the
// checkpoint.
template <bool kBf16, Kernel kKernel>
__device__ __forceinline__ void compute(const GdnAdvance& job, const Cut& cut, int own_part) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroup / kWarp;
    const int own_row = 16 * warp + lane / 4, own_column = 2 * (lane % 4);
    const int of_values = kValueTiles + own_part * kTile;
    Pipeline pipe;
    float S[64], known[32], n[32], o[32];
    float2 minus[kEights];
    u32 rounded[32], left[16], right[16];
    for (int number = blockIdx.x; number < cut.items; number += gridDim.x) {
        const Item<kKernel> item(job, cut, number);
        if (item.begin >= item.stop) continue;
        const int part = cut.parts == kParts ? own_part : item.part;
        const int in_head = (part * kPart + own_row) * kKeys + own_column;
        float* const state = job.state + item.slot * job.state_slot + i64(item.head) * kStateSize + in_head;
        float* const checkpoint =
            item.track_slot < 0 ? nullptr : state + (item.track_slot - item.slot) * job.state_slot;
        const bool is_last = item.segment == item.segments - 1;
        const int column = item.head * kValues + part * kPart;
        if constexpr (kKernel == kAdvance) {
            if (comes_early(job, number)) {
                take_state(S, cut, own_part * kPart + own_row, own_column, pipe);
            } else {
                load_state(S, state);
            }
        } else {
            begin_segment<kBf16>(S, state, item, in_head, job, cut, pipe);
        }
        // the end of a segment is the segment's before
        if (checkpoint && item.checkpoint == item.begin && item.segment == 0) store_state(checkpoint, S);
        round<kBf16>(rounded, S);
        u32 tiles = cut.tiles(pipe.stage), decays = cut.decays(pipe.stage);
        u32 tiles_before = 0, empty_before = 0;
        mbarrier_wait(cut.full(pipe.stage), pipe.phase);
        fence_proxy_async();
        wgmma_fence();
        begin_chunk<kBf16>(n, tiles, of_values);
        wgmma_wait<0>(n);
        int first_row = item.begin;
        for (;; first_row += kChunk) {
            wgmma_fence();
            look_up<kBf16>(known, rounded, tiles + kKeyTiles);
            wgmma_fence();
            look_up<kBf16, 0, kLookUpSteps / 2>(o, rounded, tiles + kQueryTiles);
            if (empty_before) {
                leave_output(right, tiles_before + of_values);
                if (cut.parts == kParts) {
                    store_output(job, tiles_before + of_values, first_row - kChunk, item.end, column);
                }
                leave_stage(empty_before);
            }
            load_decays(minus, decays + 4 * own_column);
            wgmma_wait<1>(known);
            correct<kBf16>(n, known, left, tiles, minus);
            look_up<kBf16, kLookUpSteps / 2>(o, rounded, tiles + kQueryTiles);
            scale(S, shared_float(decays + 8 * kChunk));
            wgmma_wait<1>(n);
            learn<kBf16>(S, n, left, tiles, decays + 4 * own_column);
            round<kBf16>(right, n);
            tiles_before = tiles;
            empty_before = cut.empty(pipe.stage);
            pipe.advance(cut.stages);
            if (first_row + kChunk >= item.stop) break;
            tiles = cut.tiles(pipe.stage);
            decays = cut.decays(pipe.stage);
            mbarrier_wait(cut.full(pipe.stage), pipe.phase);
            fence_proxy_async();
            wgmma_wait<0>(o, S);
            wgmma_fence();
            begin_chunk<kBf16>(n, tiles, of_values);
            round<kBf16>(rounded, S);
            pin(rounded);
            if (checkpoint && item.checkpoint == first_row + kChunk) store_state(checkpoint, S);
            decay(o, minus);
            wgmma_fence();
            add_product<kBf16>(o, right, tiles_before + kScoreTile);
            wgmma_wait<0>(o, n);
            round<kBf16>(right, o);
        }
        wgmma_wait<0>(o, S);
        decay(o, minus);
        wgmma_fence();
        add_product<kBf16>(o, right, tiles + kScoreTile);
        wgmma_wait<0>(o);
        round<kBf16>(right, o);
        leave_output(right, tiles + of_values);
        if (cut.parts == kParts) store_output(job, tiles + of_values, first_row, item.end, column);
        leave_stage(empty_before);
        if (checkpoint && item.checkpoint == item.stop) store_state(checkpoint, S);
        if (is_last) store_state(state, S);
    }
}

// S, or M where kIsMap, along the chunks of a segment. The next chunk's n = v T^T is in flight beside what ends this
// one.
template <bool kBf16, bool kIsMap>
__device__ __forceinline__ void walk(float (&S)[64], const Item<kCarry>& item, const Cut& cut, Pipeline& pipe,
                                     int of_values, int own_column) {
    float known[32], n[32];
    float2 minus[kEights];
    u32 rounded[32], left[16];
    round<kBf16>(rounded, S);
    u32 tiles = cut.tiles(pipe.stage), decays = cut.decays(pipe.stage);
    mbarrier_wait(cut.full(pipe.stage), pipe.phase);
    fence_proxy_async();
    wgmma_fence();
    if constexpr (!kIsMap) begin_chunk<kBf16>(n, tiles, of_values);
    for (int first_row = item.begin;; first_row += kChunk) {
        wgmma_fence();
        look_up<kBf16>(known, rounded, tiles + kKeyTiles);
        load_decays(minus, decays + 4 * own_column);
        if constexpr (kIsMap) {
            wgmma_wait<0>(known);
        } else {
            wgmma_wait<0>(known, n);
        }
        correct<kBf16, kIsMap>(n, known, left, tiles, minus);
        scale(S, shared_float(decays + 8 * kChunk));
        wgmma_wait<0>(n);
        learn<kBf16>(S, n, left, tiles, decays + 4 * own_column);
        const u32 empty = cut.empty(pipe.stage);
        pipe.advance(cut.stages);
        const bool is_last = first_row + kChunk >= item.stop;
        if (!is_last) {
            tiles = cut.tiles(pipe.stage);
            decays = cut.decays(pipe.stage);
            mbarrier_wait(cut.full(pipe.stage), pipe.phase);
            fence_proxy_async();
        }
        wgmma_wait<0>(S);
        leave_stage(empty);
        if (is_last) break;
        wgmma_fence();
        if constexpr (!kIsMap) begin_chunk<kBf16>(n, tiles, of_values);
        round<kBf16>(rounded, S);
    }
}

// Consumer warpgroup of `carry`: half of the rows of B, M, or the state after a first segment.
template <bool kBf16>
__device__ __forceinline__ void compute_carries(const GdnAdvance& job, const Cut& cut, int own_part) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroup / kWarp;
    const int own_row = 16 * warp + lane / 4, own_column = 2 * (lane % 4);
    const int of_values = kValueTiles + own_part * kTile;
    Pipeline pipe;
    float S[64];
    for (int number = blockIdx.x; number < cut.items; number += gridDim.x) {
        const Item<kCarry> item(job, cut, number);
        const int part = cut.parts == kParts ? own_part : item.part;
        const int in_head = (part * kPart + own_row) * kKeys + own_column;
        float* const carried = item.carry_of(job, item.segment);
        if (item.is_map) {
#pragma unroll
            for (int each = 0; each < 64; ++each) {
                const int row = part * kPart + own_row + each / 2 % 2 * 8,
                          column = own_column + each / 4 * 8 + each % 2;
                S[each] = row == column ? 1.0f : 0.0f;
            }
            walk<kBf16, true>(S, item, cut, pipe, of_values, own_column);
            store_map<kBf16>(S, reinterpret_cast<unsigned char*>(carried + kStateSize) + part * 2 * kTile);
            continue;
        }
        if (item.segment == 0) {
            load_state(S, job.state + item.slot * job.state_slot + i64(item.head) * kStateSize + in_head);
            store_state(carried + kStateSize + in_head, S);
        } else {
#pragma unroll
            for (int each = 0; each < 64; ++each) S[each] = 0;
        }
        walk<kBf16, false>(S, item, cut, pipe, of_values, own_column);
        store_state(carried + in_head, S);
    }
}

template <bool kBf16, Kernel kKernel>
__device__ __forceinline__ void advance(const GdnAdvance& job) {
    // register budget: (40 + 2 * 232) * 128 threads = 64,512, which is the launch's 384 * 168, of the SM's 65,536. The
    // maps' addresses need more in the producer; in `advance` NVRTC 12.6 would spill what a consumer then lacks.
    constexpr int kProducerRegisters = kKernel == kAdvanceSegments ? 56 : 40;
    constexpr int kConsumerRegisters = kKernel == kAdvanceSegments ? 224 : 232;
    // two consumers of segments would spill registers
    const Cut cut(job, all_shares<kKernel>(job), kKernel == kAdvanceSegments ? 1 : kParts);
    const int role = threadIdx.x / kGroup;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < cut.stages; ++stage) {
            mbarrier_init(cut.full(stage), kGroup);
            // one arrival for each consumer warp
            mbarrier_init(cut.empty(stage), cut.parts * (kGroup / kWarp));
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (role == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        load<kKernel>(job, cut);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        if (role > cut.parts) return;
        if constexpr (kKernel == kCarry) {
            compute_carries<kBf16>(job, cut, role - 1);
        } else {
            compute<kBf16, kKernel>(job, cut, role - 1);
        }
    }
}

// `prepare`: a block is one warpgroup. A work item is a chunk's queries and keys of a key head, with the matrices of
// its value heads; or a chunk's values of a value head.

// halves in 16 bytes, 16 bytes in a row, and the rows that one thread walks along
constexpr int kEight = 8;
constexpr int kRowPieces = kKeys / kEight;
constexpr int kStrip = kChunk / (kGroup / kRowPieces);
// rows of it that are computed side by side
constexpr int kAtOnce = kWidth;
// value heads of a key head that are computed side by side
constexpr int kMembers = 2;
// rows of a diagonal block of the triangular system; each thread solves one column by substitution
constexpr int kBlock = 16;
static_assert(kMembers * kChunk == kGroup, "a column for each thread");
// rows of two blocks, whose columns are a warp's
constexpr int kHalf = 2 * kBlock;
static_assert(kHalf == kWarp && 2 * kHalf == kChunk, "two warps for each member");

constexpr float kNormEpsilon = 1e-6f;
// 1 / sqrt(kKeys)
constexpr float kScale = 0.08838834764831845f;

// Shared memory. Where the queries were, each member has its diagonal blocks (fp32), then T; where the keys were, P,
// then what invert() needs; and beside them what is below the diagonal blocks (fp16): the lower half's rows, with the
// upper half's only such block where they have none.
constexpr int kQueriesAt = 0;
constexpr int kKeysAt = 2 * kTile;
constexpr int kScoresAt = kKeysAt;
constexpr int kBelowAt = 4 * kTile;
constexpr int kBelowBytes = kHalf * kRowBytes;
constexpr int kWindowsAt = kBelowAt + kMembers * kBelowBytes;
constexpr int kWindowBytes = 2 * kPast * kKeys;
constexpr int kGatesAt = kWindowsAt + 2 * kWindowBytes;
constexpr int kGainsAt = kGatesAt + 4 * kMembers * kChunk;
constexpr int kSumsAt = kGainsAt + 4 * kMembers * kChunk;
constexpr int kPrepareSharedBytes = kSumsAt + 4 * kGroup / kWarp;
constexpr int kBlocksOfMultiprocessor = 4;
static_assert(kBlocksOfMultiprocessor * (kPrepareSharedBytes + 1024) <= 228 * 1024,
              "more shared memory than an SM has");
constexpr int kBlockBytes = 4 * kBlock * kBlock;

// The inputs that a convolution at `end` looks back at; a short sequence also takes some from its slot.
__device__ __forceinline__ void window_before(u16 (&found)[kPast], const GdnPrepare& job, const Chunk& chunk,
                                              int channel, const u16* own, int end) {
#pragma unroll
    for (int past = 0; past < kPast; ++past) {
        const int row = end - kPast + past;
        found[past] = 0;
        if (row >= chunk.start) {
            found[past] = job.x[i64(row) * job.x_row + channel];
        } else if (chunk.has_window) {
            found[past] = own[(kPast + row - chunk.start) * job.conv_past];
        }
    }
}

// In a sequence's first chunk, a thread for each channel of a head: copy the old window to shared memory and write the
// new one to the pool. No other block reads or writes these channels of the pool.
__device__ __forceinline__ void turn_window(const GdnPrepare& job, const Chunk& chunk, int first_channel, u32 window) {
    const int channel = first_channel + own_thread();
    u16* const own = job.conv + chunk.slot * job.conv_slot + channel * job.conv_channel;
    u16 after[kPast], there[kPast];
#pragma unroll
    for (int past = 0; past < kPast; ++past) {
        const u16 before = chunk.has_window ? own[past * job.conv_past] : u16(0);
        set_shared(window + 2 * (past * kKeys + own_thread()), before);
    }
    window_before(after, job, chunk, channel, own, chunk.end);
    window_before(there, job, chunk, channel, own, chunk.start + at_least(chunk.track_after, 0));
#pragma unroll
    for (int past = 0; past < kPast; ++past) {
        own[past * job.conv_past] = after[past];
        if (chunk.track_slot >= 0) {
            own[(chunk.track_slot - chunk.slot) * job.conv_slot + past * job.conv_past] = there[past];
        }
    }
}

__device__ __forceinline__ int4 piece_of(const u32 (&pairs)[4]) {
    return make_int4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

template <bool kBf16>
__device__ __forceinline__ void widen(float (&wide)[kEight], int4 piece) {
    const int two[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int each = 0; each < kEight; ++each) wide[each] = widened<kBf16>(u16(u32(two[each / 2]) >> 16 * (each % 2)));
}

// A thread's share of a chunk's rows of one head: it walks along eight rows of eight channels.
struct Strip {
    int piece = own_thread() % kRowPieces;
    int first = own_thread() / kRowPieces * kStrip;

    // of its first row in tiles
    __device__ __forceinline__ u32 place(u32 tiles) const {
        return tiles + piece / kPieces * kTile + first * kRowBytes + piece % kPieces * 16;
    }
};

// The place of the n-th row after one whose number in its eight rows has none of the bits of n.
__device__ __forceinline__ u32 rows_on(u32 place, int n) { return (place ^ (16 * n)) + n * kRowBytes; }

// Copy a chunk's inputs of one head to tiles, asynchronously, with zeros past the end; and to the window those before
// it, unless turn_window() does.
__device__ __forceinline__ void fetch(const GdnPrepare& job, const Chunk& chunk, int first_channel, u32 window,
                                      u32 tiles) {
    const Strip strip;
    const int first_row = chunk.first_row + strip.first, past = strip.first / kStrip;
    const u16* const x = job.x + first_channel + strip.piece * kEight;
#pragma unroll
    for (int number = 0; number < kStrip; ++number) {
        const int row = first_row + number;
        cp_async_16_or_zeros(rows_on(strip.place(tiles), number), x + i64(row) * job.x_row, row < chunk.end);
    }
    if (past < kPast && chunk.first_row > chunk.start) {
        cp_async_16_or_zeros(window + 2 * (past * kKeys + strip.piece * kEight),
                             x + i64(chunk.first_row - kPast + past) * job.x_row, true);
    }
}

// SiLU of the causal convolution of a chunk's rows of one head, which fetch() has copied. Queries and keys are
// normalised to length `scale` and replace their inputs; values are stored to `into` with row stride `into_row`. All
// threads have to get here.
template <bool kBf16, bool kIsNormed>
__device__ __forceinline__ void convolve(const GdnPrepare& job, const Chunk& chunk, int first_channel, u32 window,
                                         u16* into, int into_row, float scale, u32 tiles) {
    const Strip strip;
    const int channel = first_channel + strip.piece * kEight;
    // each channel's taps, widened to fp32 at their use
    int4 taps[kWidth], bias = make_int4(0, 0, 0, 0);
#pragma unroll
    for (int part = 0; part < kWidth; ++part) {
        taps[part] = __ldg(reinterpret_cast<const int4*>(job.weights + channel * kWidth) + part);
    }
    if (job.bias) bias = __ldg(reinterpret_cast<const int4*>(job.bias + channel));
    const int first_row = chunk.first_row + strip.first, count = chunk.end - first_row;
    u32 place = strip.place(tiles);
    u16* to = into + i64(first_row) * into_row + strip.piece * kEight;
    float inputs[kWidth][kEight], first[kEight];
    widen<kBf16>(first, bias);
    cp_async_wait_all();
    __syncthreads();
#pragma unroll
    for (int number = 0; number < kPast; ++number) {
        const u32 above = rows_on(place - kEightRows, kStrip - kPast + number);
        const u32 before = window + 2 * (number * kKeys + strip.piece * kEight);
        widen<kBf16>(inputs[number], shared_piece(strip.first > 0 ? above : before));
    }
    // the rows above are other threads', who replace them
    if (kIsNormed) __syncthreads();
#pragma unroll 1
    for (int in_strip = 0; in_strip < kStrip;) {
        int4 now[kAtOnce];
#pragma unroll
        for (int number = 0; number < kAtOnce; ++number) now[number] = shared_piece(rows_on(place, number));
#pragma unroll
        for (int number = 0; number < kAtOnce; ++number, ++in_strip) {
            widen<kBf16>(inputs[(number + kPast) % kWidth], now[number]);
            float mixed[kEight], squares = 0, factor = 1;
#pragma unroll
            for (int each = 0; each < kEight; ++each) mixed[each] = first[each];
#pragma unroll
            for (int part = 0; part < kWidth; ++part) {
                float of_two[kEight];
                widen<kBf16>(of_two, taps[part]);
#pragma unroll
                for (int each = 0; each < kEight; ++each) {
                    mixed[2 * part + each / kWidth] +=
                        inputs[(number + each) % kWidth][2 * part + each / kWidth] * of_two[each];
                }
            }
#pragma unroll
            for (int each = 0; each < kEight; ++each) {
                mixed[each] *= one_over(1.0f + power_of_two(-kLog2E * mixed[each]));
                squares += mixed[each] * mixed[each];
            }
            if (kIsNormed) {
#pragma unroll
                for (int distance = kRowPieces / 2; distance; distance /= 2) {
                    squares += __shfl_xor_sync(0xffffffffu, squares, distance);
                }
                factor = scale * rsqrtf(squares + kNormEpsilon);
            }
            int two[4];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                two[pair] = halves<kBf16>(mixed[2 * pair] * factor, mixed[2 * pair + 1] * factor);
            }
            const int4 made = make_int4(two[0], two[1], two[2], two[3]);
            if (kIsNormed) {
                set_shared(rows_on(place, number), made);
            } else {
                set_global_if(in_strip < count, to, made);
                to += into_row;
            }
        }
        place = rows_on(place, kAtOnce);
    }
}

// Gates (as running sums, base 2) and gains of two heads, a token for each thread, and the decays that `advance` reads.
// All threads have to get here.
template <bool kBf16>
__device__ __forceinline__ void gate(const GdnPrepare& job, const Chunk& chunk, int number, int first_head, int heads,
                                     u32 memory) {
    const int member = own_thread() / kChunk, token = own_thread() % kChunk, lane = own_thread() % kWarp;
    const int warp = own_thread() / kWarp, row = chunk.first_row + token;
    const bool is_head = member < heads, is_real = is_head && row < chunk.end;
    const int head = first_head + (is_head ? member : 0);
    float sum = 0, gain = 0;
    if (is_real) {
        const float x = widened<kBf16>(job.a[i64(row) * job.a_row + head]) +
                        number_at<kBf16>(job.dt_bias, head, job.flags & kFloatDtBias);
        const float soft = x <= kSoftplusLinear ? log1pf(expf(x)) : x;
        sum = -expf(number_at<kBf16>(job.A_log, head, job.flags & kFloatALog)) * soft * kLog2E;
        // not fmaxf, which drops NaN
        sum = sum < kLeastGate ? kLeastGate : sum;
        gain = one_over(1.0f + power_of_two(-kLog2E * widened<kBf16>(job.b[i64(row) * job.b_row + head])));
    }
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
        const float before = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += before;
    }
    if (lane == kWarp - 1) set_shared(memory + kSumsAt + 4 * warp, sum);
    __syncthreads();
    const float first_half = shared_float(memory + kSumsAt + 4 * (2 * member));
    const float last = first_half + shared_float(memory + kSumsAt + 4 * (2 * member + 1));
    if (token >= kWarp) sum = first_half + sum;
    set_shared(memory + kGatesAt + 4 * own_thread(), sum);
    set_shared(memory + kGainsAt + 4 * own_thread(), gain);
    if (is_head) {
        float* const decays = job.decays + (i64(number) * job.value_heads + head) * kDecays;
        // rounding may leave the whole sum a little above a partial one
        const float rest = last - sum;
        decays[token] = -power_of_two(sum);
        decays[kChunk + token] = is_real ? power_of_two(rest > 0.0f ? 0.0f : rest) : 0.0f;
        if (token == 0) decays[2 * kChunk] = power_of_two(last);
    }
}

// Offset of an element of a diagonal block, which lies column by column; groups of four in two columns are swizzled to
// avoid bank conflicts.
__device__ __forceinline__ u32 in_block(int row, int column) {
    return 4 * (column / 2 * 2 * kBlock + ((column % 2 * 4 + row / 4) ^ (column / 2 % 4 * 2)) * 4 + row % 4);
}

// A 16x16 block of a tile, for stmatrix_x4 and ldmatrix_x4, from a lane's address in the tile's first one: from one
// block to another, the swizzle changes nothing but two bits.
__device__ __forceinline__ u32 in_first_block() { return swizzled(own_thread() % 16, own_thread() % kWarp / 16); }
__device__ __forceinline__ u32 block_at(u32 in_first, int row, int column) {
    return (in_first + row * kBlock * kRowBytes) ^ (32 * column);
}

// Copy a member's tile to its rows of the scratch.
__device__ __forceinline__ void store_rows(const GdnPrepare& job, const Chunk& chunk, u16* rows, int head, u32 tile) {
    const int piece = own_thread() % kPieces, first = own_thread() / kPieces;
    const i64 of_head = i64(head) * job.capacity - job.first_token;
    u16* const to = rows + (of_head + chunk.first_row + first) * kChunk + piece * kEight;
    const int count = chunk.end - chunk.first_row - first;
    const u32 from = tile + swizzled(first, piece);
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) {
        const int down = step * kRowsAtOnce;
        set_global_if(down < count, to + down * kChunk, shared_piece(from + down * kRowBytes));
    }
}

// From k k^T and q k^T: P, and the triangular system A, cut in blocks. A warp has the rows of one of them.
template <bool kBf16>
__device__ __forceinline__ void weigh(const float (&kk)[32], const float (&qk)[32], int member, u32 memory) {
    const int lane = own_thread() % kWarp, warp = own_thread() / kWarp;
    const int own_row = lane / 4, own_column = 2 * (lane % 4);
    const u32 gates = memory + kGatesAt + 4 * member * kChunk, gains = memory + kGainsAt + 4 * member * kChunk;
    const u32 given = in_first_block();
    const u32 scores = memory + kScoresAt + member * kTile + given;
    const u32 below = memory + kBelowAt + member * kBelowBytes + given;
    const u32 own_block = memory + kQueriesAt + (member * kChunk / kBlock + warp) * kBlockBytes;
    const u32 in_own_block = own_block + in_block(own_row, own_column);
    float gate[2], gain[2];
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        gate[lower] = shared_float(gates + 4 * (kBlock * warp + own_row + 8 * lower));
        gain[lower] = shared_float(gains + 4 * (kBlock * warp + own_row + 8 * lower));
    }
#pragma unroll
    for (int block = 0; block < kChunk / kBlock; ++block) {
        if (block > warp) {
            stmatrix_x4(block_at(scores, warp, block), 0, 0, 0, 0);
            continue;
        }
        u32 of_scores[4], of_below[4];
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int right = part / 2, lower = part % 2, at = 8 * block + 4 * right + 2 * lower;
            const int row = own_row + 8 * lower, column = own_column + 8 * right;
            const float2 earlier = shared_pair(gates + 4 * (kBlock * block + column));
            const float first = block < warp || column <= row ? power_of_two(gate[lower] - earlier.x) : 0.0f;
            const float second = block < warp || column + 1 <= row ? power_of_two(gate[lower] - earlier.y) : 0.0f;
            of_scores[part] = halves<kBf16>(qk[at] * first, qk[at + 1] * second);
            const float2 pair = make_float2(kk[at] * first * gain[lower], kk[at + 1] * second * gain[lower]);
            of_below[part] = halves<false>(pair.x, pair.y);
            if (block == warp) {
                // only the part below a block's diagonal is ever read
                const u32 to = (in_own_block + 8 * right * 4 * kBlock) ^ (32 * lower);
                set_shared(to, pair.x);
                set_shared(to ^ (4 * kBlock), pair.y);
            }
        }
        stmatrix_x4(block_at(scores, warp, block), of_scores[0], of_scores[1], of_scores[2], of_scores[3]);
        if (block < warp) {
            const u32 to = warp == 1 ? block_at(below, 0, 3) : block_at(below, warp - 2, block);
            stmatrix_x4(to, of_below[0], of_below[1], of_below[2], of_below[3]);
        }
    }
}

// One column of (I + A)^-1 of a diagonal block, by substitution in fp32. What is solved is subtracted from all later
// rows at once, so none of them waits for another.
__device__ __forceinline__ void substitute(float (&solved)[kBlock], int column, u32 block) {
#pragma unroll
    for (int row = 0; row < kBlock; ++row) solved[row] = row == column ? 1.0f : 0.0f;
#pragma unroll
    for (int earlier = 0; earlier < kBlock - 1; ++earlier) {
#pragma unroll
        for (int four = (earlier + 1) / 4; four < kBlock / 4; ++four) {
            const float4 found = shared_four(block + in_block(4 * four, earlier));
            const float of_rows[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
            for (int each = 0; each < 4; ++each) {
                const int row = 4 * four + each;
                if (row > earlier) solved[row] -= of_rows[each] * solved[earlier];
            }
        }
    }
}

// `invert` makes T of two heads, from the blocks of the system. A warp has a half of a member: two diagonal blocks,
// whose inverses are D1 and D2, and A between them. The half's inverse is D1 and D2, and -D2 A D1 below D1; of two
// halves' inverses H1 and H2, and the A between them, the whole is H1 and H2, and -H2 A H1 below H1. Entries of an
// inverse are k_i.(contractions) k_j, so at most 1, and fp16 rounds them as finely as tf32 would.
//
// The tile where a member's keys were has the columns of the inverse as rows. A row's half with its own two blocks is
// that inverse; the other half, which no product needs, hands T's columns over to the lanes that have its rows.

__device__ __forceinline__ u32 in_own_half(u32 in_first, int half, int row, int column) {
    return block_at(in_first, 2 * half + row, 2 * half + column);
}

// Leave a solved column of a diagonal block, and the same of T.
template <bool kBf16>
__device__ __forceinline__ void leave_column(const float (&solved)[kBlock], float gain, int column, u32 inverse) {
    const int block = column / kBlock, free = 4 * (1 - column / kHalf);
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
        u32 of_inverse[4], of_T[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float first = solved[8 * eight + 2 * pair], second = solved[8 * eight + 2 * pair + 1];
            of_inverse[pair] = halves<false>(first, second);
            of_T[pair] = halves<kBf16>(first * gain, second * gain);
        }
        set_shared(inverse + swizzled(column, 2 * block + eight), piece_of(of_inverse));
        set_shared(inverse + swizzled(column, free + eight), piece_of(of_T));
        // a half is zero above its second block
        const int4 zeros = make_int4(0, 0, 0, 0);
        if (block % 2 == 1) set_shared(inverse + swizzled(column, 2 * (block - 1) + eight), zeros);
    }
}

// Load a 16x16 block, transposed.
__device__ __forceinline__ void load_turned(u32 (&found)[4], u32 from) {
    u32 matrices[4];
    ldmatrix_x4_trans(matrices, from);
    found[0] = matrices[0];
    found[1] = matrices[2];
    found[2] = matrices[1];
    found[3] = matrices[3];
}

// product = left right of 16x16 blocks, in two eights of columns. The right operand has its columns as rows.
__device__ __forceinline__ void multiply_blocks(float (&product)[2][4], const u32 (&left)[4], const u32 (&right)[4]) {
    mma_m16n8k16(product[0], left, right[0], right[2]);
    mma_m16n8k16(product[1], left, right[1], right[3]);
}

// Complete a half's inverse, and T in that half's rows. `below` is the half's block of A; all but gains are lanes'
// addresses in a first block.
template <bool kBf16>
__device__ __forceinline__ void join_blocks(u32 inverse, u32 T, u32 below, u32 gains, int half) {
    u32 left[4], right[4];
    float product[2][4];
    load_turned(left, in_own_half(inverse, half, 1, 1));
    load_turned(right, below);
    multiply_blocks(product, left, right);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const float* const pair = &product[part / 2][part % 2 * 2];
        left[part] = halves<false>(-pair[0], -pair[1]);
    }
    ldmatrix_x4(right, in_own_half(inverse, half, 0, 0));
    multiply_blocks(product, left, right);
    u32 of_inverse[4], of_T[4];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const float* const pair = &product[part / 2][part % 2 * 2];
        const float2 gain = shared_pair(gains + 4 * (half * kHalf + part / 2 * 8));
        of_inverse[part] = halves<false>(pair[0], pair[1]);
        of_T[part] = halves<kBf16>(pair[0] * gain.x, pair[1] * gain.y);
    }
    stmatrix_x4_trans(in_own_half(inverse, half, 0, 1), of_inverse[0], of_inverse[2], of_inverse[1], of_inverse[3]);
    stmatrix_x4(in_own_half(T, half, 1, 0), of_T[0], of_T[1], of_T[2], of_T[3]);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
        u32 turned[4];
        load_turned(turned, block_at(inverse, 2 * half + block, 2 * (1 - half)));
        stmatrix_x4(in_own_half(T, half, block, block), turned[0], turned[1], turned[2], turned[3]);
        // T is zero above its diagonal blocks, and a warp of each half clears a row of those right of both
        stmatrix_x4(block_at(T, half, 2 + block), 0, 0, 0, 0);
    }
    stmatrix_x4(in_own_half(T, half, 0, 1), 0, 0, 0, 0);
}

// Complete T of both members below their upper halves.
template <bool kBf16>
__device__ __forceinline__ void join_halves(u32 memory) {
    const int lane = own_thread() % kWarp, warp = own_thread() / kWarp;
    float product[kMembers][32];
    u32 left[kMembers][8];
    // columns right of the upper half, and rows above the lower one, are never read
    wgmma_fence();
#pragma unroll
    for (int member = 0; member < kMembers; ++member) {
        const u64 inverse = descriptor(memory + kKeysAt + member * kTile);
        const u64 below = descriptor(memory + kBelowAt + member * kBelowBytes);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            wgmma_m64n64k16<false, true, true>(product[member], further(inverse, (step + 2) * kSixteenRows),
                                               further(below, step * kSixteenRows), step > 0);
        }
    }
    wgmma_commit();
    wgmma_wait<0>(product[0], product[1]);
#pragma unroll
    for (int member = 0; member < kMembers; ++member) {
#pragma unroll
        for (int pair = 0; pair < 8; ++pair) {
            left[member][pair] = halves<false>(-product[member][2 * pair], -product[member][2 * pair + 1]);
        }
    }
    wgmma_fence();
#pragma unroll
    for (int member = 0; member < kMembers; ++member) {
        const u64 inverse = descriptor(memory + kKeysAt + member * kTile);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            wgmma_m64n64k16<false, false>(product[member], &left[member][4 * step], further(inverse, step * kAlongRow),
                                          step > 0);
        }
    }
    wgmma_commit();
    wgmma_wait<0>(product[0], product[1]);
    if (warp * kBlock < kHalf) return;
#pragma unroll
    for (int member = 0; member < kMembers; ++member) {
        const u32 T = memory + kQueriesAt + member * kTile + in_first_block();
        const u32 gains = memory + kGainsAt + 4 * (member * kChunk + 2 * (lane % 4));
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            u32 of_T[4];
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const float* const pair = &product[member][8 * block + 2 * part];
                const float2 gain = shared_pair(gains + 4 * (block * kBlock + part / 2 * 8));
                of_T[part] = halves<kBf16>(pair[0] * gain.x, pair[1] * gain.y);
            }
            stmatrix_x4(block_at(T, warp, block), of_T[0], of_T[1], of_T[2], of_T[3]);
        }
    }
}

// All threads have to get here.
template <bool kBf16>
__device__ __forceinline__ void invert(u32 memory) {
    const int member = own_thread() / kChunk, column = own_thread() % kChunk, half = own_thread() / kHalf % 2;
    const u32 inverse = memory + kKeysAt + member * kTile, T = memory + kQueriesAt + member * kTile;
    const u32 below = memory + kBelowAt + member * kBelowBytes, gains = memory + kGainsAt;
    const float own_gain = shared_float(gains + 4 * own_thread());
    float solved[kBlock];
    substitute(solved, column % kBlock, memory + kQueriesAt + own_thread() / kBlock * kBlockBytes);
    // all blocks and P have been read
    __syncthreads();
    leave_column<kBf16>(solved, own_gain, column, inverse);
    __syncwarp();
    const u32 given = in_first_block();
    join_blocks<kBf16>(inverse + given, T + given, block_at(below + given, half, 3 - half),
                       gains + 4 * (member * kChunk + 2 * (own_thread() % 4)), half);
    fence_proxy_async();
    __syncthreads();
    join_halves<kBf16>(memory);
}

// Copy queries or keys from their tiles to their rows of the scratch.
__device__ __forceinline__ void store_tiles(const Chunk& chunk, u16* rows, u32 tiles) {
    const int piece = own_thread() % kRowPieces, first = own_thread() / kRowPieces;
    u16* const to = rows + i64(chunk.first_row + first) * kKeys + piece * kEight;
    const int count = chunk.end - chunk.first_row - first;
    const u32 from = tiles + piece / kPieces * kTile + swizzled(first, piece % kPieces);
#pragma unroll
    for (int step = 0; step < kStrip; ++step) {
        const int down = step * (kGroup / kRowPieces);
        set_global_if(down < count, to + down * kKeys, shared_piece(from + down * kRowBytes));
    }
}

// Reload what store_tiles() has stored; zeros past the chunk's end, which change no earlier row.
__device__ __forceinline__ void load_tiles(const Chunk& chunk, const u16* rows, u32 tiles) {
    const int piece = own_thread() % kRowPieces;
    for (int in_chunk = own_thread() / kRowPieces; in_chunk < kChunk; in_chunk += kGroup / kRowPieces) {
        const int row = chunk.first_row + in_chunk;
        int4 found = make_int4(0, 0, 0, 0);
        if (row < chunk.end) found = *reinterpret_cast<const int4*>(rows + i64(row) * kKeys + piece * kEight);
        set_shared(tiles + piece / kPieces * kTile + swizzled(in_chunk, piece % kPieces), found);
    }
}

// d = left right^T
template <bool kBf16>
__device__ __forceinline__ void multiply_tiles(float (&d)[32], u32 left, u32 right) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
        const u32 along = step / 4 * (kTile / 16) + step % 4 * kAlongRow;
        wgmma_m64n64k16<kBf16, false, false>(d, further(descriptor(left), along), further(descriptor(right), along),
                                             step > 0);
    }
    wgmma_commit();
}

// A chunk's queries and keys of one key head, and T and P of its value heads.
template <bool kBf16>
__device__ __forceinline__ void make_matrices(const GdnPrepare& job, int number, int key_head, u32 memory) {
    const Chunk chunk(job, job.bounds[job.span] + number);
    if (chunk.slot < 0) return;
    const int of_queries = key_head * kKeys, of_keys = (job.key_heads + key_head) * kKeys;
    const int group = job.value_heads / job.key_heads;
    const u32 queries = memory + kQueriesAt, keys = memory + kKeysAt, windows = memory + kWindowsAt;
    const i64 of_head = (i64(key_head) * job.capacity - job.first_token) * kKeys;
    fetch(job, chunk, of_queries, windows, queries);
    fetch(job, chunk, of_keys, windows + kWindowBytes, keys);
    if (chunk.first_row == chunk.start) {
        turn_window(job, chunk, of_queries, windows);
        turn_window(job, chunk, of_keys, windows + kWindowBytes);
    }
    gate<kBf16>(job, chunk, number, key_head * group, at_most(group, kMembers), memory);
    // one copy of the code for both
#pragma unroll 1
    for (int is_keys = 0; is_keys < 2; ++is_keys) {
        const int channel = is_keys ? of_keys : of_queries;
        convolve<kBf16, true>(job, chunk, channel, windows + is_keys * kWindowBytes, nullptr, 0,
                              is_keys ? 1.0f : kScale, is_keys ? keys : queries);
    }
    for (int first = 0; first < group; first += kMembers) {
        const int heads = at_most(group - first, kMembers), head = key_head * group + first;
        if (first > 0) {
            // the heads before have overwritten them
            load_tiles(chunk, job.queries + of_head, queries);
            load_tiles(chunk, job.keys + of_head, keys);
            gate<kBf16>(job, chunk, number, head, heads, memory);
        }
        fence_proxy_async();
        __syncthreads();
        float kk[32], qk[32];
        wgmma_fence();
        multiply_tiles<kBf16>(kk, keys, keys);
        multiply_tiles<kBf16>(qk, queries, keys);
        if (first == 0) {
            store_tiles(chunk, job.queries + of_head, queries);
            store_tiles(chunk, job.keys + of_head, keys);
        }
        wgmma_wait<0>(kk, qk);
        // the tiles are written next
        __syncthreads();
        for (int member = 0; member < heads; ++member) weigh<kBf16>(kk, qk, member, memory);
        __syncthreads();
        for (int member = 0; member < heads; ++member) {
            store_rows(job, chunk, job.scores, head + member, memory + kScoresAt + member * kTile);
        }
        invert<kBf16>(memory);
        __syncthreads();
        for (int member = 0; member < heads; ++member) {
            store_rows(job, chunk, job.inverses, head + member, memory + kQueriesAt + member * kTile);
        }
        __syncthreads();
    }
}

// A chunk's values of one head, stored where its output will be: the reader overwrites them.
template <bool kBf16>
__device__ __forceinline__ void make_values(const GdnPrepare& job, const Chunk& chunk, int head, u32 memory) {
    const int first_channel = (2 * job.key_heads) * kKeys + head * kValues;
    const u32 window = memory + kWindowsAt;
    fetch(job, chunk, first_channel, window, memory);
    if (chunk.first_row == chunk.start) turn_window(job, chunk, first_channel, window);
    convolve<kBf16, false>(job, chunk, first_channel, window, job.output + head * kValues, job.value_heads * kValues,
                           1.0f, memory);
    // the next item reuses the inputs' place
    __syncthreads();
}

__device__ __forceinline__ void make_zeros(const GdnPrepare& job, int first_row, int end, int head) {
    const int piece = own_thread() % kRowPieces;
    for (int row = first_row + own_thread() / kRowPieces; row < at_most(first_row + kChunk, end);
         row += kGroup / kRowPieces) {
        u16* const to = job.output + (i64(row) * job.value_heads + head) * kValues + piece * kEight;
        *reinterpret_cast<int4*>(to) = make_int4(0, 0, 0, 0);
    }
}

// Work items: every chunk's matrices by key head, then its values by value head, then the tail of zeros.
template <bool kBf16>
__device__ __forceinline__ void prepare(const GdnPrepare& job) {
    const u32 memory = shared_memory();
    const int first_chunk = job.bounds[job.span];
    const int chunks = at_most(job.bounds[job.span + 1] - first_chunk, job.max_chunks);
    int item = blockIdx.x;
    for (; item < chunks * job.key_heads; item += gridDim.x) {
        make_matrices<kBf16>(job, item / job.key_heads, item % job.key_heads, memory);
    }
    for (item -= chunks * job.key_heads; item < chunks * job.value_heads; item += gridDim.x) {
        const int number = item / job.value_heads, head = item % job.value_heads;
        const Chunk chunk(job, first_chunk + number);
        if (chunk.slot >= 0) {
            make_values<kBf16>(job, chunk, head, memory);
        } else {
            make_zeros(job, chunk.first_row, chunk.end, head);
        }
    }
    // rows of this span past the last token
    const int tail = at_least(job.counts[1], job.first_token), tail_chunks = chunks_of(job.last_token - tail);
    for (item -= chunks * job.value_heads; item < tail_chunks * job.value_heads; item += gridDim.x) {
        make_zeros(job, tail + item / job.value_heads * kChunk, job.last_token, item % job.value_heads);
    }
}

}  // namespace bcg

extern "C" __global__ void __launch_bounds__(bcg::kGroup, bcg::kBlocksOfMultiprocessor)
    bcg_gdn_prepare_bf16(const __grid_constant__ bcg::GdnPrepare job) {
    bcg::prepare<true>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kGroup, bcg::kBlocksOfMultiprocessor)
    bcg_gdn_prepare_f16(const __grid_constant__ bcg::GdnPrepare job) {
    bcg::prepare<false>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_gdn_advance_bf16(const __grid_constant__ bcg::GdnAdvance job) {
    bcg::advance<true, bcg::kAdvance>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_gdn_advance_f16(const __grid_constant__ bcg::GdnAdvance job) {
    bcg::advance<false, bcg::kAdvance>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_gdn_advance_segments_bf16(const __grid_constant__ bcg::GdnAdvance job) {
    bcg::advance<true, bcg::kAdvanceSegments>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_gdn_advance_segments_f16(const __grid_constant__ bcg::GdnAdvance job) {
    bcg::advance<false, bcg::kAdvanceSegments>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_gdn_carry_bf16(const __grid_constant__ bcg::GdnAdvance job) {
    bcg::advance<true, bcg::kCarry>(job);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads, 1)
    bcg_gdn_carry_f16(const __grid_constant__ bcg::GdnAdvance job) {
    bcg::advance<false, bcg::kCarry>(job);
}

#endif
