// out[r] = index of the largest element of row r of x: [num_rows, width], last axis contiguous, width < 2^31.
// Ties: the lowest index. NaN counts as larger than everything, as in PyTorch.
//
// Few wide rows (logits): blockIdx.x of gridDim.x blocks shares a row; each leaves its best (value, index) pair,
// as an ordered integer, in `partials` [num_rows, gridDim.x]; the block that arrives last at the row's counter
// reduces them. `counters` [num_rows] are zero before the first launch and are left zero. The maximum of
// integers does not depend on the order of arrival. gridDim.x == 1 needs neither.
#include "common/dtype.cuh"
#include "common/order.cuh"

namespace xserv {

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// Thread 0 gets the block's maximum. A second call needs a __syncthreads() before it.
__device__ __forceinline__ uint64_t block_max(uint64_t best, uint64_t (&scratch)[32]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) best = larger(best, __shfl_xor_sync(0xffffffffu, best, offset));
  if (lane == 0) scratch[warp] = best;
  __syncthreads();
  if (warp == 0) {
    best = lane < num_warps ? scratch[lane] : 0;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) best = larger(best, __shfl_xor_sync(0xffffffffu, best, offset));
  }
  return best;
}

// N elements per access: kVec<T> where rows are 16-byte aligned (a tail is read singly), else 1.
template <typename T, typename Index, int N>
__device__ __forceinline__ void argmax_row(Index* __restrict__ out, const T* __restrict__ x, int width,
                                           long long x_stride, uint64_t* partials, unsigned* counters) {
  using V = Vec<T, N>;
  __shared__ uint64_t scratch[32];
  __shared__ bool is_last;
  const T* row = x + blockIdx.y * x_stride;
  const int num_vecs = width / N, step = gridDim.x * blockDim.x;
  uint64_t best = 0;
  // The thread's running best is kept as two words: comparing the value alone is enough while the indices rise.
  // No value has the key 0.
  uint32_t best_key = 0, best_index = 0;
#pragma unroll 4
  for (int v = blockIdx.x * blockDim.x + threadIdx.x; v < num_vecs; v += step) {
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
  if (blockIdx.x == 0 && tail < width) best = larger(best, pair_key(to_float(row[tail]), tail));
  best = block_max(best, scratch);
  if (gridDim.x == 1) {
    if (threadIdx.x == 0) out[blockIdx.y] = index_of_pair(best);
    return;
  }
  uint64_t* row_partials = partials + static_cast<long long>(blockIdx.y) * gridDim.x;
  if (threadIdx.x == 0) {
    row_partials[blockIdx.x] = best;
    __threadfence();
    is_last = atomicInc(counters + blockIdx.y, gridDim.x - 1) == gridDim.x - 1;  // wraps to zero
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  best = 0;
  for (int i = threadIdx.x; i < static_cast<int>(gridDim.x); i += blockDim.x) {
    best = larger(best, __ldcg(reinterpret_cast<const unsigned long long*>(row_partials + i)));
  }
  best = block_max(best, scratch);
  if (threadIdx.x == 0) out[blockIdx.y] = index_of_pair(best);
}

}  // namespace xserv

#define XSERV_ARGMAX_KERNEL(NAME, T, Index, N)                                                          \
  extern "C" __global__ void __launch_bounds__(1024) xserv_argmax_##NAME(                               \
      Index* out, const T* x, int width, long long x_stride, uint64_t* partials, unsigned* counters) {  \
    xserv::argmax_row<T, Index, N>(out, x, width, x_stride, partials, counters);                        \
  }
#define XSERV_ARGMAX(SUFFIX, T)                                                      \
  XSERV_ARGMAX_KERNEL(i32_##SUFFIX, T, int, xserv::kVec<T>)                          \
  XSERV_ARGMAX_KERNEL(i64_##SUFFIX, T, long long, xserv::kVec<T>)                    \
  XSERV_ARGMAX_KERNEL(scalar_i32_##SUFFIX, T, int, 1)                                \
  XSERV_ARGMAX_KERNEL(scalar_i64_##SUFFIX, T, long long, 1)
XSERV_FOR_EACH_DTYPE(XSERV_ARGMAX)
