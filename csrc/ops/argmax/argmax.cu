// out[r] = index of the largest element of row r of x: [num_rows, width], last axis contiguous, width < 2^31.
// Ties: the lowest index. NaN counts as larger than everything, as in PyTorch.
//
// Few wide rows (logits): gridDim.y blocks share a row, each leaves its best (value, index) pair, as an
// ordered integer, in `partials` [num_rows, gridDim.y], and a second launch, _merge, reduces those: the
// maximum of integers does not depend on the order. gridDim.y == 1 writes the result at once.
#include "common/dtype.cuh"
#include "common/order.cuh"

namespace xserv {

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

__device__ __forceinline__ uint64_t warp_max(uint64_t best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    best = larger(best, __shfl_xor_sync(0xffffffffu, best, offset));
  }
  return best;
}

// Thread 0 gets the block's maximum.
__device__ __forceinline__ uint64_t block_max(uint64_t best, uint64_t (&scratch)[32]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
  best = warp_max(best);
  if (lane == 0) scratch[warp] = best;
  __syncthreads();
  if (warp == 0) {
    best = warp_max(lane < num_warps ? scratch[lane] : 0);
  }
  return best;
}

// N elements per access: kVec<T> where rows are 16-byte aligned (a tail is read singly), else 1.
template <typename T, typename Index, int N>
__device__ __forceinline__ void argmax_row(Index* __restrict__ out, const T* __restrict__ x, int width,
                                           long long x_stride, uint64_t* __restrict__ partials) {
  using V = Vec<T, N>;
  __shared__ uint64_t scratch[32];
  const T* row = x + blockIdx.x * x_stride;
  const unsigned num_vecs = width / N, step = gridDim.y * blockDim.x;
  uint64_t best = 0;
  // The thread's running best is kept as two words: comparing the value alone is enough while the indices
  // rise. No value has the key 0.
  uint32_t best_key = 0, best_index = 0;
#pragma unroll 4
  for (unsigned v = blockIdx.y * blockDim.x + threadIdx.x; v < num_vecs; v += step) {
    const V values = reinterpret_cast<const V*>(row)[v];
#pragma unroll
    for (int j = 0; j < N; j++) {
      const uint32_t key = order_key(to_float(values[j]));
      if (key > best_key) {
        best_key = key;
        best_index = v * N + j;
      }
    }
  }
  if (best_key != 0) best = static_cast<uint64_t>(best_key) << 32 | (0xffffffffu - best_index);
  const int tail = num_vecs * N + threadIdx.x;
  if (blockIdx.y == 0 && tail < width) best = larger(best, pair_key(to_float(row[tail]), tail));
  best = block_max(best, scratch);
  if (threadIdx.x != 0) return;
  if (gridDim.y == 1) {
    out[blockIdx.x] = index_of_pair(best);
  } else {
    partials[static_cast<long long>(blockIdx.x) * gridDim.y + blockIdx.y] = best;
  }
}

// One warp per row.
template <typename Index>
__device__ __forceinline__ void argmax_merge(Index* __restrict__ out, const uint64_t* __restrict__ partials,
                                             int splits) {
  uint64_t best = 0;
  for (int i = threadIdx.x; i < splits; i += 32) {
    best = larger(best, partials[static_cast<long long>(blockIdx.x) * splits + i]);
  }
  best = warp_max(best);
  if (threadIdx.x == 0) out[blockIdx.x] = index_of_pair(best);
}

}  // namespace xserv

#define XSERV_ARGMAX_KERNEL(NAME, T, Index, N)                                        \
  extern "C" __global__ void __launch_bounds__(1024) xserv_argmax_##NAME(             \
      Index* out, const T* x, int width, long long x_stride, uint64_t* partials) {    \
    xserv::argmax_row<T, Index, N>(out, x, width, x_stride, partials);                \
  }
#define XSERV_ARGMAX(SUFFIX, T)                                 \
  XSERV_ARGMAX_KERNEL(i32_##SUFFIX, T, int, xserv::kVec<T>)     \
  XSERV_ARGMAX_KERNEL(i64_##SUFFIX, T, long long, xserv::kVec<T>) \
  XSERV_ARGMAX_KERNEL(scalar_i32_##SUFFIX, T, int, 1)           \
  XSERV_ARGMAX_KERNEL(scalar_i64_##SUFFIX, T, long long, 1)
XSERV_FOR_EACH_DTYPE(XSERV_ARGMAX)

extern "C" __global__ void __launch_bounds__(32)
    xserv_argmax_merge_i32(int* out, const uint64_t* partials, int splits) {
  xserv::argmax_merge<int>(out, partials, splits);
}
extern "C" __global__ void __launch_bounds__(32)
    xserv_argmax_merge_i64(long long* out, const uint64_t* partials, int splits) {
  xserv::argmax_merge<long long>(out, partials, splits);
}
