// SPDX-License-Identifier: Apache-2.0
// The threads of device_on_host.hpp as its instructions see them: who waits for what, and what is under way beside
// them.
#pragma once

#include <functional>

#include "device_on_host.hpp"

namespace host {

// Where threads wait for so many arrivals, again and again.
struct Barrier {
    int arrivals = 0;
    int missing = 0;
    long round = 0;
    // when a thread that has arrived had fenced last
    unsigned long fenced = 0;
};

// Waits for the round of a barrier to end.
void wait_at(const Barrier& barrier);

// The round of the warp that has not ended yet.
long warp_round();

// Does this beside the threads at some time, after what is under way already.
void later(std::function<void()> work);

// Called before each block, with the run's seed. Of all libraries of a process, as what it prepares.
inline void (*prepare)(unsigned seed) = nullptr;

}  // namespace host
