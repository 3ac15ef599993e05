// Softmax along the last axis: out = exp(x - m) / sum(exp(x - m)), m = max(x).
// x, out: [num_rows, width], last axis contiguous. A row of -inf only gives zeros (a query that may attend to
// nothing). f32 inside, one rounding at the store. out may be x.
//
// Threads work against their own maximum and correct at the end (Milakov & Gimelshein 2018,
// arXiv:1805.02867): thread t holds e_i = exp(x_i - m_t) and s_t = sum(e_i); the block merges the pairs
// (m_t, s_t) in a single exchange, and e_i * exp(m_t - m) / s is the result. So there is one exponential per
// element and one barrier per row.
//
// _row16, _row32: one block per row, the row in registers, 16 or 32 elements per thread. On an H200 the two
// take the same time for 8192 rows of 4096 (staging the next row in shared memory meanwhile takes longer);
// 32 are for rows that 16 do not cover.
// _loop and _scalar: any width; they read the row twice, the second time from the cache.
#include "common/dtype.cuh"
#include "common/exp2.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"

namespace xserv {

// exp(x - max) for x <= max; the difference comes first, because x * log2(e) overflows for large x.
__device__ __forceinline__ float exp_below(float x, float max) { return exp2_approx((x - max) * kLog2E); }

struct MaxSum {
  float max;  // NaN is not carried here but in the sum
  float sum;
};

// -inf - -inf is NaN: where no finite value was seen, 0 takes the place of the maximum and every e_i is
// 0.
__device__ __forceinline__ float finite_base(float max) {
  return max == -__builtin_huge_valf() ? 0.0f : max;
}

__device__ __forceinline__ MaxSum warp_merge(MaxSum part) {
  float max = part.max;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
  return {max, warp_reduce<Sum>(part.sum * exp_below(part.max, finite_base(max)))};
}

__device__ __forceinline__ MaxSum block_merge(MaxSum part, float (&scratch)[2][32]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
  part = warp_merge(part);
  if (num_warps == 1) return part;
  if (lane == 0) {
    scratch[0][warp] = part.max;
    scratch[1][warp] = part.sum;
  }
  __syncthreads();
  const bool is_valid = lane < num_warps;
  part.max = is_valid ? scratch[0][lane] : -__builtin_huge_valf();
  part.sum = is_valid ? scratch[1][lane] : 0.0f;
  return warp_merge(part);
}

// Returns the factor that turns e_i of a thread with the maximum `max` into the result. NaN in the row
// makes whole.sum NaN.
__device__ __forceinline__ float correction(float max, MaxSum whole) {
  if (whole.sum == 0.0f) return 0.0f;
  return exp_below(max, finite_base(whole.max)) / whole.sum;
}

// Rows of at most VECS vectors per thread; elements beyond the row count as -inf.
template <typename T, int VECS>
__device__ __forceinline__ void softmax_row(T* out, const T* x, int width, long long out_stride,
                                            long long x_stride) {
  __shared__ float scratch[2][32];
  using V = Vec<T, kVec<T>>;
  const int num_vecs = width / kVec<T>;
  const V* source = reinterpret_cast<const V*>(x + blockIdx.x * x_stride);
  V values[VECS];
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v < num_vecs) {
      values[i] = source[v];
    } else {
#pragma unroll
      for (int j = 0; j < kVec<T>; j++) values[i][j] = from_float<T>(-__builtin_huge_valf());
    }
  }
  float e[VECS][kVec<T>];
  MaxSum part = {-__builtin_huge_valf(), 0.0f};
#pragma unroll
  for (int i = 0; i < VECS; i++) {
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) {
      e[i][j] = to_float(values[i][j]);
      part.max = fmaxf(part.max, e[i][j]);
    }
  }
  const float base = finite_base(part.max);
#pragma unroll
  for (int i = 0; i < VECS; i++) {
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) {
      e[i][j] = exp_below(e[i][j], base);
      part.sum += e[i][j];
    }
  }
  const float factor = correction(part.max, block_merge(part, scratch));
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    V result;
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) result[j] = from_float<T>(e[i][j] * factor);
    const int v = threadIdx.x + i * blockDim.x;
    if (v < num_vecs) store_vec(out + blockIdx.x * out_stride, v, result);
  }
}

// Any width; N elements per access (1, or kVec<T> where everything is 16-byte aligned).
template <typename T, int N>
__device__ __forceinline__ void softmax_loop(T* out, const T* x, int width, long long out_stride,
                                             long long x_stride) {
  using V = Vec<T, N>;
  __shared__ float scratch[2][32];
  const V* source = reinterpret_cast<const V*>(x + blockIdx.x * x_stride);
  V* target = reinterpret_cast<V*>(out + blockIdx.x * out_stride);
  MaxSum part = {-__builtin_huge_valf(), 0.0f};
#pragma unroll 2
  for (int v = threadIdx.x; v < width / N; v += blockDim.x) {
    const V values = source[v];
    float max = part.max;
#pragma unroll
    for (int j = 0; j < N; j++) max = fmaxf(max, to_float(values[j]));
    const float base = finite_base(max);
    part.sum *= exp_below(part.max, base);
    part.max = max;
#pragma unroll
    for (int j = 0; j < N; j++) part.sum += exp_below(to_float(values[j]), base);
  }
  const MaxSum whole = block_merge(part, scratch);
  const float base = finite_base(whole.max);
  const float scale = whole.sum == 0.0f ? 0.0f : 1.0f / whole.sum;
#pragma unroll 2
  for (int v = threadIdx.x; v < width / N; v += blockDim.x) {
    const V values = source[v];
    V result;
#pragma unroll
    for (int j = 0; j < N; j++) result[j] = from_float<T>(exp_below(to_float(values[j]), base) * scale);
    target[v] = result;
  }
}

}  // namespace xserv

#define XSERV_KERNEL(SUFFIX, T, NAME, CALL)                                                                \
  extern "C" __global__ void __launch_bounds__(1024) xserv_softmax_##NAME##_##SUFFIX(                      \
      T* out, const T* x, int width, long long out_stride, long long x_stride) {                           \
    CALL;                                                                                                  \
  }

#define XSERV_ROW(SUFFIX, T, NAME, ELEMENTS)                                                               \
  XSERV_KERNEL(SUFFIX, T, NAME,                                                                            \
               (xserv::softmax_row<T, ELEMENTS / xserv::kVec<T>>(out, x, width, out_stride, x_stride)))

#define XSERV_LOOP(SUFFIX, T, NAME, N)                                                                     \
  XSERV_KERNEL(SUFFIX, T, NAME, (xserv::softmax_loop<T, N>(out, x, width, out_stride, x_stride)))

#define XSERV_SOFTMAX(SUFFIX, T)                 \
  XSERV_ROW(SUFFIX, T, row16, 16)                \
  XSERV_ROW(SUFFIX, T, row32, 32)                \
  XSERV_LOOP(SUFFIX, T, loop, xserv::kVec<T>)    \
  XSERV_LOOP(SUFFIX, T, scalar, 1)
XSERV_FOR_EACH_DTYPE(XSERV_SOFTMAX)
