// Random numbers that depend on a key and a counter alone: no state, the same in whatever order they are asked
// for. Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x32, ten rounds).
#pragma once

#include <stdint.h>

namespace xserv {

// Four words of 32 random bits.
__device__ __forceinline__ uint4 philox(uint64_t key, uint4 counter) {
  uint32_t key_low = static_cast<uint32_t>(key), key_high = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xd2511f53u, counter.x), low0 = 0xd2511f53u * counter.x;
    const uint32_t high1 = __umulhi(0xcd9e8d57u, counter.z), low1 = 0xcd9e8d57u * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key_low, low1, high0 ^ counter.w ^ key_high, low0);
    key_low += 0x9e3779b9u;
    key_high += 0xbb67ae85u;
  }
  return counter;
}

// Above 0 and below 1. (The largest bits would round to 1.)
__device__ __forceinline__ float uniform(uint32_t bits) {
  return fminf((static_cast<float>(bits) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
}

// Standard Gumbel noise from 32 random bits: -log(E) for an exponentially distributed E. The bits count from
// the side where E is small, the side that wins, so that float's precision is there.
__device__ __forceinline__ float gumbel(uint32_t bits) {
  return -logf(-log1pf(-uniform(bits)));
}

// No noise is above that.
constexpr float kMostGumbel = 23.0f;

}  // namespace xserv
