// Rows of contiguous elements at strided places, and a row held in the registers of one block.
#pragma once

#include "common/dtype.cuh"
#include "common/layouts.cuh"

namespace xserv {

// Row r of [outer, inner, width] begins at (r / inner) * outer_stride + (r % inner) * inner_stride, in
// elements; a plain matrix has inner == 1. Per-head norms of a slice of a fused qkv need both levels.
// Fewer than 2^32 rows.
struct KernelRows {
  long long inner;
  long long outer_stride;
  long long inner_stride;

  __device__ __forceinline__ long long offset(long long row) const {
    if (inner == 1) return row * outer_stride;
    const unsigned outer_index = static_cast<unsigned>(row) / static_cast<unsigned>(inner);
    return outer_index * outer_stride + (row - outer_index * inner) * inner_stride;
  }
};
XSERV_LAYOUT_KernelRows;

// VECS 16-byte vectors of a row per thread, interleaved over the threads so that a warp's access is
// contiguous. Vectors beyond the row read as zero. All loads are issued before anything is used.
template <typename T, int VECS>
__device__ __forceinline__ void load_row(Vec<T, kVec<T>> (&row)[VECS], const T* source, int num_vecs,
                                         int thread, int num_threads) {
  const uint4* vecs = reinterpret_cast<const uint4*>(source);
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    const int v = thread + i * num_threads;
    const uint4 bits = v < num_vecs ? vecs[v] : make_uint4(0, 0, 0, 0);
    row[i] = reinterpret_cast<const Vec<T, kVec<T>>&>(bits);
  }
}

// The same, bypassing the L1, for rows that are not read again soon.
template <typename T, int VECS>
__device__ __forceinline__ void load_row_once(Vec<T, kVec<T>> (&row)[VECS], const T* source, int num_vecs,
                                              int thread, int num_threads) {
  const uint4* vecs = reinterpret_cast<const uint4*>(source);
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    const int v = thread + i * num_threads;
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (v < num_vecs) {
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                   : "l"(vecs + v));
    }
    row[i] = reinterpret_cast<const Vec<T, kVec<T>>&>(bits);
  }
}

// The same for data that no thread writes during the launch (weights).
template <typename T, int VECS>
__device__ __forceinline__ void load_row_const(Vec<T, kVec<T>> (&row)[VECS], const T* source, int num_vecs,
                                               int thread, int num_threads) {
  const uint4* vecs = reinterpret_cast<const uint4*>(source);
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    const int v = thread + i * num_threads;
    const uint4 bits = v < num_vecs ? __ldg(vecs + v) : make_uint4(0, 0, 0, 0);
    row[i] = reinterpret_cast<const Vec<T, kVec<T>>&>(bits);
  }
}

template <typename T>
__device__ __forceinline__ void store_vec(T* target, int v, const Vec<T, kVec<T>>& value) {
  reinterpret_cast<uint4*>(target)[v] = reinterpret_cast<const uint4&>(value);
}

// A reduction over aligned groups of LANES lanes of a warp; all lanes get the result.
template <int LANES>
__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset >>= 1) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

}  // namespace xserv
