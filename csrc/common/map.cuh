// Contiguous elementwise maps: y[i] = f(a[i]) and y[i] = f(a[i], b[i]), 16 bytes per access, U accesses per
// thread and operand under way before the first use. y may be a or b.
#pragma once

#include "common/dtype.cuh"

namespace xserv {

// Grid: ceil(ceil(n / kVec<T>) / (blockDim.x * U)) blocks; pointers 16-byte aligned. The last n % kVec<T>
// elements are done singly by the last block. F(float...) -> float.
template <typename T, int U, bool BINARY, typename F>
__device__ __forceinline__ void map_vectors(T* y, const T* a, const T* b, long long n, F f) {
  using V = Vec<T, kVec<T>>;
  const long long num_vecs = n / kVec<T>;
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x * U + threadIdx.x;
  const bool is_full = first - threadIdx.x + static_cast<long long>(blockDim.x) * U <= num_vecs;
  V left[U], right[U];
  auto apply = [&](int i) {
    V result;
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) {
      result[j] = from_float<T>(f(to_float(left[i][j]), BINARY ? to_float(right[i][j]) : 0.0f));
    }
    return result;
  };
  if (is_full) {
#pragma unroll
    for (int i = 0; i < U; i++) {
      left[i] = reinterpret_cast<const V*>(a)[first + i * blockDim.x];
      if (BINARY) right[i] = reinterpret_cast<const V*>(b)[first + i * blockDim.x];
    }
#pragma unroll
    for (int i = 0; i < U; i++) reinterpret_cast<V*>(y)[first + i * blockDim.x] = apply(i);
    // The last block takes a tail of elements, and a full block is the last only if there is no other.
    if (blockIdx.x + 1 < gridDim.x) return;
  } else {
    for (int i = 0; i < U; i++) {
      const long long v = first + i * blockDim.x;
      if (v >= num_vecs) break;
      left[0] = reinterpret_cast<const V*>(a)[v];
      if (BINARY) right[0] = reinterpret_cast<const V*>(b)[v];
      reinterpret_cast<V*>(y)[v] = apply(0);
    }
    if (blockIdx.x + 1 < gridDim.x) return;
  }
  const long long i = num_vecs * kVec<T> + threadIdx.x;
  if (i < n) y[i] = from_float<T>(f(to_float(a[i]), BINARY ? to_float(b[i]) : 0.0f));
}

// Unaligned pointers: one element per thread and step.
template <typename T, bool BINARY, typename F>
__device__ __forceinline__ void map_elements(T* y, const T* a, const T* b, long long n, F f) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    y[i] = from_float<T>(f(to_float(a[i]), BINARY ? to_float(b[i]) : 0.0f));
  }
}

}  // namespace xserv
