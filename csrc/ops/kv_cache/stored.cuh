// Keys and values as the cache stores them: numbers of T as they are, or 8-bit floats (common/e4m3.cuh).
#pragma once

#include <type_traits>

#include "common/dtype.cuh"
#include "common/e4m3.cuh"
#include "common/e4m3_pair.cuh"

namespace xserv {

template <typename T, int kCount>
__device__ __forceinline__ void store_in_cache(T* target, const Vec<T, kCount>& numbers) {
  *reinterpret_cast<Vec<T, kCount>*>(target) = numbers;
}
template <typename T, int kCount>
__device__ __forceinline__ void store_in_cache(Fp8* target, const Vec<T, kCount>& numbers) {
  Vec<uint8_t, kCount> codes;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const uint32_t pair = e4m3_pair(to_float(numbers[i]), i + 1 < kCount ? to_float(numbers[i + 1]) : 0.0f);
    codes[i] = static_cast<uint8_t>(pair);
    if (i + 1 < kCount) codes[i + 1] = static_cast<uint8_t>(pair >> 8);
  }
  *reinterpret_cast<Vec<uint8_t, kCount>*>(target) = codes;
}

}  // namespace xserv
