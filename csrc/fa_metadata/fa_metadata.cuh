// SPDX-License-Identifier: Apache-2.0
// FlashAttention's metadata: four kernels, one launch each. The contract is in sglang_bcg_fixes/kernels/fa_metadata.
//
// Grids depend on shapes, never on values, so a captured launch is right for other lengths. No host headers:
// NVRTC compiles this file on the user's machine.
#ifndef BCG_FA_METADATA_CUH
#define BCG_FA_METADATA_CUH

namespace bcg {

using i64 = long long;

// small blocks: each costs 1.5 ns on an H200, and wide tables with short rows have many idle ones
constexpr int kThreads = 128;
constexpr int kVerifyThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
// loads in flight per thread
constexpr int kInFlight = 4;
// the same for 16 bytes of slots, which four loads from the window's mapping follow
constexpr int kTranslatedInFlight = 2;
// the same for flags, which are bytes
constexpr int kFlagsInFlight = 8;
// lengths summed per thread
constexpr int kItems = 8;

// bits of `flags`: the index tensors that are i64, and options
enum Flag : int {
    kWideSeqLens = 1,
    kWideReqPoolIndices = 2,
    kWideRowStart = 4,
    kWideExtendLens = 8,
    kWideOutCacheLoc = 16,
    kDropLast = 32,
    kZeroTail = 64,
};

// Kernel parameters as cuda.py packs them: eight-byte fields first, then four-byte ones. A null pointer is the
// contract's None; strides count elements.
struct FaMetadata {
    const void* seq_lens;
    const void* req_pool_indices;
    const int* req_to_token;
    const void* row_start;
    const void* extend_lens;
    const i64* mapping;
    const void* out_cache_loc;
    int* cache_seqlens;
    int* cu_seqlens_k;
    int* cu_seqlens_q;
    int* page_table;
    int* swa_page_table;
    i64* swa_out_cache_loc;
    i64 req_to_token_stride;
    i64 page_table_stride;
    i64 swa_page_table_stride;
    int req_to_token_width;
    int width;
    int bs;
    int page_shift;
    int delta;
    int q_stride;
    int new_tokens;
    int swa_out_length;
    // split of the grid: 1 or 0 blocks for the sums, these for the rows, the rest for swa_out_cache_loc
    int sum_blocks;
    int row_blocks;
    // a team is 2^team_shift threads of a block; this many teams share a row
    int team_shift;
    int teams_per_row;
    int flags;
};

struct DraftExpand {
    const void* seq_lens;
    const void* out_cache_loc;
    int* cache_seqlens;
    int* page_table;
    int* cu_seqlens_q;
    int* cu_seqlens_k;
    i64 page_table_stride;
    int width;
    int bs;
    int page_shift;
    int topk;
    int steps;
    int length;
    int flags;
};

struct VerifyExpand {
    const void* seq_lens;
    const int* cu_seqlens;
    const void* req_pool_indices;
    const int* req_to_token;
    const unsigned char* custom_mask;
    int* cache_seqlens;
    int* cu_seqlens_k;
    int* cu_seqlens_q;
    int* page_table;
    i64 req_to_token_stride;
    i64 page_table_stride;
    int req_to_token_width;
    int bs;
    int draft_tokens;
    int live_rows;
    // 1, or 0 if another launch sums
    int sum_blocks;
    int flags;
};

struct LocalAttention {
    const void* seq_lens;
    const void* req_pool_indices;
    const int* req_to_token;
    const i64* mapping;
    int* seqused;
    int* block_table;
    int* cu_seqlens_q;
    i64 req_to_token_stride;
    i64 block_table_stride;
    int req_to_token_width;
    int width;
    int bs;
    int page_shift;
    int chunk;
    int team_shift;
    int teams_per_row;
    int flags;
};

// An element of an i32 or i64 tensor. Lengths, rows and slots fit 32 bits, so the low word says all, and loads need no
// branch between them. A plain load: an output may be the same memory.
__device__ __forceinline__ int index_at(const void* values, i64 place, bool wide) {
    return static_cast<const int*>(values)[place << (wide ? 1 : 0)];
}

__device__ __forceinline__ i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// ceil(count / 2^shift), 0 for a negative count
__device__ __forceinline__ i64 pieces(i64 count, int shift) {
    return count > 0 ? (count + (i64(1) << shift) - 1) >> shift : 0;
}

__device__ __forceinline__ bool is_aligned(const void* address) {
    return (reinterpret_cast<unsigned long long>(address) & 15) == 0;
}

// elements before the next 16-byte boundary
__device__ __forceinline__ int elements_to_boundary(const int* address) {
    return static_cast<int>((4 - (reinterpret_cast<unsigned long long>(address) >> 2)) & 3);
}

// The threads that share a row: this one's rank and their number.
struct Team {
    int rank;
    int size;
};

struct RowTeam {
    int row;
    Team team;
};

template <typename Job>
__device__ __forceinline__ RowTeam row_team(const Job& job, int block) {
    const int thread = block * kThreads + threadIdx.x;
    const int number = thread >> job.team_shift, part = number % job.teams_per_row;
    const int own = thread & ((1 << job.team_shift) - 1);
    return {number / job.teams_per_row, {(part << job.team_shift) + own, job.teams_per_row << job.team_shift}};
}

// Zero-fill, 16 bytes at a time between 16-byte boundaries.
__device__ __forceinline__ void zero(int* out, int count, Team team) {
    const int head = static_cast<int>(smaller(count, elements_to_boundary(out)));
    const int vectors = (count - head) / 4;
    const int tail = head + 4 * vectors;
    if (team.rank < head) out[team.rank] = 0;
    for (int v = team.rank; v < vectors; v += team.size) {
        reinterpret_cast<int4*>(out + head)[v] = make_int4(0, 0, 0, 0);
    }
    if (team.rank < count - tail) out[tail + team.rank] = 0;
}

// Copy count units, several in flight.
template <typename Unit>
__device__ __forceinline__ void copy_units(Unit* out, const Unit* in, int count, Team team) {
    for (int first = team.rank; first < count; first += kInFlight * team.size) {
        Unit unit[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            if (first + j * team.size < count) unit[j] = __ldg(in + first + j * team.size);
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            if (first + j * team.size < count) out[first + j * team.size] = unit[j];
        }
    }
}

// Page size 1 without translation is a copy: 16 bytes at a time if both sides have the same alignment.
__device__ __forceinline__ void copy(int* out, const int* in, int count, Team team) {
    const int head = static_cast<int>(smaller(count, elements_to_boundary(out)));
    if (!is_aligned(in + head) || !is_aligned(out + head)) {
        copy_units(out, in, count, team);
        return;
    }
    const int vectors = (count - head) / 4;
    const int tail = head + 4 * vectors;
    if (team.rank < head) out[team.rank] = __ldg(in + team.rank);
    copy_units(reinterpret_cast<int4*>(out + head), reinterpret_cast<const int4*>(in + head), vectors, team);
    if (team.rank < count - tail) out[tail + team.rank] = __ldg(in + tail + team.rank);
}

// A slot's slot in the window's pool. It fits 32 bits, so the low word suffices, and -1 stays -1.
__device__ __forceinline__ int in_window(const i64* mapping, int slot) {
    return slot < 0 ? -1 : __ldg(reinterpret_cast<const int*>(mapping) + 2 * i64(slot));
}

// The pages of a row: `slots` is the slot of its first token. Either table may be null.
__device__ __forceinline__ void gather(int* table, int* swa_table, const int* slots, const i64* mapping, int page_shift,
                                       int live, Team team) {
    for (int first = team.rank; first < live; first += kInFlight * team.size) {
        int slot[kInFlight], swa[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            const int column = first + j * team.size;
            if (column < live) slot[j] = __ldg(slots + (i64(column) << page_shift));
        }
        if (swa_table) {
#pragma unroll
            for (int j = 0; j < kInFlight; ++j) {
                if (first + j * team.size < live) swa[j] = in_window(mapping, slot[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            const int column = first + j * team.size;
            if (column < live) {
                // the shift rounds down, so a page of -1 stays -1
                if (table) table[column] = slot[j] >> page_shift;
                if (swa_table) swa_table[column] = swa[j] >> page_shift;
            }
        }
    }
}

// The same for page size 1 with a window: 16 bytes at a time if all sides have the same alignment.
__device__ __forceinline__ void translate(int* table, int* swa_table, const int* slots, const i64* mapping, int live,
                                          Team team) {
    const int head = static_cast<int>(smaller(live, elements_to_boundary(swa_table)));
    if (!is_aligned(slots + head) || !is_aligned(swa_table + head) || (table && !is_aligned(table + head))) {
        gather(table, swa_table, slots, mapping, 0, live, team);
        return;
    }
    const int vectors = (live - head) / 4;
    const int tail = head + 4 * vectors;
    gather(table, swa_table, slots, mapping, 0, head, team);
    for (int first = team.rank; first < vectors; first += kTranslatedInFlight * team.size) {
        int4 slot[kTranslatedInFlight], swa[kTranslatedInFlight];
#pragma unroll
        for (int j = 0; j < kTranslatedInFlight; ++j) {
            const int v = first + j * team.size;
            if (v < vectors) slot[j] = __ldg(reinterpret_cast<const int4*>(slots + head) + v);
        }
#pragma unroll
        for (int j = 0; j < kTranslatedInFlight; ++j) {
            if (first + j * team.size < vectors) {
                swa[j] = make_int4(in_window(mapping, slot[j].x), in_window(mapping, slot[j].y),
                                   in_window(mapping, slot[j].z), in_window(mapping, slot[j].w));
            }
        }
#pragma unroll
        for (int j = 0; j < kTranslatedInFlight; ++j) {
            const int v = first + j * team.size;
            if (v < vectors) {
                if (table) reinterpret_cast<int4*>(table + head)[v] = slot[j];
                reinterpret_cast<int4*>(swa_table + head)[v] = swa[j];
            }
        }
    }
    gather(table ? table + tail : nullptr, swa_table + tail, slots + tail, mapping, 0, live - tail, team);
}

// One row of one or two tables, from token `start` of `tokens`, which has `left` tokens from there on.
__device__ __forceinline__ void fill_row(int* table, int* swa_table, const int* tokens, i64 start, i64 left, i64 length,
                                         const i64* mapping, int page_shift, int width, bool zero_tail, Team team) {
    const i64 pages = smaller(pieces(length, page_shift), pieces(left, page_shift));
    const int live = static_cast<int>(smaller(pages, width));
    if (page_shift == 0 && !swa_table) {
        copy(table, tokens + start, live, team);
    } else if (page_shift == 0) {
        translate(table, swa_table, tokens + start, mapping, live, team);
    } else {
        gather(table, swa_table, tokens + start, mapping, page_shift, live, team);
    }
    if (zero_tail) {
        if (table) zero(table + live, width - live, team);
        if (swa_table) zero(swa_table + live, width - live, team);
    }
}

// Block-wide sums: of the threads below this one, and of all. Every thread must call it.
struct Sums {
    unsigned below;
    unsigned all;
};

template <int threads>
__device__ __forceinline__ Sums sum_over_block(unsigned value, unsigned* of_warps) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    unsigned sum = value;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
        const unsigned other = __shfl_up_sync(kAllLanes, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == kWarp - 1) of_warps[warp] = sum;
    __syncthreads();
    Sums sums = {sum - value, 0};
#pragma unroll
    for (int other = 0; other < threads / kWarp; ++other) {
        if (other < warp) sums.below += of_warps[other];
        sums.all += of_warps[other];
    }
    // the next call overwrites what others may still read here
    __syncthreads();
    return sums;
}

// One block: cache_seqlens and both running sums. Sums wrap as i32 does.
__device__ __forceinline__ void sum_lengths(const FaMetadata& job) {
    __shared__ unsigned of_warps[kThreads / kWarp];
    const int keep = job.flags & kDropLast ? ~((1 << job.page_shift) - 1) : ~0;
    unsigned carry_k = 0, carry_q = 0;
    if (threadIdx.x == 0) {
        if (job.cu_seqlens_k) job.cu_seqlens_k[0] = 0;
        if (job.cu_seqlens_q) job.cu_seqlens_q[0] = 0;
    }
    for (int tile = 0; tile < job.bs; tile += kThreads * kItems) {
        const int first = tile + threadIdx.x * kItems;
        unsigned k[kItems], q[kItems];
        unsigned sum_k = 0, sum_q = 0;
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            const bool in = first + j < job.bs;
            k[j] =
                in ? static_cast<unsigned>(index_at(job.seq_lens, first + j, job.flags & kWideSeqLens)) + job.delta : 0;
            q[j] = in && job.extend_lens
                       ? static_cast<unsigned>(index_at(job.extend_lens, first + j, job.flags & kWideExtendLens))
                       : job.q_stride;
        }
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            if (first + j < job.bs) job.cache_seqlens[first + j] = static_cast<int>(k[j]) & keep;
            k[j] = sum_k += k[j];
            q[j] = sum_q += q[j];
        }
        if (job.cu_seqlens_k) {
            const Sums sums = sum_over_block<kThreads>(sum_k, of_warps);
#pragma unroll
            for (int j = 0; j < kItems; ++j) {
                if (first + j < job.bs) job.cu_seqlens_k[first + j + 1] = static_cast<int>(carry_k + sums.below + k[j]);
            }
            carry_k += sums.all;
        }
        if (job.cu_seqlens_q) {
            const Sums sums = sum_over_block<kThreads>(sum_q, of_warps);
#pragma unroll
            for (int j = 0; j < kItems; ++j) {
                if (first + j < job.bs) job.cu_seqlens_q[first + j + 1] = static_cast<int>(carry_q + sums.below + q[j]);
            }
            carry_q += sums.all;
        }
    }
}

// The blocks after the rows: slots of new tokens in the sliding-window pool.
__device__ __forceinline__ void translate_new_tokens(const FaMetadata& job, int block) {
    const int blocks = gridDim.x - (blockIdx.x - block);
    for (int i = block * kThreads + threadIdx.x; i < job.swa_out_length; i += blocks * kThreads) {
        i64 to = 0;
        if (i < job.new_tokens) {
            const int slot = index_at(job.out_cache_loc, i, job.flags & kWideOutCacheLoc);
            to = slot < 0 ? -1 : __ldg(job.mapping + slot);
        }
        job.swa_out_cache_loc[i] = to;
    }
}

// Flags of one row of verify_expand. A padded row has one flag for all draft tokens.
struct RowFlags {
    const unsigned char* first;
    int step;

    __device__ __forceinline__ bool sees(int token) const { return __ldg(first + i64(token) * step) != 0; }
};

__device__ __forceinline__ RowFlags flags_of(const VerifyExpand& job, int row) {
    if (row >= job.live_rows) return {job.custom_mask, 0};
    const int request = row / job.draft_tokens, token = row % job.draft_tokens;
    const i64 length = index_at(job.seq_lens, request, job.flags & kWideSeqLens);
    const i64 earlier = job.draft_tokens * (job.cu_seqlens[request] + i64(job.draft_tokens) * request);
    return {job.custom_mask + earlier + token * (length + job.draft_tokens) + length, 1};
}

// How many draft tokens the row first_row + lane sees. The lanes of the warp read each row together, and several rows
// before they count.
__device__ __forceinline__ int count_seen(const VerifyExpand& job, int first_row) {
    const int lane = threadIdx.x % kWarp;
    const RowFlags own = first_row + lane < job.bs ? flags_of(job, first_row + lane) : RowFlags{job.custom_mask, 0};
    int lanes_per_row = 1;
    while (lanes_per_row < job.draft_tokens && lanes_per_row < kWarp) lanes_per_row *= 2;
    const int rows_at_once = kWarp / lanes_per_row;
    const unsigned row_lanes = lanes_per_row == kWarp ? kAllLanes : (1u << lanes_per_row) - 1;
    int seen = 0;
    for (int first_token = 0; first_token < job.draft_tokens; first_token += lanes_per_row) {
        const int token = first_token + lane % lanes_per_row;
        for (int batch = 0; batch < kWarp; batch += kFlagsInFlight * rows_at_once) {
            bool sees[kFlagsInFlight];
#pragma unroll
            for (int j = 0; j < kFlagsInFlight; ++j) {
                const int source = batch + j * rows_at_once + lane / lanes_per_row;
                const RowFlags flags = {
                    reinterpret_cast<const unsigned char*>(
                        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(own.first), source % kWarp)),
                    __shfl_sync(kAllLanes, own.step, source % kWarp)};
                const bool is_row = source < kWarp && first_row + source < job.bs;
                sees[j] = is_row && token < job.draft_tokens && flags.sees(token);
            }
#pragma unroll
            for (int j = 0; j < kFlagsInFlight; ++j) {
                const unsigned votes = __ballot_sync(kAllLanes, sees[j]);
                const int mine = lane - (batch + j * rows_at_once);
                if (mine >= 0 && mine < rows_at_once) seen += __popc(votes >> (mine * lanes_per_row) & row_lanes);
            }
        }
    }
    return seen;
}

// One block: the running sum of what each row sees, counted here once more, so that it need not wait for the rows.
__device__ __forceinline__ void sum_seen(const VerifyExpand& job) {
    __shared__ unsigned of_warps[kVerifyThreads / kWarp];
    unsigned carry = 0;
    if (threadIdx.x == 0) job.cu_seqlens_k[0] = 0;
    for (int tile = 0; tile < job.bs; tile += kVerifyThreads) {
        const int row = tile + threadIdx.x;
        const int first_row = row - threadIdx.x % kWarp;
        // uniform for a warp
        const int seen = first_row < job.bs ? count_seen(job, first_row) : 0;
        const Sums sums = sum_over_block<kVerifyThreads>(row < job.bs ? seen : 0, of_warps);
        if (row < job.bs) job.cu_seqlens_k[row + 1] = static_cast<int>(carry + sums.below + seen);
        carry += sums.all;
    }
}

// One warp: how many draft tokens the row sees, and the slots of those in their order, then of the others.
__device__ __forceinline__ void order_slots(const VerifyExpand& job, int row) {
    const int lane = threadIdx.x % kWarp;
    const unsigned lower_lanes = (1u << lane) - 1;
    const int request = row / job.draft_tokens;
    const i64 length = index_at(job.seq_lens, request, job.flags & kWideSeqLens);
    const i64 pool_row = index_at(job.req_pool_indices, request, job.flags & kWideReqPoolIndices);
    const RowFlags flags = flags_of(job, row);
    const int* tokens = job.req_to_token + pool_row * job.req_to_token_stride + length;
    const i64 left = job.req_to_token_width - length;
    int* out = job.page_table + row * job.page_table_stride;
    // most drafts have no more tokens than a warp has lanes: theirs are read once, flag and slot at the same time
    const bool first_sees = lane < job.draft_tokens && flags.sees(lane);
    const int first_slot = lane < job.draft_tokens && lane < left ? __ldg(tokens + lane) : 0;
    int count = __popc(__ballot_sync(kAllLanes, first_sees));
    for (int first = kWarp; first < job.draft_tokens; first += kWarp) {
        const bool sees = first + lane < job.draft_tokens && flags.sees(first + lane);
        count += __popc(__ballot_sync(kAllLanes, sees));
    }
    int seen_place = 0, unseen_place = count;
    for (int first = 0; first < job.draft_tokens; first += kWarp) {
        const int token = first + lane;
        const bool in = token < job.draft_tokens;
        const bool sees = first == 0 ? first_sees : in && flags.sees(token);
        const int slot = first == 0 ? first_slot : in && token < left ? __ldg(tokens + token) : 0;
        const unsigned seen = __ballot_sync(kAllLanes, sees);
        const unsigned unseen = __ballot_sync(kAllLanes, in && !sees);
        const int place = sees ? seen_place + __popc(seen & lower_lanes) : unseen_place + __popc(unseen & lower_lanes);
        if (in) out[place] = slot;
        seen_place += __popc(seen);
        unseen_place += __popc(unseen);
    }
    if (lane == 0) {
        job.cache_seqlens[row] = count;
        if (job.cu_seqlens_q) job.cu_seqlens_q[row + 1] = row + 1;
    }
}

// One warp: the pages of the row's slots, each run of equal ones once; where a page is a slot, the slots as they are.
__device__ __forceinline__ void compact_pages(const DraftExpand& job, int row) {
    const int lane = threadIdx.x % kWarp;
    const unsigned lower_lanes = (1u << lane) - 1;
    const bool wide = job.flags & kWideOutCacheLoc;
    int* out = job.page_table + row * job.page_table_stride;
    int runs = 0;
    int page_before = 0;
    for (int first = 0; first < job.length; first += kWarp) {
        const int place = first + lane;
        const bool in = place < job.length;
        const int page = in ? index_at(job.out_cache_loc, i64(row) * job.steps + place, wide) >> job.page_shift : 0;
        const int neighbour = __shfl_up_sync(kAllLanes, page, 1);
        const int before = lane == 0 ? page_before : neighbour;
        const bool begins = in && (job.page_shift == 0 || place == 0 || page != before);
        const unsigned begin = __ballot_sync(kAllLanes, begins);
        if (begins) out[runs + __popc(begin & lower_lanes)] = page;
        runs += __popc(begin);
        page_before = __shfl_sync(kAllLanes, page, kWarp - 1);
    }
    if (job.flags & kZeroTail) zero(out + runs, job.width - runs, {lane, kWarp});
}

}  // namespace bcg

extern "C" __global__ void __launch_bounds__(bcg::kThreads)
    bcg_fa_metadata(const __grid_constant__ bcg::FaMetadata job) {
    using namespace bcg;
    int block = blockIdx.x;
    if (block < job.sum_blocks) {
        sum_lengths(job);
        return;
    }
    block -= job.sum_blocks;
    if (block >= job.row_blocks) {
        translate_new_tokens(job, block - job.row_blocks);
        return;
    }
    const RowTeam place = row_team(job, block);
    const int row = place.row;
    if (row >= job.bs) return;
    const i64 length = i64(index_at(job.seq_lens, row, job.flags & kWideSeqLens)) + job.delta;
    const i64 pool_row = index_at(job.req_pool_indices, row, job.flags & kWideReqPoolIndices);
    const i64 start = job.row_start ? index_at(job.row_start, row, job.flags & kWideRowStart) : 0;
    const i64 kept = job.flags & kDropLast ? length >> job.page_shift << job.page_shift : length;
    fill_row(job.page_table + row * job.page_table_stride,
             job.swa_page_table ? job.swa_page_table + row * job.swa_page_table_stride : nullptr,
             job.req_to_token + pool_row * job.req_to_token_stride, start, job.req_to_token_width - start, kept,
             job.mapping, job.page_shift, job.width, job.flags & kZeroTail, place.team);
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads)
    bcg_local_attention(const __grid_constant__ bcg::LocalAttention job) {
    using namespace bcg;
    if (blockIdx.x == 0 && threadIdx.x == 0 && job.cu_seqlens_q) job.cu_seqlens_q[0] = 0;
    const RowTeam place = row_team(job, blockIdx.x);
    const int row = place.row;
    if (row >= job.bs) return;
    const int length = index_at(job.seq_lens, row, job.flags & kWideSeqLens);
    const i64 pool_row = index_at(job.req_pool_indices, row, job.flags & kWideReqPoolIndices);
    const int start = length > 0 ? (length - 1) / job.chunk * job.chunk : 0;
    const int used = length > 0 ? length - start : 0;
    int* table = job.block_table + row * job.block_table_stride;
    fill_row(job.mapping ? nullptr : table, job.mapping ? table : nullptr,
             job.req_to_token + pool_row * job.req_to_token_stride, start, job.req_to_token_width - start, used,
             job.mapping, job.page_shift, job.width, job.flags & kZeroTail, place.team);
    if (place.team.rank == 0) {
        job.seqused[row] = used;
        if (job.cu_seqlens_q) job.cu_seqlens_q[row + 1] = row + 1;
    }
}

extern "C" __global__ void __launch_bounds__(bcg::kThreads)
    bcg_draft_expand(const __grid_constant__ bcg::DraftExpand job) {
    using namespace bcg;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (job.cu_seqlens_q) job.cu_seqlens_q[0] = 0;
        if (job.cu_seqlens_k) job.cu_seqlens_k[0] = 0;
    }
    const int row = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
    if (row >= job.bs) return;
    compact_pages(job, row);
    if (threadIdx.x % kWarp == 0) {
        const int length = index_at(job.seq_lens, row / job.topk, job.flags & kWideSeqLens);
        job.cache_seqlens[row] = job.length + (length & ((1 << job.page_shift) - 1));
        if (job.cu_seqlens_q) job.cu_seqlens_q[row + 1] = row + 1;
        if (job.cu_seqlens_k) job.cu_seqlens_k[row + 1] = (row + 1) * job.length;
    }
}

extern "C" __global__ void __launch_bounds__(bcg::kVerifyThreads)
    bcg_verify_expand(const __grid_constant__ bcg::VerifyExpand job) {
    using namespace bcg;
    if (blockIdx.x == 0 && threadIdx.x == 0 && job.cu_seqlens_q) job.cu_seqlens_q[0] = 0;
    const int block = static_cast<int>(blockIdx.x) - job.sum_blocks;
    if (block < 0) {
        sum_seen(job);
        return;
    }
    const int row = block * (kVerifyThreads / kWarp) + threadIdx.x / kWarp;
    if (row < job.bs) order_slots(job, row);
}

#endif
