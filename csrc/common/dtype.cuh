// Element types: how a value is read as f32 and rounded back, and vectors of 16 bytes.
//
// Kernels are templates over T = float, __half or __nv_bfloat16; they read T, compute in f32 and round
// once at the store (to nearest even, as the hardware conversions do).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace xserv {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// N elements that one instruction loads or stores; N * sizeof(T) is 4, 8 or 16.
template <typename T, int N>
struct alignas(N * sizeof(T)) Vec {
  T values[N];

  __device__ __forceinline__ T& operator[](int i) { return values[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return values[i]; }
};

// Elements of T in 16 bytes.
template <typename T>
constexpr int kVec = 16 / sizeof(T);

// A read that bypasses the L1 cache, for data that this launch reads once.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_streaming(const Vec<T, N>* source) {
  static_assert(sizeof(Vec<T, N>) == 16, "16-byte vectors only");
  const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(source));
  return reinterpret_cast<const Vec<T, N>&>(bits);
}

// A write that leaves the caches first, for results that are not read soon.
template <typename T, int N>
__device__ __forceinline__ void store_streaming(Vec<T, N>* target, const Vec<T, N>& value) {
  static_assert(sizeof(Vec<T, N>) == 16, "16-byte vectors only");
  __stcs(reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4&>(value));
}

}  // namespace xserv

// Expands MACRO(suffix, type) for every element type: kernels are exported as xserv_<op>_<suffix>.
#define XSERV_FOR_EACH_DTYPE(MACRO) \
  MACRO(f32, float)                 \
  MACRO(f16, __half)                \
  MACRO(bf16, __nv_bfloat16)
