// Total order of values as unsigned integers, and of (value, index) pairs: larger values first, then lower
// indices. NaN is larger than everything and equal to itself (as PyTorch orders it), -0 equals +0.
#pragma once

#include <stdint.h>

namespace xserv {

__device__ __forceinline__ uint32_t order_key(float value) {
  if (value != value) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 + 0 is +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Returns the value of a key.
__device__ __forceinline__ float value_of_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Distinct for distinct indices, and above 0 for every index below 2^32 - 1: 0 is free to mean "none".
__device__ __forceinline__ uint64_t pair_key(float value, uint32_t index) {
  return static_cast<uint64_t>(order_key(value)) << 32 | (0xffffffffu - index);
}
__device__ __forceinline__ uint32_t index_of_pair(uint64_t pair) {
  return 0xffffffffu - static_cast<uint32_t>(pair);
}

}  // namespace xserv
