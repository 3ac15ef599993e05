// Layer norm (Ba, Kiros & Hinton 2016, arXiv:1607.06450, eq. 4):
//   out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
// x, out: [num_rows, width], last axis contiguous; weight, bias: [width], bias may be null. The variance is
// that of the population. f32 inside, one rounding at the store. out may be x.
//
// A row with a large mean loses nothing to cancellation: each thread sums x - p and (x - p)^2 about a pivot
// p, the first of its own elements, and parts are merged as mean and M2, the sum of squared deviations from
// the mean (Chan, Golub & LeVeque 1979, eq. 2.1), with means counted from pivots too. A pivot that is the
// mean of k of a part's m elements is at most sqrt(m / k) of the part's standard deviations off
// (Cauchy-Schwarz), so shifted sums of the part lose at most a factor of 1 + m / k, however the row looks.
//
// _row: one block per row, the row in registers, 16 elements per thread.
// _walk: the same for blocks that walk over rows: weight and bias are read once per block, and the next row
// is fetched before the present one is reduced. On an H200 faster than _row for many rows of 16-bit
// elements, slower for f32.
// _loop and _scalar: any width; they read the row twice, the second time from the cache.
#include "common/dtype.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"

namespace xserv {

// The moments of some elements of a row. The mean is pivot + mean: so a large mean is not rounded.
struct Moments {
  float count;
  float pivot;
  float mean;
  float m2;
};
static_assert(sizeof(Moments) == 16, "one access to shared memory");

// Computes the moments of the block's row. Each thread brings `count` elements x with the sums of x -
// pivot and of its square. `scratch` is for this row alone, as in block_reduce.
__device__ __forceinline__ Moments block_moments(int count, float pivot, float sum, float squares,
                                                 float inverse_width, float4 (&scratch)[32]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
  // Combines the warp about the mean of its first thread. Elements go to threads in order: if there are
  // any, the first thread has one.
  const float mean = __fdividef(sum, max(count, 1));
  Moments part;
  part.pivot = __shfl_sync(kFullWarp, pivot + mean, 0);
  float shift = (pivot - part.pivot) + mean;
  float weighted = count * shift;
  part.m2 = warp_reduce<Sum>((squares - sum * mean) + weighted * shift);
  weighted = warp_reduce<Sum>(weighted);
  part.count = __reduce_add_sync(kFullWarp, count);
  part.mean = __fdividef(weighted, fmaxf(part.count, 1.0f));
  part.m2 -= weighted * part.mean;
  if (num_warps == 1) return part;
  if (lane == 0) scratch[warp] = make_float4(part.count, part.pivot, part.mean, part.m2);
  __syncthreads();
  // Combines the block about the mean of its first warp. Every group of `lanes` lanes adds up all warps.
  const float4 first = scratch[0];
  const int lanes = 1 << (32 - __clz(num_warps - 1)), from = lane & (lanes - 1);
  const float4 own = from < num_warps ? scratch[from] : make_float4(0.0f, first.y, first.z, 0.0f);
  shift = (own.y - first.y) + (own.z - first.z);
  weighted = own.x * shift;
  float m2 = own.w + weighted * shift;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    if (offset < lanes) {
      weighted += __shfl_xor_sync(kFullWarp, weighted, offset);
      m2 += __shfl_xor_sync(kFullWarp, m2, offset);
    }
  }
  const float whole_mean = weighted * inverse_width;
  return {0.0f, first.y, first.z + whole_mean, m2 - weighted * whole_mean};
}

// Returns 1 / sqrt(var + eps). Rounding must not make the variance negative; NaN stays.
__device__ __forceinline__ float inverse_deviation(const Moments& row, float inverse_width, float eps) {
  const float m2 = row.m2 < 0.0f ? 0.0f : row.m2;
  return rsqrtf(m2 * inverse_width + eps);
}

template <typename T, int VECS>
__device__ __forceinline__ void normalize(T* target, const Vec<T, kVec<T>> (&row)[VECS],
                                          const Vec<T, kVec<T>> (&weights)[VECS],
                                          const Vec<T, kVec<T>> (&biases)[VECS], int num_vecs, int thread,
                                          int num_threads, float inverse_width, float eps,
                                          float4 (&scratch)[32]) {
  const float pivot = to_float(row[0][0]);
  int count = 0;
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    if (thread + i * num_threads < num_vecs) {
      count += kVec<T>;
#pragma unroll
      for (int j = 0; j < kVec<T>; j++) {
        const float shifted = to_float(row[i][j]) - pivot;
        sum += shifted;
        squares += shifted * shifted;
      }
    }
  }
  const Moments whole = block_moments(count, pivot, sum, squares, inverse_width, scratch);
  const float scale = inverse_deviation(whole, inverse_width, eps);
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    Vec<T, kVec<T>> result;
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) {
      const float normalized = ((to_float(row[i][j]) - whole.pivot) - whole.mean) * scale;
      result[j] = from_float<T>(normalized * to_float(weights[i][j]) + to_float(biases[i][j]));
    }
    const int v = thread + i * num_threads;
    if (v < num_vecs) store_vec(target, v, result);
  }
}

// Rows of at most VECS vectors per thread.
template <typename T, int VECS>
__device__ __forceinline__ void layer_norm_row(T* out, const T* x, const T* weight, const T* bias, int width,
                                               float eps, long long out_stride, long long x_stride) {
  __shared__ float4 scratch[32];
  const int num_vecs = width / kVec<T>, thread = threadIdx.x, num_threads = blockDim.x;
  Vec<T, kVec<T>> values[VECS], weights[VECS], biases[VECS];
  load_row(values, x + blockIdx.x * x_stride, num_vecs, thread, num_threads);
  load_row_const(weights, weight, num_vecs, thread, num_threads);
  load_row_const(biases, bias, bias != nullptr ? num_vecs : 0, thread, num_threads);
  normalize<T, VECS>(out + blockIdx.x * out_stride, values, weights, biases, num_vecs, thread, num_threads,
                     1.0f / width, eps, scratch);
}

template <typename T, int VECS>
__device__ __forceinline__ void layer_norm_walk(T* out, const T* x, const T* weight, const T* bias,
                                                long long num_rows, int width, float eps,
                                                long long out_stride, long long x_stride) {
  __shared__ float4 scratch[2][32];
  const int num_vecs = width / kVec<T>, thread = threadIdx.x, num_threads = blockDim.x;
  const float inverse_width = 1.0f / width;
  long long row = blockIdx.x;
  Vec<T, kVec<T>> values[VECS], next_values[VECS], weights[VECS], biases[VECS];
  load_row(values, x + row * x_stride, num_vecs, thread, num_threads);
  load_row_const(weights, weight, num_vecs, thread, num_threads);
  load_row_const(biases, bias, bias != nullptr ? num_vecs : 0, thread, num_threads);
  // Two scratches alternate: the barrier of a row keeps a fast warp from the scratch of the row before.
  for (int parity = 0;; parity ^= 1) {
    const long long next_row = row + gridDim.x;
    if (next_row < num_rows) {
      load_row(next_values, x + next_row * x_stride, num_vecs, thread, num_threads);
    }
    normalize<T, VECS>(out + row * out_stride, values, weights, biases, num_vecs, thread, num_threads,
                       inverse_width, eps, scratch[parity]);
    row = next_row;
    if (row >= num_rows) break;
#pragma unroll
    for (int i = 0; i < VECS; i++) values[i] = next_values[i];
  }
}

// Any width; N elements per access (1, or kVec<T> where everything is 16-byte aligned).
template <typename T, int N>
__device__ __forceinline__ void layer_norm_loop(T* out, const T* x, const T* weight, const T* bias, int width,
                                                float eps, long long out_stride, long long x_stride) {
  using V = Vec<T, N>;
  __shared__ float4 scratch[32];
  const V* source = reinterpret_cast<const V*>(x + blockIdx.x * x_stride);
  V* target = reinterpret_cast<V*>(out + blockIdx.x * out_stride);
  const float inverse_width = 1.0f / width;
  const int thread = threadIdx.x, num_vecs = width / N;
  const float pivot = thread < num_vecs ? to_float(source[thread][0]) : 0.0f;
  int count = 0;
  float sum = 0.0f, squares = 0.0f;
#pragma unroll 4
  for (int v = thread; v < num_vecs; v += blockDim.x) {
    const V values = source[v];
    count += N;
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float shifted = to_float(values[j]) - pivot;
      sum += shifted;
      squares += shifted * shifted;
    }
  }
  const Moments whole = block_moments(count, pivot, sum, squares, inverse_width, scratch);
  const float scale = inverse_deviation(whole, inverse_width, eps);
  for (int v = thread; v < num_vecs; v += blockDim.x) {
    const V values = source[v], weights = reinterpret_cast<const V*>(weight)[v];
    V biases, result;
#pragma unroll
    for (int j = 0; j < N; j++) biases[j] = from_float<T>(0.0f);
    if (bias != nullptr) biases = reinterpret_cast<const V*>(bias)[v];
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float normalized = ((to_float(values[j]) - whole.pivot) - whole.mean) * scale;
      result[j] = from_float<T>(normalized * to_float(weights[j]) + to_float(biases[j]));
    }
    target[v] = result;
  }
}

}  // namespace xserv

#define XSERV_KERNEL(SUFFIX, T, NAME, MAX_THREADS, CALL)                                                   \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS) xserv_layer_norm_##NAME##_##SUFFIX(            \
      T* out, const T* x, const T* __restrict__ weight, const T* __restrict__ bias, long long num_rows,    \
      int width, float eps, long long out_stride, long long x_stride) {                                    \
    CALL;                                                                                                  \
  }

// One block of 1024 threads takes rows of up to 16384 elements, or 8192 elements where it also prefetches.
#define XSERV_LAYER_NORM(SUFFIX, T)                                                                        \
  XSERV_KERNEL(SUFFIX, T, row, 1024,                                                                       \
               (xserv::layer_norm_row<T, 16 / xserv::kVec<T>>(out, x, weight, bias, width, eps,            \
                                                              out_stride, x_stride)))                      \
  XSERV_KERNEL(SUFFIX, T, walk, 512,                                                                       \
               (xserv::layer_norm_walk<T, 16 / xserv::kVec<T>>(out, x, weight, bias, num_rows, width, eps, \
                                                               out_stride, x_stride)))                     \
  XSERV_KERNEL(SUFFIX, T, loop, 1024,                                                                      \
               (xserv::layer_norm_loop<T, xserv::kVec<T>>(out, x, weight, bias, width, eps, out_stride,    \
                                                          x_stride)))                                      \
  XSERV_KERNEL(SUFFIX, T, scalar, 1024,                                                                    \
               (xserv::layer_norm_loop<T, 1>(out, x, weight, bias, width, eps, out_stride, x_stride)))
XSERV_FOR_EACH_DTYPE(XSERV_LAYER_NORM)
