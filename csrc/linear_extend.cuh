// SPDX-License-Identifier: Apache-2.0
// What the first launch of linear layers shares: its chunks in the tables, numbers of a layer, and what keeps its gates
// in bounds.
#ifndef BCG_LINEAR_EXTEND_CUH
#define BCG_LINEAR_EXTEND_CUH

#include "hopper.cuh"

namespace bcg {

// taps of the convolution, and the rows that it looks back at
constexpr int kWidth = 4;
constexpr int kPast = kWidth - 1;

// numbers of a chunk in the tables
constexpr int kChunkFields = 8;
// 2^-160 is zero in fp32, and fp32 still resolves the sum of 64 such gates
constexpr float kLeastGate = -160.0f;
constexpr float kLog2E = 1.4426950408889634f;
// above, softplus is the identity, as in SGLang
constexpr float kSoftplusLinear = 20.0f;

struct Chunk {
    int first_row;
    int start;
    int end;
    int slot;
    bool has_window;
    int track_after;
    int track_slot;

    template <typename Job>
    __device__ __forceinline__ Chunk(const Job& job, int number) {
        const int* const fields = job.chunks + number * kChunkFields;
        first_row = fields[0];
        start = fields[1];
        end = at_most(fields[2], job.rows_of_output);
        slot = fields[3];
        has_window = fields[4] != 0;
        track_after = fields[5];
        track_slot = job.is_tracking() ? fields[6] : -1;
    }
};

template <bool kBf16>
__device__ __forceinline__ float number_at(const void* numbers, int place, bool is_float) {
    return is_float ? static_cast<const float*>(numbers)[place]
                    : widened<kBf16>(static_cast<const u16*>(numbers)[place]);
}

}  // namespace bcg

#endif
