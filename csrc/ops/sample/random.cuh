// Random numbers that depend on a key and a counter alone: there is no state, and the numbers are the
// same in whatever order they are asked for. Source: Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3" (Philox4x32, ten rounds).
#pragma once

#include <stdint.h>

namespace xserv {

// Returns four words of 32 random bits.
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

// Returns a number above 0 and below 1. (The largest bits would round to 1.)
__device__ __forceinline__ float uniform(uint32_t bits) {
  return fminf((static_cast<float>(bits) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
}

// Returns standard Gumbel noise from 32 random bits: -log(E) for an exponentially distributed E. The
// bits count from the side where E is small, because that side wins the draw and float is most precise
// there.
__device__ __forceinline__ float gumbel(uint32_t bits) {
  return -logf(-log1pf(-uniform(bits)));
}

// The noise is never above this value.
constexpr float kMaxGumbel = 23.0f;

}  // namespace xserv
